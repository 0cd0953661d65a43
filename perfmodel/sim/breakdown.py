"""Where the iteration time of one rank goes: parts in ps that sum exactly to it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from perfmodel.sim.intervals import NO_SPANS, Spans, clip, divide, fold, total, union
from perfmodel.sim.program import COMM, COMPUTE, COPY, HOST
from perfmodel.sim.timeline import Timeline


@dataclass(frozen=True, slots=True, kw_only=True)
class Breakdown:
    """Each instant of the iteration belongs to the first of these that holds on the rank; the parts sum to the window.

    Attributes:
        compute_ps: a compute kernel runs.
        exposed_comm_ps: a collective, or work on a communication stream, runs and no compute kernel does.
        exposed_copy_ps: a copy runs and none of the above.
        wait_ps: a collective of this rank waits for other ranks and none of the above.
        host_ps: the device has nothing to do and a host thread works, or a launch is on its way to the device.
        idle_ps: none of the above: the host waits for something that is not running on this rank, or the rank is done.
        comm_ps: time in which communication runs at all; `hidden_comm_ps` of it lies under compute.
    """

    compute_ps: int
    exposed_comm_ps: int
    exposed_copy_ps: int
    wait_ps: int
    host_ps: int
    idle_ps: int
    comm_ps: int

    @property
    def hidden_comm_ps(self) -> int:
        """Communication that runs while compute does."""
        return self.comm_ps - self.exposed_comm_ps

    @property
    def total_ps(self) -> int:
        """Sum of the six parts: the iteration time."""
        return (
            self.compute_ps + self.exposed_comm_ps + self.exposed_copy_ps + self.wait_ps + self.host_ps + self.idle_ps
        )


def breakdown(timeline: Timeline, cls: int) -> Breakdown:
    """Divides the iteration time of a rank of class `cls`.

    The window is [begin_ps, finish_ps) of the timeline. In steady state, work of this iteration that runs outside the
    window stands for the same work of its neighbours that runs inside, and is folded into it.
    """
    layers = _layers(timeline, cls)
    shares = divide(layers, timeline.begin_ps, timeline.finish_ps)
    compute, comm, copy, wait, host, idle = (total(share) for share in shares)
    return Breakdown(
        compute_ps=compute,
        exposed_comm_ps=comm,
        exposed_copy_ps=copy,
        wait_ps=wait,
        host_ps=host,
        idle_ps=idle,
        comm_ps=total(layers[1]),
    )


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
    compute, comm, copy, host = ((start[kinds == kind], end[kinds == kind]) for kind in (COMPUTE, COMM, COPY, HOST))
    waiting = (ready, start)
    flights = _launches(timeline, cls, kinds == HOST)
    host = (np.concatenate([host[0], flights[0]]), np.concatenate([host[1], flights[1]]))
    return [_in_window(timeline, spans) for spans in (compute, comm, copy, waiting, host)]


def _in_window(timeline: Timeline, spans: Spans) -> Spans:
    if timeline.steady:
        return union(fold(spans, timeline.begin_ps, timeline.makespan_ps))
    return union(clip(spans, timeline.begin_ps, timeline.finish_ps))


def _launches(timeline: Timeline, cls: int, is_host: np.ndarray[tuple[int], np.dtype[np.bool_]]) -> Spans:
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
