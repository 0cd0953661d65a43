"""The law of pointwise kernels, reductions, norms and softmax: streams from device memory or L2, and rows per block.

A kernel that moves B bytes and touches F bytes of memory finds the share h of them in L2, written there by the kernel
before (a working set that fits),

    h        = 1 / (1 + (F / (l2_share L2))^l2_sharp)
    stream   = B ((1 - h) / (bandwidth bw_eff gain^(streams - 2)) + h / (l2_bandwidth l2_eff))
    threads  = elements / (SMs clock rate)           strided or broadcast operands: one element and one address a thread
    rows     = ceil(rows / (SMs slots)) row_s + padded elements / (SMs clock row_rate)       norms, softmax, short reductions
    time     = floor + ramp + (stream^p + (threads + rows)^p)^(1/p)

A row that a warp keeps in registers is read once. A block keeps a row in shared memory if it fits and can be loaded 16
bytes at a time; if not, it goes over the row again, through L1 and L2, for every step. So the bandwidths of norms and
softmax are multiplied by a gain: 1 (warp), `block_gain`, `again_gain`; beyond LONGEST_BLOCK_ROW_BYTES softmax has
`long_gain`, and norms, whose second pass hits L1 while the rows of all resident blocks fit, move towards it beyond that.
`slots` rows run at a time on one SM; a row's elements are padded to whole warps (softmax: to a power of two up to 1024).
All parameters but floors are fractions of the device's own rates, so that a fit carries over to a sibling device.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from perfmodel.db.device import Device
from perfmodel.estimate import Estimate
from perfmodel.kernels.correction import Floats, LawResult, Segment, price_by_segments
from perfmodel.kernels.elementwise import SERVING
from perfmodel.kernels.norm import BATCH, GRAD_WEIGHT, GROUP, SERVING_RMS
from perfmodel.kernels.registry import KernelCall, kernel_family
from perfmodel.units import KIBI

LAW = "vector/1"

WARP = 32
LONGEST_WARP_ROW = 1024  # softmax keeps longer rows in a block (ATen/native/cuda/PersistentSoftmax.cuh)
# Shared memory of a block without opting in to more (CUDA C++ programming guide, all compute capabilities).
LONGEST_BLOCK_ROW_BYTES = 48 * KIBI
VECTOR_BYTES = 16
HALF_BYTES = 2
NORM_BLOCKS_PER_SM = 16  # of 128 threads (ATen/native/cuda/layer_norm_kernel.cu), 2048 threads an SM
L1_SHARP = 4.0  # a cache that is half as large as its working set is nearly no use to a second pass in order
# One block an SM takes more than its share of the bandwidth: between 0.4 and 0.6 fits the backward layer norms of NeuSight's
# model tables (4096 x 1024: 75 us on A100, 150 us on V100, 42 us on H100, both kernels).
COLUMN_FILL_POWER = 0.5
BATCH_FILL_POWER = (
    1.0  # bandwidth grows with the SMs in use (V100 trace of ResNet-50: 64 channels on 80 SMs reach 0.8 of it)
)
WARP_ROWS, BLOCK_ROWS, AGAIN_ROWS, LONG_ROWS = 0, 1, 2, 3

# Features each family's rule sets, in the order of the law's table; what a family lacks counts as the value given.
_COLUMNS: Mapping[str, float] = {
    "n_elems": 0.0, "n_streams": 2.0, "vectorised": 1.0, "op_kind": 0.0, "rows": 0.0, "cols": 0.0, "n_out": 0.0,
    "n_reduced": 0.0, "inner": 1.0, "flat": 1.0, "kind": 0.0, "stage": 0.0, "backward": 0.0, "itemsize_bytes": 4.0,
}  # fmt: skip

FEATURES = (
    "log_time", "log_bytes", "log_bytes_per_l2", "n_streams", "vectorised", "op_kind", "log_rows", "log_cols", "log_wave_fill",
    "cols_mod_4", "cols_mod_32", "pad", "regime", "block_fill", "log_row_l2", "stage", "backward", "kind", "log_stream",
    "log_rows_s",
)  # fmt: skip


def columns_of(calls: Sequence[KernelCall]) -> dict[str, Floats]:
    """Columns of the calls, with `bytes` moved; rows and columns of a reduction are its outputs and their lengths."""
    found: dict[str, Floats] = {
        name: np.array([call.features.get(name, default) for call in calls], dtype=np.float64)
        for name, default in _COLUMNS.items()
    }
    for family in ("softmax", "norm"):
        found[f"is_{family}"] = np.array([float(call.family == family) for call in calls])
    found["bytes"] = np.array([float(call.work.bytes) for call in calls])
    found["footprint_bytes"] = np.array(
        [call.features.get("footprint_bytes", float(call.work.bytes)) for call in calls]
    )
    reduces = found["n_reduced"] > 0
    found["rows"] = np.where(reduces, found["n_out"], found["rows"])
    found["cols"] = np.where(reduces, found["n_reduced"], found["cols"])
    found["n_elems"] = np.where(found["rows"] > 0, found["rows"] * found["cols"], found["n_elems"])
    found["regime"] = row_regime(found)
    return found


def padded_cols(cols: Floats) -> Floats:
    """Elements that the lanes of a warp or block step over for a row: a power of two up to 1024, whole warps beyond."""
    power = 2.0 ** np.ceil(np.log2(np.maximum(cols, 1.0)))
    whole = np.ceil(cols / WARP) * WARP
    result: Floats = np.where(cols <= LONGEST_WARP_ROW, np.maximum(power, 1.0), whole)
    return result


def block_fill(f: Mapping[str, Floats]) -> Floats:
    """Share of the loads of a block's threads that fall into the row: a power of two of threads, 16 bytes each, loops."""
    loads = np.maximum(f["cols"] * f["itemsize_bytes"] / VECTOR_BYTES, 1.0)
    threads = np.minimum(2.0 ** np.floor(np.log2(loads)), float(LONGEST_WARP_ROW))
    result: Floats = loads / (np.ceil(loads / threads) * threads)
    return result


def stream_s(p: Mapping[str, float], f: Mapping[str, Floats], device: Device) -> Floats:
    """Seconds to move the bytes, partly from L2."""
    size = f["bytes"]
    resident = 1.0 / (1.0 + (f["footprint_bytes"] / (p["l2_share"] * device.l2_bytes)) ** p["l2_sharp"])
    memory = device.memory_bytes_per_s * p["bw_eff"] * p["stream_gain"] ** (f["n_streams"] - 2.0)
    near = device.l2_bytes_per_s * p["l2_eff"]
    result: Floats = size * ((1.0 - resident) / memory + resident / near) / row_gain(p, f, device)
    return result


def row_gain(p: Mapping[str, float], f: Mapping[str, Floats], device: Device) -> Floats:
    """Bandwidth left by further passes over the rows, as a fraction; 1 for what has no rows."""
    gains = np.array([1.0, p["block_gain"], p["again_gain"], p["long_gain"]])[f["regime"].astype(np.int64)]
    resident_bytes = f["cols"] * f["itemsize_bytes"] * NORM_BLOCKS_PER_SM
    in_l1 = 1.0 / (1.0 + (resident_bytes / device.smem_per_sm_bytes) ** L1_SHARP)
    # A channel of a batch norm is one block: fewer channels than SMs leave memory bandwidth unused.
    filled = np.minimum(1.0, (f["rows"] / device.n_sms) ** BATCH_FILL_POWER)
    batch = (f["is_norm"] > 0) & (f["kind"] == BATCH)
    per_row = np.where(f["is_norm"] > 0, gains * (in_l1 + (1.0 - in_l1) * p["long_gain"]), gains)
    # Gradients of layer-norm weights are summed by column: a block takes WARP columns and all rows.
    columns = np.minimum(1.0, f["cols"] / (WARP * device.n_sms)) ** COLUMN_FILL_POWER
    by_column = (f["is_norm"] > 0) & (f["stage"] == GRAD_WEIGHT) & (f["kind"] != GROUP)
    result: Floats = np.where(batch, filled, per_row) * np.where(by_column, columns, 1.0)
    return result


def row_regime(f: Mapping[str, Floats]) -> Floats:
    """Where the kernel keeps a row between its steps (see the module); WARP_ROWS for what has no rows."""
    row_bytes = f["cols"] * f["itemsize_bytes"]
    regime = np.where(row_bytes % VECTOR_BYTES == 0, BLOCK_ROWS, AGAIN_ROWS)
    regime = np.where((row_bytes >= LONGEST_BLOCK_ROW_BYTES) & (f["is_softmax"] > 0), LONG_ROWS, regime)
    in_warp = (
        (f["rows"] == 0)
        | (f["n_reduced"] > 0)
        | ((f["is_norm"] > 0) & (f["kind"] == BATCH))
        | ((f["is_softmax"] > 0) & (f["cols"] <= LONGEST_WARP_ROW))
    )
    result: Floats = np.where(in_warp, WARP_ROWS, regime).astype(np.float64)
    return result


def rows_s(p: Mapping[str, float], f: Mapping[str, Floats], device: Device) -> Floats:
    """Seconds that the rows take on the SMs; 0 for pointwise kernels."""
    waves = np.ceil(f["rows"] / (device.n_sms * p["slots"]))
    lanes = f["rows"] * padded_cols(f["cols"])
    inner = np.where((f["inner"] > 0) & (f["flat"] > 0), 1.0, 0.0)
    per_row = waves * p["row_s"] * inner
    result: Floats = np.where(f["rows"] > 0, per_row + lanes / (device.n_sms * device.clock_hz * p["row_rate"]), 0.0)
    return result


def threads_s(p: Mapping[str, float], f: Mapping[str, Floats], device: Device) -> Floats:
    """Seconds of address arithmetic where 16-byte loads are not possible; 0 otherwise."""
    rate = device.n_sms * device.clock_hz * p["strided_rate"]
    result: Floats = np.where((f["vectorised"] == 0) & (f["rows"] == 0), f["n_elems"] / rate, 0.0)
    return result


def law(segment: Segment, calls: Sequence[KernelCall], device: Device) -> LawResult:
    """The module's formula, the features of its correction and what the fit range bounds."""
    return evaluate(segment.parameters, columns_of(calls), device)


def evaluate(p: Mapping[str, float], f: Mapping[str, Floats], device: Device) -> LawResult:
    """`law` on columns, for fits that evaluate it many times."""
    stream = stream_s(p, f, device)
    rows = rows_s(p, f, device)
    other = rows + threads_s(p, f, device)
    largest = np.maximum(stream, np.maximum(other, 1e-12))
    body = largest * ((stream / largest) ** p["sharp"] + (other / largest) ** p["sharp"]) ** (1.0 / p["sharp"])
    time_s = p["floor_s"] + p["ramp_s"] + body
    return LawResult(
        time_s=time_s,
        features=_features(f, device, time_s, stream, rows),
        ranged={
            "bytes": np.maximum(f["bytes"], 1.0),
            "cols": np.maximum(f["cols"], 1.0),
            "rows": np.maximum(f["rows"], 1.0),
        },
    )


def _features(f: Mapping[str, Floats], device: Device, time_s: Floats, stream: Floats, rows: Floats) -> Floats:
    """Feature matrix [n, len(FEATURES)]; the order is FEATURES."""
    cols, n_rows = np.maximum(f["cols"], 1.0), np.maximum(f["rows"], 1.0)
    waves = n_rows / device.n_sms
    return np.column_stack(
        [
            np.log(time_s),
            np.log(np.maximum(f["bytes"], 1.0)),
            np.log(np.maximum(f["bytes"], 1.0) / device.l2_bytes),
            f["n_streams"],
            f["vectorised"],
            f["op_kind"],
            np.log(n_rows),
            np.log(cols),
            np.log(waves / np.ceil(waves)),
            cols % 4,
            cols % WARP,
            cols / padded_cols(cols),
            f["regime"],
            block_fill(f),
            np.log(cols * f["itemsize_bytes"] * device.n_sms / device.l2_bytes),
            f["stage"],
            f["backward"],
            f["kind"],
            np.log(np.maximum(stream, 1e-9) / time_s),
            np.log(np.maximum(rows, 1e-9) / time_s),
        ]
    )


def segment_name(call: KernelCall) -> str:
    """Which set of parameters a call belongs to: element size, and for norms and vLLM's kernels the implementation."""
    width = "fp16" if call.features["itemsize_bytes"] <= HALF_BYTES else "fp32"
    if call.family == "elementwise" and call.features["op_kind"] == SERVING:
        return f"{width}_serving"
    if call.family == "norm" and call.features["kind"] == SERVING_RMS:
        return f"{width}_serving"
    if call.family == "norm" and call.features["kind"] == BATCH:
        return f"{width}_batch"
    if call.family in {"norm", "softmax"} and (call.features.get("backward", 0) or call.features.get("stage", 0)):
        return f"{width}_backward"
    return width


# Where a fit lacks a segment, the first of these that it has stands in, as derived.
_STAND_INS: Mapping[str, tuple[str, ...]] = {
    "fp32": ("fp16",),
    "fp16": ("fp32",),
    "fp32_batch": ("fp32", "fp16"),
    "fp16_batch": ("fp32_batch", "fp16", "fp32"),
    "fp32_backward": ("fp32", "fp16"),
    "fp16_backward": ("fp32_backward", "fp16", "fp32"),
    "fp16_serving": ("fp32_serving", "fp16", "fp32"),
    "fp32_serving": ("fp16_serving", "fp32", "fp16"),
}


def choose_segment(segments: Mapping[str, Segment], call: KernelCall, device: Device) -> Segment | None:
    """The segment of the call, or the one that stands in for it by its law alone."""
    name = segment_name(call)
    if name in segments:
        return segments[name]
    for other in _STAND_INS[name]:
        if other in segments:
            return segments[other].only_law()
    return None


def derived_segment(segments: Mapping[str, Segment], call: KernelCall, device: Device) -> Segment | None:
    """As `choose_segment`, for a family that borrows another's fit: the law alone."""
    segment = choose_segment(segments, call, device)
    return segment.only_law() if segment else None


def _family(name: str) -> None:
    @kernel_family(name)
    def price(calls: Sequence[KernelCall], device: Device) -> list[Estimate]:
        if name in device.fits:
            return price_by_segments(calls, device, name, LAW, (choose_segment, law))
        return price_by_segments(calls, device, DONOR, LAW, (derived_segment, law))


DONOR = "elementwise"  # a family without a fit of its own streams as pointwise kernels of its device do
for _name in ("elementwise", "reduction", "norm", "softmax"):
    _family(_name)
