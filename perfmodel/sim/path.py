"""Why the run took as long as it did: the critical path across ranks, and how much slack everything else has."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np

from perfmodel.sim.loops import compiled_loop, use_numba
from perfmodel.sim.program import IntArray
from perfmodel.sim.timeline import Timeline

Cause = Literal["begin", "stream order", "dep", "last member"]
CAUSES: tuple[Cause, ...] = ("begin", "stream order", "dep", "last member")
BEGIN, STREAM_ORDER, DEP, LAST_MEMBER = range(4)  # places in CAUSES


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
    rows = critical_rows(timeline)
    task, start, end, cause, lag = rows.T.tolist() if len(rows) else ([], [], [], [], [])
    return Stretches(task, start, end, [CAUSES[code] for code in cause], [bool(one) for one in lag])


def critical_rows(timeline: Timeline, *, numba: bool | None = None) -> IntArray:
    """`critical_path` as rows (global task index, start, end, place of the cause in CAUSES, 1 for a lag).

    `numba` says how to walk: compiled or plain Python; None leaves it to the size.
    """
    n = timeline.compiled.n_tasks
    if not n:
        return np.zeros((0, 5), dtype=np.int64)
    wiring = timeline.compiled.wiring
    arrays = Links(
        ready=timeline.ready_ps,
        start=timeline.start_ps,
        end=timeline.end_ps,
        prev=wiring.prev,
        dep_ptr=wiring.dep_ptr,
        dep_index=wiring.dep_index,
        dep_lag=timeline.compiled.dep_lag_ps,
        group=wiring.group,
        group_ptr=wiring.group_ptr,
        group_member=wiring.group_member,
    )
    last = int(np.argmax(timeline.end_ps))
    rows = np.zeros((2 * n + 1, 5), dtype=np.int64)
    if use_numba(walk_loop, n) if numba is None else numba:
        count = compiled_loop(walk_loop)(arrays, last, timeline.begin_ps, rows)
        rows = rows[:count]
    else:
        found = rows.tolist()
        count = walk_loop(Links(*(array.tolist() for array in arrays)), last, timeline.begin_ps, found)
        rows = np.array(found[:count], dtype=np.int64).reshape(-1, 5)
    return rows[::-1]


class Links(NamedTuple):
    """What the walk reads, as lists or int64 arrays; names as in `Timeline`, `Compiled` and `Wiring`."""

    ready: Any
    start: Any
    end: Any
    prev: Any
    dep_ptr: Any
    dep_index: Any
    dep_lag: Any
    group: Any
    group_ptr: Any
    group_member: Any


# One flat function on local names, as in `overlap_loop`.
def walk_loop(a: Links, task: int, begin: int, rows: Any) -> int:  # noqa: C901 -- as just said
    """Fills `rows` with (task, start, end, code of the cause, lag) from the last task back, and returns how many."""
    count = 0
    until = a.end[task]
    while until > begin:
        start = a.start[task]
        member = task  # the member of its group whose readiness set the start
        g = a.group[task]
        if g >= 0 and a.ready[task] != start:
            for m in range(a.group_ptr[g], a.group_ptr[g + 1]):
                if a.ready[a.group_member[m]] == start:
                    member = a.group_member[m]
                    break
        # What set that member's readiness, how, and when it ended.
        ready = a.ready[member]
        before, cause, freed = -1, BEGIN, ready
        if a.prev[member] >= 0 and a.end[a.prev[member]] == ready:
            before, cause = a.prev[member], STREAM_ORDER
        else:
            for d in range(a.dep_ptr[member], a.dep_ptr[member + 1]):
                if a.end[a.dep_index[d]] + a.dep_lag[d] == ready:
                    before, cause, freed = a.dep_index[d], DEP, a.end[a.dep_index[d]]
                    break
        if until > max(start, begin):
            row = rows[count]
            row[0], row[1], row[2] = task, max(start, begin), until
            row[3], row[4] = cause if member == task else LAST_MEMBER, 0
            count += 1
        if start > max(freed, begin) or (before < 0 and start > begin):
            row = rows[count]
            row[0], row[1], row[2] = member, begin if before < 0 else max(freed, begin), start
            row[3], row[4] = cause, 1
            count += 1
        if before < 0:
            break
        task, until = before, freed
    return count


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
