"""More processes than cores: those that compute at one time take turns.

Prices assume that every process of a CPU is busy all the time: each then has cores / processes of a core and takes that much
longer. Where processes wait for each other (stages of a pipeline) fewer are busy, and those run faster: a task that runs while
A processes compute takes max(1, A / cores) of its time alone. A follows from the timeline and the timeline from all times; the
two are found in turn until the iteration time stands still (equal shares are what the Linux scheduler gives equal processes).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from perfmodel.pipeline.pricebook import FloatArray
from perfmodel.pipeline.tasks import LoweredClass
from perfmodel.sim.compile import Compiled
from perfmodel.sim.intervals import union
from perfmodel.sim.program import COMPUTE, IntArray
from perfmodel.sim.steady import CarryDep, simulate_steady_compiled
from perfmodel.sim.timeline import Timeline

BoolArray = NDArray[np.bool_]

MAX_ROUNDS = 30
SETTLED_FRAC = 1e-4  # change of the iteration time between rounds that ends the search
DAMPING = 0.5  # of each round's change: two stages that take turns would swing


def share_cores(classes: Sequence[LoweredClass], compiled: Compiled, carry: Sequence[CarryDep]) -> Compiled:
    """The programs with the times that tasks take at the crowding they meet; themselves on GPUs or with cores for all."""
    crowding = max(lowered.device.n_processes / lowered.device.n_sms for lowered in classes)
    if classes[0].device.kind != "cpu" or crowding <= 1.0 or len(classes) == 1:
        return compiled
    n_processes = sum(len(lowered.rank_class.ranks) for lowered in classes)
    kinds = np.concatenate([compiled.kinds_of(cls) for cls in range(compiled.n_classes)])
    computes = kinds == COMPUTE
    slower = np.where(computes, crowding, 1.0)
    alone = compiled.duration_ps / slower
    before = 0.0
    for _ in range(MAX_ROUNDS):
        durations = np.rint(alone * slower).astype(np.int64)
        steady = simulate_steady_compiled(compiled, durations, carry_deps=carry)
        now = float(steady.iteration_ps)
        if abs(now - before) <= SETTLED_FRAC * now:
            break
        before = now
        met = _crowding_met(steady.timeline, classes, computes, n_processes / crowding)
        slower = np.where(computes, slower + DAMPING * (met - slower), 1.0)
    return replace(compiled, duration_ps=durations)


def _crowding_met(
    timeline: Timeline, classes: Sequence[LoweredClass], computes: BoolArray, n_cores: float
) -> FloatArray:
    """For each task the mean of max(1, busy processes / cores) while it runs."""
    at, busy = _busy(timeline, classes, computes)
    rate = np.maximum(1.0, busy / n_cores)
    integral = np.concatenate([[0.0], np.cumsum(rate[:-1] * np.diff(at))])
    start, end = timeline.start_ps.astype(np.float64), timeline.end_ps.astype(np.float64)
    length = np.maximum(end - start, 1.0)
    met: FloatArray = np.maximum(1.0, (np.interp(end, at, integral) - np.interp(start, at, integral)) / length)
    return met


def _busy(timeline: Timeline, classes: Sequence[LoweredClass], computes: BoolArray) -> tuple[IntArray, IntArray]:
    """Times at which the number of computing processes changes, and the number from each on."""
    times: list[IntArray] = []
    changes: list[IntArray] = []
    for cls, lowered in enumerate(classes):
        tasks = timeline.compiled.tasks_of(cls)
        mine = computes[tasks]
        starts, ends = union((timeline.start_ps[tasks][mine], timeline.end_ps[tasks][mine]))
        n_ranks = len(lowered.rank_class.ranks)
        times += [starts, ends]
        changes += [np.full(len(starts), n_ranks, dtype=np.int64), np.full(len(ends), -n_ranks, dtype=np.int64)]
    at, place = np.unique(np.concatenate(times), return_inverse=True)
    change = np.bincount(place, weights=np.concatenate(changes), minlength=len(at))
    return at, np.rint(np.cumsum(change)).astype(np.int64)
