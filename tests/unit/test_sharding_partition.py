"""Multi-way partition against worked examples and enumeration; the beam against enumeration of all ways to divide."""

from itertools import product

import numpy as np
import pytest

from perfmodel.sharding.choices import Choice, arrays_of
from perfmodel.sharding.partition import beam_over_splits, largest_differencing, longest_first, spread
from perfmodel.sharding.search import ArraySearch


def loads(weights, part, n_parts):
    return np.bincount(part, weights=weights, minlength=n_parts)


def best_of_all(weights, n_parts):
    ways = product(range(n_parts), repeat=len(weights))
    return min(loads(weights, np.array(part), n_parts).max() for part in ways)


def test_the_textbook_example_of_two_parts():
    # Karmarkar and Karp's 8, 7, 6, 5, 4: differences 1, 1 and 4 end in 2, sums 14 and 16; longest first has 17 and 13.
    weights = np.array([8.0, 7.0, 6.0, 5.0, 4.0])
    assert sorted(loads(weights, largest_differencing(weights, 2), 2).tolist()) == [14.0, 16.0]
    assert sorted(loads(weights, longest_first(weights, np.zeros(2)), 2).tolist()) == [13.0, 17.0]


@pytest.mark.parametrize("seed", range(8))
def test_differencing_is_near_the_optimum(seed):
    rng = np.random.default_rng(seed)
    weights = rng.uniform(1, 10, 8)
    found = loads(weights, largest_differencing(weights, 3), 3)
    best = best_of_all(weights, 3)
    assert found.sum() == pytest.approx(weights.sum())
    # Longest first is within 4/3 - 1/(3 m) of the optimum (Graham 1969); differencing of few parts is known to be better.
    assert best <= found.max() <= best * (4 / 3 - 1 / 9)


def test_longest_first_takes_what_lies_there_into_account():
    assert longest_first(np.array([3.0, 2.0, 2.0]), np.array([4.0, 0.0])).tolist() == [1, 1, 0]


def choice(*costs, spread="device"):
    return Choice(costs=np.array(costs), memory=np.ones((len(costs), 1)), spread=spread)


def test_pieces_bound_to_groups_are_placed_first():
    tables = [
        [choice(2.0, 2.0, spread="host")],
        [choice(3.0)],
        [choice(1.0)],
        [choice(1.0, 1.0, 1.0, 1.0, spread="uniform")],
    ]
    search = ArraySearch(arrays_of(tables, np.full((4, 1), 9.0), 2))
    piece = np.zeros((4, search.max_pieces), dtype=np.int64)
    spread(search.arrays, np.zeros(4, dtype=np.int64), piece, differencing=False)
    # Host 0 has 2 a rank beside the 1 everywhere; the single ones go to the ranks of host 1, one each.
    assert piece[0, 0] == 0
    assert sorted((piece[1, 0], piece[2, 0])) == [2, 3]


def test_the_beam_divides_what_sets_the_largest_load():
    # One table of 9 that may be halved at a little more; two of 3. Whole: 9. Halved: 5 + 3 on one of the ranks, 5 + 3.
    tables = [[choice(9.0), choice(5.0, 5.0)], [choice(3.0)], [choice(3.0)]]
    search = ArraySearch(arrays_of(tables, np.full((2, 1), 99.0), 2))

    def evaluate(option):
        piece = np.zeros((3, search.max_pieces), dtype=np.int64)
        spread(search.arrays, option, piece, differencing=True)
        return search.state(option, piece, "").cost_s, piece

    option = beam_over_splits(search.arrays, evaluate, lambda: True)
    assert option.tolist() == [1, 0, 0]
    assert evaluate(option)[0] == 8.0
