"""The balance of fixed costs over ranks, against enumeration of every assignment."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from perfmodel.errors import InfeasiblePlanError
from perfmodel.sharding.balance import Choice, balance

ROOM = np.full((3, 1), 100.0)


def _whole(cost: float, memory: float = 1.0) -> Choice:
    return Choice(costs=np.array([cost]), memory=np.array([[memory]]), spread="device")


def _halves(cost: float) -> Choice:
    return Choice(costs=np.array([cost, cost]), memory=np.ones((2, 1)), spread="device")


def _everywhere(cost: float) -> Choice:
    return Choice(costs=np.full(3, cost), memory=np.ones((3, 1)), spread="uniform")


def _optimum(tables: list[list[Choice]], n_ranks: int) -> float:
    """The smallest largest load over every choice and every rank of every part."""

    def spots(choices: list[Choice]) -> list[np.ndarray]:
        found = []
        for choice in choices:
            places = product(range(n_ranks), repeat=len(choice.costs))
            for ranks in [range(n_ranks)] if choice.spread == "uniform" else places:
                load = np.zeros(n_ranks)
                np.add.at(load, list(ranks), choice.costs)
                found.append(load)
        return found

    return min(float(sum(loads).max()) for loads in product(*map(spots, tables)))


def _counted(n_steps: int) -> object:
    """A clock that ends the search after so many looks at it: tests do not depend on the machine's speed."""
    ticks = iter(range(n_steps * 10))
    return lambda: float(next(ticks))


def test_small_cases_reach_the_optimum_of_enumeration():
    rng = np.random.default_rng(7)
    n_met = 0
    for _ in range(20):
        costs = rng.uniform(1, 10, 5)
        tables = [[_whole(c), _halves(c * 0.55), _everywhere(c * 0.4)] for c in costs[:2]] + [
            [_whole(c)] for c in costs[2:]
        ]
        found = balance(tables, ROOM, 3, 300, seed=1, clock=_counted(300))
        best = _optimum(tables, 3)
        assert found.cost >= best * (1 - 1e-12)
        n_met += found.cost <= best * (1 + 1e-9)
    assert n_met >= 19


def test_the_cost_is_that_of_the_ranks_returned():
    tables = [[_whole(3.0)], [_whole(5.0), _halves(2.6)], [_everywhere(1.0)]]
    found = balance(tables, ROOM, 3, 50, clock=_counted(50))
    load = np.zeros(3)
    for table, number, ranks in zip(tables, found.choice, found.ranks, strict=True):
        np.add.at(load, list(ranks), table[number].costs)
    assert found.cost == pytest.approx(load.max())


def test_memory_is_kept_to():
    # Two tables fit one rank by cost, but a rank holds one only.
    found = balance([[_whole(1.0, 80.0)], [_whole(1.0, 80.0)], [_whole(9.0, 10.0)]], ROOM, 3, 20, clock=_counted(20))
    assert len({found.ranks[0], found.ranks[1]}) == 2


def test_a_host_holds_all_parts():
    choice = Choice(costs=np.ones(2), memory=np.ones((2, 1)), spread="host")
    found = balance([[choice], [choice]], np.full((4, 1), 10.0), 2, 20, clock=_counted(20))
    assert sorted(found.ranks) == [(0, 1), (2, 3)]


def test_what_does_not_fit_is_refused():
    with pytest.raises(InfeasiblePlanError, match="fits the memory left"):
        balance([[_whole(1.0, 101.0)]], ROOM, 3, 1, clock=_counted(1))


def test_one_seed_gives_one_answer():
    rng = np.random.default_rng(3)
    tables = [[_whole(float(c)), _halves(float(c) * 0.6)] for c in rng.uniform(1, 10, 12)]
    first, second = (balance(tables, ROOM, 3, 60, seed=5, clock=_counted(60)) for _ in range(2))
    assert first == second
