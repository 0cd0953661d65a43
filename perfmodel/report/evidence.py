"""What the pages and plots show beside a prediction: spans, roofline points, memory over time, link load, table load.

Plain values in SI units, read off a run; nothing here predicts.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from perfmodel.collectives import CollectiveCall
from perfmodel.collectives.load import groups_of, link_bytes, total_bytes
from perfmodel.kernels import calls_of
from perfmodel.kernels.roofline import peak_flops_per_s
from perfmodel.pipeline.loader import LOADER_STREAM
from perfmodel.pipeline.memory import memory_curve, schedule_curve
from perfmodel.pipeline.run import Run
from perfmodel.pipeline.tasks import CATEGORIES, LoweredClass
from perfmodel.plan import Collective
from perfmodel.sim.path import critical_stretches
from perfmodel.sim.program import COMM, COMPUTE, COPY, COPY_BACK, HOST
from perfmodel.units import ps_to_seconds

STREAM_NAMES = {
    HOST: "host thread", COMPUTE: "compute", COMM: "communication", COPY: "copy", 4: "tensor-parallel communication",
    5: "send to next stage", 6: "receive from previous stage", 7: "send to previous stage", 8: "receive from next stage",
    COPY_BACK: "copy to the host", LOADER_STREAM: "data loader",
}  # fmt: skip
MAX_CLASSES = 8  # rank classes with a timeline in a page
MAX_SPANS = 60_000  # spans of one class in a page, about 2 MB
MAX_POINTS = 400
MAX_LOAD_RANKS = 512  # an exchange has a route per pair of ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class RooflinePoint:
    """Calls of one op with equal work: FLOPs, bytes and seconds of one call, and how many calls."""

    name: str
    phase: str
    family: str
    flops: int
    bytes: int
    time_s: float
    calls: int

    @property
    def intensity(self) -> float:
        """FLOPs per byte."""
        return self.flops / self.bytes

    @property
    def flops_per_s(self) -> float:
        """Rate reached."""
        return self.flops / self.time_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Roofline:
    """Points of the rank that bounds the iteration, and its device's peaks."""

    device: str
    memory_bytes_per_s: float
    peaks: dict[str, float]
    points: tuple[RooflinePoint, ...]
    shown_frac: float  # share of the kernels' time that the points stand for


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """Memory in use of one class of ranks over the iteration: `bytes[i]` from `time_s[i]` on."""

    ranks: tuple[int, ...]
    time_s: tuple[float, ...]
    bytes: tuple[int, ...]
    base_bytes: int
    capacity_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkLoad:
    """Bytes that an iteration moves over one direction of a link, and the share of the iteration that takes at full rate."""

    name: str
    source: str
    target: str
    kind: str
    n_lanes: int
    bandwidth_bytes_per_s: float
    bytes: float
    busy_frac: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardLoad:
    """What the embedding tables cost one class of ranks."""

    ranks: tuple[int, ...]
    tables: tuple[str, ...]
    parameters_bytes: int
    embedding_s: float
    sent_bytes: float
    received_bytes: float


def class_order(run: Run) -> list[int]:
    """Simulator classes in the order of `prediction.ranks`."""
    index = {lowered.rank_class.ranks: i for i, lowered in enumerate(run.classes)}
    return [index[summary.ranks] for summary in run.prediction.ranks]


def timelines(run: Run) -> list[dict[str, Any]]:
    """Spans of the first classes as columns: times in integer picoseconds from the iteration's begin, names by index."""
    path = critical_stretches(run.steady.timeline)
    critical = {task for task, lag in zip(path.task, path.lag, strict=True) if not lag}
    return [_timeline(run, index, critical) for index in class_order(run)[:MAX_CLASSES]]


def _timeline(run: Run, index: int, critical: set[int]) -> dict[str, Any]:
    lowered, timeline = run.classes[index], run.steady.timeline
    first = timeline.compiled.tasks_of(index).start
    starts, ends = timeline.starts(index) - timeline.begin_ps, timeline.ends(index) - timeline.begin_ps
    kept = np.flatnonzero(ends > starts)
    events = lowered.rank_class.events
    names: dict[str, int] = {}
    stream = np.asarray(lowered.program.stream)
    rows: dict[str, list[int]] = {key: [] for key in ("stream", "start", "length", "name", "kind", "critical")}
    for task in kept[:MAX_SPANS].tolist():
        event = events[int(lowered.tasks.event[task])]
        label = f"{event.label} · {event.phase}"
        if event.op is not None and event.op.module:
            label += f" · {event.op.module}"
        if stream[task] == LOADER_STREAM:
            label = STREAM_NAMES[LOADER_STREAM]
        rows["stream"].append(int(stream[task]))
        rows["start"].append(int(starts[task]))
        rows["length"].append(int(ends[task] - starts[task]))
        rows["name"].append(names.setdefault(label, len(names)))
        rows["kind"].append(int(lowered.tasks.category[task]))
        rows["critical"].append(int(first + task in critical))
    streams = sorted(set(rows["stream"]))
    return {
        "ranks": list(lowered.rank_class.ranks),
        "streams": [{"id": s, "name": STREAM_NAMES.get(s, f"stream {s}")} for s in streams],
        "names": list(names),
        "kinds": list(CATEGORIES),
        "left_out": int(max(len(kept) - MAX_SPANS, 0)),
        **rows,
    }


def roofline(run: Run) -> Roofline:
    """Kernels of the rank that bounds the iteration by their work, largest total time first."""
    lowered = run.classes[class_order(run)[0]]
    found: dict[tuple[str, str, str, int, int], list[float]] = {}
    pipes: set[str] = set()
    total_s = 0.0
    for event_index, time_s, family in _kernel_times(lowered):
        total_s += time_s
        event = lowered.rank_class.events[event_index]
        if event.op is None:
            continue
        calls = calls_of(event.op)
        flops, n_bytes = sum(call.work.flops for call in calls), sum(call.work.bytes for call in calls)
        if flops > 0 and n_bytes > 0 and time_s > 0:
            pipes.update(call.pipe for call in calls if call.work.flops)
            found.setdefault((event.op.name, event.phase, family, flops, n_bytes), []).append(time_s)
    points = [
        RooflinePoint(
            name=key[0], phase=key[1], family=key[2], flops=key[3], bytes=key[4], time_s=sum(t) / len(t), calls=len(t)
        )
        for key, t in found.items()
    ]
    points.sort(key=lambda p: (-p.time_s * p.calls, p.name, p.flops))
    shown = points[:MAX_POINTS]
    return Roofline(
        device=lowered.device.title,
        memory_bytes_per_s=lowered.device.memory_bytes_per_s,
        peaks={pipe: peak_flops_per_s(lowered.device, pipe) for pipe in sorted(pipes)},
        points=tuple(shown),
        shown_frac=sum(p.time_s * p.calls for p in shown) / total_s if total_s else 0.0,
    )


def _kernel_times(lowered: LoweredClass) -> Iterator[tuple[int, float, str]]:
    """(event, seconds of its kernels, family of the longest) of every event with kernels."""
    tasks = lowered.tasks
    kernels = np.flatnonzero(tasks.category == CATEGORIES.index("kernel"))
    spent: dict[int, list[tuple[float, int]]] = {}
    for task in kernels.tolist():
        spent.setdefault(int(tasks.event[task]), []).append((float(tasks.time_s[task]), int(tasks.family[task])))
    for event, parts in spent.items():
        yield event, sum(time_s for time_s, _ in parts), tasks.names[max(parts)[1]]


def memory_curves(run: Run) -> tuple[Curve, ...]:
    """Memory over the iteration: by storages where each rank has a whole copy of the model, by steps where it has a schedule.

    None where a plan without a schedule splits tensors.
    """
    sharded = frozenset(name for lowered in run.classes for name in lowered.rank_class.tables)
    curves = []
    for index in class_order(run)[:MAX_CLASSES]:
        lowered = run.classes[index]
        if lowered.rank_class.holding is not None:
            curve = schedule_curve(lowered, index, run.steady.timeline)
        elif run.placement.n_replicas in (0, run.placement.n_ranks) and run.placement.n_micro == 1:
            curve = memory_curve(lowered, index, run.steady.timeline, run.graph, sharded)
        else:
            continue
        memory = lowered.rank_class.memory
        base = memory.total_bytes - curve.peak_bytes
        if base < 0:  # the plan holds less than the graph's storages: this would be another plan's curve
            continue
        times, used = _thinned(curve.time_ps - run.steady.timeline.begin_ps, curve.bytes)
        curves.append(
            Curve(
                ranks=lowered.rank_class.ranks,
                time_s=tuple(ps_to_seconds(t) for t in times),
                bytes=tuple(base + b for b in used),
                base_bytes=base,
                capacity_bytes=lowered.device.memory_bytes,
            )
        )
    return tuple(curves)


def _thinned(time_ps: NDArray[np.int64], used: NDArray[np.int64], n: int = 600) -> tuple[list[int], list[int]]:
    """At most 2 n steps: the largest and the last value of each n-th of the time."""
    settled = (
        int(np.searchsorted(time_ps, time_ps[0], side="right")) - 1
    )  # what stands at the beginning is there at once
    time_ps, used = time_ps[settled:], used[settled:]
    if len(time_ps) <= 2 * n:
        return time_ps.tolist(), used.tolist()
    cell = (time_ps * n // max(int(time_ps[-1]), 1)).astype(int)
    keep: set[int] = {0, len(time_ps) - 1}
    for number in np.unique(cell):
        members = np.flatnonzero(cell == number)
        keep.update((int(members[used[members].argmax()]), int(members[-1])))
    order = sorted(keep)
    return time_ps[order].tolist(), used[order].tolist()


def link_loads(run: Run) -> tuple[LinkLoad, ...]:
    """Every link that an iteration's collectives cross, busiest first; none where a group is too large to follow."""
    seen: dict[int, Collective] = {}
    for lowered in run.classes:
        for event in lowered.rank_class.events:
            if event.collective is not None:
                seen.setdefault(event.collective.instance, event.collective)
    if any(len(c.ranks) > MAX_LOAD_RANKS for c in seen.values()):
        return ()
    priced: dict[tuple[object, ...], list[dict[str, float]]] = {}
    parts = []
    for instance, c in seen.items():
        algorithm = run.collectives[instance].algorithm
        key = (c.op, c.bytes, c.ranks, c.siblings, c.send_bytes, algorithm)
        if key not in priced:
            priced[key] = [
                link_bytes(_call(c, ranks), run.topology, algorithm) for ranks in groups_of(c.ranks, c.siblings)
            ]
        parts += priced[key]
    links = {data["link"].name: data["link"] for _, _, data in run.topology.graph.edges(data=True)}
    iteration_s = run.prediction.iteration_time_s
    loads = [
        LinkLoad(
            name=name,
            source=links[name].source,
            target=links[name].target,
            kind=str(links[name].kind),
            n_lanes=links[name].n_lanes,
            bandwidth_bytes_per_s=links[name].bandwidth_bytes_per_s,
            bytes=n_bytes,
            busy_frac=n_bytes / links[name].bandwidth_bytes_per_s / iteration_s,
        )
        for name, n_bytes in total_bytes(parts).items()
        if name in links
    ]
    return tuple(sorted(loads, key=lambda load: (-load.busy_frac, load.name)))


def _call(c: Collective, ranks: tuple[int, ...]) -> CollectiveCall:
    return CollectiveCall(op=c.op, bytes=c.bytes, ranks=ranks, dtype=c.dtype, send_bytes=c.send_bytes)


def shard_loads(run: Run) -> tuple[ShardLoad, ...]:
    """What whole or sharded embedding tables cost each class of ranks; none where the plan spreads no table."""
    if not any(lowered.rank_class.tables for lowered in run.classes):
        return ()
    loads = []
    for index in class_order(run):
        lowered = run.classes[index]
        sent, received = _exchanged(lowered)
        loads.append(
            ShardLoad(
                ranks=lowered.rank_class.ranks,
                tables=lowered.rank_class.tables,
                parameters_bytes=lowered.rank_class.memory.parameters_bytes,
                embedding_s=sum(t for _, t, family in _kernel_times(lowered) if family.startswith("embedding")),
                sent_bytes=sent,
                received_bytes=received,
            )
        )
    return tuple(sorted(loads, key=lambda load: load.ranks))


def _exchanged(lowered: LoweredClass) -> tuple[float, float]:
    """Bytes that the class's first rank sends to and receives from others in all_to_all_v collectives."""
    rank, sent, received = lowered.rank_class.representative, 0, 0
    for event in lowered.rank_class.events:
        c = event.collective
        if c is not None and c.send_bytes is not None and rank in c.ranks:
            place = c.ranks.index(rank)
            sent += sum(c.send_bytes[place]) - c.send_bytes[place][place]
            received += sum(row[place] for row in c.send_bytes) - c.send_bytes[place][place]
    return float(sent), float(received)
