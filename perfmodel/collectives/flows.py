"""Flows that share links: max-min fair rates, and when each flow ends."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from perfmodel.topology import Link

# A flow with less than this share of its bytes left has ended: float rounding, not data.
DONE_FRAC = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class Flow:
    """Bytes that cross some resources one after the other; `resources` may name one twice (host memory, in and out)."""

    n_bytes: float
    resources: tuple[str, ...]


def flow_of(links: Sequence[Link], n_bytes: float) -> Flow:
    """The flow of so many bytes along a route."""
    return Flow(n_bytes=n_bytes, resources=tuple(link.resource for link in links))


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


def finish_times(flows: Sequence[Flow], capacity: Mapping[str, float]) -> NDArray[np.float64]:
    """When each flow ends (s), all starting at once and sharing max-min fairly; rates change as flows end."""
    names = sorted({name for flow in flows for name in flow.resources})
    column = {name: index for index, name in enumerate(names)}
    crossings = np.zeros((len(flows), len(names)))
    for row, flow in enumerate(flows):
        for name in flow.resources:
            crossings[row, column[name]] += 1
    limits = np.array([capacity[name] for name in names], dtype=float)
    total = np.array([flow.n_bytes for flow in flows], dtype=float)
    left, ends, clock = total.copy(), np.zeros(len(flows)), 0.0
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


def busiest(flows: Sequence[Flow], capacity: Mapping[str, float]) -> tuple[str, float]:
    """The resource that needs longest to carry its bytes, and that time (s); ('', 0) where nothing moves."""
    load: dict[str, float] = {}
    for flow in flows:
        for name in flow.resources:
            load[name] = load.get(name, 0.0) + flow.n_bytes
    times = {name: n_bytes / capacity[name] for name, n_bytes in load.items()}
    return max(times.items(), key=lambda item: (item[1], item[0]), default=("", 0.0))
