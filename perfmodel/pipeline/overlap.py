"""Steady state in which compute kernels slow down while a collective runs beside them on their rank.

A kernel with work w that runs for T, of which it has communication beside it for O, makes progress at 1/f of its pace in O:
w = (T - O) + O / f, so T = w + O (1 - 1/f). O follows from the timeline, the timeline from all T: the two are found in turn
until the iteration time stands still. The event engine (`sim.overlap`) solves the same rule in one pass over several
unrolled iterations; this way costs a few sweeps instead and agrees with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from perfmodel.pipeline.pricebook import FloatArray, IntArray
from perfmodel.pipeline.tasks import LoweredClass
from perfmodel.sim.compile import Compiled
from perfmodel.sim.intervals import Spans, fold, union
from perfmodel.sim.program import COMM, COMPUTE
from perfmodel.sim.steady import CarryDep, Steady, seam_of, simulate_steady_compiled
from perfmodel.sim.timeline import Timeline

MAX_ROUNDS = 30
SETTLED_FRAC = 1e-6  # change of the iteration time between rounds that ends the search


@dataclass(frozen=True, slots=True, kw_only=True)
class Overlapped:
    """A steady state under slowdown; `settled` is False if the iteration time still moved after `MAX_ROUNDS` rounds."""

    steady: Steady
    settled: bool


def simulate_with_overlap(
    classes: Sequence[LoweredClass], compiled: Compiled, carry: Sequence[CarryDep], *, overlap: bool
) -> Overlapped:
    """The steady state of `compiled`, the programs of `classes`, with the factors of their devices if `overlap`."""
    seam = seam_of(compiled, carry)
    steady = simulate_steady_compiled(compiled, seam=seam)
    factors = [lowered.device.overlap_factor for lowered in classes]
    if not overlap or max(factors) <= 1.0:
        return Overlapped(steady=steady, settled=True)
    lost = 1.0 - 1.0 / np.repeat(np.array(factors), np.diff(compiled.wiring.offsets))
    kinds = compiled.kind
    is_compute = kinds == COMPUTE
    for _ in range(MAX_ROUNDS):
        beside = _beside_ps(steady.timeline, kinds) * is_compute
        durations = compiled.duration_ps + np.rint(beside * lost).astype(np.int64)
        found = simulate_steady_compiled(compiled, durations, seam=seam)
        moved = abs(float(found.iteration_ps - steady.iteration_ps))
        steady = found
        if moved <= SETTLED_FRAC * float(found.iteration_ps):
            return Overlapped(steady=steady, settled=True)
    return Overlapped(steady=steady, settled=False)


def _beside_ps(timeline: Timeline, kinds: IntArray) -> FloatArray:
    """How long (ps) communication of its own rank, of any iteration, runs beside each task."""
    found = np.zeros(timeline.compiled.n_tasks)
    period = timeline.makespan_ps
    for cls in range(timeline.compiled.n_classes):
        tasks = timeline.compiled.tasks_of(cls)
        start, end = timeline.start_ps[tasks], timeline.end_ps[tasks]
        mine = kinds[tasks] == COMM
        spans = union(fold((start[mine], end[mine]), timeline.begin_ps, period))
        if len(spans[0]):
            found[tasks] = _covered(spans, end, timeline) - _covered(spans, start, timeline)
    return found


def _covered(spans: Spans, at: IntArray, timeline: Timeline) -> IntArray:
    """Length of the spans, repeated every iteration, from the iteration's beginning to each time (negative before it)."""
    whole, inside = np.divmod(at - timeline.begin_ps, timeline.makespan_ps)
    inside = inside + timeline.begin_ps
    length = spans[1] - spans[0]
    before = np.concatenate([[0], np.cumsum(length)])
    place = np.searchsorted(spans[0], inside, side="right")
    last = np.maximum(place - 1, 0)
    partial = np.where(place > 0, before[last] + np.minimum(inside - spans[0][last], length[last]), 0)
    covered: IntArray = whole * before[-1] + partial
    return covered
