"""How long a convolution takes: the fastest of implicit gemm and Winograd, by tiles and waves, or the L1 rate if depthwise.

Each kind is a product over the same sizes (Chetlur et al. 2014, "cuDNN: Efficient Primitives for Deep Learning"):

    forward  m = batch out_h out_w   n = c_out/g   k = c_in/g taps
    dgrad    m = batch in_h in_w     n = c_in/g    k = c_out/g taps / strides
    wgrad    m = c_out/g             n = c_in/g taps   k = batch out_h out_w     (split over k)

Winograd F(r x r, 3 x 3) (Lavin and Gray 2016) runs (r + 2)^2 products over r x r times fewer outputs, for 3 x 3 filters with
stride 1, and moves its transformed tiles through memory. Over tiles (tm, tn) of a menu, per algorithm a:

    compute_a = ceil(ceil(m/tm) ceil(n/tn) products split / SMs) 2 tm tn k/split / (peak/SMs eff_a tm tn/(tm tn + half^2))
    memory_a  = (compulsory + transformed bytes) / (bandwidth bw_eff)
    time      = floor + min over a of (compute^p + memory^p)^(1/p) (1 + throttle body/(body + 3 ms))

A 1 x 1 filter takes `pointwise_slowdown` times its implicit gemm. A depthwise convolution loads one value per
multiplication: its rate is that of L1. Pipes without convolution data take the device's matrix-product law for the same
m, n, k (`choose_segment` says which).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from perfmodel.db.device import Device
from perfmodel.estimate import Estimate, Source
from perfmodel.kernels.conv import DGRAD, FORWARD, WGRAD
from perfmodel.kernels.correction import Floats, LawResult, Segment, price_by_segments, segments_of
from perfmodel.kernels.gemm_law import STAND_IN
from perfmodel.kernels.registry import KernelCall, kernel_family
from perfmodel.kernels.roofline import peak_flops_per_s

LAW = "conv/1"

TILES = np.array([(256, 128), (128, 256), (128, 128), (128, 64), (64, 128), (64, 64), (128, 32), (32, 128), (32, 32)])
SPLITS = np.array([1.0, 4.0, 16.0, 64.0])  # of wgrad's long reduction
MIN_SPLIT_K = 256.0  # shortest part of a split reduction
SUSTAINED_S = 3e-3  # as in gemm_law
# Conversions between channels-first and channels-last around tensor-core kernels, in passes over a kernel's own bytes: in
# the trace of ResNet-50 on A100 in TF32 (HolisticTraceAnalysis, resnet50_ddp) they take 1.3 ms of the forward and 3.7 ms of
# the backward convolutions of a step, one pass 2.3 and 4.6 ms on 40 GB; converted neighbours pay less.
LAYOUT_PASSES = 1.0
L1_LOADS_PER_CLOCK = 32.0  # load/store lanes per SM (Volta to Hopper white papers: 32 per SM)
# Parameters a gemm segment lends to this law, and what it lacks: no Winograd in 16 bit beyond cuDNN's heuristics.
_FROM_GEMM = ("eff", "half_tile", "bw_eff", "sharp", "throttle", "floor_s", "compute_capability")

FEATURES = (
    "log_law", "log_m", "log_n", "log_k", "log_batch", "log_c_in", "log_c_out", "log_image", "log_compute", "log_memory",
    "algorithm", "log_units", "wave_fill", "tile_m", "tile_n", "c_in_mod_32", "c_out_mod_32", "out_mod_2", "out_mod_4",
    "m_fill_128", "n_fill_128", "n_fill_64", "log_bytes_per_l2", "kind", "taps", "stride", "groups", "align_in", "align_out",
    "align_image", "log_winograd_2", "log_winograd_4", "log_implicit",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Convolutions:
    """Columns of n convolution kernels."""

    f: Mapping[str, Floats]
    bytes: Floats
    flops: Floats
    peak_flops_per_s: Floats
    tensor: NDArray[np.bool_]

    def product(self) -> tuple[Floats, Floats, Floats]:
        """m, n, k of the implicit product of each kernel, per group."""
        f = self.f
        taps, strides = f["taps_h"] * f["taps_w"], f["stride_h"] * f["stride_w"]
        outputs, inputs = f["batch"] * f["out_h"] * f["out_w"], f["batch"] * f["in_h"] * f["in_w"]
        c_in, c_out = f["c_in"] / f["groups"], f["c_out"] / f["groups"]
        kinds = [f["kind"] == FORWARD, f["kind"] == DGRAD, f["kind"] == WGRAD]
        m = np.select(kinds, [outputs, inputs, c_out])
        n = np.select(kinds, [c_out, c_in, c_in * taps])
        k = np.select(kinds, [c_in * taps, np.maximum(c_out * taps / strides, 1.0), outputs])
        return m, n, k


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One algorithm on all kernels: products per group, sizes, efficiency, bytes; infinite where it does not apply."""

    m: Floats
    n: Floats
    k: Floats
    products: Floats
    eff: float
    bytes: Floats
    serial_bytes: Floats
    applies: NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True)
class Best:
    """The fastest tile and split of a candidate: seconds, units and tile."""

    time_s: Floats
    compute_s: Floats
    memory_s: Floats
    units: Floats
    tile_m: Floats
    tile_n: Floats


def convolutions_of(calls: Sequence[KernelCall], device: Device) -> Convolutions:
    """Columns of the calls."""
    names = list(calls[0].features)
    table = np.array([[call.features[name] for name in names] for call in calls]).T
    return Convolutions(
        f=dict(zip(names, table, strict=True)),
        bytes=np.array([float(call.work.bytes) for call in calls]),
        flops=np.array([float(call.work.flops) for call in calls]),
        peak_flops_per_s=np.array([peak_flops_per_s(device, call.pipe) for call in calls]),
        tensor=np.array([call.pipe.endswith("_tensor") and call.pipe in device.peak_flops_per_s for call in calls]),
    )


def candidates(parameters: Mapping[str, float], c: Convolutions) -> list[Candidate]:
    """Implicit gemm, then fused Winograd on 2 x 2 outputs, then Winograd on 4 x 4 outputs through memory."""
    m, n, k = c.product()
    none = np.zeros_like(m)
    implicit = Candidate(
        m=m,
        n=n,
        k=k,
        products=c.f["groups"],
        eff=parameters["eff"],
        bytes=c.bytes,
        serial_bytes=none,
        applies=none == 0,
    )
    if parameters.get("winograd_2_eff", 0.0) <= 0:
        return [implicit]
    return [implicit, _winograd(parameters, c, 2.0), _winograd(parameters, c, 4.0)]


def _winograd(parameters: Mapping[str, float], c: Convolutions, r: float) -> Candidate:
    """F(r x r, 3 x 3). The weights are transformed on every call; at r = 4 so are the activations, through memory."""
    f = c.f
    applies = (f["taps_h"] == 3) & (f["taps_w"] == 3) & (f["stride_h"] * f["stride_w"] == 1) & (f["dilation"] == 1)
    tiles = f["batch"] * np.ceil(f["out_h"] / r) * np.ceil(f["out_w"] / r)
    points = (r + 2.0) ** 2
    c_in, c_out = f["c_in"] / f["groups"], f["c_out"] / f["groups"]
    is_wgrad, is_dgrad = f["kind"] == WGRAD, f["kind"] == DGRAD
    # written by the transform, read by the products (and the other way round for the results)
    moved = (
        2.0 * points * f["itemsize_bytes"] * (c_in * c_out * f["groups"] + (r > 2) * tiles * (f["c_in"] + f["c_out"]))
    )
    return Candidate(
        m=np.where(is_wgrad, c_out, tiles),
        n=np.where(is_wgrad | is_dgrad, c_in, c_out),
        k=np.where(is_wgrad, tiles, np.where(is_dgrad, c_out, c_in)),
        products=f["groups"] * points,
        eff=parameters[f"winograd_{r:.0f}_eff"],
        bytes=c.bytes,
        serial_bytes=moved * parameters["transform"],
        applies=applies,
    )


def fastest_tile(parameters: Mapping[str, float], a: Candidate, c: Convolutions, device: Device) -> Best:
    """The candidate's time over all tiles and splits."""
    tm, tn, split = TILES[None, :, 0, None], TILES[None, :, 1, None], SPLITS[None, None, :]
    m, n, k, products = (v[:, None, None] for v in (a.m, a.n, a.k, a.products))
    units = np.ceil(m / tm) * np.ceil(n / tn) * products * split
    rate = c.peak_flops_per_s[:, None, None] / device.n_sms * a.eff * tm * tn / (tm * tn + parameters["half_tile"] ** 2)
    waves = np.ceil(units / device.n_sms)
    compute = waves * (2.0 * tm * tn * np.maximum(k / split, 8.0) / rate + parameters["prolog_s"])
    bandwidth = device.memory_bytes_per_s * parameters["bw_eff"]
    partial = np.where(split > 1, split * m * n * products * 8.0, 0.0)
    memory = (a.bytes[:, None, None] + 0.5 * partial) / bandwidth
    largest = np.maximum(compute, memory)
    sharp = parameters["sharp"]
    body = largest * ((compute / largest) ** sharp + (memory / largest) ** sharp) ** (1.0 / sharp)
    allowed = (split == 1) | ((k / split >= MIN_SPLIT_K) & (c.f["kind"] == WGRAD)[:, None, None])
    body = np.where(allowed & a.applies[:, None, None], body + a.serial_bytes[:, None, None] / bandwidth, np.inf)
    shape, flat = body.shape, body.reshape(body.shape[0], -1)
    rows, best = np.arange(shape[0]), flat.argmin(axis=1)

    def chosen(values: Floats) -> Floats:
        picked: Floats = np.broadcast_to(values, shape).reshape(shape[0], -1)[rows, best]
        return picked

    return Best(
        time_s=flat[rows, best],
        compute_s=chosen(compute),
        memory_s=chosen(memory),
        units=chosen(units),
        tile_m=chosen(tm),
        tile_n=chosen(tn),
    )


def law(segment: Segment, calls: Sequence[KernelCall], device: Device) -> LawResult:
    """The law and the correction's features for calls that share a segment."""
    c = convolutions_of(calls, device)
    p = segment.parameters
    found = [fastest_tile(p, a, c, device) for a in candidates(p, c)]
    times = np.stack([best.time_s for best in found])
    chosen = times.argmin(axis=0)
    body = times.min(axis=0)
    depthwise = (c.f["groups"] > 1) & (c.f["groups"] == c.f["c_in"])
    loads = 2.0 * L1_LOADS_PER_CLOCK * device.clock_hz * device.n_sms
    direct = np.maximum(c.flops / loads, c.bytes / (device.memory_bytes_per_s * p["bw_eff"]))
    pointwise = c.f["taps_h"] * c.f["taps_w"] == 1
    body = np.where(pointwise, body * p.get("pointwise_slowdown", 1.0), body)
    body = np.where(depthwise, direct, body) + _layout_s(segment, c, device)
    time_s = p["floor_s"] + body * (1.0 + p["throttle"] * body / (body + SUSTAINED_S))
    return LawResult(
        time_s=time_s,
        features=correction_features(c, found, chosen, time_s, device),
        ranged={
            **{name: c.f[name] for name in ("batch", "c_in", "c_out", "in_w", "taps_h", "stride_h", "groups")},
            "kind_number": c.f["kind"] + 1.0,
        },
    )


def _layout_s(segment: Segment, c: Convolutions, device: Device) -> Floats:
    """Seconds of the conversions to channels-last and back that tensor-core kernels need for channels-first tensors."""
    bandwidth = device.memory_bytes_per_s * segment.parameters["bw_eff"]
    result: Floats = np.where(c.tensor & (c.f["channels_last"] == 0), LAYOUT_PASSES * c.bytes / bandwidth, 0.0)
    return result


def correction_features(
    c: Convolutions, found: Sequence[Best], chosen: Floats, time_s: Floats, device: Device
) -> Floats:
    """Feature matrix [n, len(FEATURES)]; the order is FEATURES."""
    f = c.f
    m, n, k = c.product()
    rows = np.arange(m.size)

    def pick(name: str) -> Floats:
        values: Floats = np.stack([getattr(best, name) for best in found])[chosen, rows]
        return values

    waves = pick("units") / device.n_sms
    algorithm_times = [np.log(np.minimum(best.time_s, 1e3) / time_s) for best in found]
    algorithm_times += [np.zeros(m.size)] * (3 - len(found))
    implicit, winograd_2, winograd_4 = algorithm_times
    return np.column_stack(
        [
            *(np.log(v) for v in (time_s, m, n, k, f["batch"], f["c_in"], f["c_out"], f["in_w"])),
            *(np.log(pick(name) / time_s) for name in ("compute_s", "memory_s")),
            chosen,
            np.log(waves),
            waves / np.ceil(waves),
            *(pick(name) for name in ("tile_m", "tile_n")),
            *(f[name] % 32 for name in ("c_in", "c_out")),
            *(f["out_w"] % size for size in (2, 4)),
            m / (np.ceil(m / 128) * 128),
            *(n / (np.ceil(n / size) * size) for size in (128, 64)),
            np.log(c.bytes / device.l2_bytes),
            f["kind"],
            f["taps_h"] * f["taps_w"],
            f["stride_h"],
            np.log(f["groups"]),
            *(f[name] % 4 for name in ("c_in", "c_out", "in_w")),
            winograd_2,
            winograd_4,
            implicit,
        ]
    )


def choose_segment(segments: Mapping[str, Segment], call: KernelCall, device: Device) -> Segment | None:
    """The convolution segment of the call's pipe, or one that borrows the device's matrix-product law for that pipe."""
    if call.pipe in segments:
        own = segments[call.pipe]
        # Public sweeps measure forward only; an own calibration has all three kinds.
        measured = call.features["kind"] + 1.0 <= own.fit_range.get("kind_number", (1.0, 1.0))[1]
        return own if measured else own.derived()
    fit = device.fits.get("gemm")
    if fit is None:
        return None
    products = segments_of(fit, device)
    pipe: str | None = call.pipe
    while pipe is not None:
        for name in (pipe, {"fp16_tensor": "bf16_tensor", "bf16_tensor": "fp16_tensor"}.get(pipe, pipe)):
            if name in products:
                return _borrowed(products[name], call.pipe)
        pipe = STAND_IN.get(pipe)
    return None


def _borrowed(segment: Segment, pipe: str) -> Segment:
    parameters = {name: segment.parameters[name] for name in _FROM_GEMM if name in segment.parameters}
    parameters["prolog_s"] = segment.parameters["prolog_s"]
    lent = segment.only_law()
    return Segment(
        name=f"gemm:{segment.name}:{pipe}",
        parameters=parameters,
        arrays={},
        fit_range={},
        low_frac=lent.low_frac,
        high_frac=lent.high_frac,
        source=max(lent.source, Source.DERIVED),
        corrected=False,
    )


@kernel_family("conv")
def conv_family(calls: Sequence[KernelCall], device: Device) -> list[Estimate]:
    """Estimates of convolutions by the fit of this device, by its matrix-product fit, or by roofline without either."""
    return price_by_segments(calls, device, "conv", LAW, (choose_segment, law))
