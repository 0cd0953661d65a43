"""Durations of the slowest of many equal ranks, drawn at once however many they are.

Ranks of a class that run the same tasks wait for the slowest of them where they meet. Between two meetings the tasks of a
stream add up: their sum is taken as log-normal, of the mean and the variance that the tasks' own have together. The slowest
of n such sums is drawn by its distribution, P(slowest <= x) = P(one <= x) ** n, and what it is longer than the mean is spread
over the tasks as the mean of each given their sum (by its share of the variance). Exact for a lone task; elsewhere a sum of
log-normals is nearly one (Fenton 1960). What the ranks of one class do not have in common at the end of a stretch, one
being ahead of the next, is left out: the class goes on as its slowest rank did.
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

from perfmodel.sim.compile import Compiled
from perfmodel.sim.perturb import FloatArray, Jitter, lognormal, variation_of
from perfmodel.sim.program import COMM, IntArray

_NORMAL = NormalDist()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Stretches:
    """Tasks that add up between meetings: the stretch of each task, how many ranks meet at its end, and variances.

    `share` is each task's part of the variance (ps squared) of its stretch, which is `deviation_ps` squared; `mean_ps` is the
    sum of the durations of those that vary.
    """

    stretch: IntArray
    n_ranks: IntArray
    mean_ps: FloatArray
    deviation_ps: FloatArray
    share: FloatArray


def stretches_of(compiled: Compiled, duration_ps: IntArray, n_meeting: IntArray, jitter: Jitter) -> Stretches:
    """The stretches of programs; `n_meeting` is the number of ranks that meet at each task of communication, by task.

    What follows the last meeting of a class belongs to the first one of the next iteration. A collective is a stretch of its
    own, drawn once.
    """
    variation = variation_of(compiled.kind, jitter)
    key = np.zeros((compiled.n_tasks, 3), dtype=np.int64)
    ranks = np.ones(compiled.n_tasks, dtype=np.int64)
    for cls in range(compiled.n_classes):
        tasks = compiled.tasks_of(cls)
        meets = n_meeting[tasks] > 1
        before: IntArray = np.cumsum(meets) - meets.astype(np.int64)
        at = np.flatnonzero(meets)
        place = before % max(len(at), 1)
        key[tasks, 0], key[tasks, 1], key[tasks, 2] = cls, compiled.stream[tasks], place
        if len(at):
            ranks[tasks] = n_meeting[tasks][at][place]
        else:
            ranks[tasks] = compiled.programs[cls].n_ranks
    comm = np.flatnonzero(compiled.kind == COMM)
    key[comm] = np.stack([np.full(len(comm), -1), comm, comm], axis=1)
    ranks[comm] = 1
    _, first, stretch = np.unique(key, axis=0, return_index=True, return_inverse=True)
    stretch = stretch.reshape(-1)
    varies = variation > 0
    square = (variation * duration_ps) ** 2
    total = np.bincount(stretch, weights=square, minlength=len(first))
    return Stretches(
        stretch=stretch,
        n_ranks=ranks[first],
        mean_ps=np.bincount(stretch, weights=np.where(varies, duration_ps, 0.0), minlength=len(first)).astype(
            np.float64
        ),
        deviation_ps=np.sqrt(total),
        share=square / np.maximum(total[stretch], np.finfo(np.float64).tiny),
    )


def slowest_normal(n_ranks: IntArray, rng: np.random.Generator) -> FloatArray:
    """The largest of so many standard normal numbers, for each entry.

    u ** (1 / n) near 1 has its few digits in 1 - u ** (1 / n), which is what the upper tail is asked for.
    """
    upper = -np.expm1(np.log1p(-rng.random(len(n_ranks))) / n_ranks)
    return np.array([-_NORMAL.inv_cdf(min(max(p, 1e-300), 1 - 1e-16)) for p in upper.tolist()])


def slowest_durations(
    compiled: Compiled, duration_ps: IntArray, stretches: Stretches, jitter: Jitter, rng: np.random.Generator
) -> IntArray:
    """Durations of one iteration (ps) of the slowest rank of each class."""
    drawn = duration_ps.astype(np.float64)
    mean = np.maximum(stretches.mean_ps, 1.0)
    factor = lognormal(stretches.deviation_ps / mean, slowest_normal(stretches.n_ranks, rng))
    longer_ps = np.where(stretches.deviation_ps > 0, stretches.mean_ps * (factor - 1.0), 0.0)
    drawn += longer_ps[stretches.stretch] * stretches.share
    if jitter.rank_frac:
        n_ranks = np.array([program.n_ranks for program in compiled.programs], dtype=np.int64)
        of_rank = lognormal(np.array(jitter.rank_frac), slowest_normal(n_ranks, rng))
        drawn *= np.where(compiled.kind == COMM, 1.0, np.repeat(of_rank, np.diff(compiled.wiring.offsets)))
    return np.rint(np.maximum(drawn, 0.0)).astype(np.int64)
