"""The low and high of an estimate, by how long the kernel takes.

Short kernels scatter otherwise than long ones: a library's choice of tile shows in the middle, the clock of a card at its
power limit at the long end. So a segment may hold knots, `range_<i>_s` (rising device times) with `range_<i>_low` and
`range_<i>_high`: 10 % of the held-out measurements near that time lie below `low` times their estimate and 10 % above `high`
times it. Between knots both are interpolated over log time, beyond the ends they stay. `calibrate.fit_ranges` writes them.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

MAX_KNOTS = 16


def knots_of(parameters: Mapping[str, float]) -> int:
    """How many knots a segment's parameters hold."""
    return next((i for i in range(MAX_KNOTS) if f"range_{i}_s" not in parameters), MAX_KNOTS)


def range_frac(parameters: Mapping[str, float], time_s: Floats, ends: tuple[float, float]) -> tuple[Floats, Floats]:
    """Multipliers (low [n], high [n]) of device times (s) [n].

    `ends` are the segment's own multipliers, all there is without knots. A segment used on another chip has wider ends than
    its parameters say; its knots are widened by as much.
    """
    low, high = ends
    n_knots = knots_of(parameters)
    if n_knots == 0:
        return np.full(time_s.shape, low), np.full(time_s.shape, high)
    places = np.log([parameters[f"range_{i}_s"] for i in range(n_knots)])
    asked = np.log(np.maximum(time_s, 1e-12))
    lows, highs = ([parameters[f"range_{i}_{side}"] for i in range(n_knots)] for side in ("low", "high"))
    wider = (low / parameters.get("low_frac", low), high / parameters.get("high_frac", high))
    return np.interp(asked, places, lows) * wider[0], np.interp(asked, places, highs) * wider[1]
