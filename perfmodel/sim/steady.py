"""Steady state: the iteration time of a run of equal iterations that overlap at their seams, exact on our clock.

Iteration i + 1 starts on each stream where iteration i left it, and waits for its carry deps. This is a max-plus linear
system x(k + 1) = M x(k) over the times x that an iteration hands on. If x(k + c) - x(k) = x(k) - x(k - c) in every
component, the largest component of that difference, over c, is the growth per iteration for ever: each component that
grows fastest is set by one that grows as fast, and none can ever grow faster (max-plus maps are monotone and commute
with shifts). So the answer is exact, not a limit that was cut off (Baccelli et al., Synchronization and Linearity,
1992, chapter 3).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import overload

import numpy as np

from perfmodel.errors import GraphError
from perfmodel.sim.compile import Compiled, compile_programs
from perfmodel.sim.order import Wiring
from perfmodel.sim.program import NO_GROUP, ArrayProgram, IntArray, Program
from perfmodel.sim.sweep import Sweeper
from perfmodel.sim.timeline import Timeline

MAX_ITERATIONS = 256
LONGEST_CYCLE = 8  # iterations; longer repeating patterns are reported as not converged


@dataclass(frozen=True, slots=True, kw_only=True)
class CarryDep:
    """Task `task` of class `cls` waits, `distance` iterations later, for the end of task `on` plus `lag_ps`."""

    cls: int
    task: int
    on: int
    lag_ps: int = 0
    distance: int = 1


class CarryRows(Sequence[CarryDep]):
    """Carry deps as rows (class, task, on, lag, distance), which a launch queue has many of."""

    def __init__(self, rows: IntArray) -> None:
        self.rows = rows
        self._seam: tuple[Wiring, Seam] | None = None

    @staticmethod
    def of(deps: Sequence[CarryDep]) -> CarryRows:
        """The rows of carry deps."""
        rows = [(dep.cls, dep.task, dep.on, dep.lag_ps, dep.distance) for dep in deps]
        return CarryRows(np.array(rows, dtype=np.int64).reshape(-1, 5))

    def seam(self, compiled: Compiled) -> Seam:
        """`seam_of` them, found once however the durations of the programs change."""
        if self._seam is None or self._seam[0] is not compiled.wiring:
            self._seam = compiled.wiring, _seam_of(compiled, self.rows)
        return self._seam[1]

    @overload
    def __getitem__(self, index: int) -> CarryDep: ...
    @overload
    def __getitem__(self, index: slice) -> CarryRows: ...
    def __getitem__(self, index: int | slice) -> CarryDep | CarryRows:
        if isinstance(index, slice):
            return CarryRows(self.rows[index])
        cls, task, on, lag_ps, distance = self.rows[index].tolist()
        return CarryDep(cls=cls, task=task, on=on, lag_ps=lag_ps, distance=distance)

    def __len__(self) -> int:
        return len(self.rows)


@dataclass(frozen=True, slots=True, kw_only=True)
class Steady:
    """A run in steady state.

    Attributes:
        iteration_ps: time of one iteration, exact; a Fraction where a repeating pattern of several iterations does not
            divide evenly.
        timeline: the last simulated iteration; it begins where the one before ended. Its makespan is `iteration_ps`
            when `cycle` is 1.
        n_iterations: how many were simulated.
        cycle: iterations in one repetition of the pattern.
        converged: False if the pattern had not begun to repeat; `iteration_ps` is then the mean over the second half.
    """

    iteration_ps: Fraction
    timeline: Timeline
    n_iterations: int
    cycle: int
    converged: bool


@dataclass(frozen=True, slots=True, eq=False)
class Seam:
    """What an iteration hands on: ends of `source` at `distance` iterations before free `target` after `lag`."""

    target: IntArray
    source: IntArray
    lag: IntArray
    distance: IntArray


def simulate_steady(
    programs: Sequence[Program | ArrayProgram],
    *,
    carry_deps: Sequence[CarryDep] = (),
    max_iterations: int = MAX_ITERATIONS,
) -> Steady:
    """Repeats the programs until the pattern repeats. Raises GraphError as `simulate`, or for a malformed carry dep."""
    compiled = compile_programs(programs)
    return simulate_steady_compiled(compiled, carry_deps=carry_deps, max_iterations=max_iterations)


def simulate_steady_compiled(
    compiled: Compiled,
    duration_ps: IntArray | None = None,
    *,
    carry_deps: Sequence[CarryDep] = (),
    seam: Seam | None = None,
    max_iterations: int = MAX_ITERATIONS,
) -> Steady:
    """`simulate_steady` without the conversion; `duration_ps` replaces the programs' own durations.

    `seam` is that of the carry deps, where it was found before (`seam_of`).
    """
    durations = compiled.duration_ps if duration_ps is None else np.asarray(duration_ps, dtype=np.int64)
    seam = seam or seam_of(compiled, carry_deps)
    depth = int(seam.distance.max()) if len(seam.distance) else 1
    kept = np.unique(seam.source)
    sweeper = Sweeper(compiled, durations)
    ends: list[IntArray] = []  # by iteration, most recent last; no more than `depth` are read
    states: list[IntArray] = []  # x(k)
    timeline: Timeline | None = None
    for count in range(1, max_iterations + 1):
        release = release_after(seam, ends, compiled.n_tasks)
        ready, start, end = sweeper.run(release)
        timeline = Timeline(
            compiled=compiled,
            duration_ps=durations,
            release_ps=release,
            ready_ps=ready,
            start_ps=start,
            end_ps=end,
            begin_ps=timeline.finish_ps if timeline else 0,
            steady=True,
        )
        ends = [*ends[-(depth - 1) :], timeline.end_ps] if depth > 1 else [timeline.end_ps]
        states.append(np.concatenate([e[kept] for e in ends] + [[timeline.finish_ps]]))
        cycle = cycle_of(states, depth)
        if cycle:
            growth = int((states[-1] - states[-1 - cycle]).max())
            return Steady(
                iteration_ps=Fraction(growth, cycle),
                timeline=timeline,
                n_iterations=count,
                cycle=cycle,
                converged=True,
            )
    if timeline is None:
        raise GraphError(f"max_iterations is {max_iterations}; at least 1 is needed")
    half = len(states) // 2
    growth = int(states[-1][-1] - states[half - 1][-1]) if half else timeline.makespan_ps
    mean = Fraction(growth, max(len(states) - half, 1))
    return Steady(iteration_ps=mean, timeline=timeline, n_iterations=len(states), cycle=0, converged=False)


def release_after(seam: Seam, ends: Sequence[IntArray], n_tasks: int) -> IntArray:
    """Earliest start of each task (ps) after iterations that ended at `ends`, the most recent last."""
    release = np.zeros(n_tasks, dtype=np.int64)
    for distance in range(1, len(ends) + 1):
        mine = seam.distance == distance
        np.maximum.at(release, seam.target[mine], ends[-distance][seam.source[mine]] + seam.lag[mine])
    return release


def cycle_of(states: Sequence[IntArray], depth: int) -> int:
    """Length of the repeating pattern that the last states show, or 0.

    The end of the iteration itself (the last component) must grow at the full rate: then the timeline is steady too.
    """
    for cycle in range(1, LONGEST_CYCLE + 1):
        if len(states) < 2 * cycle + depth:
            return 0
        step = states[-1] - states[-1 - cycle]
        if np.array_equal(step, states[-1 - cycle] - states[-1 - 2 * cycle]) and step[-1] == step.max():
            return cycle
    return 0


def seam_of(compiled: Compiled, carry_deps: Sequence[CarryDep]) -> Seam:
    """Streams go on where they stopped; carry deps are checked and turned into global indices."""
    deps = carry_deps if isinstance(carry_deps, CarryRows) else CarryRows.of(carry_deps)
    return deps.seam(compiled)


def _seam_of(compiled: Compiled, rows: IntArray) -> Seam:
    prev = compiled.wiring.prev
    first = np.flatnonzero(prev < 0)
    is_last = np.ones(compiled.n_tasks, dtype=bool)
    is_last[prev[prev >= 0]] = False
    last = np.flatnonzero(is_last)
    # Every stream of every class has one first task and one last: sorted by stream they meet.
    first, last = first[_by_stream(compiled, first)], last[_by_stream(compiled, last)]
    offsets = compiled.wiring.offsets
    cls, task, on, lag, distance = rows.T
    strange = np.flatnonzero((cls < 0) | (cls >= compiled.n_classes))
    if len(strange):
        raise GraphError(f"carry dep {CarryRows(rows)[int(strange[0])]}: there are {compiled.n_classes} classes")
    start, size = offsets[cls], np.diff(offsets)[cls]
    wrong = np.flatnonzero((task < 0) | (task >= size) | (on < 0) | (on >= size) | (lag < 0) | (distance < 1))
    if len(wrong):
        dep, n_tasks = CarryRows(rows)[int(wrong[0])], int(size[wrong[0]])
        raise GraphError(f"carry dep {dep}: class {dep.cls} has {n_tasks} tasks; lag from 0, distance from 1")
    return Seam(
        target=np.concatenate([first, start + task]),
        source=np.concatenate([last, start + on]),
        lag=np.concatenate([np.zeros_like(first), lag]),
        distance=np.concatenate([np.ones_like(first), distance]),
    )


def _by_stream(compiled: Compiled, tasks: IntArray) -> IntArray:
    """An order of tasks by class and stream."""
    cls = np.searchsorted(compiled.wiring.offsets, tasks, side="right")
    return np.lexsort((compiled.stream[tasks], cls))


def unrolled(
    programs: Sequence[Program | ArrayProgram], n_iterations: int, carry_deps: Sequence[CarryDep] = ()
) -> list[ArrayProgram]:
    """The programs repeated `n_iterations` times as one long run, groups renumbered and carry deps drawn in.

    `simulate` of it is what `simulate_steady` computes iteration by iteration.
    """
    parts = [program.arrays() for program in programs]
    stride = 1 + max((int(part.group.max()) for part in parts if len(part.group)), default=0)
    return [
        _repeated(part, n_iterations, stride, [dep for dep in carry_deps if dep.cls == cls])
        for cls, part in enumerate(parts)
    ]


def _repeated(part: ArrayProgram, n: int, stride: int, carry: Sequence[CarryDep]) -> ArrayProgram:
    size, iteration = len(part.stream), np.repeat(np.arange(n, dtype=np.int64), len(part.stream))
    owner = np.repeat(np.arange(size, dtype=np.int64), part.dep_count)
    rows = [(owner + size * k, part.dep_index + size * k, part.dep_lag_ps) for k in range(n)]
    for dep in carry:
        later = np.arange(dep.distance, n, dtype=np.int64)
        lag = np.full(len(later), dep.lag_ps, dtype=np.int64)
        rows.append((dep.task + size * later, dep.on + size * (later - dep.distance), lag))
    owners, index, lags = (np.concatenate(column) for column in zip(*rows, strict=True))
    by_owner = np.argsort(owners, kind="stable")
    group = np.tile(part.group, n)
    return ArrayProgram(
        stream=np.tile(part.stream, n),
        duration_ps=np.tile(part.duration_ps, n),
        group=np.where(group == NO_GROUP, NO_GROUP, group + stride * iteration),
        dep_count=np.bincount(owners, minlength=size * n),
        dep_index=index[by_owner],
        dep_lag_ps=lags[by_owner],
        n_ranks=part.n_ranks,
        stream_kinds=part.stream_kinds,
    )
