"""Kernels bound by memory traffic: copies, fills, gathers, optimizers, random numbers, pooling.

    time = max(plain(bytes / pattern fraction), FLOPs / peak, serial steps · step time) + extra

`plain(b)` is the time of a pointwise kernel that moves b bytes: by the device's own fit of the family `elementwise`, where it
has one (that includes what is still in L2), else floor + b / (sustained fraction · bandwidth). The pattern fraction is what
the access pattern leaves of that bandwidth, from the kernel listing of DLRM training on a V100 (owensgroup/ml_perf_model,
op -> kernel -> us; batch 2048), named per family; nothing is extra. A device that was calibrated here has a fit of both, by
family.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from perfmodel.db.device import Device
from perfmodel.estimate import Estimate, Source, Work
from perfmodel.graph import ITEMSIZE_BYTES
from perfmodel.kernels.correction import LawResult, Segment, price_by_segments
from perfmodel.kernels.registry import FAMILIES, KernelCall, kernel_family
from perfmodel.kernels.roofline import estimates, peak_flops_per_s

LAW = "streaming/1"

# Sustained copy bandwidth over datasheet bandwidth: 817 of 900 GB/s on V100, 1391 of 1555 GB/s on A100
# (owensgroup/ml_perf_model, analysis/utils.py @5b2522a, peak_DRAM_BW).
SUSTAINED_FRAC = 0.90
# CPU: datasheet field is already the measured triad rate of this machine.
CPU_SUSTAINED_FRAC = 1.0

# Of the sustained bandwidth, what each family's access pattern keeps.
PATTERN_FRAC: Mapping[str, float] = {
    "copy": 0.80,  # CatArrayBatchedCopy of 28 MB in 92 us: 615 GB/s of 817 on V100
    "fill": 1.0,  # writes only, one stream
    "transpose": 0.55,  # unrolled_elementwise_kernel of a permuted 2048x351 matrix: 13 us for 5.8 MB
    "index": 0.40,  # index_elementwise_kernel: 718,848 elements in 21 us, of which 4 us are floor: 340 GB/s
    "index_accumulate": 0.27,  # indexing_backward_kernel: 718,848 x 3 sectors of 32 bytes in 319 us: 216 GB/s
    "sort": 0.50,  # radix sort scatters one digit a pass; half of the streams are uncoalesced
    "scan": 0.70,  # decoupled look-back: one read, one write, and a wait on the neighbour
    "optimizer": 0.95,  # multi_tensor_apply with 65,536-element chunks streams as a plain copy does
    "random": 0.80,  # Philox costs about 30 integer operations an element beside the write
    "loss": 0.75,
    "interaction": 0.65,  # staged through shared memory in small tiles: taken between a copy and a transposing one
    "pool": 0.70,  # overlapping windows are read from L1 and L2
}
LOW_FRAC, HIGH_FRAC = 0.6, 1.7

# A step of a loop that one block runs alone waits for two dependent loads from device memory, about 500 ns each
# (Jia et al., arXiv:1804.06826, V100: 375 to 1029 cycles of 0.65 ns by TLB level).
SERIAL_STEP_S = 0.8e-6

PLAIN = "elementwise"


def streaming_s(calls: Sequence[KernelCall], device: Device, pattern_frac: float | None = None) -> NDArray[np.float64]:
    """Seconds of each call by the law above, without extra; `pattern_frac` replaces that of the calls' families."""
    peaks = {pipe: peak_flops_per_s(device, pipe) for pipe in {call.pipe for call in calls}}
    flops = np.array([call.work.flops for call in calls], dtype=np.float64)
    peak = np.array([peaks[call.pipe] for call in calls])
    serial = np.array([call.features.get("serial_steps", 0.0) for call in calls]) * SERIAL_STEP_S
    arithmetic = device.kernel_floor_s + np.maximum(flops / peak, serial)
    time_s: NDArray[np.float64] = np.maximum(plain_s(calls, device, pattern_frac), arithmetic)
    return time_s


def plain_s(calls: Sequence[KernelCall], device: Device, pattern_frac: float | None = None) -> NDArray[np.float64]:
    """Seconds of pointwise kernels that move the calls' bytes, each over its pattern fraction."""
    fractions = [pattern_frac or PATTERN_FRAC[call.family] for call in calls]
    if PLAIN in device.fits:
        found = FAMILIES[PLAIN]([_plain_call(*pair) for pair in zip(calls, fractions, strict=True)], device)
        return np.array([estimate.time_s for estimate in found])
    sustained = SUSTAINED_FRAC if device.kind == "cuda" else CPU_SUSTAINED_FRAC
    moved = np.array([call.work.bytes for call in calls], dtype=np.float64) / np.array(fractions)
    time_s: NDArray[np.float64] = device.kernel_floor_s + moved / (device.memory_bytes_per_s * sustained)
    return time_s


def _plain_call(call: KernelCall, fraction: float) -> KernelCall:
    """A vectorised pointwise kernel with one stream in and one out that moves the call's bytes over its pattern fraction."""
    itemsize = ITEMSIZE_BYTES[call.dtype]
    work = Work(read_bytes=round(call.work.read_bytes / fraction), write_bytes=round(call.work.write_bytes / fraction))
    features = {
        "n_elems": work.bytes / (2 * itemsize),
        "n_streams": 2.0,
        "vectorised": 1.0,
        "itemsize_bytes": float(itemsize),
        "op_kind": 0.0,
    }
    return KernelCall(family=PLAIN, work=work, dtype=call.dtype, features=features)


def law(segment: Segment, calls: Sequence[KernelCall], device: Device) -> LawResult:
    """The law with the fraction and the extra seconds of a family's own fit, and what its correction reads."""
    p = segment.parameters
    time_s = streaming_s(calls, device, p["pattern_frac"]) + p["extra_s"]
    moved = np.maximum(np.array([call.work.bytes for call in calls], dtype=np.float64), 1.0)
    written = np.array([call.work.write_bytes for call in calls], dtype=np.float64)
    sizes = np.array([ITEMSIZE_BYTES[call.dtype] for call in calls], dtype=np.float64)
    features = np.column_stack(
        [np.log(time_s), np.log(moved), np.log(moved / device.l2_bytes), written / moved, np.log2(sizes)]
    )
    return LawResult(time_s=time_s, features=features, ranged={"bytes": moved})


def choose_segment(segments: Mapping[str, Segment], call: KernelCall, device: Device) -> Segment | None:
    """A family's fit has one segment."""
    return segments.get("all")


def streaming(calls: Sequence[KernelCall], device: Device) -> list[Estimate]:
    """Estimates by the fit of the calls' family, where the device was calibrated; else derived, range 0.6 to 1.7 times."""
    family = calls[0].family
    if family in device.fits:
        return price_by_segments(calls, device, family, LAW, (choose_segment, law))
    return estimates(streaming_s(calls, device), (LOW_FRAC, HIGH_FRAC), Source.DERIVED)


for _family in PATTERN_FRAC:
    kernel_family(_family)(streaming)
