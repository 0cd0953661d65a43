"""Gaussian-process regression of what a collective's law leaves over. Small, dense and with fixed hyperparameters."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
_REWEIGHTINGS = 3
_OUTLIER_SIGMAS = 3.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Features:
    """Columns of equal length; op, system, narrow and version are numbers that only compare equal or not."""

    log2_bytes: Array
    log2_ranks: Array
    narrow: Array
    op: Array
    system: Array
    version: Array


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernel:
    """Standard deviations (log time), lengths (octaves) and correlations between unlike labels.

    A residual is a level, a smooth curve over size and a rough one, each shared in part between operations, sister systems,
    numbers of ranks and element types; on top each library version of a system has its own smooth curve.
    """

    level: float = 0.15
    smooth: float = 0.15
    smooth_octaves: float = 1.2
    rough: float = 0.04
    rough_octaves: float = 0.5
    rank_octaves: float = 1.2
    ops: float = 0.6
    systems: float = 0.8
    dtypes: float = 0.9
    version: float = 0.06
    version_octaves: float = 2.0
    noise: float = 0.02


def _delta(left: Array, right: Array) -> Array:
    return left[:, None] - right[None, :]


def _matern(distance: Array, octaves: float) -> Array:
    scaled = np.sqrt(3.0) * np.abs(distance) / octaves
    return (1 + scaled) * np.exp(-scaled)


def covariance(left: Features, right: Features, kernel: Kernel) -> Array:
    """Prior covariance of residuals [n_left, n_right]."""
    size = _delta(left.log2_bytes, right.log2_bytes)
    ranks = np.exp(-0.5 * (_delta(left.log2_ranks, right.log2_ranks) / kernel.rank_octaves) ** 2)
    ops = np.where(_delta(left.op, right.op) == 0, 1.0, kernel.ops)
    systems = np.where(_delta(left.system, right.system) == 0, 1.0, kernel.systems)
    dtypes = np.where(_delta(left.narrow, right.narrow) == 0, 1.0, kernel.dtypes)
    curve = kernel.level**2 + kernel.smooth**2 * _matern(size, kernel.smooth_octaves) * dtypes
    rough = kernel.rough**2 * np.exp(-np.abs(size) / kernel.rough_octaves) * dtypes
    known = (left.version[:, None] >= 0) & (_delta(left.version, right.version) == 0)
    same = known & (_delta(left.system, right.system) == 0)
    version = kernel.version**2 * same * (0.5 + 0.5 * _matern(size, kernel.version_octaves)) * (0.4 + 0.6 * ranks)
    total: Array = ranks * ops * systems * (curve + rough) + version * ops
    return total


class Residuals:
    """A fitted residual model: `mean(features)` is the expected log residual."""

    def __init__(self, seen: Features, weights: Array, kernel: Kernel) -> None:
        self._seen, self._weights, self._kernel = seen, weights, kernel

    def mean(self, asked: Features) -> Array:
        """Posterior mean [n]."""
        found: Array = covariance(asked, self._seen, self._kernel) @ self._weights
        return found


def fit_residuals(seen: Features, residuals: Array, kernel: Kernel) -> Residuals:
    """Posterior weights; points far from their neighbours are taken for noise (three reweightings)."""
    prior = covariance(seen, seen, kernel)
    trust = np.ones(len(residuals))
    weights = np.zeros(len(residuals))
    for _ in range(_REWEIGHTINGS):
        weights = np.linalg.solve(prior + np.diag(kernel.noise**2 / trust), residuals)
        left = residuals - prior @ weights
        trust = 1 / (1 + (left / (_OUTLIER_SIGMAS * kernel.noise)) ** 2)
    return Residuals(seen, weights, kernel)
