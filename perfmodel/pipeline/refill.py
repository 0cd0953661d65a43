"""Iteration times of programs that differ only in how long their tasks take: wired once, refilled and run many times.

The same rules, in the same integer arithmetic, as `sim.steady` and `pipeline.overlap`, in one compiled loop without the
values between: `Wires.iteration_ps` equals what `simulate_with_overlap` finds of the same programs and durations, picosecond
for picosecond, and keeps no timeline.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from perfmodel.pipeline.overlap import MAX_ROUNDS, SETTLED_FRAC
from perfmodel.pipeline.programs import compile_classes
from perfmodel.pipeline.tasks import CATEGORIES, LoweredClass
from perfmodel.sim.compile import Compiled
from perfmodel.sim.loops import compiled_loop
from perfmodel.sim.program import COMM, COMPUTE, HOST, NO_GROUP, IntArray
from perfmodel.sim.steady import LONGEST_CYCLE, MAX_ITERATIONS, Seam, seam_of
from perfmodel.units import PS_PER_S

FloatArray = NDArray[np.float64]


class Links(NamedTuple):
    """What the loop reads; the first nine as in `sim.sweep.Arrays`, the seam as in `sim.steady.Seam`.

    `lost` is the share of the time beside communication that a task loses (0: none), `comm` the tasks of communication of
    each class from `comm_ptr`, `offsets` where classes begin.
    """

    order: IntArray
    prev: IntArray
    dep_ptr: IntArray
    dep_index: IntArray
    dep_lag: IntArray
    group: IntArray
    group_ptr: IntArray
    group_member: IntArray
    target: IntArray
    source: IntArray
    lag: IntArray
    kept: IntArray
    lost: FloatArray
    comm: IntArray
    comm_ptr: IntArray
    offsets: IntArray


class Wires:
    """The programs of ranks, one class a rank, that new durations are put into.

    Args:
        classes: lowered classes on CUDA devices.
        ranks: for each program, the number of its class in `classes`.
        overlap: whether compute slows beside communication.
    """

    def __init__(self, classes: Sequence[LoweredClass], ranks: Sequence[int], *, overlap: bool) -> None:
        chosen = [
            replace(classes[number], carry=tuple(replace(dep, cls=place) for dep in classes[number].carry))
            for place, number in enumerate(ranks)
        ]
        self.compiled: Compiled
        self.compiled, carry = compile_classes(chosen)
        if any(dep.distance != 1 for dep in carry):
            raise RuntimeError("waits over several iterations are not refilled")
        factors = np.array([lowered.device.overlap_factor for lowered in chosen])
        self.links = _links(self.compiled, seam_of(self.compiled, carry), factors, overlap=overlap)

    @property
    def duration_ps(self) -> IntArray:
        """Durations of all tasks as they were compiled, program by program."""
        return self.compiled.duration_ps

    def iteration_ps(self, durations_ps: IntArray) -> list[Fraction]:
        """Time of one iteration (ps) for each row of durations [runs, tasks]."""
        found = np.zeros((len(durations_ps), 2), dtype=np.int64)
        helpers = (sweep_once, cycle_length, steady_state, fold_spans, join_spans, covered, beside)
        limits = (MAX_ITERATIONS, MAX_ROUNDS, SETTLED_FRAC)
        compiled_loop(run_all, *helpers)(self.links, durations_ps, limits, found)
        return [Fraction(growth, span) for growth, span in found.tolist()]


def with_empty_kernels(lowered: LoweredClass, after: Mapping[int, int]) -> LoweredClass:
    """The class with so many kernels that take no time behind some of its eager kernels; no other task ends otherwise.

    Each has a host task of its own, as every kernel has: host and device go on where the kernel before left them.
    """
    n = len(lowered.tasks)
    extra = np.zeros(n, dtype=np.int64)
    extra[list(after)] = 2 * np.array(list(after.values()), dtype=np.int64)
    old = np.repeat(np.arange(n), 1 + extra)
    moved = np.arange(n) + np.cumsum(extra) - extra
    place = np.arange(len(old)) - moved[old]
    host, empty = place % 2 == 1, (place > 0) & (place % 2 == 0)
    program, tasks = lowered.program, lowered.tasks
    owner = np.repeat(np.arange(n), program.dep_count)
    launch_ps = round(lowered.device.host.launch_latency_s * PS_PER_S)
    rows = np.concatenate([moved[owner], np.flatnonzero(empty)])
    index = np.concatenate([moved[program.dep_index], np.flatnonzero(empty) - 1])
    lags = np.concatenate([program.dep_lag_ps, np.full(int(empty.sum()), launch_ps, dtype=np.int64)])
    by_owner = np.argsort(rows, kind="stable")

    def spent(time_s: FloatArray) -> FloatArray:
        return np.where(place > 0, 0.0, time_s[old])

    return replace(
        lowered,
        program=replace(
            program,
            stream=np.where(host, HOST, program.stream[old]),
            duration_ps=np.where(place > 0, 0, program.duration_ps[old]),
            group=np.where(place > 0, NO_GROUP, program.group[old]),
            dep_count=np.bincount(rows, minlength=len(old)).astype(np.int64),
            dep_index=index[by_owner],
            dep_lag_ps=lags[by_owner],
        ),
        tasks=replace(
            tasks,
            event=tasks.event[old],
            category=np.where(host, CATEGORIES.index("host"), tasks.category[old]),
            family=tasks.family[old],
            source=tasks.source[old],
            time_s=spent(tasks.time_s),
            low_s=spent(tasks.low_s),
            high_s=spent(tasks.high_s),
            ideal_s=spent(tasks.ideal_s),
        ),
        carry=tuple(replace(dep, task=int(moved[dep.task]), on=int(moved[dep.on])) for dep in lowered.carry),
    )


def _links(compiled: Compiled, seam: Seam, factors: FloatArray, *, overlap: bool) -> Links:
    wiring = compiled.wiring
    lost = (1.0 - 1.0 / np.repeat(factors, np.diff(wiring.offsets))) * (compiled.kind == COMPUTE)
    if not overlap or float(factors.max()) <= 1.0:
        lost = np.zeros_like(lost)
    comm = np.flatnonzero(compiled.kind == COMM)
    return Links(
        order=compiled.order,
        prev=wiring.prev,
        dep_ptr=wiring.dep_ptr,
        dep_index=wiring.dep_index,
        dep_lag=compiled.dep_lag_ps,
        group=wiring.group,
        group_ptr=wiring.group_ptr,
        group_member=wiring.group_member,
        target=seam.target,
        source=seam.source,
        lag=seam.lag,
        kept=np.unique(seam.source),
        lost=lost,
        comm=comm,
        comm_ptr=np.searchsorted(comm, wiring.offsets),
        offsets=wiring.offsets,
    )


def run_all(a: Links, durations: IntArray, limits: tuple[int, int, float], found: IntArray) -> None:
    """For each row of durations, the growth of a repeating pattern (ps) and its length in iterations."""
    n = durations.shape[1]
    start, end, before = np.zeros(n, np.int64), np.zeros(n, np.int64), np.zeros(n, np.int64)
    extra = np.zeros(n, np.int64)
    states = np.zeros((limits[0], len(a.kept) + 1), np.int64)
    slows = a.lost.max() > 0.0
    for row in range(durations.shape[0]):
        growth, span, begin = steady_state(a, durations[row], (start, end, before), states)
        if slows:
            for _ in range(limits[1]):
                beside(a, (start, end), begin, extra)
                longer = durations[row] + extra
                again, wide, begin = steady_state(a, longer, (start, end, before), states)
                moved = abs((again * span - growth * wide) / (span * wide))
                growth, span = again, wide
                if moved <= limits[2] * (growth / span):
                    break
        found[row, 0], found[row, 1] = growth, span


def sweep_once(a: Links, duration: IntArray, start: IntArray, end: IntArray) -> None:
    """As `sim.sweep.sweep_loop`; `start` holds the release times."""
    for task in a.order:
        at = start[task]
        before = a.prev[task]
        if before >= 0 and end[before] > at:
            at = end[before]
        for d in range(a.dep_ptr[task], a.dep_ptr[task + 1]):
            at = max(at, end[a.dep_index[d]] + a.dep_lag[d])
        start[task] = at
        end[task] = at + duration[task]
        g = a.group[task]
        if g >= 0 and a.group_member[a.group_ptr[g + 1] - 1] == task:
            together, longest = at, duration[task]
            for m in range(a.group_ptr[g], a.group_ptr[g + 1]):
                together = max(together, start[a.group_member[m]])
                longest = max(longest, duration[a.group_member[m]])
            for m in range(a.group_ptr[g], a.group_ptr[g + 1]):
                start[a.group_member[m]] = together
                end[a.group_member[m]] = together + longest


def cycle_length(states: IntArray, count: int) -> int:
    """As `sim.steady.cycle_of` at a depth of 1, of the first `count` states."""
    width = states.shape[1]
    for cycle in range(1, LONGEST_CYCLE + 1):
        if count < 2 * cycle + 1:
            return 0
        same, top = True, states[count - 1, width - 1] - states[count - 1 - cycle, width - 1]
        for i in range(width):
            step = states[count - 1, i] - states[count - 1 - cycle, i]
            if step > top or step != states[count - 1 - cycle, i] - states[count - 1 - 2 * cycle, i]:
                same = False
                break
        if same:
            return cycle
    return 0


def steady_state(
    a: Links, duration: IntArray, times: tuple[IntArray, IntArray, IntArray], states: IntArray
) -> tuple[int, int, int]:
    """As `sim.steady.simulate_steady_compiled`: growth, its span in iterations, and where the last iteration began."""
    start, end, before = times
    n, n_kept = len(duration), len(a.kept)
    finish, begin = 0, 0
    for count in range(1, states.shape[0] + 1):
        before[:] = end
        start[:] = 0
        if count > 1:
            for s in range(len(a.target)):
                start[a.target[s]] = max(start[a.target[s]], before[a.source[s]] + a.lag[s])
        sweep_once(a, duration, start, end)
        begin, finish = finish, 0
        for task in range(n):
            finish = max(finish, end[task])
        for i in range(n_kept):
            states[count - 1, i] = end[a.kept[i]]
        states[count - 1, n_kept] = finish
        cycle = cycle_length(states, count)
        if cycle > 0:
            growth = 0
            for i in range(n_kept + 1):
                growth = max(growth, states[count - 1, i] - states[count - 1 - cycle, i])
            return growth, cycle, begin
    half = states.shape[0] // 2
    return states[-1, n_kept] - states[half - 1, n_kept], states.shape[0] - half, begin


def fold_spans(a: Links, cls: int, times: tuple[IntArray, IntArray], begin: int, spans: IntArray) -> int:
    """Communication of a class within the period from `begin`, as `sim.intervals.fold`; how many spans there are."""
    start, end = times
    period, count = end.max() - begin, 0
    for c in range(a.comm_ptr[cls], a.comm_ptr[cls + 1]):
        task = a.comm[c]
        length = min(end[task] - start[task], period)
        if length <= 0:
            continue
        low = (start[task] - begin) % period + begin
        over = max(low + length - (begin + period), 0)
        spans[count, 0], spans[count, 1] = low, low + length - over
        count += 1
        if over > 0:
            spans[count, 0], spans[count, 1] = begin, begin + over
            count += 1
    return count


def join_spans(spans: IntArray, count: int) -> int:
    """Sorts spans and joins those that touch, as `sim.intervals.union`; how many are left."""
    for i in range(1, count):
        low, high, j = spans[i, 0], spans[i, 1], i - 1
        while j >= 0 and spans[j, 0] > low:
            spans[j + 1, 0], spans[j + 1, 1] = spans[j, 0], spans[j, 1]
            j -= 1
        spans[j + 1, 0], spans[j + 1, 1] = low, high
    left = 0
    for i in range(count):
        if left > 0 and spans[i, 0] <= spans[left - 1, 1]:
            spans[left - 1, 1] = max(spans[left - 1, 1], spans[i, 1])
        else:
            spans[left, 0], spans[left, 1] = spans[i, 0], spans[i, 1]
            left += 1
    return left


def covered(spans: IntArray, count: int, at: int, window: tuple[int, int]) -> int:
    """Length of the spans, repeated every period, from the window's beginning to a time."""
    whole, inside = (at - window[0]) // window[1], (at - window[0]) % window[1] + window[0]
    total, partial = 0, 0
    for i in range(count):
        length = spans[i, 1] - spans[i, 0]
        total += length
        if inside >= spans[i, 0]:
            partial += min(inside - spans[i, 0], length)
    return whole * total + partial


def beside(a: Links, times: tuple[IntArray, IntArray], begin: int, extra: IntArray) -> None:
    """Picoseconds that each task takes longer for the communication of its rank that runs beside it."""
    start, end = times
    period = end.max() - begin
    extra[:] = 0
    if period <= 0:
        return
    spans = np.zeros((2 * len(a.comm) + 1, 2), np.int64)
    for cls in range(len(a.offsets) - 1):
        count = join_spans(spans, fold_spans(a, cls, times, begin, spans))
        for task in range(a.offsets[cls], a.offsets[cls + 1]):
            if a.lost[task] > 0.0 and count > 0:
                window = (begin, period)
                met = covered(spans, count, end[task], window) - covered(spans, count, start[task], window)
                extra[task] = np.int64(np.rint(met * a.lost[task]))
