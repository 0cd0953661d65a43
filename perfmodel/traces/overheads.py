"""Host overheads, kernel times and collective times that a trace shows.

The five classes of host overhead of an op are those of Lin et al., "Building a Performance Model for Deep Learning
Recommendation Model Training on GPUs" (arXiv:2201.07821, section on host overheads):

    T1 from the end of the op before to its start      T2 from its start to its first launch
    T3 from its last launch to its end                 T4 a launch call      T5 between two launches

An op here is the outermost one on its thread. Ops in which the host waits for the device are left out: their time is no
overhead. Recording costs about 1 us an event, which is part of all five.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from perfmodel.db.device import HostCosts
from perfmodel.errors import ConfigError
from perfmodel.kernels.host import DEFAULT_WEIGHT, WEIGHTS
from perfmodel.traces.anchors import BLOCKING_COPY, Latencies, find_anchors, measure_latencies
from perfmodel.traces.explain import SYNC_CALLS
from perfmodel.traces.link import NO_OP, Links, ancestors, link
from perfmodel.traces.ranks import Job
from perfmodel.traces.spans import HostSpan, KinetoTrace

MAX_GAP_S = 1e-3  # a longer time between two ops is the program's own work, not overhead (T1 of the paper is 5-50 us)
_LAUNCH_WORDS = ("Launch", "Memcpy", "Memset")


@dataclass(frozen=True, slots=True, kw_only=True)
class Overhead:
    """Medians (s) of the five classes over all calls of an op; T5 is 0 where no call launches twice."""

    op: str
    phase: str
    n_calls: int
    t1_s: float
    t2_s: float
    t3_s: float
    t4_s: float
    t5_s: float
    n_launches: float


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelTime:
    """Times (s) of one kernel of one op on inputs of given shapes and dtypes."""

    op: str
    shapes: str
    dtypes: str
    kernel: str
    n_calls: int
    median_s: float
    min_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveTime:
    """Transfer time (s) of a collective: the minimum over ranks of each call, the median over calls."""

    op: str
    bytes: int
    n_ranks: int
    n_calls: int
    transfer_s: float
    ranks_seen: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Call:
    op: HostSpan
    phase: str
    gap_s: float
    launches: tuple[HostSpan, ...]


def measure_overheads(trace: KinetoTrace) -> tuple[Overhead, ...]:
    """The five classes of every outermost op that launches work, most frequent first."""
    links = link(trace)
    groups: dict[tuple[str, str], list[_Call]] = {}
    for call in _outermost_calls(trace, links):
        groups.setdefault((call.op.name, call.phase), []).append(call)
    found = [_overhead(name, phase, calls) for (name, phase), calls in groups.items()]
    return tuple(sorted(found, key=lambda row: (-row.n_calls, row.op)))


def _outermost_calls(trace: KinetoTrace, links: Links) -> list[_Call]:
    ops, parents = trace.ops, links.parents
    top: dict[int, int] = {}
    launches: dict[int, list[HostSpan]] = {}
    waits = set()
    launched = trace.launched
    for call, inner in zip(trace.calls, links.call_ops, strict=True):
        if inner == NO_OP:
            continue
        outer = top.setdefault(inner, _outer(inner, trace, parents))
        work = launched.get(call.correlation)
        if call.name.startswith(SYNC_CALLS) or (work and work.kind == "memcpy" and BLOCKING_COPY in work.name):
            waits.add(outer)
        elif any(word in call.name for word in _LAUNCH_WORDS):
            launches.setdefault(outer, []).append(call)
    phases = {work.op: work.phase for work in links.work if work.op != NO_OP}
    by_outer = {outer: phases[inner] for inner, outer in top.items() if inner in phases}
    ends: dict[str, float] = {}
    found = []
    for index, op in enumerate(ops):
        if op.kind != "op" or (parents[index] >= 0 and _outer(index, trace, parents) != index):
            continue
        gap_s = op.start_s - ends.get(op.thread, op.start_s)
        ends[op.thread] = op.end_s
        if index in launches and index not in waits:
            phase = by_outer.get(index, "forward")
            found.append(_Call(op=op, phase=phase, gap_s=gap_s, launches=tuple(launches[index])))
    return found


def _outer(index: int, trace: KinetoTrace, parents: Sequence[int]) -> int:
    found = index
    for above in ancestors(index, parents):
        if trace.ops[above].kind == "op":
            found = above
    return found


def _overhead(name: str, phase: str, calls: Sequence[_Call]) -> Overhead:
    gaps = [call.gap_s for call in calls if 0 <= call.gap_s < MAX_GAP_S]
    between = [
        after.start_s - before.end_s
        for call in calls
        for before, after in zip(call.launches, call.launches[1:], strict=False)
    ]
    return Overhead(
        op=name,
        phase=phase,
        n_calls=len(calls),
        t1_s=median(gaps) if gaps else 0.0,
        t2_s=median(call.launches[0].start_s - call.op.start_s for call in calls),
        t3_s=median(max(call.op.end_s - call.launches[-1].end_s, 0.0) for call in calls),
        t4_s=median(launch.duration_s for call in calls for launch in call.launches),
        t5_s=median(between) if between else 0.0,
        n_launches=sum(len(call.launches) for call in calls) / len(calls),
    )


def host_costs(trace: KinetoTrace, base: HostCosts) -> HostCosts:
    """Host costs of the machine a trace was taken on; what the trace does not show stays as in `base`.

    An op's host time without its launches, T1 + T2 + T3 + (n - 1) T5, over the weight of its kind (`kernels.host`) is the
    dispatch of a plain op; the median over calls is taken, of the backward thread apart.

    Raises:
        ConfigError: no op of the trace launches anything.
    """
    rows = measure_overheads(trace)
    if not rows:
        raise ConfigError(f"{trace.path}: no op launches device work; host overheads need a trace with CUDA activity")
    latencies = measure_latencies(find_anchors(trace))
    launch_s = median(_repeated([(row.t4_s, row.n_calls) for row in rows]))
    return HostCosts(
        op_dispatch_s=_dispatch_s([row for row in rows if row.phase != "backward"], base.op_dispatch_s),
        backward_op_s=_dispatch_s([row for row in rows if row.phase == "backward"], base.backward_op_s),
        launch_s=launch_s,
        launch_latency_s=_latency_s(latencies, launch_s, base.launch_latency_s),
        sync_s=latencies.sync_s + latencies.return_s or base.sync_s,
        source=f"trace {trace.path}",
    )


def _latency_s(latencies: Latencies, launch_s: float, otherwise: float) -> float:
    """From the end of the launch call to the kernel: the trace's latency counts from the call's start."""
    return max(latencies.launch_s - launch_s, 0.0) if latencies.launch_s > 0 else otherwise


def _repeated(pairs: Sequence[tuple[float, int]]) -> list[float]:
    return [value for value, count in pairs for _ in range(min(count, 1000))]


def _dispatch_s(rows: Sequence[Overhead], otherwise: float) -> float:
    values = []
    for row in rows:
        weight = _weight(row.op)
        host_s = row.t1_s + row.t2_s + row.t3_s + max(row.n_launches - 1, 0.0) * row.t5_s
        values.append((host_s / weight, row.n_calls))
    return median(_repeated(values)) if values else otherwise


def _weight(op: str) -> float:
    """Weight of an op by name; of a backward node, of the op it is the gradient of."""
    plain = op.rpartition(": ")[2].replace("::", ".", 1)
    if plain.rstrip("0123456789").endswith("Backward"):
        stem = plain.rstrip("0123456789").removesuffix("Backward").casefold()
        plain = next((name for name in WEIGHTS if name.replace("aten.", "").replace("_", "") == stem), "")
    return max(WEIGHTS.get(plain, DEFAULT_WEIGHT), 0.25)


def kernel_times(job: Job) -> tuple[KernelTime, ...]:
    """Times of each kernel by op and shapes, over all ranks, largest total first."""
    groups: dict[tuple[str, str, str, str], list[float]] = {}
    for trace in job.traces:
        links = link(trace)
        for work in links.work:
            if work.span.kind != "kernel" or work.span.is_collective:
                continue
            op = next((trace.ops[a] for a in ancestors(work.op, links.parents) if trace.ops[a].arguments), None)
            named = op or (trace.ops[work.op] if work.op >= 0 else None)
            shapes, dtypes = (str(op.arguments.shapes), str(op.arguments.dtypes)) if op and op.arguments else ("", "")
            key = (named.name if named else "", shapes, dtypes, work.span.name)
            groups.setdefault(key, []).append(work.span.duration_s)
    rows = [
        KernelTime(op=op, shapes=shapes, dtypes=d, kernel=k, n_calls=len(ts), median_s=median(ts), min_s=min(ts))
        for (op, shapes, d, k), ts in groups.items()
    ]
    return tuple(sorted(rows, key=lambda row: (-row.median_s * row.n_calls, row.op, row.kernel, row.shapes)))


def collective_times(job: Job) -> tuple[CollectiveTime, ...]:
    """Transfer times by collective and size; with one rank's trace alone, waits are part of them (`ranks_seen` is 1)."""
    groups: dict[tuple[str, int, int], list[tuple[float, int]]] = {}
    if job.collectives:
        for shared in job.collectives:
            n = shared.info.group_size or len(shared.members)
            groups.setdefault((shared.info.op, shared.info.bytes, n), []).append(
                (shared.transfer_s, len(shared.members))
            )
    else:
        for trace in job.traces:
            for span in trace.collectives:
                info = span.collective
                if info is not None:
                    key = (info.op, info.bytes, info.group_size or trace.world_size)
                    groups.setdefault(key, []).append((span.duration_s, 1))
    return tuple(
        CollectiveTime(
            op=op,
            bytes=n_bytes,
            n_ranks=n,
            n_calls=len(rows),
            transfer_s=median(time_s for time_s, _ in rows),
            ranks_seen=max(seen for _, seen in rows),
        )
        for (op, n_bytes, n), rows in sorted(groups.items())
    )


def as_rows(values: Sequence[Overhead] | Sequence[KernelTime] | Sequence[CollectiveTime]) -> list[Mapping[str, object]]:
    """The values as rows of a table, columns named after their fields."""
    return [{name: getattr(value, name) for name in type(value).__dataclass_fields__} for value in values]
