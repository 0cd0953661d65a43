"""The range of a segment's estimates from measurements that its fit has not seen, by how long the kernel takes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from perfmodel.kernels.ranges import MAX_KNOTS, Floats, knots_of, range_frac

LOW_QUANTILE, HIGH_QUANTILE = 0.1, 0.9
MAX_SETS = 2  # of rows whose ranges are put together: a source's sweep and its test shapes
MIN_KNOT_ROWS = 40  # below it a tenth is fewer than four rows
MIN_DEVICE_SHARE = 0.3  # of a reading; the rest is the launch of an eager call, whose scatter is not the kernel's


def range_parameters(time_s: Floats, device_s: Floats, share: Floats) -> dict[str, float]:
    """Knots (see `perfmodel.kernels.ranges`) from estimates, measured device times (s) and the device's share of readings.

    Empty with too few rows to tell. Rows are cut into groups of equal size by their estimate.
    """
    told = np.flatnonzero(share >= MIN_DEVICE_SHARE)
    n_knots = min(told.size // MIN_KNOT_ROWS, MAX_KNOTS // MAX_SETS)
    found: dict[str, float] = {}
    if n_knots == 0:
        return found
    order = told[np.argsort(time_s[told], kind="stable")]
    for number, rows in enumerate(np.array_split(order, n_knots)):
        low, high = np.quantile(device_s[rows] / time_s[rows], [LOW_QUANTILE, HIGH_QUANTILE])
        found[f"range_{number}_s"] = float(np.exp(np.log(time_s[rows]).mean()))
        found[f"range_{number}_low"] = float(min(low, 1.0))
        found[f"range_{number}_high"] = float(max(high, 1.0))
    return found


def widest(sets: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The knots of all sets (at most MAX_SETS), each as wide as the widest set is there.

    A sweep of random sizes and a list of models' shapes scatter differently at one length; a range must hold for both.
    """
    told = [knots for knots in sets if knots_of(knots)]
    places = np.array(sorted(knots[f"range_{i}_s"] for knots in told for i in range(knots_of(knots))))
    if not told:
        return {}
    ends = [range_frac(knots, places, (1.0, 1.0)) for knots in told]
    lows, highs = np.min([low for low, _ in ends], axis=0), np.max([high for _, high in ends], axis=0)
    return {
        f"range_{i}_{name}": float(values[i])
        for i in range(len(places))
        for name, values in (("s", places), ("low", lows), ("high", highs))
    }
