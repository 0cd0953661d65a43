"""Error and ranking measures, defined once. scipy is imported only where a rank correlation is asked for.

An error of a case is the relative error |predicted / measured - 1|. Sequences are (predicted, measured) of equal length.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean, median

import numpy as np


def relative_errors(predicted: Sequence[float], measured: Sequence[float]) -> list[float]:
    """|predicted / measured - 1| of every case. Raises ValueError on unequal lengths or a measured value <= 0."""
    if len(predicted) != len(measured):
        raise ValueError(f"{len(predicted)} predictions for {len(measured)} measurements")
    if any(value <= 0 for value in measured):
        raise ValueError("a measured time must be positive")
    return [abs(p / m - 1.0) for p, m in zip(predicted, measured, strict=True)]


def mean_error(errors: Sequence[float]) -> float:
    """Arithmetic mean of errors."""
    return fmean(errors)


def geomean_error(errors: Sequence[float], floor: float = 1e-4, weights: Sequence[float] | None = None) -> float:
    """Geometric mean of errors; each error is first raised to `floor` so that one exact hit cannot make it zero.

    With `weights`, errors count by their weight.

    >>> round(geomean_error([0.01, 0.04]), 6)
    0.02
    """
    return math.exp(fmean([math.log(max(error, floor)) for error in errors], weights))


def median_error(errors: Sequence[float]) -> float:
    """Median of errors."""
    return median(errors)


def percentile(values: Sequence[float], fraction: float) -> float:
    """Linearly interpolated percentile (`fraction` 0 to 1), as numpy's default. Raises ValueError on no values.

    >>> percentile([1.0, 2.0, 3.0, 4.0], 0.5)
    2.5
    """
    if not values:
        raise ValueError("no values")
    return float(np.quantile(np.asarray(values, dtype=float), fraction))


def kendall_tau(predicted: Sequence[float], measured: Sequence[float]) -> float:
    """Kendall tau-b rank correlation (-1 to 1).

    >>> kendall_tau([1, 2, 3], [10, 20, 30])
    1.0
    """
    from scipy.stats import kendalltau

    return float(kendalltau(predicted, measured).statistic)


def spearman_rho(predicted: Sequence[float], measured: Sequence[float]) -> float:
    """Spearman rank correlation (-1 to 1), average ranks for ties.

    >>> round(spearman_rho([1, 2, 3], [3, 2, 1]), 6)
    -1.0
    """
    from scipy.stats import spearmanr

    return float(spearmanr(predicted, measured).statistic)


def regret(predicted: Sequence[float], measured: Sequence[float]) -> float:
    """Relative loss from taking the predicted-fastest choice instead of the measured-fastest one."""
    chosen = min(range(len(predicted)), key=predicted.__getitem__)
    return measured[chosen] / min(measured) - 1.0
