"""Why the run took as long as it did: the critical path across ranks, and how much slack everything else has."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np

from perfmodel.sim.program import IntArray
from perfmodel.sim.timeline import Timeline

Cause = Literal["begin", "stream order", "dep", "last member"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """A stretch of the critical path.

    Attributes:
        cls, task: rank class and index in its program. For a lag, those of the task that the lag delays.
        start_ps, end_ps: the stretch, cut at the beginning of the iteration.
        cause: what held it until `start_ps`: nothing in this iteration (`begin`), the previous task on its stream, a
            dep, or (`last member`) that another rank's part of the same collective was the last to be ready, whose
            own path goes on below.
        lag: True for the time between the end of a dep and the start it allows (launch latency).
    """

    cls: int
    task: int
    start_ps: int
    end_ps: int
    cause: Cause
    lag: bool = False

    @property
    def length_ps(self) -> int:
        """Duration of the stretch."""
        return self.end_ps - self.start_ps


class Stretches(NamedTuple):
    """The critical path as columns, earliest first: global task index, start and end (ps), cause, and whether a lag."""

    task: list[int]
    start_ps: list[int]
    end_ps: list[int]
    cause: list[Cause]
    lag: list[bool]


def critical_path(timeline: Timeline) -> tuple[Segment, ...]:
    """The chain of tasks and lags that ends with the last task, earliest first; lengths sum exactly to the makespan.

    Ties go to the lowest class and task, to stream order before deps, and to a task's own rank before another member's.
    """
    found = []
    for task, start, end, cause, lag in zip(*critical_stretches(timeline), strict=True):
        cls = timeline.compiled.class_of(task)
        own = task - timeline.compiled.tasks_of(cls).start
        found.append(Segment(cls=cls, task=own, start_ps=start, end_ps=end, cause=cause, lag=lag))
    return tuple(found)


def critical_stretches(timeline: Timeline) -> Stretches:
    """`critical_path` as columns."""
    if not timeline.compiled.n_tasks:
        return Stretches([], [], [], [], [])
    begin = timeline.begin_ps
    walk, path = _Walk(timeline), Stretches([], [], [], [], [])

    def add(task: int, start: int, end: int, cause: Cause, *, lag: bool) -> None:
        start = max(start, begin)
        if end > start:
            path.task.append(task)
            path.start_ps.append(start)
            path.end_ps.append(end)
            path.cause.append(cause)
            path.lag.append(lag)

    task, until = int(np.argmax(timeline.end_ps)), timeline.finish_ps
    while until > begin:
        member = walk.last_member(task)
        before, cause, freed = walk.blocker(member)
        start = walk.start[task]
        add(task, start, until, cause if member == task else "last member", lag=False)
        if before < 0:
            add(member, begin, start, "begin", lag=True)
            break
        if freed < start:
            add(member, freed, start, cause, lag=True)
        task, until = before, freed
    return Stretches(path.task[::-1], path.start_ps[::-1], path.end_ps[::-1], path.cause[::-1], path.lag[::-1])


class _Walk:
    """What the walk reads, as lists: an element of an array costs ten times as much as one of a list."""

    def __init__(self, timeline: Timeline) -> None:
        wiring = timeline.compiled.wiring
        self.wiring = wiring
        self.ready, self.start, self.end = (a.tolist() for a in (timeline.ready_ps, timeline.start_ps, timeline.end_ps))
        self.prev, self.dep_ptr, self.dep_index = (a.tolist() for a in (wiring.prev, wiring.dep_ptr, wiring.dep_index))
        self.lag = timeline.compiled.dep_lag_ps.tolist()

    def last_member(self, task: int) -> int:
        """The member of the task's group whose readiness set the start; the task itself if it is one of them."""
        start = self.start[task]
        if self.ready[task] == start:
            return task
        return next(m for m in self.wiring.members(task) if self.ready[m] == start)

    def blocker(self, task: int) -> tuple[int, Cause, int]:
        """(task that set the readiness or -1, how, when it ended)."""
        ready, before = self.ready[task], self.prev[task]
        if before >= 0 and self.end[before] == ready:
            return before, "stream order", ready
        for d in range(self.dep_ptr[task], self.dep_ptr[task + 1]):
            dep = self.dep_index[d]
            if self.end[dep] + self.lag[d] == ready:
                return dep, "dep", self.end[dep]
        return -1, "begin", ready


def slack(timeline: Timeline) -> IntArray:
    """How much later each task (by global index) could start without delaying the end of the run, in ps.

    Taken at the spans the timeline shows: where overlap slows kernels, a delay may also change durations, which this
    leaves out. Members of a collective share its slack.
    """
    wiring, lag = timeline.compiled.wiring, timeline.compiled.dep_lag_ps.tolist()
    latest_end = [timeline.finish_ps] * timeline.compiled.n_tasks
    length = (timeline.end_ps - timeline.start_ps).tolist()
    prev, dep_ptr, dep_index = wiring.prev.tolist(), wiring.dep_ptr.tolist(), wiring.dep_index.tolist()
    group, group_ptr, member = wiring.group.tolist(), wiring.group_ptr.tolist(), wiring.group_member.tolist()
    for task in reversed(timeline.compiled.order.tolist()):
        g = group[task]
        together = [task] if g < 0 else member[group_ptr[g] : group_ptr[g + 1]]
        if task != together[-1]:
            continue  # the group was settled as a whole when its last member, first in reverse, came up
        end = min(latest_end[m] for m in together)
        for m in together:
            latest_end[m] = end
            start = end - length[m]
            if prev[m] >= 0:
                latest_end[prev[m]] = min(latest_end[prev[m]], start)
            for d in range(dep_ptr[m], dep_ptr[m + 1]):
                latest_end[dep_index[d]] = min(latest_end[dep_index[d]], start - lag[d])
    return np.array(latest_end, dtype=np.int64) - timeline.end_ps
