"""Where the iteration time of one rank goes: parts in ps that sum exactly to it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from perfmodel.sim.intervals import NO_SPANS, Spans, clip, divide, fold, total, union
from perfmodel.sim.program import COMM, COMPUTE, COPY, HOST, INPUT, IntArray
from perfmodel.sim.timeline import Timeline

BoolArray = NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True)
class Breakdown:
    """Each instant of the iteration belongs to the first of these that holds on the rank; the parts sum to the window.

    Attributes:
        compute_ps: a compute kernel runs.
        exposed_comm_ps: a collective, or work on a communication stream, runs and no compute kernel does.
        exposed_copy_ps: a copy runs and none of the above.
        wait_ps: a collective of this rank waits for other ranks and none of the above.
        host_ps: the device has nothing to do and a host thread works, or a launch is on its way to the device.
        input_ps: the next input is being made and none of the above.
        idle_ps: none of the above: the host waits for something that is not running on this rank, or the rank is done.
        comm_ps: time in which communication runs at all; `hidden_comm_ps` of it lies under compute.
    """

    compute_ps: int
    exposed_comm_ps: int
    exposed_copy_ps: int
    wait_ps: int
    host_ps: int
    input_ps: int
    idle_ps: int
    comm_ps: int

    @property
    def hidden_comm_ps(self) -> int:
        """Communication that runs while compute does."""
        return self.comm_ps - self.exposed_comm_ps

    @property
    def total_ps(self) -> int:
        """Sum of the seven parts: the iteration time."""
        busy_ps = self.compute_ps + self.exposed_comm_ps + self.exposed_copy_ps
        return busy_ps + self.wait_ps + self.host_ps + self.input_ps + self.idle_ps


def breakdown(timeline: Timeline, cls: int) -> Breakdown:
    """Divides the iteration time of a rank of class `cls`.

    The window is [begin_ps, finish_ps) of the timeline. In steady state, work of this iteration that runs outside the
    window stands for the same work of its neighbours that runs inside, and is folded into it.
    """
    layers = _layers(timeline, cls)
    shares = divide(layers, timeline.begin_ps, timeline.finish_ps)
    compute, comm, copy, wait, host, made, idle = (total(share) for share in shares)
    return Breakdown(
        compute_ps=compute,
        exposed_comm_ps=comm,
        exposed_copy_ps=copy,
        wait_ps=wait,
        host_ps=host,
        input_ps=made,
        idle_ps=idle,
        comm_ps=total(layers[1]),
    )


def breakdowns(timeline: Timeline) -> list[Breakdown]:
    """`breakdown` of every class, in one pass: the windows of the classes stand beside each other on one axis."""
    compiled, period = timeline.compiled, timeline.makespan_ps
    pitch = period + 1  # a gap keeps the spans of neighbours apart
    cls = np.repeat(np.arange(compiled.n_classes), np.diff(compiled.wiring.offsets))
    ready, start, end, kind = timeline.ready_ps, timeline.start_ps, timeline.end_ps, compiled.kind
    covered, covered_ps, parts = NO_SPANS, [0] * compiled.n_classes, []
    all_comm_ps = covered_ps
    for code in (COMPUTE, COMM, COPY, None, HOST, INPUT):
        at = np.flatnonzero(ready < start if code is None else kind == code)
        spans = (ready[at], start[at]) if code is None else (start[at], end[at])
        of = cls[at]
        if code == HOST:
            flights, owner = _all_launches(timeline, kind == HOST, cls)
            spans = (np.concatenate([spans[0], flights[0]]), np.concatenate([spans[1], flights[1]]))
            of = np.concatenate([of, owner])
        layer = _beside(timeline, spans, of, pitch)
        if code == COMM:
            all_comm_ps = _by_class(union(layer), pitch, compiled.n_classes)
        # What a layer adds to what those before it cover is its own.
        covered = union((np.concatenate([covered[0], layer[0]]), np.concatenate([covered[1], layer[1]])))
        before_ps, covered_ps = covered_ps, _by_class(covered, pitch, compiled.n_classes)
        parts.append([after - before for after, before in zip(covered_ps, before_ps, strict=True)])
    return [
        Breakdown(
            compute_ps=compute,
            exposed_comm_ps=comm,
            exposed_copy_ps=copy,
            wait_ps=wait,
            host_ps=host,
            input_ps=made,
            idle_ps=period - compute - comm - copy - wait - host - made,
            comm_ps=all_comm,
        )
        for compute, comm, copy, wait, host, made, all_comm in zip(*parts, all_comm_ps, strict=True)
    ]


def _beside(timeline: Timeline, spans: Spans, cls: IntArray, pitch: int) -> Spans:
    """Spans in the window, moved to the part of the axis that belongs to their class."""
    begin, period = timeline.begin_ps, timeline.makespan_ps
    if not timeline.steady:
        low, high = np.clip(spans[0], begin, begin + period), np.clip(spans[1], begin, begin + period)
    elif period <= 0:
        return NO_SPANS
    else:
        low = (spans[0] - begin) % period + begin
        high = low + np.minimum(spans[1] - spans[0], period)
    shift = cls * pitch - begin
    over = np.maximum(high - (begin + period), 0)
    wrapped = over > 0
    starts = np.concatenate([low + shift, cls[wrapped] * pitch])
    return starts, np.concatenate([high - over + shift, cls[wrapped] * pitch + over[wrapped]])


def _by_class(spans: Spans, pitch: int, n_classes: int) -> list[int]:
    """Length of disjoint spans by the part of the axis that they lie in."""
    lengths = np.concatenate([[0], np.cumsum(spans[1] - spans[0])])
    edges = np.searchsorted(spans[0], np.arange(n_classes + 1) * pitch)
    return np.diff(lengths[edges]).tolist()  # type: ignore[no-any-return]  # numpy does not say of what


def _all_launches(timeline: Timeline, is_host: BoolArray, cls: IntArray) -> tuple[Spans, IntArray]:
    """As `_launches`, of all classes, and the class of each."""
    wiring = timeline.compiled.wiring
    owner = np.repeat(np.arange(timeline.compiled.n_tasks), np.diff(wiring.dep_ptr))
    flies = is_host[wiring.dep_index] & ~is_host[owner]
    left = timeline.end_ps[wiring.dep_index[flies]]
    return (left, left + timeline.compiled.dep_lag_ps[flies]), cls[owner[flies]]


def host_bound_spans(timeline: Timeline, cls: int) -> list[tuple[int, int]]:
    """The (start, end) of every interval counted in `Breakdown.host_ps`, ascending."""
    starts, ends = divide(_layers(timeline, cls), timeline.begin_ps, timeline.finish_ps)[4]
    return list(zip(starts.tolist(), ends.tolist(), strict=True))


def stream_busy(timeline: Timeline, cls: int) -> dict[int, int]:
    """Time (ps) in which each stream of a class has a task running, by stream number."""
    tasks = timeline.compiled.tasks_of(cls)
    busy = timeline.end_ps[tasks] - timeline.start_ps[tasks]
    streams = timeline.compiled.stream[tasks]
    return {int(stream): int(busy[streams == stream].sum()) for stream in np.unique(streams)}


def _layers(timeline: Timeline, cls: int) -> list[Spans]:
    tasks = timeline.compiled.tasks_of(cls)
    ready, start, end = timeline.ready_ps[tasks], timeline.start_ps[tasks], timeline.end_ps[tasks]
    kinds = timeline.compiled.kinds_of(cls)
    codes = (COMPUTE, COMM, COPY, HOST, INPUT)
    compute, comm, copy, host, made = ((start[kinds == kind], end[kinds == kind]) for kind in codes)
    waiting = (ready, start)
    flights = _launches(timeline, cls, kinds == HOST)
    host = (np.concatenate([host[0], flights[0]]), np.concatenate([host[1], flights[1]]))
    return [_in_window(timeline, spans) for spans in (compute, comm, copy, waiting, host, made)]


def _in_window(timeline: Timeline, spans: Spans) -> Spans:
    if timeline.steady:
        return union(fold(spans, timeline.begin_ps, timeline.makespan_ps))
    return union(clip(spans, timeline.begin_ps, timeline.finish_ps))


def _launches(timeline: Timeline, cls: int, is_host: BoolArray) -> Spans:
    """From the end of each host task to when what it launched could start (a dep's lag)."""
    wiring, tasks = timeline.compiled.wiring, timeline.compiled.tasks_of(cls)
    first, last = int(wiring.dep_ptr[tasks.start]), int(wiring.dep_ptr[tasks.stop])
    if first == last:
        return NO_SPANS
    counts = np.diff(wiring.dep_ptr[tasks.start : tasks.stop + 1])
    owner_is_host = np.repeat(is_host, counts)
    source = wiring.dep_index[first:last]
    flies = is_host[source - tasks.start] & ~owner_is_host
    left = timeline.end_ps[source[flies]]
    return left, left + timeline.compiled.dep_lag_ps[first:last][flies]
