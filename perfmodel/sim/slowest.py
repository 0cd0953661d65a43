"""Durations of the slowest of many equal ranks, drawn at once however many they are.

Ranks of a class that run the same tasks wait for the slowest of them where they meet. Between two meetings the tasks of a
stream add up: their sum is taken as log-normal, of the mean and the variance that the tasks' own have together. The slowest
of n such sums is drawn by its distribution, P(slowest <= x) = P(one <= x) ** n, and what it is longer than the mean is spread
over the tasks as the mean of each given their sum (by its share of the variance). Exact for a lone task; elsewhere a sum of
log-normals is nearly one (Fenton 1960).

Where ranks of a class meet others but not each other (the stages of each of many pipelines), stretches in between are links of
a chain up to where they do: each draws its own, given that all together are those of the slowest chain (the law of normal
numbers given their weighted sum). What the ranks of one class do not have in common at the end of a chain, one being ahead of
the next, is left out: the class goes on as its slowest rank did.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from perfmodel.sim.compile import Compiled
from perfmodel.sim.perturb import FloatArray, Jitter, lognormal, variation_of
from perfmodel.sim.program import COMM, IntArray


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Stretches:
    """Tasks that add up between meetings: the stretch of each task, the chain of each stretch, and variances.

    `n_ranks` is how many ranks meet at the end of each chain. `share` is each task's part of the variance (ps squared) of its
    stretch, which is `deviation_ps` squared; `mean_ps` is the sum of the durations of those that vary.
    """

    stretch: IntArray
    chain: IntArray
    n_ranks: IntArray
    mean_ps: FloatArray
    deviation_ps: FloatArray
    share: FloatArray


def stretches_of(compiled: Compiled, duration_ps: IntArray, n_meeting: IntArray, jitter: Jitter) -> Stretches:
    """The stretches of programs; `n_meeting` is, by task, how many ranks of its class meet there (0: it meets nobody).

    What follows the last meeting of a class belongs to the first one of the next iteration. A collective is a stretch of its
    own, drawn once.
    """
    variation = variation_of(compiled.kind, jitter)
    stretch, first = _numbers(compiled, n_meeting > 0)
    chain, ends = _numbers(compiled, n_meeting > 1)
    ranks = np.ones(compiled.n_tasks, dtype=np.int64)
    for cls in range(compiled.n_classes):
        tasks = compiled.tasks_of(cls)
        meeting = n_meeting[tasks]
        at = np.flatnonzero(meeting > 1)
        ranks[tasks] = meeting[at][_before(meeting > 1) % len(at)] if len(at) else compiled.programs[cls].n_ranks
    ranks[compiled.kind == COMM] = 1
    varies = variation > 0
    square = (variation * duration_ps) ** 2
    total = np.bincount(stretch, weights=square, minlength=len(first))
    return Stretches(
        stretch=stretch,
        chain=chain[first],
        n_ranks=ranks[ends],
        mean_ps=np.bincount(stretch, weights=np.where(varies, duration_ps, 0.0), minlength=len(first)).astype(
            np.float64
        ),
        deviation_ps=np.sqrt(total),
        share=square / np.maximum(total[stretch], np.finfo(np.float64).tiny),
    )


def _before(meets: NDArray[np.bool_]) -> IntArray:
    found: IntArray = np.cumsum(meets) - meets.astype(np.int64)
    return found


def _numbers(compiled: Compiled, meets: NDArray[np.bool_]) -> tuple[IntArray, IntArray]:
    """A number for what each task adds up with on its stream up to the next meeting, and the first task of each number."""
    place = np.zeros(compiled.n_tasks, dtype=np.int64)
    for cls in range(compiled.n_classes):
        tasks = compiled.tasks_of(cls)
        place[tasks] = _before(meets[tasks]) % max(int(meets[tasks].sum()), 1)
    cls_of = np.repeat(np.arange(compiled.n_classes), np.diff(compiled.wiring.offsets))
    stream = compiled.stream - compiled.stream.min(initial=0)
    key = (cls_of * (int(stream.max(initial=0)) + 1) + stream) * (int(place.max(initial=0)) + 1) + place
    is_comm = compiled.kind == COMM
    key[is_comm] = -1 - np.flatnonzero(is_comm)
    _, first, number = np.unique(key, return_index=True, return_inverse=True)
    return number.reshape(-1), first


def slowest_normal(n_ranks: IntArray, rng: np.random.Generator) -> FloatArray:
    """The largest of so many standard normal numbers, for each entry.

    u ** (1 / n) near 1 has its few digits in 1 - u ** (1 / n), which is what the upper tail is asked for.
    """
    from scipy.special import ndtri

    upper = -np.expm1(np.log1p(-rng.random(len(n_ranks))) / n_ranks)
    found: FloatArray = -ndtri(np.clip(upper, 1e-300, 1 - 1e-16))
    return found


def _of_slowest_chains(stretches: Stretches, rng: np.random.Generator) -> FloatArray:
    """A normal number for each stretch, such that those of a chain add up, by their deviations, to the slowest chain's."""
    chain, deviation = stretches.chain, stretches.deviation_ps
    own = rng.standard_normal(len(chain))
    of_chain = np.sqrt(np.bincount(chain, weights=deviation**2, minlength=len(stretches.n_ranks)))
    weight = deviation / np.maximum(of_chain, 1.0)[chain]
    together = np.bincount(chain, weights=weight * own, minlength=len(stretches.n_ranks))
    found: FloatArray = own + weight * (slowest_normal(stretches.n_ranks, rng) - together)[chain]
    return found


def slowest_durations(
    compiled: Compiled, duration_ps: IntArray, stretches: Stretches, jitter: Jitter, rng: np.random.Generator
) -> IntArray:
    """Durations of one iteration (ps) of the slowest rank of each class."""
    drawn = duration_ps.astype(np.float64)
    mean = np.maximum(stretches.mean_ps, 1.0)
    factor = lognormal(stretches.deviation_ps / mean, _of_slowest_chains(stretches, rng))
    longer_ps = np.where(stretches.deviation_ps > 0, stretches.mean_ps * (factor - 1.0), 0.0)
    drawn += longer_ps[stretches.stretch] * stretches.share
    if jitter.rank_frac:
        n_ranks = np.array([program.n_ranks for program in compiled.programs], dtype=np.int64)
        of_rank = lognormal(np.array(jitter.rank_frac), slowest_normal(n_ranks, rng))
        drawn *= np.where(compiled.kind == COMM, 1.0, np.repeat(of_rank, np.diff(compiled.wiring.offsets)))
    return np.rint(np.maximum(drawn, 0.0)).astype(np.int64)
