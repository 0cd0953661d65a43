"""Steady state where compute and communication slow each other: one long run of the iteration, read in its middle.

Work of neighbouring iterations overlaps at their seam and slows, so an iteration cannot be simulated after the other as in
`steady`. The programs are unrolled until consecutive iterations repeat; the last ones, which nothing follows, are left
out. Slowdown is not max-plus, so repetition is observed, not proven.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

import numpy as np

from perfmodel.sim.compile import Compiled, compile_programs
from perfmodel.sim.overlap import simulate_overlapped_compiled
from perfmodel.sim.program import ArrayProgram, IntArray, Program
from perfmodel.sim.rivals import OverlapModel
from perfmodel.sim.steady import CarryDep, Seam, Steady, cycle_of, release_after, seam_of, unrolled
from perfmodel.sim.timeline import Timeline

_FIRST_RUN = 8  # iterations of the first attempt; each further one doubles it
_TAIL = 2  # iterations at the end that lack the overlap with what would follow


def simulate_overlapped_steady(
    programs: Sequence[Program | ArrayProgram],
    model: OverlapModel,
    *,
    carry_deps: Sequence[CarryDep] = (),
    max_iterations: int = 64,
) -> Steady:
    """Iteration time under overlap slowdown; fields as in `Steady`, of the last iteration that has successors.

    Raises:
        GraphError: as `simulate`, or for a malformed carry dep.
    """
    compiled = compile_programs(programs)
    seam = seam_of(compiled, carry_deps)
    n = min(_FIRST_RUN, max(max_iterations, _TAIL + 2))
    while True:
        long = compile_programs(unrolled(programs, n, carry_deps))
        run = simulate_overlapped_compiled(long, _tiled(model, compiled, n))
        ends = [_iteration(run.end_ps, compiled, long, k) for k in range(n - _TAIL)]
        depth = int(seam.distance.max()) if len(seam.distance) else 1
        states = _states(ends, np.unique(seam.source), depth)
        cycle = cycle_of(states, depth)
        if cycle or 2 * n > max_iterations:
            break
        n *= 2
    span = cycle or max(len(ends) // 2, 1)  # a mean over the second half where they do not repeat
    return Steady(
        iteration_ps=Fraction(int(ends[-1].max() - ends[-1 - span].max()), span),
        timeline=_middle(run, compiled, long, seam, ends),
        n_iterations=n,
        cycle=cycle,
        converged=bool(cycle),
    )


def _iteration(values: IntArray, compiled: Compiled, long: Compiled, k: int) -> IntArray:
    """The part of a per-task array of the long run that belongs to iteration k."""
    parts = []
    for cls in range(compiled.n_classes):
        size = compiled.tasks_of(cls).stop - compiled.tasks_of(cls).start
        begin = long.tasks_of(cls).start + k * size
        parts.append(values[begin : begin + size])
    return np.concatenate(parts)


def _states(ends: Sequence[IntArray], kept: IntArray, depth: int) -> list[IntArray]:
    return [
        np.concatenate([e[kept] for e in ends[max(k - depth + 1, 0) : k + 1]] + [[ends[k].max(initial=0)]])
        for k in range(len(ends))
    ]


def _tiled(model: OverlapModel, compiled: Compiled, n: int) -> OverlapModel:
    """The model for n iterations: shares given per task are repeated class by class."""

    def tile(share: int | IntArray) -> int | IntArray:
        if isinstance(share, int):
            return share
        return np.concatenate([np.tile(share[compiled.tasks_of(cls)], n) for cls in range(compiled.n_classes)])

    return OverlapModel(held=tile(model.held), traffic=tile(model.traffic), memory=tile(model.memory))


def _middle(run: Timeline, compiled: Compiled, long: Compiled, seam: Seam, ends: Sequence[IntArray]) -> Timeline:
    """The last iteration that has successors, as a timeline of its own."""
    k = len(ends) - 1
    return Timeline(
        compiled=compiled,
        duration_ps=compiled.duration_ps,
        release_ps=release_after(seam, ends[:-1], compiled.n_tasks),
        ready_ps=_iteration(run.ready_ps, compiled, long, k),
        start_ps=_iteration(run.start_ps, compiled, long, k),
        end_ps=ends[-1],
        begin_ps=int(ends[-2].max(initial=0)),
        steady=True,
        stretched=True,
    )
