"""Copies between host and device memory.

    time = latency + bytes / (link bandwidth · fraction)

Features: `pinned` (1 or 0), `to_host` (1 or 0). On a CPU device a "transfer" is a copy within its own memory.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from perfmodel.db.device import Device
from perfmodel.estimate import Estimate, Source, Work
from perfmodel.graph import Op
from perfmodel.kernels.copy import total_bytes
from perfmodel.kernels.registry import KernelCall, kernel_family, kernel_rule
from perfmodel.kernels.roofline import estimates

# DMA of pinned memory over the datasheet rate of the link: 12.3 of 15.75 GB/s (PCIe 3 x16) and 24-25 of 31.5 GB/s
# (PCIe 4 x16) are what nvidia's bandwidthTest prints; packet headers take the rest (PCI Express base specification).
PINNED_FRAC = 0.78
# Pageable memory is staged through a pinned buffer by a host memcpy: about half (CUDA C++ Best Practices Guide, "Pinned
# Memory": both transfers count).
PAGEABLE_FRAC = 0.4
# Shortest memcpy of a few bytes in V100 and A100 profiler traces (kernel listing of owensgroup/ml_perf_model: 1-2 us).
COPY_FLOOR_S = 1.5e-6
LOW_FRAC, HIGH_FRAC = 0.8, 1.6


@kernel_rule("perfmodel.host_to_device_copy")
def to_device(op: Op) -> tuple[KernelCall, ...]:
    """One memcpy of the tensors copied; pinned unless the op says otherwise."""
    return _transfer(op, to_host=False)


@kernel_rule("perfmodel.device_to_host_copy", "aten._local_scalar_dense", "aten.item")
def to_host(op: Op) -> tuple[KernelCall, ...]:
    """One memcpy to host memory; reading a scalar is a copy of one element (that the host waits is not counted here)."""
    return _transfer(op, to_host=True)


@kernel_rule("perfmodel.host_update")
def host_update(_: Op) -> tuple[KernelCall, ...]:
    """Work of the host's thread alone: nothing runs on the device."""
    return ()


def _transfer(op: Op, *, to_host: bool) -> tuple[KernelCall, ...]:
    specs = op.inputs or op.outputs
    n_bytes = total_bytes(specs)
    if n_bytes == 0:
        return ()
    pinned = bool(op.attrs.get("pinned", not to_host))
    work = Work(read_bytes=n_bytes) if to_host else Work(write_bytes=n_bytes)
    features = {"pinned": float(pinned), "to_host": float(to_host)}
    return (KernelCall(family="transfer", work=work, dtype=specs[0].dtype, features=features),)


@kernel_family("transfer")
def transfer_law(calls: Sequence[KernelCall], device: Device) -> list[Estimate]:
    """Latency plus bytes over the sustained link rate; range 0.8 to 1.6 times."""
    n_bytes = np.array([call.work.bytes for call in calls], dtype=np.float64)
    if device.kind == "cpu":
        return estimates(2 * n_bytes / device.memory_bytes_per_s, (LOW_FRAC, HIGH_FRAC), Source.ROOFLINE)
    pinned = np.array([call.features["pinned"] for call in calls])
    fraction = np.where(pinned > 0, PINNED_FRAC, PAGEABLE_FRAC)
    time_s = COPY_FLOOR_S + n_bytes / (device.host_link_bytes_per_s * fraction)
    return estimates(time_s, (LOW_FRAC, HIGH_FRAC), Source.DERIVED)
