"""Local search by the simulator: placements a move away from the best are simulated, a batch at a time.

Moves: a part goes to another rank, or two parts of different tables change places. The surrogate that found the start does not
see launches, waits and overlap; these moves are judged by the whole model's iteration.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from fractions import Fraction

import numpy as np

from perfmodel.config.sharding import TablePlacement
from perfmodel.sharding.plan import Placements
from perfmodel.sharding.problem import Problem
from perfmodel.sharding.simulate import PlanSimulator
from perfmodel.units import ps_to_seconds

BATCH = 64  # placements simulated at once
MOVED = ("table_wise", "column_wise", "table_column_wise")
PATIENCE = 12  # batches without a better placement after which the search ends


def refine(
    problem: Problem,
    simulator: PlanSimulator,
    start: Placements,
    deadline: float,
    *,
    seed: int = 0,
    clock: Callable[[], float] = time.monotonic,
) -> tuple[Placements, float, int]:
    """The best placement found until the deadline, its iteration time (s, infinite if `start` does not run), and how many ran.

    Tables whose constraint names ranks or neighbours stay where they are.
    """
    rng = np.random.default_rng(seed)
    best, best_ps = start, simulator.times([start])[0]
    free = [
        name
        for name, where in start.items()
        if where.sharding in MOVED and not problem.constraint(name).ranks and not problem.constraint(name).together
    ]
    n_done, n_vain = 1, 0
    while free and isinstance(best_ps, Fraction) and n_vain < PATIENCE and clock() < deadline:
        tried = [_moved(best, free, problem.n_ranks, rng) for _ in range(BATCH)]
        times = simulator.times(tried)
        n_done += len(tried)
        n_vain += 1
        for placement, found in zip(tried, times, strict=True):
            if isinstance(found, Fraction) and found < best_ps:
                best, best_ps, n_vain = placement, found, 0
    return best, ps_to_seconds(float(best_ps)) if isinstance(best_ps, Fraction) else float("inf"), n_done


def _moved(placement: Placements, free: Sequence[str], n_ranks: int, rng: np.random.Generator) -> Placements:
    found = dict(placement)
    first, second = (free[int(i)] for i in rng.integers(0, len(free), 2))
    place = int(rng.integers(0, len(found[first].ranks)))
    if first == second or rng.random() < 0.5:
        found[first] = _with_rank(found[first], place, int(rng.integers(0, n_ranks)))
        return found
    other = int(rng.integers(0, len(found[second].ranks)))
    here, there = found[first].ranks[place], found[second].ranks[other]
    found[first], found[second] = _with_rank(found[first], place, there), _with_rank(found[second], other, here)
    return found


def _with_rank(where: TablePlacement, place: int, rank: int) -> TablePlacement:
    return where.model_copy(update={"ranks": (*where.ranks[:place], rank, *where.ranks[place + 1 :])})
