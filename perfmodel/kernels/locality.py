"""How often table rows are used again: distinct rows of a batch, and hit rates of a cache of recently used rows.

A `Popularity` groups the rows of a table into classes of equal access probability. Then, for n independent lookups,

    expected distinct rows   = sum_i c_i (1 - (1 - p_i)^n)
    hit rate of an LRU cache = sum_i c_i p_i (1 - exp(-p_i T)),   T from   sum_i c_i (1 - exp(-p_i T)) = cache rows

with c_i rows of probability p_i each. The second is Che's approximation (Che, Tung, Wang, IEEE JSAC 2002; why it holds for
almost any popularity: Fricker, Robert, Roberts, ITC 2012). T is the age, in lookups, at which the cache drops a row. A Zipf
table of any size becomes about a thousand classes, so that each figure costs microseconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

EXACT_RANKS = 256  # the hottest ranks have a class of their own
CLASSES_PER_OCTAVE = 24  # beyond, probabilities within a class differ by less than 3 % per unit of the exponent
AGES = 65  # points of a hit curve: neighbouring ages differ by at most a third for a million lookups
BISECTIONS = 80  # halvings of the logarithm of T; more than doubles can tell apart


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Popularity:
    """Rows in classes: `counts` [classes] rows with access probability `probability` [classes] each.

    The probabilities of all rows add up to 1.
    """

    counts: Floats
    probability: Floats

    @property
    def rows(self) -> float:
        """Rows of the table."""
        return float(self.counts.sum())


@lru_cache(maxsize=4096)
def uniform(rows: int) -> Popularity:
    """Every row alike."""
    size = max(rows, 1)
    return Popularity(counts=np.array([float(size)]), probability=np.array([1.0 / size]))


@lru_cache(maxsize=4096)
def zipf(rows: int, exponent: float) -> Popularity:
    """The row of rank r (1 is the hottest) has probability proportional to r ** -exponent.

    Ranks beyond EXACT_RANKS share classes whose mass is the midpoint integral of the law, exact to 1e-6 there.
    """
    if exponent <= 0.0:
        return uniform(rows)
    size = max(rows, 1)
    exact = min(size, EXACT_RANKS)
    head = np.arange(1, exact + 1, dtype=np.float64) ** -exponent
    edges = _class_edges(exact, size)
    counts = np.diff(edges)
    mass = np.diff(_integral(edges + 0.5, exponent))
    total = head.sum() + mass.sum()
    return Popularity(
        counts=np.concatenate([np.ones(exact), counts]), probability=np.concatenate([head, mass / counts]) / total
    )


def _class_edges(exact: int, size: int) -> Floats:
    """Last ranks of the classes beyond `exact`, starting with `exact` itself."""
    if size <= exact:
        return np.array([float(exact)])
    n_classes = max(1, int(np.ceil(np.log2(size / exact) * CLASSES_PER_OCTAVE)))
    edges: Floats = np.unique(np.rint(np.geomspace(exact, size, n_classes + 1)))
    return edges


def _integral(x: Floats, exponent: float) -> Floats:
    result: Floats = np.log(x) if abs(exponent - 1.0) < 1e-9 else x ** (1.0 - exponent) / (1.0 - exponent)
    return result


@lru_cache(maxsize=4096)
def histogram(pairs: tuple[tuple[float, float], ...], rows: int) -> Popularity:
    """Rows grouped by measured accesses: `pairs` of (number of rows, accesses per iteration and row).

    Rows of the table that no pair names are never accessed. Raises ValueError if the pairs name no access at all.
    """
    counts = np.array([max(count, 0.0) for count, _ in pairs])
    weights = np.array([max(accesses, 0.0) for _, accesses in pairs])
    total = float(counts @ weights)
    if total <= 0.0:
        raise ValueError("the histogram names no access")
    idle = max(float(rows) - float(counts.sum()), 0.0)
    if idle > 0.0:
        counts, weights = np.append(counts, idle), np.append(weights, 0.0)
    return Popularity(counts=counts, probability=weights / total)


def popularity(rows: int, zipf_exponent: float = 0.0, pairs: Sequence[Sequence[float]] = ()) -> Popularity:
    """How a table's rows are accessed: by histogram if there is one, else by Zipf law (exponent 0: uniform)."""
    if pairs:
        return histogram(tuple((float(count), float(accesses)) for count, accesses in pairs), rows)
    return zipf(rows, float(zipf_exponent))


def seen_frac(table: Popularity, n_lookups: float) -> Floats:
    """Probability [classes] that a row is among `n_lookups` independent lookups."""
    certain = np.minimum(table.probability, 1.0 - 1e-16)
    result: Floats = -np.expm1(n_lookups * np.log1p(-certain))
    return result


def expected_unique(table: Popularity, n_lookups: float) -> float:
    """Expected number of distinct rows among `n_lookups` independent lookups."""
    return float(table.counts @ seen_frac(table, n_lookups))


def characteristic_age(tables: Sequence[Popularity], shares: Sequence[float], cache_rows: float) -> float:
    """Che's T: the number of lookups after which an LRU cache of `cache_rows` rows drops a row that is not used again.

    Several tables share the cache; `shares` are their fractions of all lookups. Infinite if every row fits.
    """
    counts = np.concatenate([table.counts for table in tables])
    rates = np.concatenate([table.probability * share for table, share in zip(tables, shares, strict=True)])
    counts, rates = counts[rates > 0.0], rates[rates > 0.0]
    if counts.sum() <= cache_rows:
        return float("inf")
    if cache_rows <= 0.0:
        return 0.0
    # At T lookups at most T rows are held, so T >= cache_rows; an upper bound is found by doubling.
    low, high = np.log(cache_rows), np.log(cache_rows) + 1.0
    while float(counts @ -np.expm1(-rates * np.exp(high))) < cache_rows:
        high += 1.0
    for _ in range(BISECTIONS):
        middle = 0.5 * (low + high)
        if float(counts @ -np.expm1(-rates * np.exp(middle))) < cache_rows:
            low = middle
        else:
            high = middle
    return float(np.exp(0.5 * (low + high)))


def held_frac(table: Popularity, age: float, share: float = 1.0) -> Floats:
    """Probability [classes] that a cache of characteristic age `age` holds a row of the table."""
    if np.isinf(age):
        return np.asarray(table.probability > 0.0, dtype=np.float64)
    result: Floats = -np.expm1(-table.probability * share * age)
    return result


def hit_rate(table: Popularity, cache_rows: float) -> float:
    """Share of lookups that find their row in an LRU cache of `cache_rows` rows, in steady state."""
    age = characteristic_age([table], [1.0], cache_rows)
    return float((table.counts * table.probability) @ held_frac(table, age))


def hit_rates(tables: Sequence[Popularity], shares: Sequence[float], cache_rows: float) -> list[float]:
    """Steady-state hit rate of each of several tables that share one LRU cache; see `characteristic_age`."""
    age = characteristic_age(tables, shares, cache_rows)
    return [
        float((table.counts * table.probability) @ held_frac(table, age, share))
        for table, share in zip(tables, shares, strict=True)
    ]


def unique_misses(table: Popularity, n_lookups: float, cache_rows: float, warm_lookups: float = float("inf")) -> float:
    """Distinct rows of a batch of `n_lookups` that a row cache does not hold when the batch starts.

    The cache has served `warm_lookups` lookups before: a row that none of these named is missing, however large the cache.
    """
    age = min(characteristic_age([table], [1.0], cache_rows), warm_lookups)
    return float(table.counts @ (seen_frac(table, n_lookups) * (1.0 - held_frac(table, age))))


def batch_hit_rate(table: Popularity, n_lookups: float, cache_rows: float) -> float:
    """Share of a batch's lookups that find their row in an LRU cache which held none of the table before the batch.

    A lookup at position t of the batch hits if its row was named within the last min(t, T) lookups; averaged over t:
    with q = 1 - exp(-p T), sum_i c_i p_i (T - q_i/p_i + (n - T) q_i) / n for T < n, else (n - expected distinct rows) / n.
    """
    if n_lookups <= 0.0:
        return 0.0
    age = characteristic_age([table], [1.0], cache_rows)
    if age >= n_lookups:
        return 1.0 - expected_unique(table, n_lookups) / n_lookups
    known = table.probability > 0.0
    p, counts = table.probability[known], table.counts[known]
    held = -np.expm1(-p * age)
    return float(counts @ (p * age - held + (n_lookups - age) * p * held)) / n_lookups


def batch_hit_curve(table: Popularity, n_lookups: float, cache_rows: Sequence[float]) -> Floats:
    """`batch_hit_rate` for several cache sizes at once [len(cache_rows)], to about 0.002.

    Rows held and hits are computed on a grid of ages T, which gives hits as a function of rows held.
    """
    if n_lookups <= 1.0:
        return np.zeros(len(cache_rows))
    known = table.probability > 0.0
    p, counts = table.probability[known], table.counts[known]
    ages = np.geomspace(1.0, n_lookups, AGES)
    held = -np.expm1(-np.outer(ages, p))
    rows_held = held @ counts
    by_age = ages * float(p @ counts) - rows_held + (n_lookups - ages) * (held @ (p * counts))
    result: Floats = np.interp(
        np.log(np.maximum(cache_rows, 1e-9)), np.log(rows_held), np.maximum(by_age, 0.0) / n_lookups, left=0.0
    )
    return result
