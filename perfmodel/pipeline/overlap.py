"""Steady state in which compute kernels and collectives slow each other while they run beside one another on their rank.

A task with work w that runs for T loses a share of its pace at each instant: x on average, so T = w / (1 - x). What it loses
follows from the timeline, and the timeline from all T: the two are found in turn until the iteration time stands still. The
event engine (`sim.overlap`) solves the same rule in one pass over several unrolled iterations; this way costs a few sweeps
instead and agrees with it, but for what members of one collective lose at different times: there the engine takes the largest
loss of each instant, this the largest of their means.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from perfmodel.pipeline.overlap_rounds import MAX_ROUNDS, SETTLED_FRAC, links_of, run_all, settle
from perfmodel.pipeline.pricebook import FloatArray, IntArray
from perfmodel.sim.compile import Compiled
from perfmodel.sim.loops import use_numba
from perfmodel.sim.overlap import OverlapModel
from perfmodel.sim.overlap_loop import FULL_PACE, MOST_LOST
from perfmodel.sim.program import COMM, COMPUTE
from perfmodel.sim.steady import CarryDep, Seam, Steady, seam_of, simulate_steady_compiled
from perfmodel.sim.timeline import Timeline


@dataclass(frozen=True, slots=True, kw_only=True)
class Overlapped:
    """A steady state under slowdown; `settled` is False if the iteration time still moved after `MAX_ROUNDS` rounds.

    `plain_ps` is the iteration time without slowdown.
    """

    steady: Steady
    settled: bool
    plain_ps: Fraction


def simulate_with_overlap(compiled: Compiled, carry: Sequence[CarryDep], model: OverlapModel | None) -> Overlapped:
    """The steady state of `compiled` under the shares of `model`; without one nothing slows."""
    seam = seam_of(compiled, carry)
    if model is not None and use_numba(run_all, compiled.n_tasks) and (seam.distance == 1).all():
        durations = compiled.duration_ps[None, :].copy()
        _, _, settled, growth, span = settle(links_of(compiled, seam, model), durations)[0].tolist()
        steady = simulate_steady_compiled(compiled, durations[0], seam=seam)
        return Overlapped(steady=steady, settled=bool(settled), plain_ps=Fraction(growth, span))
    steady = simulate_steady_compiled(compiled, seam=seam)
    plain_ps = steady.iteration_ps
    if model is None:
        return Overlapped(steady=steady, settled=True, plain_ps=plain_ps)
    found, is_settled = rounds(compiled, seam, model, steady)
    return Overlapped(steady=found, settled=is_settled, plain_ps=plain_ps)


def rounds(compiled: Compiled, seam: Seam, model: OverlapModel, steady: Steady) -> tuple[Steady, bool]:
    """From the steady state without slowdown to that with it, and whether it settled.

    Durations go half of the way in the second round and where the iteration time has just turned back: whole steps may go to
    and fro for ever, since a kernel that takes longer has less of its collective beside it, and then takes less again.
    """
    durations, halves, last = compiled.duration_ps, False, 0.0
    for turn in range(MAX_ROUNDS):
        longer = _slowed(compiled.duration_ps, lost_frac(steady.timeline, model))
        durations = (durations + longer) // 2 if halves else longer
        found = simulate_steady_compiled(compiled, durations, seam=seam)
        moved = float(found.iteration_ps - steady.iteration_ps)
        steady, halves, last = found, turn == 0 or moved * last < 0, moved
        if abs(moved) <= SETTLED_FRAC * float(found.iteration_ps):
            return steady, True
    return steady, False


def _slowed(duration_ps: IntArray, lost: FloatArray) -> IntArray:
    slowed: IntArray = np.rint(duration_ps / (1.0 - lost)).astype(np.int64)
    return slowed


def lost_frac(timeline: Timeline, model: OverlapModel) -> FloatArray:
    """Share of its pace that each task loses, on average over its time, to those of its own rank, of any iteration."""
    compiled = timeline.compiled
    found = np.zeros(compiled.n_tasks)
    for cls in range(compiled.n_classes):
        tasks, kinds = compiled.tasks_of(cls), compiled.kinds_of(cls)
        spans = timeline.start_ps[tasks], timeline.end_ps[tasks]
        comm, compute = np.flatnonzero(kinds == COMM), np.flatnonzero(kinds == COMPUTE)
        if not len(comm) or not len(compute):
            continue
        held, traffic, memory = (_part(share, tasks) for share in (model.held, model.traffic, model.memory))
        of_kernels = _mean_beside(spans, compute, (comm, held), timeline)
        of_kernels += _mean_beside(spans, compute, (comm, traffic), timeline) * memory[compute] / FULL_PACE
        found[tasks.start + compute] = of_kernels
        found[tasks.start + comm] = _mean_beside(spans, comm, (compute, memory), timeline) * traffic[comm] / FULL_PACE
    return np.minimum(found / FULL_PACE, MOST_LOST / FULL_PACE)


def _part(share: int | IntArray, tasks: slice) -> IntArray:
    return np.full(tasks.stop - tasks.start, share, dtype=np.int64) if isinstance(share, int) else share[tasks]


def _mean_beside(
    spans: tuple[IntArray, IntArray], mine: IntArray, others: tuple[IntArray, IntArray], timeline: Timeline
) -> FloatArray:
    """The sum of the shares of `others` (their places, and the shares of all) that run beside each of `mine`, its mean."""
    places, shares = others
    start, end = spans
    places = places[(shares[places] > 0) & (end[places] > start[places])]
    length = end[mine] - start[mine]
    if timeline.makespan_ps <= 0 or not len(places):
        return np.zeros(len(mine))
    levels = _levels((start[places], end[places], shares[places]), timeline)
    met = _until(levels, end[mine], timeline) - _until(levels, start[mine], timeline)
    mean: FloatArray = met / np.maximum(length, 1)
    return np.where(length > 0, mean, 0.0)


def _levels(spans: tuple[IntArray, IntArray, IntArray], timeline: Timeline) -> tuple[IntArray, IntArray, IntArray]:
    """Edges (ps from the iteration's beginning), the sum of the shares from each edge on, and its integral up to there."""
    start, end, share = spans
    period = timeline.makespan_ps
    length = np.minimum(end - start, period)
    low = (start - timeline.begin_ps) % period
    over = np.maximum(low + length - period, 0)
    at = np.concatenate([low, low + length - over, np.zeros_like(over), over])
    change = np.concatenate([share, -share, share * (over > 0), -share * (over > 0)])
    order = np.argsort(at, kind="stable")
    edges, level = at[order], np.cumsum(change[order])
    area = np.concatenate([[0], np.cumsum(level[:-1] * np.diff(edges))])
    return edges, level, area


def _until(levels: tuple[IntArray, IntArray, IntArray], at: IntArray, timeline: Timeline) -> IntArray:
    """Integral of the levels, repeated every iteration, from the iteration's beginning to each time (negative before it)."""
    edges, level, area = levels
    whole, inside = np.divmod(at - timeline.begin_ps, timeline.makespan_ps)
    place = np.maximum(np.searchsorted(edges, inside, side="right") - 1, 0)
    partial = np.where(inside >= edges[0], area[place] + level[place] * (inside - edges[place]), 0)
    total = area[-1] + level[-1] * (timeline.makespan_ps - edges[-1])
    until: IntArray = whole * total + partial
    return until
