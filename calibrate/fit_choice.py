"""Fits a library's choice of kernel and a correction that knows it (`perfmodel.kernels.gemm_choice`).

A correction must learn from shares as it will meet them: of rows that the choice's trees have not seen. So the trees that a
row's shares come from are fitted without it (four folds); those that are stored have seen all rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray
from sklearn.ensemble import HistGradientBoostingClassifier

from calibrate.fitting import SEED, Rows, SegmentFit, as_segment, fit_trees, targets, tree_arrays, with_heldout
from perfmodel.db.device import Device
from perfmodel.kernels.correction import Floats, Law
from perfmodel.kernels.gemm_choice import PREFIX, kernel_shares, tile_features

FOLDS = 4
ROUNDS = 80  # of boosting, one tree a kernel in each
RARE_FRAC = 0.01  # kernels of fewer rows are one
OTHER = "other"
LEAF_ROWS = 5  # of the correction's trees: small, for the choice changes within few rows
Arrays = dict[str, NDArray[np.generic]]


def grouped(kernels: Sequence[str]) -> tuple[NDArray[np.int64], int]:
    """Number of each row's kernel, rare ones together, and how many numbers there are."""
    names, counts = np.unique(np.array(kernels), return_counts=True)
    common = set(names[counts >= RARE_FRAC * len(kernels)].tolist())
    found, numbers = np.unique([name if name in common else OTHER for name in kernels], return_inverse=True)
    return numbers.astype(np.int64), len(found)


def fit_choice(features: Floats, kernels: NDArray[np.int64], n_kernels: int) -> Arrays:
    """Trees of every kernel over features [n, f]. Needs three kernels, each with rows."""
    model = HistGradientBoostingClassifier(
        max_iter=ROUNDS,
        learning_rate=0.15,
        max_leaf_nodes=31,
        min_samples_leaf=5,
        random_state=SEED,
        early_stopping=False,
    )
    model.fit(features, kernels)
    arrays: Arrays = {}
    for number in range(n_kernels):
        # scikit-learn has no public access to the nodes of its trees.
        nodes = [stage[number].nodes for stage in model._predictors]
        trees = tree_arrays(nodes, float(model._baseline_prediction.ravel()[number]))
        arrays |= {f"{PREFIX}{number}_{name}": array for name, array in trees.items()}
    return arrays


def unseen_shares(features: Floats, kernels: NDArray[np.int64], n_kernels: int) -> Floats:
    """Shares [n, kernels] of each row by trees that have not seen it."""
    found = np.zeros((len(kernels), n_kernels))
    fold = np.random.default_rng(SEED).permutation(np.arange(len(kernels)) % FOLDS)
    for part in range(FOLDS):
        seen = fold != part
        found[~seen] = kernel_shares(fit_choice(features[seen], kernels[seen], n_kernels), features[~seen])
    return found


def with_choice(
    fit: SegmentFit, rows: Rows, kernels: Sequence[str], device: Device, law: Law, trees: Mapping[str, float | str]
) -> SegmentFit:
    """The segment with the choice among the rows' kernels and a correction that knows it; `trees` are its options."""
    seen = ~rows.heldout
    train = rows.where(seen)
    result = law(as_segment("", replace(fit, arrays={})), train.calls, device)
    sizes = tuple(result.ranged[name] for name in ("m", "n", "k", "batch"))
    wide = np.column_stack([result.features, tile_features(sizes, device)])  # type: ignore[arg-type]  # four sizes
    numbers, n_kernels = grouped([name for name, keep in zip(kernels, seen.tolist(), strict=True) if keep])
    shares = unseen_shares(wide, numbers, n_kernels)
    target, weight = targets(result.time_s, train, fit.parameters)
    options = {**trees, "min_samples_leaf": LEAF_ROWS}
    correction = fit_trees(np.column_stack([wide, shares]), target, weight, options=options)
    arrays = {**fit_choice(wide, numbers, n_kernels), **correction}
    return with_heldout(replace(fit, arrays=arrays), rows.where(rows.heldout), device, law)
