"""The law of operators on a CPU: one formula, fitted per operator.

    share    = 1 / (1 + (grain / work)^edge)            an operator splits its work over cores from some size on
    speed    = 1 + (used - 1) share,   used = cores, or parts / ceil(parts / cores) where its parts are known
    compute  = (padded / (work_per_s eff) + rows row_s + tails tail_s + narrow narrow_s) / speed,
               eff = prod x / (x + half_x), x = m, n, k;   padded = work (1 + lane (lanes_n - 1))
    memory   = shared bytes / (shared_bytes_per_s speed) + memory bytes / (memory_bytes_per_s gain) + far rows far_s / speed,
               gain = 1 + (SECOND_CORE_GAIN - 1)(speed - 1)
    time     = fixed + flushed flush_s + fork share + packed bytes / pack_bytes_per_s + (compute^p + memory^p)^(1/p)
               + fresh bytes / fresh_bytes_per_s

Far rows are rows of a table that no cache holds: each costs a page walk and a wait. `eff` and packing (a library copies
both operands into its own order) are of products.

A call behind FORGOTTEN_OPS others costs `in_step_s` more (see `calibrate/host.py`), behind fewer proportionally less.
Which bytes come from where is told by `cpu_memory`; the features by `cpu_features`. Every operator that was measured is a
segment of its family's fit; a pointwise operator that was not is priced by the law of `add`, as derived.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from perfmodel.db.device import Device, Pace
from perfmodel.estimate import Estimate, Source
from perfmodel.graph import Op
from perfmodel.kernels.correction import (
    FADE_OCTAVES,
    OUTSIDE_WIDENING,
    Floats,
    LawResult,
    Segment,
    corrected_s,
    segments_of,
)
from perfmodel.kernels.cpu_features import (
    SHARPNESS,
    accesses,
    cpu_call,
    op_key,
    rows_bytes,
    table_lookups,
)
from perfmodel.kernels.cpu_heap import MAP_BYTES
from perfmodel.kernels.cpu_memory import GIVEN_BACK_RANGE, Reach, beyond, reaches
from perfmodel.kernels.pricing import calls_of, price_apart
from perfmodel.kernels.registry import KernelCall

LAW = "cpu/2"
# What a second core adds to the memory bandwidth that one core gets: 38 and 27 GB/s are the medians of the bandwidths that
# operators' fits of 2026-11-29 found with two threads and with one.
SECOND_CORE_GAIN = 1.43
# Calls after which an operator's code has left the caches. `relu` behind 0, 4, 8, 12, 16 and 24 other small operators takes
# 2.2, 2.4, 2.9, 3.4, 3.6 and 3.9 us, `mm` 4.3, 5.0, 5.5, 7.6, 7.9 and 9.3 us (torch 2.13, measured 2026-11-29).
FORGOTTEN_OPS = 24
# The part of the last-level cache whose lines last until a table is asked again: neighbours on the host share it. After 2 ms
# of sleep 74 kernels of the calibration take 1.6 times what their warm rows say (median), `_embedding_bag` 64 us for 14:
# nothing of 32 MiB is left then, in which time a DLRM moves some 8 MiB itself (2 threads, measured 2026-11-30).
LEFT_FRAC = 0.25
PAGE_BYTES = 4096
FAULT_S = 2.86e-6  # of one page in one process; see crowded_faults_s
FAULTS_TOGETHER = 1.17  # a fault beside n - 1 other processes' takes this times n as long
STAND_IN = {"elementwise": "add", "optimizer": "add_", "copy": "clone", "fill": "zeros_like", "random": "bernoulli_"}
COLUMNS = (
    "work", "m", "n", "k", "batch", "trans_a", "trans_b", "columns", "rows", "in_bytes", "out_bytes", "out_elems",
    "n_tensors", "strided", "broadcast", "shared_bytes", "memory_bytes", "fresh_bytes", "kind", "taps", "stride", "causal",
    "lookups", "pooling", "bias", "side", "far_rows", "lanes_n", "lanes_k", "tails", "narrow", "distinct",
    "parts", "flushed",
)  # fmt: skip
FIRST_FEATURES = COLUMNS[: COLUMNS.index("shared_bytes")]
MORE_FEATURES = COLUMNS[COLUMNS.index("fresh_bytes") + 1 : COLUMNS.index("parts")]
_LOGGED = frozenset({
    "work", "m", "n", "k", "batch", "columns", "rows", "in_bytes", "out_bytes", "out_elems", "lookups", "pooling", "taps",
    "side", "far_rows", "lanes_n", "lanes_k", "tails", "narrow", "distinct",
})  # fmt: skip


def columns_of(calls: Sequence[KernelCall]) -> dict[str, Floats]:
    """Columns of the calls; what an operator lacks is 0."""
    return {name: np.array([call.features.get(name, 0.0) for call in calls], dtype=np.float64) for name in COLUMNS}


def law(segment: Segment, calls: Sequence[KernelCall], device: Device) -> LawResult:
    """The module's formula, the features of its correction and what the fit range bounds."""
    columns = columns_of(calls)
    found = evaluate(segment.parameters, columns, device)
    if device.pace != Pace():
        now = evaluate(paced_parameters(segment.parameters, device.pace), columns, device)
        found = replace(found, time_s=now.time_s)
    if device.n_on_host == 1:
        return found
    crowd = slowdown(segment.parameters, columns, device)
    now_parameters = paced_parameters(segment.parameters, device.pace)
    slower = evaluate(_crowded_memory(now_parameters, device), columns, device)
    return replace(
        found, time_s=slower.time_s * crowd + crowded_faults_s(columns["fresh_bytes"], device.n_on_host, crowd)
    )


def paced_parameters(p: Mapping[str, float], pace: Pace) -> dict[str, float]:
    """A law's parameters on a machine whose parts take as much longer as `pace` says. The correction stays as it is."""
    longer = {
        **dict.fromkeys(("row_s", "tail_s", "narrow_s"), pace.compute),
        "far_s": pace.lookups,
        **dict.fromkeys(("fixed_s", "fork_s", "flush_s"), pace.host),
    }
    slower = {"work_per_s": pace.compute}
    slower |= dict.fromkeys(
        ("shared_bytes_per_s", "memory_bytes_per_s", "fresh_bytes_per_s", "pack_bytes_per_s"), pace.memory
    )
    return {name: value * longer.get(name, 1.0) / slower.get(name, 1.0) for name, value in p.items()}


def _crowded_memory(p: Mapping[str, float], device: Device) -> dict[str, float]:
    """Parameters with the part of the memory's bandwidth that a process gets while another runs on each other core.

    Two processes that add 16 MiB at once take 1.33 times as long as one, 1.42 times into new pages (torch 2.13, 2 cores,
    measured 2026-11-29).
    """
    running = max(min(device.n_on_host, device.host_cores), 1)
    part = (1.0 + (SECOND_CORE_GAIN - 1.0) * (running - 1)) / running
    return {**p, "memory_bytes_per_s": p["memory_bytes_per_s"] * part}


def crowded_faults_s(fresh_bytes: Floats, n_processes: int, crowding: Floats) -> Floats:
    """Seconds that faults on new pages take longer while other processes fault as well: the host serves one at a time.

    `crowding` is how much longer a fault takes already because processes take turns.

    Measured 2026-11-29 on the project's 2-core virtual machine, new mappings touched page by page: 2.86 us a page in one
    process, 6.7 in each of two at once, 13.5 in each of four. Elsewhere pages may cost less and be served side by side.
    """
    return fresh_bytes / PAGE_BYTES * FAULT_S * np.maximum(FAULTS_TOGETHER * n_processes - crowding, 0.0)


def slowdown(p: Mapping[str, float], f: Mapping[str, Floats], device: Device) -> Floats:
    """How much longer calls take while other processes keep their equal part of the cores busy.

    What a call splits over cores it now splits over its part of them; more processes than cores take turns.
    """
    cores = max(1, device.n_sms // device.n_processes)
    crowding = max(1.0, device.n_processes / device.n_sms)
    found: Floats = crowding * _speed(p, f, device.n_sms) / _speed(p, f, cores)
    return found


def _speed(p: Mapping[str, float], f: Mapping[str, Floats], cores: int) -> Floats:
    """How many times faster a call's loops run on so many cores than on one."""
    parts = np.maximum(f["parts"], 1.0)
    used = np.where(f["parts"] > 0, parts / np.ceil(parts / cores), float(cores))
    return 1.0 + (used - 1.0) * _split(p, f)


def _split(p: Mapping[str, float], f: Mapping[str, Floats]) -> Floats:
    """The part of a call's work that is split over cores."""
    return 1.0 / (1.0 + (p["grain"] / np.maximum(f["work"], 1.0)) ** p["edge"])


def evaluate(p: Mapping[str, float], f: Mapping[str, Floats], device: Device) -> LawResult:
    """`law` on columns, for fits that evaluate it many times."""
    efficiency: Floats = np.ones(f["work"].shape)
    for name in ("m", "n", "k"):
        half = p.get(f"half_{name}", 0.0)
        if half > 0:
            efficiency = efficiency * f[name] / (f[name] + half)
    speed = _speed(p, f, device.n_sms)
    padded = f["work"] * (1.0 + p.get("lane", 0.0) * np.maximum(f["lanes_n"] - 1.0, 0.0))
    alone = padded / (p["work_per_s"] * np.maximum(efficiency, 1e-6)) + f["rows"] * p.get("row_s", 0.0)
    alone = alone + f["tails"] * p.get("tail_s", 0.0) + f["narrow"] * p.get("narrow_s", 0.0)
    compute = alone / speed
    packed = f["in_bytes"] / p["pack_bytes_per_s"] if "pack_bytes_per_s" in p else 0.0
    gain = 1.0 + (SECOND_CORE_GAIN - 1.0) * (speed - 1.0)
    memory = f["shared_bytes"] / (p["shared_bytes_per_s"] * speed)
    memory = memory + f["memory_bytes"] / (p["memory_bytes_per_s"] * gain) + f["far_rows"] * p.get("far_s", 0.0) / speed
    sharp = p["sharp"]
    largest = np.maximum(np.maximum(compute, memory), 1e-12)
    body = largest * ((compute / largest) ** sharp + (memory / largest) ** sharp) ** (1.0 / sharp)
    start = p["fixed_s"] + f["flushed"] * p.get("flush_s", 0.0) + p["fork_s"] * _split(p, f)
    time_s = start + packed + body + f["fresh_bytes"] / p["fresh_bytes_per_s"]
    return LawResult(
        time_s=time_s,
        features=_features(f, time_s, compute, memory),
        ranged={"work": np.maximum(f["work"], 1.0), "columns": np.maximum(f["columns"], 1.0)},
    )


def _features(f: Mapping[str, Floats], time_s: Floats, compute: Floats, memory: Floats) -> Floats:
    """Feature matrix of the correction: logarithms of sizes, the rest as it is, and the law's parts."""
    sizes = [np.log(np.maximum(f[name], 1.0)) if name in _LOGGED else f[name] for name in FIRST_FEATURES]
    more = [np.log(np.maximum(f[name], 1.0)) if name in _LOGGED else f[name] for name in MORE_FEATURES]
    parts = [
        np.log(time_s),
        compute / time_s,
        memory / time_s,
        f["fresh_bytes"] / np.maximum(f["out_bytes"], 1.0),
        f["memory_bytes"] / np.maximum(f["in_bytes"] + f["out_bytes"], 1.0),
    ]
    return np.column_stack([*sizes, *more, *parts])


def price_step(ops: Sequence[Op], device: Device) -> list[tuple[Estimate, ...]]:
    """Estimates of the ops of one repeated step on a CPU: one each, () for an op that runs nothing.

    An op is priced in its place: how warm its tensors are follows from the ops around it.
    """
    known = accesses(ops)
    lookups = [table_lookups(op, known) for op in ops]
    touched = [None if item is None else rows_bytes(item) for item in lookups]
    found = reaches(ops, touched, keeps_pages=device.keeps_pages)
    priced: list[tuple[Estimate, ...]] = [()] * len(ops)
    segments = _segments(device)
    recent = _Recent()
    groups: dict[str, tuple[Segment, list[int], list[KernelCall]]] = {}
    apart: list[int] = []
    extra_s: dict[int, float] = {}
    for index, op in enumerate(ops):
        calls = calls_of(op)
        if not calls:
            continue
        segment = _segment(segments, op, calls)
        if segment is None:
            apart.append(index)
            continue
        call = flushed(cpu_call(op, found[index], lookups[index], float(device.l2_bytes), known), found[index], device)
        # Cold code is part of what a flushed call costs.
        cold_code = device.pace.host * (1.0 - call.features.get("flushed", 0.0))
        extra_s[index] = recent.cost_s(index, op_key(op), segment) * cold_code
        _, members, chosen = groups.setdefault(op_key(op), (segment, [], []))
        members.append(index)
        chosen.append(call)
    for segment, members, chosen in groups.values():
        for index, call, estimate in zip(members, chosen, price_segment(segment, chosen, device), strict=True):
            uncertain = with_faults(estimate, faults_s(call, segment))
            priced[index] = (_longer(uncertain, extra_s.get(index, 0.0)),)
    # The families' own laws cannot read fits of whole operators: for them this device has only its datasheet.
    bare = replace(device, fits={name: fit for name, fit in device.fits.items() if fit.law != LAW})
    for index, estimates in zip(apart, price_apart([calls_of(ops[i]) for i in apart], bare), strict=True):
        priced[index] = estimates
    return priced


def flushed(call: KernelCall, reach: Reach, device: Device) -> KernelCall:
    """A call on a table with the share of the caches that the step swept since the table's last use.

    Behind swept caches a call on a table waits for code and for page tables, whatever rows it needs: eight `_embedding_bag`
    of 2048 lookups in a step of 100 MB take 150 us each, 228 us the first, where their bytes would take 38 us; of 256 lookups
    in a step of 8 MB, 30 us for 18 (2 threads, torch 2.13, profiler, medians of 9 steps, 2026-11-30).
    """
    if call.family != "embedding":
        return call
    share = beyond(reach.gap_bytes, LEFT_FRAC * float(device.l2_bytes), SHARPNESS)
    return replace(call, features={**call.features, "flushed": share})


class _Recent:
    """How long ago each operator ran, in calls."""

    def __init__(self) -> None:
        self.last: dict[str, int] = {}

    def cost_s(self, index: int, key: str, segment: Segment) -> float:
        """What the step adds to this call: less, the fewer calls ago the operator ran."""
        before = self.last.get(key)
        self.last[key] = index
        share = 1.0 if before is None else min((index - before - 1) / FORGOTTEN_OPS, 1.0)
        return share * segment.parameters.get("in_step_s", 0.0)


def faults_s(call: KernelCall, segment: Segment) -> float:
    """Time (s) in page faults of blocks that come from the heap; a block with a map of its own always faults."""
    fresh_bytes = call.features["fresh_bytes"]
    return fresh_bytes / segment.parameters["fresh_bytes_per_s"] if fresh_bytes <= MAP_BYTES else 0.0


def with_faults(estimate: Estimate, time_s: float) -> Estimate:
    """The estimate with the range of how many of its pages fault, which is independent of its law's error."""
    least, most = GIVEN_BACK_RANGE
    below = math.hypot(estimate.time_s - estimate.low_s, (1.0 - least) * time_s)
    above = math.hypot(estimate.high_s - estimate.time_s, (most - 1.0) * time_s)
    return replace(estimate, low_s=max(estimate.time_s - below, 0.0), high_s=estimate.time_s + above)


def _longer(estimate: Estimate, time_s: float) -> Estimate:
    """The estimate with a fixed cost on top."""
    return Estimate(
        time_s=estimate.time_s + time_s,
        low_s=estimate.low_s + time_s,
        high_s=estimate.high_s + time_s,
        source=estimate.source,
    )


def price_segment(segment: Segment, calls: Sequence[KernelCall], device: Device) -> list[Estimate]:
    """Estimates of calls of one operator."""
    time_s, outside = corrected_s(segment, law(segment, calls, device))
    widen = OUTSIDE_WIDENING ** np.minimum(outside, FADE_OCTAVES)
    low, high = time_s * segment.low_frac / widen, time_s * segment.high_frac * widen
    return [
        Estimate(time_s=t, low_s=lo, high_s=hi, source=Source.EXTRAPOLATED if out > 0 else segment.source)
        for t, lo, hi, out in zip(time_s.tolist(), low.tolist(), high.tolist(), outside.tolist(), strict=True)
    ]


def _segments(device: Device) -> dict[str, Segment]:
    """Every operator that a fit of this law covers."""
    found: dict[str, Segment] = {}
    for fit in device.fits.values():
        if fit.law == LAW:
            found |= segments_of(fit, device)
    return found


def _segment(segments: Mapping[str, Segment], op: Op, calls: Sequence[KernelCall]) -> Segment | None:
    """The segment of the op, or the law of the operator that stands in for its family."""
    own = segments.get(op_key(op))
    if own is not None:
        return own
    stand_in = segments.get(STAND_IN.get(calls[0].family, ""))
    return stand_in.only_law() if stand_in is not None else None
