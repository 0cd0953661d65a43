"""Flows that share links: max-min fair rates, and when each flow ends."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from perfmodel.topology import Link

# A flow with less than this share of its bytes left has ended: float rounding, not data.
DONE_FRAC = 1e-9


def capacities(routes: Sequence[Sequence[Link]]) -> dict[str, float]:
    """Bytes per second of every resource that some route crosses."""
    return {link.resource: link.bandwidth_bytes_per_s for links in routes for link in links}


def max_min_rates(crossings: NDArray[np.float64], capacity: NDArray[np.float64]) -> NDArray[np.float64]:
    """Max-min fair rates (bytes/s) of flows [n_flows] by progressive filling.

    `crossings[f, r]` is how often flow f crosses resource r of `capacity[r]`. All rates rise together until a resource is
    full; the flows that cross it keep their rate, the rest go on. A flow that crosses nothing is infinitely fast.
    """
    n_flows = crossings.shape[0]
    rates = np.full(n_flows, np.inf)
    active = crossings.sum(axis=1) > 0
    left = capacity.astype(float).copy()
    level = 0.0
    while active.any():
        load = crossings[active].sum(axis=0)
        used = load > 0
        growth = float(np.min(left[used] / load[used]))
        level += growth
        left[used] = np.maximum(left[used] - growth * load[used], 0.0)
        full = used & (left <= capacity * DONE_FRAC)
        ended = active & (crossings[:, full].sum(axis=1) > 0)
        rates[ended] = level
        active &= ~ended
    return rates


def ends_of(
    crossings: NDArray[np.float64], limits: NDArray[np.float64], total: NDArray[np.float64]
) -> NDArray[np.float64]:
    """When flows of `total` bytes end (s), all starting at once and sharing max-min fairly; rates change as flows end.

    `crossings` as in `max_min_rates`, `limits` the resources' bytes a second.
    """
    left, ends, clock = total.copy(), np.zeros(len(total)), 0.0
    running = total > 0
    while running.any():
        index = np.flatnonzero(running)
        rates = max_min_rates(crossings[index], limits)
        needs = np.where(np.isinf(rates), 0.0, left[index] / rates)
        step = float(needs.min())
        clock += step
        moved = np.where(np.isinf(rates), left[index], rates * step)
        left[index] -= moved
        done = index[left[index] <= total[index] * DONE_FRAC]
        ends[done] = clock
        running[done] = False
    return ends
