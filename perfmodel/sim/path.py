"""Why the run took as long as it did: the critical path across ranks, and how much slack everything else has."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

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


def critical_path(timeline: Timeline) -> tuple[Segment, ...]:
    """The chain of tasks and lags that ends with the last task, earliest first; lengths sum exactly to the makespan.

    Ties go to the lowest class and task, to stream order before deps, and to a task's own rank before another member's.
    """
    if not timeline.compiled.n_tasks:
        return ()
    task = int(np.argmax(timeline.end_ps))
    until = timeline.finish_ps
    backwards: list[Segment] = []
    while until > timeline.begin_ps:
        member = _last_member(timeline, task)
        before, cause, freed = _blocker(timeline, member)
        start = int(timeline.start_ps[task])
        backwards.append(_segment(timeline, task, start, until, cause if member == task else "last member"))
        if before < 0:
            if timeline.begin_ps < start:
                backwards.append(_segment(timeline, member, timeline.begin_ps, start, "begin", lag=True))
            break
        if freed < start:
            backwards.append(_segment(timeline, member, freed, start, cause, lag=True))
        task, until = before, freed
    return tuple(segment for segment in reversed(backwards) if segment.length_ps > 0)


def _segment(timeline: Timeline, task: int, start: int, end: int, cause: Cause, *, lag: bool = False) -> Segment:
    cls = timeline.compiled.class_of(task)
    return Segment(
        cls=cls,
        task=task - timeline.compiled.tasks_of(cls).start,
        start_ps=max(start, timeline.begin_ps),
        end_ps=max(end, timeline.begin_ps),
        cause=cause,
        lag=lag,
    )


def _last_member(timeline: Timeline, task: int) -> int:
    """The member of the task's group whose readiness set the start; the task itself if it is one of them."""
    start = timeline.start_ps[task]
    if timeline.ready_ps[task] == start:
        return task
    return next(m for m in timeline.compiled.wiring.members(task) if timeline.ready_ps[m] == start)


def _blocker(timeline: Timeline, task: int) -> tuple[int, Cause, int]:
    """(task that set the readiness or -1, how, when it ended)."""
    wiring, ready = timeline.compiled.wiring, int(timeline.ready_ps[task])
    before = int(wiring.prev[task])
    if before >= 0 and int(timeline.end_ps[before]) == ready:
        return before, "stream order", ready
    for d in range(int(wiring.dep_ptr[task]), int(wiring.dep_ptr[task + 1])):
        dep = int(wiring.dep_index[d])
        if int(timeline.end_ps[dep] + timeline.compiled.dep_lag_ps[d]) == ready:
            return dep, "dep", int(timeline.end_ps[dep])
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
