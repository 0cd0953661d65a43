"""The datasheet roofline: what a kernel costs if nothing was measured.

    time = max(FLOPs / peak(pipe), bytes / memory bandwidth, kernel floor)      (Williams et al., CACM 2009)

It is optimistic by construction: no kernel sustains a datasheet peak. The range says so. On unseen bf16 matrix products
the plain datasheet roofline is 39-47 % under the measured time in the median, that is, measured is 1.6-1.9 times the
roofline, and up to 2.5 times for most rows; a kernel whose operands are still in the L2 cache can finish under it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from perfmodel.db.device import Device
from perfmodel.estimate import Estimate, Source
from perfmodel.kernels.registry import KernelCall

LOW_FRAC = 0.8  # operands left in L2 by the previous kernel are read faster than from device memory
HIGH_FRAC = 2.5  # see the module docstring

# Where a device lacks a pipe, the arithmetic runs on the next one named here.
PIPE_FALLBACK: Mapping[str, str] = {
    "tf32_tensor": "fp32",
    "fp16_tensor": "fp16",
    "bf16_tensor": "bf16",
    "fp8_tensor": "fp16_tensor",
    "int8_tensor": "fp32",
    "fp16": "fp32",
    "bf16": "fp32",
    "fp64": "fp32",
}


def peak_flops_per_s(device: Device, pipe: str) -> float:
    """Peak rate (FLOP/s) of `pipe` on `device`, or of the pipe that stands in for it there.

    Raises RuntimeError if `pipe` is not a pipe's name: that is a bug of a rule, not of a file.
    """
    rates = device.peak_flops_per_s
    name = pipe
    while name not in rates:
        if name not in PIPE_FALLBACK:
            raise RuntimeError(f"{pipe!r} is no pipe of {device.name}; it has {sorted(rates)}")
        name = PIPE_FALLBACK[name]
    return rates[name]


def roofline_s(calls: Sequence[KernelCall], device: Device) -> NDArray[np.float64]:
    """Roofline time (s) of each call, floor included."""
    peaks = {pipe: peak_flops_per_s(device, pipe) for pipe in {call.pipe for call in calls}}
    works = [call.work for call in calls]
    flops = np.array([work.flops for work in works], dtype=np.float64)
    moved = np.array([work.read_bytes + work.write_bytes for work in works], dtype=np.float64)
    rates = np.array([peaks[call.pipe] for call in calls], dtype=np.float64)
    body = np.maximum(flops / rates, moved / device.memory_bytes_per_s)
    return np.maximum(body, device.kernel_floor_s)


def roofline(calls: Sequence[KernelCall], device: Device) -> list[Estimate]:
    """Roofline estimates of `calls` on `device`; the range is 0.8 to 2.5 times the time (see the module)."""
    return estimates(roofline_s(calls, device), (LOW_FRAC, HIGH_FRAC), Source.ROOFLINE)


def estimates(time_s: NDArray[np.float64], range_frac: tuple[float, float], source: Source) -> list[Estimate]:
    """Estimates from an array of times (s), one range (multipliers) and one source."""
    low, high = range_frac
    return [Estimate(time_s=t, low_s=t * low, high_s=t * high, source=source) for t in time_s.tolist()]
