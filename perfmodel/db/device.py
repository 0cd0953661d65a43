"""Device: what the datasheet says of one GPU (or CPU) model, and the fits that calibrate it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from numpy import ndarray

from perfmodel.estimate import Source


@dataclass(frozen=True, slots=True, kw_only=True)
class HostCosts:
    """What the host thread that drives this device spends, in seconds, and where the figures come from.

    `op_dispatch_s`: Python and dispatcher time of one eager op that launches nothing; `launch_s`: host time of one
    kernel launch; `launch_latency_s`: from the launch call to the first kernel's start on an idle device; `sync_s`: a
    blocking synchronisation's own cost; `backward_op_s`: as op_dispatch_s for ops run by the autograd engine (C++, no
    Python); `low_frac`, `high_frac`: multipliers for the range of a run's host time, wider
    where the figures were carried over to a later host.
    """

    op_dispatch_s: float
    backward_op_s: float
    launch_s: float
    launch_latency_s: float
    sync_s: float
    source: str
    # Lowest and highest of 37 training runs (7 models, several batch sizes) on one V100 host: host time before first launches
    # over what the median cost of each op over all runs would give (owensgroup/ml_perf_model, overheads_study, T1 and T2).
    low_frac: float = 0.79
    high_frac: float = 1.23


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """Fitted parameters of one kernel family on one device, as data.

    Attributes:
        family: name of the kernel family (`gemm`, `attention`, ...).
        law: name and version of the law that reads `parameters` and `arrays`; another version refuses them.
        parameters: scalars of the law, by name with unit suffix.
        arrays: larger tables (tree nodes of a correction), from an npz beside the YAML; empty if none.
        fit_range: per feature the (low, high) the measurements covered.
        heldout: error on rows not used in the fit: `n_rows`, `median`, `p90` (fractions), by subset name.
        low_frac, high_frac: multipliers for the range of an estimate, from held-out residual quantiles.
        provenance: source, commit, licence, date, rows used, rows held out, software versions.
        source: FITTED, or DERIVED if inherited from another device or family.
    """

    family: str
    law: str
    parameters: Mapping[str, float]
    arrays: Mapping[str, ndarray] = field(default_factory=dict)
    fit_range: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    heldout: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    low_frac: float = 0.8
    high_frac: float = 1.25
    provenance: Mapping[str, str] = field(default_factory=dict)
    source: Source = Source.FITTED


@dataclass(frozen=True, slots=True, kw_only=True)
class Overlap:
    """What kernels lose beside collectives over what their shares of the device say (`pipeline.contention`).

    `low_frac` and `high_frac` are multipliers for the range of what is lost. The figures here are those of A100, where they
    were measured; `is_measured` says of the device itself. The range is that of four sorts of collectives in two traces
    (0.92 to 2.1 times what their shares say), and of other devices half as much again on either side.
    """

    scale: float = 1.29
    low_frac: float = 0.5
    high_frac: float = 2.5
    is_measured: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """How many times longer a CPU's parts take than when it was calibrated: a shared machine is not the same every hour.

    `compute`: arithmetic; `memory`: bytes of the last-level cache and of memory; `lookups`: rows that no cache holds; `host`:
    what a call costs whatever its size.
    """

    compute: float = 1.0
    memory: float = 1.0
    lookups: float = 1.0
    host: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """One GPU or CPU model: datasheet rates, host costs and fits.

    `peak_flops_per_s` is keyed by pipe: `fp64`, `fp64_tensor`, `fp32`, `tf32_tensor`, `fp16`, `fp16_tensor`, `bf16`,
    `bf16_tensor`, `fp8_tensor`, `int8_tensor`; dense rates, no sparsity. A missing key means the device has no such
    pipe. `cite` maps each datasheet field to its source. `kernel_floor_s` is the shortest device time of any kernel.
    `overlap` says how compute and communication slow each other.
    Of a CPU, `n_sms` is its cores, `l2_bytes` its last-level cache and `smem_per_sm_bytes` its level-1 data cache;
    `n_processes` share its cores equally (see `shared`); `n_on_host` run on the machine, whose cores are `host_cores`;
    `keeps_pages` says that its processes never give memory back (`kernels.cpu_heap.keeps_pages`), `pace` how fast it is now.
    """

    name: str
    title: str
    kind: Literal["cuda", "cpu"]
    architecture: str
    compute_capability: str
    n_sms: int
    clock_hz: float
    peak_flops_per_s: Mapping[str, float]
    memory_bytes: int
    memory_bytes_per_s: float
    l2_bytes: int
    l2_bytes_per_s: float
    smem_per_sm_bytes: int
    kernel_floor_s: float
    host_link_bytes_per_s: float
    tdp_w: float
    nearest: str
    host: HostCosts
    cite: Mapping[str, str]
    overlap: Overlap = Overlap()
    n_processes: int = 1
    n_on_host: int = 1
    host_cores: int = 0
    keeps_pages: bool = False
    pace: Pace = Pace()
    fits: Mapping[str, Fit] = field(default_factory=dict)


def shared(device: Device, n_processes: int) -> Device:
    """A CPU as each of `n_processes` busy processes sees it: its part of the memory, host work at its share of a core."""
    if device.kind != "cpu" or n_processes == 1:
        return device
    crowding = max(1.0, n_processes / device.n_sms)
    host = replace(
        device.host,
        op_dispatch_s=device.host.op_dispatch_s * crowding,
        backward_op_s=device.host.backward_op_s * crowding,
    )
    return replace(
        device,
        n_processes=n_processes,
        n_on_host=n_processes,
        host_cores=device.n_sms,
        memory_bytes=device.memory_bytes // n_processes,
        host=host,
    )


def paced(device: Device, pace: Pace) -> Device:
    """A CPU at another pace than its calibration's: its host costs and datasheet rates, and by `pace` its laws."""
    if device.kind != "cpu" or pace == Pace():
        return device
    host = replace(
        device.host,
        op_dispatch_s=device.host.op_dispatch_s * pace.host,
        backward_op_s=device.host.backward_op_s * pace.host,
    )
    return replace(
        device,
        pace=pace,
        host=host,
        peak_flops_per_s={pipe: rate / pace.compute for pipe, rate in device.peak_flops_per_s.items()},
        memory_bytes_per_s=device.memory_bytes_per_s / pace.memory,
        l2_bytes_per_s=device.l2_bytes_per_s / pace.memory,
        kernel_floor_s=device.kernel_floor_s * pace.host,
    )
