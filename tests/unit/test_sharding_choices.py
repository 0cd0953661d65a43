"""The balance of fixed costs over ranks, against enumeration of every assignment."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from perfmodel.errors import InfeasiblePlanError
from perfmodel.sharding.choices import Balanced, Choice, arrays_of, best_choices
from perfmodel.sharding.search import ArraySearch

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


def _best(tables: list[list[Choice]], capacity: np.ndarray = ROOM, per_host: int = 3, seed: int = 0) -> Balanced:
    """Two rounds of annealing with time to spare: tests do not depend on the machine's speed."""
    return best_choices(ArraySearch(arrays_of(tables, capacity, per_host), seed=seed), tables, 1e6, rounds=2)


def test_small_cases_reach_the_optimum_of_enumeration():
    rng = np.random.default_rng(7)
    n_met = 0
    for _ in range(4):
        costs = rng.uniform(1, 10, 5)
        tables = [[_whole(c), _halves(c * 0.55), _everywhere(c * 0.4)] for c in costs[:2]] + [
            [_whole(c)] for c in costs[2:]
        ]
        found = _best(tables, seed=1)
        best = _optimum(tables, 3)
        assert found.cost >= best * (1 - 1e-12)
        n_met += found.cost <= best * (1 + 1e-9)
    assert n_met == 4


def test_the_cost_is_that_of_the_ranks_returned():
    tables = [[_whole(3.0)], [_whole(5.0), _halves(2.6)], [_everywhere(1.0)]]
    found = _best(tables)
    load = np.zeros(3)
    for table, number, ranks in zip(tables, found.choice, found.ranks, strict=True):
        np.add.at(load, list(ranks), table[number].costs)
    assert found.cost == pytest.approx(load.max())


def test_memory_is_kept_to():
    # Two tables fit one rank by cost, but a rank holds one only.
    found = _best([[_whole(1.0, 80.0)], [_whole(1.0, 80.0)], [_whole(9.0, 10.0)]])
    assert len({found.ranks[0], found.ranks[1]}) == 2


def test_a_host_holds_all_parts():
    choice = Choice(costs=np.ones(2), memory=np.ones((2, 1)), spread="host")
    found = _best([[choice], [choice]], np.full((4, 1), 10.0), 2)
    assert sorted(found.ranks) == [(0, 1), (2, 3)]


def test_what_does_not_fit_is_refused():
    with pytest.raises(InfeasiblePlanError, match=r"fits memory: rank \d is short of tier 0"):
        _best([[_whole(1.0, 101.0)]])


def test_one_seed_gives_one_answer():
    rng = np.random.default_rng(3)
    tables = [[_whole(float(c)), _halves(float(c) * 0.6)] for c in rng.uniform(1, 10, 12)]
    first, second = (_best(tables, seed=5) for _ in range(2))
    assert first == second


def test_each_tier_of_memory_is_kept_to():
    # Cheap in host memory, which has room for one; dear in device memory.
    both = [
        Choice(costs=np.array([1.0]), memory=np.array([[0.0, 60.0]]), spread="device"),
        Choice(costs=np.array([5.0]), memory=np.array([[60.0, 0.0]]), spread="device"),
    ]
    found = _best([both, both], np.array([[100.0, 100.0]]), 1)
    assert sorted(found.choice) == [0, 1]
    assert found.cost == 6.0


def test_an_interrupted_search_gives_its_first_construction():
    tables = [[_whole(float(c))] for c in range(1, 8)]
    ticks = iter(range(10**6))
    search = ArraySearch(arrays_of(tables, ROOM, 3), clock=lambda: float(next(ticks)))
    found = best_choices(search, tables, 0.5)
    assert found.origin == "cheapest, longest first"
    assert found.cost == 10.0  # 7 + 2 + 1; 6 + 3; 5 + 4
