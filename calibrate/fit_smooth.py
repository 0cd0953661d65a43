"""Corrections of laws that were fitted to tens or hundreds of rows: a Gaussian process, alone or with boosted trees.

Length scales, amplitude and noise of the process (`perfmodel.kernels.smooth`) are those of the largest marginal likelihood
(scikit-learn). Where there are enough rows, trees are fitted as well, and the mean of both is taken if it predicts rows left
out better: libraries switch algorithms at thresholds, which trees follow and a smooth function does not.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from calibrate.fitting import fit_trees
from perfmodel.kernels.correction import LEAF, Floats, evaluate_trees
from perfmodel.kernels.smooth import matern

MANY_ROWS = 60  # from here on every column gets a length scale of its own; fewer rows may fit them to their noise
# Fewer rows, from here on, may have them as well where one column tells nearly all (a kernel that takes another path for sides
# of 16 and 32 than for 14 and 28): if they leave less than this share of what one scale for all leaves.
OWN_ROWS, OWN_SHARE = 24, 0.7
START_SCALE, SCALES = 3.0, (0.3, 100.0)  # in standard deviations of a column
AMPLITUDES = (1e-4, 1.0)  # variance of log corrections
NOISES = (1e-4, 0.1)  # 1 % to 30 %
MIN_ROWS = 14  # fewer say nothing about a correction
MIN_TREE_ROWS = 40
TREES = 60
LEAF_ROWS = 4  # plans have tens of cases an operator, each the best of several rounds
FOLDS = 5
JITTER = 1e-6
CONSTANT = 1e-9  # standard deviation of a column that says nothing


@dataclass(frozen=True, slots=True, kw_only=True)
class Correction:
    """A fitted correction: its arrays, and what it leaves of each row when it has not seen that row (log)."""

    arrays: Mapping[str, NDArray[np.generic]]
    left_out: Floats


def fit_correction(features: Floats, target: Floats, *, try_own_scales: bool = False) -> Correction:
    """The correction of log corrections `target` [n] over `features` [n, f] that leaves least on rows it has not seen.

    With `try_own_scales`, OWN_ROWS to MANY_ROWS rows may have a length scale for each column as well.
    """
    if len(target) < MIN_ROWS:
        return Correction(arrays={}, left_out=target)
    smooth = fit_smooth(features, target)
    if try_own_scales and OWN_ROWS <= len(target) <= MANY_ROWS:
        own = fit_smooth(features, target, own_scales=True)
        if _score(own.left_out) < OWN_SHARE * _score(smooth.left_out):
            smooth = own
    if len(target) < MIN_TREE_ROWS:
        return smooth
    both = mean_of(smooth, fit_forest(features, target))
    return min((smooth, both), key=lambda found: _score(found.left_out))


def _score(left_out: Floats) -> float:
    error = np.abs(left_out)
    return float(np.median(error) + np.quantile(error, 0.9) / 4)


def fit_forest(features: Floats, target: Floats) -> Correction:
    """Boosted trees, and what they leave of rows that they have not seen (five folds)."""
    left_out = np.zeros(len(target))
    fold = np.arange(len(target)) % FOLDS
    for part in range(FOLDS):
        seen = fold != part
        arrays = _trees(features[seen], target[seen])
        left_out[~seen] = target[~seen] - evaluate_trees(arrays, features[~seen])
    return Correction(arrays=_trees(features, target), left_out=left_out)


def _trees(features: Floats, target: Floats) -> dict[str, NDArray[np.generic]]:
    return fit_trees(features, target, np.ones(len(target)), n_trees=TREES, leaf_rows=LEAF_ROWS)


def mean_of(smooth: Correction, trees: Correction) -> Correction:
    """Half of each."""
    arrays = {**smooth.arrays, **trees.arrays}
    for name in ("smooth_weight", "smooth_offset"):
        arrays[name] = arrays[name].astype(np.float32) / np.float32(2)
    leaf = arrays["tree_feature"] == LEAF
    value = arrays["tree_value"].astype(np.float32)
    arrays["tree_value"] = np.where(leaf, value / np.float32(2), value)
    return Correction(arrays=arrays, left_out=(smooth.left_out + trees.left_out) / 2)


def fit_smooth(features: Floats, target: Floats, *, own_scales: bool = False) -> Correction:
    """The process through log corrections `target` [n] over `features` [n, f].

    Every column has a length scale of its own if asked for, or if there are more than MANY_ROWS rows.
    """
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.gaussian_process import GaussianProcessRegressor
    from sklearn.gaussian_process.kernels import ConstantKernel, Matern, WhiteKernel

    centre, spread = features.mean(axis=0), features.std(axis=0)
    columns = np.flatnonzero(spread > CONSTANT)
    z = (features[:, columns] - centre[columns]) / spread[columns]
    many = own_scales or len(target) > MANY_ROWS
    scales = np.full(max(len(columns), 1), START_SCALE) if many else START_SCALE
    kernel = ConstantKernel(0.02, AMPLITUDES) * Matern(scales, SCALES, nu=1.5) + WhiteKernel(1e-3, NOISES)
    offset = float(np.median(target))
    with warnings.catch_warnings():
        # A column that says nothing drives its length scale to the upper bound; scikit-learn warns of it.
        warnings.simplefilter("ignore", ConvergenceWarning)
        model = GaussianProcessRegressor(kernel, alpha=JITTER).fit(z, target - offset)
    amplitude = float(model.kernel_.k1.k1.constant_value)
    length = np.broadcast_to(model.kernel_.k1.k2.length_scale, (len(columns),))
    noise = float(model.kernel_.k2.noise_level) + JITTER
    # The points as they are stored: weights that fit others would magnify the rounding.
    points = (z / length).astype(np.float32)
    exact = points.astype(np.float64)
    inverse = np.linalg.inv(amplitude * matern(exact, exact) + noise * np.eye(len(exact)))
    weight = inverse @ (target - offset)
    arrays = {
        "smooth_columns": columns.astype(np.uint8),
        "smooth_centre": centre[columns].astype(np.float32),
        "smooth_scale": (spread[columns] * length).astype(np.float32),
        "smooth_points": points,
        "smooth_weight": (amplitude * weight).astype(np.float32),
        "smooth_offset": np.array([offset], np.float32),
    }
    # Leave-one-out residuals of a Gaussian process (Rasmussen and Williams 2006, eq. 5.12).
    return Correction(arrays=arrays, left_out=weight / np.diag(inverse))
