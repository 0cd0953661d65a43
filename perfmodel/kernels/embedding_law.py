"""The law of embedding kernels: what comes from memory, from L2 and over the host link, and what the threads can keep busy.

With h the share of gathered bytes that the device's L2 serves from reuse within the batch (`hit_<k>`, interpolated at the
L2's size times `l2_share`), rows of r bytes reach r / (r + half_row_bytes) of the random-access bandwidth:

    memory   = (stream / stream_eff + (1 - h) rows / (random_eff f(r)) + rmw / (rmw_eff f(r))) / bandwidth
    cache    = (stream + rows + rmw) / (l2_bandwidth l2_eff)
    threads  = elements / (SMs clock gather_rate)                  PyTorch's gather moves one element per thread and step
    latency  = waves of bags * pooling * step_s                    a bag's rows are added one after the other
    link     = bytes over the host link, one way / (link bandwidth eff)   eff by access: uvm_eff, uvm_rmw_eff, link_eff;
               what an SSD needs for them (`storage_s`), if that is more
    time     = floor + max(memory, cache, threads, latency) + link     and update_s for the look-ups an update starts with
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from perfmodel.db.device import Device
from perfmodel.estimate import Estimate
from perfmodel.kernels.correction import Floats, LawResult, Segment, corrected_s, price_by_segments, segments_of
from perfmodel.kernels.embedding import CACHE_MIB, GATHER, POOL, UPDATE
from perfmodel.kernels.registry import KernelCall, kernel_family
from perfmodel.units import MEBI

LAW = "embedding/1"

WARPS_PER_SM = 48.0  # resident at the occupancy of these kernels (nvprof, V100: 0.95 of 64 at best)
LANE_BYTES = 16.0  # a lane loads 16 bytes at a time, so a row of r bytes takes r / 512 warps
WARP_BYTES = 32 * LANE_BYTES

_NAMES = (
    "stage", "lookups", "bags", "pooling", "row_bytes", "row_bytes_total", "stream_bytes", "rmw_bytes", "link_bytes", "elems",
)  # fmt: skip


def hit_share(columns: Mapping[str, Floats], cache_bytes: float) -> Floats:
    """Share of the gathered bytes that a cache of `cache_bytes` serves: linear in the logarithm of the size."""
    position = float(np.log2(max(cache_bytes / MEBI, 1.0)))
    sizes = np.log2(np.array(CACHE_MIB, dtype=np.float64))
    upper = int(np.clip(np.searchsorted(sizes, position), 1, len(sizes) - 1))
    weight = float(np.clip((position - sizes[upper - 1]) / (sizes[upper] - sizes[upper - 1]), 0.0, 1.0))
    low, high = (columns[f"hit_{CACHE_MIB[i]}"] for i in (upper - 1, upper))
    result: Floats = low + weight * (high - low)
    return result


def columns_of(calls: Sequence[KernelCall]) -> dict[str, Floats]:
    """Feature columns of the calls; the optional ones are 0 where a rule did not set them."""
    names = (*_NAMES, *(f"hit_{mib}" for mib in CACHE_MIB))
    table = np.array([[call.features[name] for name in names] for call in calls]).T
    found: dict[str, Floats] = dict(zip(names, table, strict=True))
    for name in ("vectorised", "in_host", "serial_steps", "storage_s"):
        found[name] = np.array([call.features.get(name, 0.0) for call in calls])
    return found


def law(segment: Segment, calls: Sequence[KernelCall], device: Device) -> LawResult:
    """The module's formula for calls on one device."""
    return law_of_columns(segment, columns_of(calls), device)


def law_of_columns(segment: Segment, f: Mapping[str, Floats], device: Device) -> LawResult:
    """The module's formula for calls that are given as columns of features."""
    p = segment.parameters
    hits = hit_share(f, device.l2_bytes * p["l2_share"])
    missed = (1.0 - hits) * f["row_bytes_total"]
    # Rows in host memory do not load device memory; the gradient rows of an update always do.
    near = np.where(f["rmw_bytes"] > 0, 1.0, 1.0 - f["in_host"])
    written_back = f["rmw_bytes"] * (1.0 - f["in_host"])
    reach = f["row_bytes"] / (f["row_bytes"] + p["half_row_bytes"])
    memory = (
        f["stream_bytes"] / p["stream_eff"]
        + (near * missed / p["random_eff"] + written_back / p["rmw_eff"]) / np.maximum(reach, 1e-9)
    ) / device.memory_bytes_per_s
    moved = f["stream_bytes"] + f["row_bytes_total"] + f["rmw_bytes"]
    cache = moved / (device.l2_bytes_per_s * p["l2_eff"])
    rate = device.n_sms * device.clock_hz * p["gather_rate"]
    threads = np.where((f["stage"] == GATHER) & (f["vectorised"] == 0), f["elems"] / rate, 0.0)
    latency = np.where(f["stage"] == POOL, _latency_s(p, f, device), f["serial_steps"] * p["serial_s"])
    body = np.maximum(np.maximum(memory, cache), np.maximum(threads, latency))
    start = np.where(f["stage"] == UPDATE, p["update_s"], 0.0)
    time_s = p["floor_s"] + start + body + np.maximum(_link_s(p, f, missed, device), f["storage_s"])
    return LawResult(
        time_s=time_s,
        features=np.column_stack([np.log(time_s)]),
        ranged={"lookups": np.maximum(f["lookups"], 1.0), "row_bytes": np.maximum(f["row_bytes"], 1.0)},
    )


def _link_s(p: Mapping[str, float], f: Mapping[str, Floats], missed: Floats, device: Device) -> Floats:
    """Seconds on the host link: rows a lookup misses in L2, or that an update reads and writes back; fetched cache rows."""
    update = f["rmw_bytes"] > 0
    in_place = np.where(update, 0.5 * f["rmw_bytes"] / p["uvm_rmw_eff"], missed / p["uvm_eff"]) * f["in_host"]
    result: Floats = (in_place + f["link_bytes"] / p["link_eff"]) / device.host_link_bytes_per_s
    return result


def _latency_s(p: Mapping[str, float], f: Mapping[str, Floats], device: Device) -> Floats:
    warps = f["bags"] * np.maximum(f["row_bytes"] / WARP_BYTES, 0.25)
    waves = np.ceil(warps / (device.n_sms * WARPS_PER_SM))
    result: Floats = waves * f["pooling"] * p["step_s"]
    return result


def choose_segment(segments: Mapping[str, Segment], call: KernelCall, device: Device) -> Segment | None:
    """`gather` for PyTorch's one-row lookups, `rows` for everything that pools, sums or updates."""
    own = call.features["stage"] == GATHER and not call.features.get("vectorised", 0.0)
    return segments.get("gather" if own else "rows")


def has_rows(device: Device) -> bool:
    """Whether `rows_time_s` has an answer for a device."""
    fit = device.fits.get("embedding")
    return fit is not None and fit.law == LAW and "rows" in segments_of(fit, device)


def rows_time_s(columns: Mapping[str, Floats], device: Device) -> Floats | None:
    """Seconds of calls by the segment `rows`, from columns of features; None on a device that has no fit of it."""
    if not has_rows(device):
        return None
    segment = segments_of(device.fits["embedding"], device)["rows"]
    return corrected_s(segment, law_of_columns(segment, columns, device))[0]


@kernel_family("embedding")
def embedding_family(calls: Sequence[KernelCall], device: Device) -> list[Estimate]:
    """Estimates of embedding kernels by the device's fit, or by roofline without one."""
    return price_by_segments(calls, device, "embedding", LAW, (choose_segment, law))
