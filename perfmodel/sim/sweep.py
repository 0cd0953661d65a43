"""The inner loop: every task's ready, start and end from those before it. Plain Python on lists, or compiled by numba.

A stream is first-in first-out and a collective's members are known, so starts follow from a longest-path recursion:
ready = max(release, end of the previous task on the stream, end of each dep + lag); start = ready, for a collective the
largest ready of its members; end = start + duration, for a collective the largest duration of its members.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from perfmodel.sim.compile import Compiled
from perfmodel.sim.loops import compiled_loop, has_numba, use_numba
from perfmodel.sim.program import IntArray


class Arrays(NamedTuple):
    """What the loop reads, as lists (plain Python) or int64 arrays (numba); names as in `Compiled` and `Wiring`."""

    order: Any
    prev: Any
    dep_ptr: Any
    dep_index: Any
    dep_lag: Any
    group: Any
    group_ptr: Any
    group_member: Any
    duration: Any


def sweep(compiled: Compiled, duration_ps: IntArray, release_ps: IntArray) -> tuple[IntArray, IntArray, IntArray]:
    """(ready, start, end) of every task in ps. `release_ps` is the earliest start of each task."""
    return Sweeper(compiled, duration_ps).run(release_ps)


class Sweeper:
    """Sweeps of the same programs and durations from different release times; conversion is done once.

    `numba` says how to run: compiled or plain Python; None leaves it to the size.
    """

    def __init__(self, compiled: Compiled, duration_ps: IntArray, *, numba: bool | None = None) -> None:
        wiring = compiled.wiring
        arrays = Arrays(
            order=compiled.order,
            prev=wiring.prev,
            dep_ptr=wiring.dep_ptr,
            dep_index=wiring.dep_index,
            dep_lag=compiled.dep_lag_ps,
            group=wiring.group,
            group_ptr=wiring.group_ptr,
            group_member=wiring.group_member,
            duration=duration_ps,
        )
        self._numba = use_numba(sweep_loop, compiled.n_tasks) if numba is None else numba
        self._arrays = arrays if self._numba else Arrays(*(array.tolist() for array in arrays))

    def run(self, release_ps: IntArray) -> tuple[IntArray, IntArray, IntArray]:
        """(ready, start, end) of every task in ps. `release_ps` is the earliest start of each task."""
        if self._numba:
            ready = release_ps.copy()
            start, end = np.zeros_like(ready), np.zeros_like(ready)
            compiled_loop(sweep_loop)(self._arrays, ready, start, end)
            return ready, start, end
        ready_list = release_ps.tolist()
        start_list, end_list = [0] * len(ready_list), [0] * len(ready_list)
        sweep_loop(self._arrays, ready_list, start_list, end_list)
        return _int64(ready_list), _int64(start_list), _int64(end_list)


def sweep_loop(a: Arrays, ready: Any, start: Any, end: Any) -> None:
    """Fills `ready` (which holds the release times), `start` and `end` in sweep order. Lists or arrays alike.

    Comparisons and counting are spelled out: a call of `max` doubles the time of the plain Python loop, a `range` for each
    task adds a third.
    """
    prev, dep_ptr, dep_index, dep_lag = a.prev, a.dep_ptr, a.dep_index, a.dep_lag
    group, group_ptr, group_member, duration = a.group, a.group_ptr, a.group_member, a.duration
    for task in a.order:
        at = ready[task]
        before = prev[task]
        if before >= 0:
            free = end[before]
            if free > at:  # noqa: PLR1730 -- see above
                at = free
        d, last = dep_ptr[task], dep_ptr[task + 1]
        while d < last:
            free = end[dep_index[d]] + dep_lag[d]
            if free > at:  # noqa: PLR1730 -- see above
                at = free
            d += 1
        ready[task] = start[task] = at
        end[task] = at + duration[task]
        g = group[task]
        if g >= 0 and group_member[group_ptr[g + 1] - 1] == task:
            together, longest = at, duration[task]
            for m in range(group_ptr[g], group_ptr[g + 1]):
                together = max(together, ready[group_member[m]])
                longest = max(longest, duration[group_member[m]])
            for m in range(group_ptr[g], group_ptr[g + 1]):
                start[group_member[m]] = together
                end[group_member[m]] = together + longest


def warm_up() -> bool:
    """Loads the compiled loop now, so that later runs of any size use it; False if numba is not installed.

    Worth it for a process that predicts many times (0.4 s once, from the cache on disk).
    """
    if not has_numba():
        return False
    nothing = np.empty(0, dtype=np.int64)
    pointers = np.zeros(1, dtype=np.int64)
    arrays = Arrays(nothing, nothing, pointers, nothing, nothing, nothing, pointers, nothing, nothing)
    compiled_loop(sweep_loop)(arrays, nothing, nothing, nothing)
    return True


def _int64(values: list[int]) -> IntArray:
    return np.array(values, dtype=np.int64)
