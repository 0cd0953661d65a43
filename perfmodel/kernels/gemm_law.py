"""How long a matrix product takes: tiles, waves, splits of the reduction, L2 and device memory traffic.

For every tile (tm x tn) of a menu and every split s of the reduction:

    waves    = ceil(ceil(m/tm) ceil(n/tn) batch s / SMs)
    compute  = waves (2 tm tn ceil(k/s) / (peak/SMs eff tm tn / (tm tn + half_tile^2)) + prologue fitted clock/clock)
    memory   = traffic / (bandwidth bw_eff) / active^spread,    active = min(1, units / SMs)
    L2       = units (tm + tn) k/s itemsize / (l2_eff 64 bytes/clock SMs) / active^spread
    split    = split_overhead + half of the partial results' traffic, if s > 1
    body     = (compute^p + memory^p + L2^p)^(1/p) + split

and the fastest counts (a library picks nearly that). Traffic is compulsory while the operands fit in L2; beyond, a wave's
tiles form a near-square block whose panels are read again for each block. Long kernels run at sustained clocks:
time = floor + body (1 + throttle body / (body + 3 ms)). Sizes beyond the data need nothing but these formulas.

Tile quantisation and waves follow NVIDIA's "Matrix Multiplication Background User's Guide" (tile and wave quantisation);
split-K and stream-K, Osama et al., PPoPP 2023. Menus are the tiles that cuBLAS and CUTLASS name in kernel names.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from perfmodel.db.device import Device
from perfmodel.estimate import Estimate
from perfmodel.kernels.correction import Floats, LawResult, Segment, price_by_segments
from perfmodel.kernels.gemm import MAX_ALIGN_BYTES
from perfmodel.kernels.gemm_choice import with_choice
from perfmodel.kernels.registry import KernelCall, kernel_family
from perfmodel.kernels.roofline import peak_flops_per_s

LAW = "gemm/1"

TENSOR_TILES = (
    (256, 128), (128, 256), (128, 128), (256, 64), (64, 256), (128, 64), (64, 128), (64, 64),
    (128, 32), (32, 128), (64, 32), (32, 64), (16, 128), (16, 64), (32, 32),
)  # fmt: skip
VECTOR_TILES = ((128, 128), (128, 64), (64, 128), (64, 64), (128, 32), (32, 128), (32, 32))
SPLITS = np.array([1.0, 2.0, 4.0, 8.0, 16.0])
MIN_SPLIT_K = 64.0  # shortest part of a split reduction: two main-loop steps
K_STEP = 32.0  # elements of k per main-loop step (CUTLASS threadblock shapes)
PARTIAL_BYTES = 8.0  # a float32 partial result is written and read again
L2_PORT_BYTES = 64.0  # bytes an SM receives from L2 per clock (Ampere white paper: 5120 B/clk over 80-108 SMs)
SUSTAINED_S = 3e-3  # kernels of this length are half way to sustained clocks
SAME_RATE = {"fp16_tensor": "bf16_tensor", "bf16_tensor": "fp16_tensor"}  # one tensor-core rate on every datasheet
STAND_IN = {
    "tf32_tensor": "bf16_tensor",
    "fp8_tensor": "bf16_tensor",
    "int8_tensor": "bf16_tensor",
    "fp16_tensor": "fp32",
    "bf16_tensor": "fp32",
    "fp16": "fp32",
    "bf16": "fp32",
    "fp64": "fp32",
}  # whose law, in fractions of its own peak, an unmeasured pipe borrows

HALF_BYTES = 2
ASYNC_COPY_BYTES = 4  # the least that one cp.async brings to shared memory (PTX ISA 7.0, section cp.async)
# Share of the rate that products keep whose rows cannot be copied so: padding the 50257 columns of GPT-2's head to 50304
# made its products "nearly" three times as fast on A100 SXM 80 GB, and a step of 113 ms one of 87 ms (PyTorch blog,
# "Accelerating Large Language Models with Accelerated Transformers", 2023-04-18).
UNALIGNED_RATE = 1 / 3

FEATURES = (
    "log_m", "log_n", "log_k", "log_batch", "log_law", "compute_share", "memory_share", "log_bytes_per_l2",
    "log_compute", "log_memory", "log_l2", "log_units", "wave_fill", "log_tile_m", "log_tile_n", "log_split", "padding",
    "log_units_128", "wave_fill_128", "wave_fill_256", "wave_fill_64", "align_bytes", "m_bytes_mod", "n_bytes_mod",
    "k_bytes_mod", "m_fill_128", "n_fill_128", "m_fill_64", "n_fill_64", "trans_a", "trans_b",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Products:
    """Columns of n products: sizes, layout, element size (bytes) and peak rate (FLOP/s) of the pipe each runs on."""

    m: Floats
    n: Floats
    k: Floats
    batch: Floats
    trans_a: Floats
    trans_b: Floats
    align_bytes: Floats
    itemsize_bytes: Floats
    peak_flops_per_s: Floats

    @property
    def bytes(self) -> Floats:
        """Compulsory traffic."""
        return self.batch * (self.m * self.k + self.k * self.n + self.m * self.n) * self.itemsize_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """The law's inside for the chosen tile of each product: seconds, units of work, tile and split."""

    time_s: Floats
    compute_s: Floats
    memory_s: Floats
    l2_s: Floats
    units: Floats
    tile_m: Floats
    tile_n: Floats
    split: Floats


def products_of(calls: Sequence[KernelCall], device: Device, *, min_n: float = 0.0) -> Products:
    """Columns of the calls. A product with n below `min_n` and a larger m is read as its transpose, which costs the same."""
    names = ("m", "n", "k", "batch", "trans_a", "trans_b", "align_bytes", "itemsize_bytes")
    rows = np.array([[call.features[name] for name in names] for call in calls]).T
    m, n, k, batch, trans_a, trans_b, align, itemsize = rows
    swap = (n < min_n) & (m > n)
    peaks = {pipe: peak_flops_per_s(device, pipe) for pipe in {call.pipe for call in calls}}
    return Products(
        m=np.where(swap, n, m),
        n=np.where(swap, m, n),
        k=np.maximum(k, 1.0),
        batch=batch,
        trans_a=np.where(swap, 1.0 - trans_b, trans_a),
        trans_b=np.where(swap, 1.0 - trans_a, trans_b),
        align_bytes=align,
        itemsize_bytes=itemsize,
        peak_flops_per_s=np.array([peaks[call.pipe] for call in calls]),
    )


def menu_of(parameters: Mapping[str, float], *, tensor: bool) -> NDArray[np.float64]:
    """Tiles [t, 2] the law may choose from; a fit that names `tile_m`, `tile_n` found that the library uses one only."""
    if parameters.get("tile_m", 0.0) > 0:
        return np.array([[parameters["tile_m"], parameters["tile_n"]]])
    return np.array(TENSOR_TILES if tensor else VECTOR_TILES, dtype=np.float64)


def law_parts(parameters: Mapping[str, float], products: Products, device: Device, tiles: NDArray[np.float64]) -> Parts:
    """The law for every tile and split, reduced to the fastest of each product."""
    p = products
    m, n, k, batch, size = (v[:, None, None] for v in (p.m, p.n, p.k, p.batch, p.itemsize_bytes))
    tm, tn, split = tiles[None, :, 0, None], tiles[None, :, 1, None], SPLITS[None, None, :]
    units = np.ceil(m / tm) * np.ceil(n / tn) * batch * split
    steps = np.ceil(np.maximum(k / split, K_STEP) / K_STEP) * K_STEP
    rate = parameters["eff"] * tm * tn / (tm * tn + parameters["half_tile"] ** 2)
    per_sm = p.peak_flops_per_s[:, None, None] / device.n_sms
    # A prologue is a number of clocks: what one device took in seconds, another takes by its own clock.
    prolog_s = parameters["prolog_s"] * parameters.get("clock_hz", device.clock_hz) / device.clock_hz
    compute = np.ceil(units / device.n_sms) * (2.0 * tm * tn * steps / (per_sm * rate) + prolog_s)
    starved = np.minimum(units / device.n_sms, 1.0) ** -parameters["spread"]
    bandwidth = device.memory_bytes_per_s * parameters["bw_eff"]
    memory = _traffic_bytes(parameters, p, device, tm * tn) / bandwidth * starved
    port = parameters["l2_eff"] * L2_PORT_BYTES * device.clock_hz * device.n_sms
    l2 = units * (tm + tn) * steps * size / port * starved
    partial = parameters["split_s"] + 0.5 * split * m * n * batch * PARTIAL_BYTES / bandwidth
    body = _soft_max((compute, memory, l2), parameters["sharp"]) + np.where(split > 1, partial, 0.0)
    body = np.where((split > 1) & (k / split < MIN_SPLIT_K), np.inf, body)
    shape = body.shape
    flat = body.reshape(shape[0], -1)
    rows, best = np.arange(shape[0]), flat.argmin(axis=1)

    def chosen(values: Floats) -> Floats:
        picked: Floats = np.broadcast_to(values, shape).reshape(shape[0], -1)[rows, best]
        return picked

    fastest = flat[rows, best]
    return Parts(
        time_s=parameters["floor_s"] + fastest * (1.0 + parameters["throttle"] * fastest / (fastest + SUSTAINED_S)),
        compute_s=chosen(compute),
        memory_s=chosen(memory),
        l2_s=chosen(l2),
        units=chosen(units),
        tile_m=chosen(tm),
        tile_n=chosen(tn),
        split=chosen(split),
    )


def _traffic_bytes(parameters: Mapping[str, float], p: Products, device: Device, tile_elems: Floats) -> Floats:
    """Bytes to and from device memory, by tile: compulsory, plus panels read again, minus what is left in L2."""
    m, n, k, batch, size = (v[:, None, None] for v in (p.m, p.n, p.k, p.batch, p.itemsize_bytes))
    operands, output = (m * k + k * n) * batch * size, m * n * batch * size
    side = np.sqrt(device.n_sms * tile_elems)
    reread = batch * size * k * m * n * (1.0 / np.minimum(n, side) + 1.0 / np.minimum(m, side))
    room = parameters["l2_frac"] * device.l2_bytes
    fits = 1.0 / (1.0 + (operands / batch / room) ** 2)
    traffic = operands * fits + np.maximum(reread, operands) * (1.0 - fits) + output
    result: Floats = traffic * (1.0 - parameters["hot"] / (1.0 + ((operands + output) / room) ** 4))
    return result


def _soft_max(terms: Sequence[Floats], sharpness: float) -> Floats:
    """(sum x^p)^(1/p) without overflow."""
    largest = np.maximum.reduce(np.broadcast_arrays(*terms))
    total = np.zeros_like(largest)
    for term in terms:
        total = total + (term / largest) ** sharpness
    result: Floats = largest * total ** (1.0 / sharpness)
    return result


def correction_features(p: Products, parts: Parts, device: Device, *, forward_only: bool = False) -> Floats:
    """Feature matrix [n, len(FEATURES)] of the correction; the order is FEATURES.

    With `forward_only` (the data had one layout, that of a linear layer's forward) the other layouts pass as aligned:
    NeuSight's backward times of vocabulary layers (30522 and 50257 columns) show no penalty where forward has one.
    """
    loads = np.where(forward_only & ((p.trans_a > 0) | (p.trans_b == 0)), 0.0, 1.0)
    sms = device.n_sms
    waves = parts.units / sms
    by_128 = np.ceil(p.m / 128) * np.ceil(p.n / 128) * p.batch / sms
    by_256 = np.ceil(p.m / 128) * np.ceil(p.n / 256) * p.batch / sms
    by_64 = np.ceil(p.m / 64) * np.ceil(p.n / 64) * p.batch / sms
    flops = 2.0 * p.batch * p.m * p.n * p.k
    padded = np.ceil(p.m / parts.tile_m) * parts.tile_m * np.ceil(p.n / parts.tile_n) * parts.tile_n
    columns = [
        *(np.log(v) for v in (p.m, p.n, p.k, p.batch, parts.time_s)),
        np.log(flops / p.peak_flops_per_s / parts.time_s),
        np.log(p.bytes / device.memory_bytes_per_s / parts.time_s),
        np.log(p.bytes / device.l2_bytes),
        *(np.log(v / parts.time_s) for v in (parts.compute_s, parts.memory_s, parts.l2_s)),
        np.log(waves),
        waves / np.ceil(waves),
        *(np.log(v) for v in (parts.tile_m, parts.tile_n, parts.split)),
        padded / (p.m * p.n),
        np.log(by_128),
        *(v / np.ceil(v) for v in (by_128, by_256, by_64)),
        np.where(loads > 0, p.align_bytes, MAX_ALIGN_BYTES),
        *(loads * (v * p.itemsize_bytes % MAX_ALIGN_BYTES) for v in (p.m, p.n, p.k)),
        *(v / (np.ceil(v / 128) * 128) for v in (p.m, p.n)),
        *(v / (np.ceil(v / 64) * 64) for v in (p.m, p.n)),
        p.trans_a,
        p.trans_b,
    ]
    return np.column_stack(columns)


def _loads_without_copies(p: Products) -> Floats:
    """1 where rows of an operand or of the result start at odd 16-bit elements, else 0."""
    halves = p.itemsize_bytes == HALF_BYTES
    odd = (p.align_bytes < ASYNC_COPY_BYTES) | ((p.n % 2 == 1) & (p.m > 1) & (p.n > 1))
    found: Floats = (halves & odd).astype(np.float64)
    return found


def law(segment: Segment, calls: Sequence[KernelCall], device: Device) -> LawResult:
    """The law and the correction's features for calls that share a segment."""
    products = products_of(calls, device, min_n=segment.fit_range.get("n", (0.0, 0.0))[0])
    tiles = menu_of(segment.parameters, tensor=calls[0].pipe.endswith("_tensor"))
    parts = law_parts(segment.parameters, products, device, tiles)
    slowed = _loads_without_copies(products) if calls[0].pipe.endswith("_tensor") else 0.0
    features = correction_features(
        products, parts, device, forward_only=segment.parameters.get("forward_only", 0.0) > 0
    )
    return LawResult(
        time_s=parts.time_s + slowed * (1.0 / UNALIGNED_RATE - 1.0) * parts.compute_s,
        features=with_choice(segment.arrays, features, (products.m, products.n, products.k, products.batch), device),
        ranged={
            "m": products.m,
            "n": products.n,
            "k": products.k,
            "batch": products.batch,
            "align_bytes": products.align_bytes,
        },
    )


def choose_segment(segments: Mapping[str, Segment], call: KernelCall, device: Device) -> Segment | None:
    """The segment of the call's pipe (and batching, if measured apart); else one of the same rate; else a stand-in's law."""
    pipe = call.pipe if call.pipe in device.peak_flops_per_s else STAND_IN.get(call.pipe, call.pipe)
    batched = call.features["batch"] > 1
    own = _named(segments, pipe, batched=batched)
    if own is not None:
        return own if pipe == call.pipe else own.only_law()
    twin = _named(segments, SAME_RATE.get(pipe, ""), batched=batched)
    if twin is not None:
        return twin.derived()
    while pipe in STAND_IN:
        pipe = STAND_IN[pipe]
        found = _named(segments, pipe, batched=batched)
        if found is not None:
            return found.only_law()
    return None


def _named(segments: Mapping[str, Segment], pipe: str, *, batched: bool) -> Segment | None:
    if batched and f"{pipe}_batched" in segments:
        return segments[f"{pipe}_batched"]
    return segments.get(pipe)


@kernel_family("gemm")
def gemm_family(calls: Sequence[KernelCall], device: Device) -> list[Estimate]:
    """Estimates of matrix products by the fit of this device, or by roofline without one."""
    return price_by_segments(calls, device, "gemm", LAW, (choose_segment, law))
