"""Draws embedding indices as a table's distribution says. Everything comes from one seeded generator."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from perfmodel.config.dlrm import Distribution
from perfmodel.graph import ROW_SCATTER

# Rows whose Zipf weights are summed one by one; beyond, the weights change so slowly that an integral is exact to 1e-9.
_EXACT_ROWS = 1 << 20
# Classes of rows that stand for a Zipf law: the hottest ranks alone, then classes within which the probability changes by
# a factor of 2 ** (exponent / 16).
_EXACT_CLASSES = 64
_CLASSES_PER_OCTAVE = 16


def draw_indices(distribution: Distribution, rows: int, n: int, rng: np.random.Generator) -> Tensor:
    """`n` row numbers (int64) below `rows`, drawn independently."""
    if distribution.histogram:
        ranks = _draw_histogram(distribution.histogram, rows, n, rng)
    elif distribution.zipf:
        ranks = _draw_zipf(distribution.zipf, rows, n, rng)
    else:
        return torch.from_numpy(rng.integers(0, rows, n))
    return torch.from_numpy(ranks * (ROW_SCATTER % rows or 1) % rows)


def popularity_classes(distribution: Distribution, rows: int, n_accesses: float) -> tuple[tuple[float, float], ...]:
    """Pairs (number of rows, accesses of each row) that share `n_accesses` accesses out as the distribution says.

    Of a Zipf law, the hottest ranks are pairs of their own; beyond, a pair has the midpoint integral of its ranks.
    """
    if distribution.histogram:
        total = sum(count * accesses for count, accesses in distribution.histogram)
        return tuple((count, accesses * n_accesses / total) for count, accesses in distribution.histogram)
    if not distribution.zipf:
        return ((float(rows), n_accesses / rows),)
    exact = min(rows, _EXACT_CLASSES)
    n_classes = max(1, math.ceil(math.log2(rows / exact) * _CLASSES_PER_OCTAVE))
    edges = np.unique(np.rint(np.geomspace(exact, rows, n_classes + 1)))
    counts = np.concatenate([np.ones(exact), np.diff(edges)])
    tail = np.diff([_integral(edge + 0.5, distribution.zipf) for edge in edges])
    mass = np.concatenate([np.arange(1, exact + 1, dtype=float) ** -distribution.zipf, tail])
    each = n_accesses * mass / mass.sum() / counts
    return tuple(zip(counts.tolist(), each.tolist(), strict=True))


def draw_lengths(mean: float, n_bags: int, *, ragged: bool, rng: np.random.Generator) -> Tensor:
    """Lengths (int64) of `n_bags` bags that sum to `round(mean * n_bags)`.

    Even bags differ by at most one; ragged ones are Poisson lengths given their sum.
    """
    total = round(mean * n_bags)
    if ragged:
        return torch.from_numpy(rng.multinomial(total, np.full(n_bags, 1.0 / n_bags)))
    ends = np.arange(1, n_bags + 1) * total // n_bags
    return torch.from_numpy(np.diff(ends, prepend=0))


def offsets_of(lengths: Tensor) -> Tensor:
    """Start of each bag (int64) in the concatenated indices."""
    return torch.cumsum(lengths, 0) - lengths


def _draw_zipf(exponent: float, rows: int, n: int, rng: np.random.Generator) -> np.ndarray:
    """Ranks 0..rows-1 with probability proportional to (rank + 1) ** -exponent."""
    n_exact = min(rows, _EXACT_ROWS)
    cumulated = np.cumsum(np.arange(1, n_exact + 1, dtype=float) ** -exponent)
    low, high = _integral(n_exact + 0.5, exponent), _integral(rows + 0.5, exponent)
    drawn = rng.random(n) * (cumulated[-1] + high - low)
    ranks = np.searchsorted(cumulated, drawn, side="right")
    tail = ranks >= n_exact
    ranks[tail] = np.rint(_inverse_integral(low + drawn[tail] - cumulated[-1], exponent)).astype(np.int64) - 1
    return np.asarray(np.clip(ranks, 0, rows - 1))


def _integral(x: float, exponent: float) -> float:
    return math.log(x) if exponent == 1.0 else x ** (1.0 - exponent) / (1.0 - exponent)


def _inverse_integral(y: np.ndarray, exponent: float) -> np.ndarray:
    result = np.exp(y) if exponent == 1.0 else ((1.0 - exponent) * y) ** (1.0 / (1.0 - exponent))
    return np.asarray(result)


def _draw_histogram(
    histogram: Sequence[tuple[float, float]], rows: int, n: int, rng: np.random.Generator
) -> np.ndarray:
    """Ranks: a class of rows in proportion to its accesses, then one of its rows."""
    sizes = np.maximum(1, np.rint([size for size, _ in histogram])).astype(np.int64)
    accesses = np.array([size * count for size, count in histogram])
    classes = rng.choice(len(sizes), size=n, p=accesses / accesses.sum())
    starts = np.cumsum(sizes) - sizes
    ranks = starts[classes] + (rng.random(n) * sizes[classes]).astype(np.int64)
    return np.asarray(np.minimum(ranks, rows - 1))
