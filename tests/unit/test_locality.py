"""Reuse of table rows against brute force: sampled indices, an LRU cache simulated lookup by lookup."""

from __future__ import annotations

import time
from collections import OrderedDict

import numpy as np
import pytest

from perfmodel.kernels.locality import (
    batch_hit_curve,
    batch_hit_rate,
    expected_unique,
    histogram,
    hit_rate,
    hit_rates,
    popularity,
    unique_misses,
    zipf,
)

ROWS = 20_000


def exact_probability(kind, rows=ROWS):
    """Probability of each row, written out without classes."""
    if kind == "histogram":
        weights = np.concatenate([np.full(100, 50.0), np.full(2_000, 3.0), np.full(rows - 2_100, 0.1)])
    else:
        weights = np.arange(1, rows + 1, dtype=float) ** -float(kind)
    return weights / weights.sum()


def model_of(kind, rows=ROWS):
    if kind == "histogram":
        return histogram(((100.0, 50.0), (2_000.0, 3.0), (rows - 2_100.0, 0.1)), rows)
    return popularity(rows, float(kind))


def lru(indices, capacity, warm=0):
    """Hit rate of an LRU cache over the indices after the first `warm`."""
    cache, hits = OrderedDict(), 0
    for position, index in enumerate(indices.tolist()):
        if index in cache:
            cache.move_to_end(index)
            hits += position >= warm
        else:
            cache[index] = None
            if len(cache) > capacity:
                cache.popitem(last=False)
    return hits / (len(indices) - warm)


KINDS = ("0", "0.6", "0.9", "1.05", "1.5", "histogram")


@pytest.mark.parametrize("capacity", [50, 300, 1_000, 5_000, 12_000])
@pytest.mark.parametrize("kind", KINDS)
def test_steady_hit_rate_is_within_two_points_of_a_simulation(kind, capacity):
    rng = np.random.default_rng(1)
    indices = rng.choice(ROWS, size=150_000, p=exact_probability(kind))
    assert hit_rate(model_of(kind), capacity) == pytest.approx(lru(indices, capacity, warm=75_000), abs=0.02)


@pytest.mark.parametrize("capacity", [50, 1_000, 5_000, 30_000])
@pytest.mark.parametrize("kind", KINDS)
def test_hit_rate_of_a_cold_batch(kind, capacity):
    rng = np.random.default_rng(2)
    probability = exact_probability(kind)
    simulated = np.mean([lru(rng.choice(ROWS, size=20_000, p=probability), capacity) for _ in range(2)])
    assert batch_hit_rate(model_of(kind), 20_000, capacity) == pytest.approx(simulated, abs=0.02)


@pytest.mark.parametrize("n_lookups", [100, 5_000, 60_000])
@pytest.mark.parametrize("kind", KINDS)
def test_distinct_rows_are_within_one_percent_of_a_count(kind, n_lookups):
    rng = np.random.default_rng(3)
    probability = exact_probability(kind)
    n_draws = max(2, 60_000 // n_lookups)
    counts = [np.unique(rng.choice(ROWS, size=n_lookups, p=probability)).size for _ in range(n_draws)]
    assert expected_unique(model_of(kind), n_lookups) == pytest.approx(np.mean(counts), rel=0.01)


def test_rows_missing_from_a_warm_cache():
    rng = np.random.default_rng(4)
    probability = exact_probability("0.9")
    n, capacity, missing = 2_000, 4_000, []
    cache = OrderedDict()
    for batch in range(60):
        distinct = np.unique(rng.choice(ROWS, size=n, p=probability))
        if batch >= 30:
            missing.append(sum(index not in cache for index in distinct.tolist()))
        for index in distinct.tolist():
            cache.pop(index, None)
            cache[index] = None
        while len(cache) > capacity:
            cache.popitem(last=False)
    assert unique_misses(model_of("0.9"), n, capacity) == pytest.approx(np.mean(missing), rel=0.05)


def test_rows_never_seen_are_missing_however_large_the_cache():
    table = zipf(ROWS, 1.05)
    # With room for every row, what is missing after 3 batches is what 4 batches name and 3 do not.
    expected = expected_unique(table, 4_000) - expected_unique(table, 3_000)
    assert unique_misses(table, 1_000, 10 * ROWS, warm_lookups=3_000) == pytest.approx(expected, rel=0.01)


def test_two_tables_share_a_cache():
    rng = np.random.default_rng(5)
    first, second = exact_probability("1.05"), exact_probability("0.6")
    n = 120_000
    pick = rng.random(n) < 0.7
    indices = np.where(pick, rng.choice(ROWS, n, p=first), ROWS + rng.choice(ROWS, n, p=second))
    cache, hits = OrderedDict(), np.zeros(n, dtype=bool)
    for position, index in enumerate(indices.tolist()):
        hits[position] = index in cache
        cache.pop(index, None)
        cache[index] = None
        if len(cache) > 3_000:
            cache.popitem(last=False)
    late = np.arange(n) > n // 2
    simulated = [hits[late & pick].mean(), hits[late & ~pick].mean()]
    assert hit_rates([model_of("1.05"), model_of("0.6")], [0.7, 0.3], 3_000) == pytest.approx(simulated, abs=0.02)


@pytest.mark.parametrize("exponent", [0.5, 0.8, 1.0, 1.2])
def test_classes_reproduce_a_zipf_law_row_by_row(exponent):
    rows = 300_000
    probability = exact_probability(str(exponent), rows)
    n = 100_000
    exact = float(-np.expm1(n * np.log1p(-probability)).sum())
    table = zipf(rows, exponent)
    assert table.rows == rows
    assert float(table.counts @ table.probability) == pytest.approx(1.0)
    assert expected_unique(table, n) == pytest.approx(exact, rel=1e-3)


def test_every_row_fits():
    assert hit_rate(zipf(1_000, 1.0), 1_000) == 1.0
    assert hit_rate(zipf(1_000, 1.0), 0) == 0.0
    assert batch_hit_rate(zipf(1_000, 1.0), 0, 10) == 0.0


def test_a_hundred_million_rows_need_no_array_of_rows():
    table = zipf(100_000_000, 1.05)
    assert table.counts.size < 1_000
    start = time.process_time()
    hit_rate(table, 1e6)
    assert time.process_time() - start < 0.1  # an array of 1e8 rows would take seconds


def test_a_histogram_without_accesses_is_refused():
    with pytest.raises(ValueError, match="no access"):
        histogram(((10.0, 0.0),), 10)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("n_lookups", [200.0, 50_000.0])
def test_the_curve_agrees_with_each_cache_size_alone(kind, n_lookups):
    sizes = [1.0, 30.0, 400.0, 3_000.0, 15_000.0, 40_000.0]
    alone = [batch_hit_rate(model_of(kind), n_lookups, size) for size in sizes]
    assert batch_hit_curve(model_of(kind), n_lookups, sizes) == pytest.approx(alone, abs=0.004)
    assert batch_hit_curve(model_of(kind), 0.0, sizes).tolist() == [0.0] * len(sizes)
