"""A smooth correction: the mean of a Gaussian process over a law's features, stored as plain arrays.

    z = (x - centre) / scale                          columns of the feature matrix that vary, in length scales
    correction(x) = offset + sum_i weight_i (1 + sqrt(3) r_i) exp(-sqrt(3) r_i),    r_i = |z - point_i|

the Matern kernel of order 3/2 (Rasmussen and Williams, Gaussian Processes for Machine Learning, 2006, eq. 4.17). Tens of rows
suffice where boosted trees need hundreds, and far from every point the correction goes to its offset. Arrays:

- `smooth_columns` [d]: columns of the feature matrix.
- `smooth_centre`, `smooth_scale` [d].
- `smooth_points` [n, d]: the fitted rows, as z.
- `smooth_weight` [n]; `smooth_offset` [1].
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

BLOCK_ELEMS = 1 << 20  # of a block of distances: 8 MB


def evaluate_smooth(arrays: Mapping[str, NDArray[np.generic]], features: Floats) -> Floats:
    """The process's mean for each row of `features` [n, f]: [n]."""
    points = arrays["smooth_points"].astype(np.float64)
    weight = arrays["smooth_weight"].astype(np.float64)
    columns = arrays["smooth_columns"].astype(np.int64)
    centre, scale = (arrays[f"smooth_{name}"].astype(np.float64) for name in ("centre", "scale"))
    z = (features[:, columns] - centre) / scale
    found: Floats = np.empty(len(z))
    size = max(BLOCK_ELEMS // max(len(points), 1), 1)
    for start in range(0, len(z), size):
        found[start : start + size] = matern(z[start : start + size], points) @ weight
    offset: Floats = arrays["smooth_offset"].astype(np.float64)
    return found + offset


def matern(a: Floats, b: Floats) -> Floats:
    """The kernel between all pairs of rows of `a` [n, d] and `b` [m, d], in length scales: [n, m]."""
    square = (a**2).sum(axis=1)[:, None] + (b**2).sum(axis=1) - 2.0 * a @ b.T
    root = np.sqrt(3.0 * np.maximum(square, 0.0))
    found: Floats = (1.0 + root) * np.exp(-root)
    return found
