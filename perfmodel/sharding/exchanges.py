"""How long links need for many exchanges of pairs among the same ranks: `collectives.flows.ends_of`, compiled.

The same progressive filling with the same arithmetic, so that a time is equal to the last bit; the routes are found once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from perfmodel.collectives.flows import DONE_FRAC
from perfmodel.sim.loops import compiled_loop
from perfmodel.topology import Topology

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


class Routes(NamedTuple):
    """Flow f from `source[f]` to `target[f]` crosses `resource[first[f]:first[f + 1]]`, each `times` over; bytes a second."""

    source: Ints
    target: Ints
    first: Ints
    resource: Ints
    times: Floats
    capacity: Floats


def routes_of(topology: Topology, ranks: Sequence[int]) -> Routes:
    """Routes between all pairs of ranks."""
    pairs = [(i, j) for i in range(len(ranks)) for j in range(len(ranks)) if i != j]
    links = [topology.route(ranks[i], ranks[j]) for i, j in pairs]
    capacity = {link.resource: link.bandwidth_bytes_per_s for route in links for link in route}
    number = {name: place for place, name in enumerate(sorted(capacity))}
    crossed = [np.unique([number[link.resource] for link in route], return_counts=True) for route in links]
    return Routes(
        source=np.array([i for i, _ in pairs], dtype=np.int64),
        target=np.array([j for _, j in pairs], dtype=np.int64),
        first=np.cumsum([0, *(len(places) for places, _ in crossed)]).astype(np.int64),
        resource=np.concatenate([places for places, _ in crossed]).astype(np.int64),
        times=np.concatenate([counts for _, counts in crossed]).astype(np.float64),
        capacity=np.array([capacity[name] for name in sorted(capacity)]),
    )


def exchange_s(routes: Routes, sent_bytes: Floats) -> Floats:
    """Seconds until the last pair is done, for each matrix of `sent_bytes` [exchanges, ranks, ranks]."""
    found = np.zeros(len(sent_bytes))
    compiled_loop(finish_all, count_load, is_held, fill_rates)(routes, sent_bytes, DONE_FRAC, found)
    return found


def finish_all(a: Routes, sent: Floats, done_frac: float, found: Floats) -> None:
    """Fills `found` with the end of the last flow of each exchange."""
    n_flows = len(a.source)
    left, total, rates = np.zeros(n_flows), np.zeros(n_flows), np.zeros(n_flows)
    running = np.zeros(n_flows, np.bool_)
    for number in range(sent.shape[0]):
        alive = 0
        for f in range(n_flows):
            total[f] = left[f] = sent[number, a.source[f], a.target[f]]
            running[f] = total[f] > 0
            alive += running[f]
        clock = 0.0
        while alive > 0:
            fill_rates(a, running, done_frac, rates)
            step = np.inf
            for f in range(n_flows):
                if running[f]:
                    step = min(step, left[f] / rates[f])
            clock += step
            for f in range(n_flows):
                if running[f]:
                    left[f] -= rates[f] * step
                    if left[f] <= total[f] * done_frac:
                        running[f] = False
                        alive -= 1
        found[number] = clock


def fill_rates(a: Routes, running: NDArray[np.bool_], done_frac: float, rates: Floats) -> None:
    """Max-min fair rates of the running flows, as `collectives.flows.max_min_rates`."""
    active = running.copy()
    left, load = a.capacity.copy(), np.zeros(len(a.capacity))
    level, n_active = 0.0, active.sum()
    while n_active > 0:
        count_load(a, active, load)
        growth = np.inf
        for r in range(len(left)):
            if load[r] > 0:
                growth = min(growth, left[r] / load[r])
        level += growth
        for r in range(len(left)):
            if load[r] > 0:
                left[r] = max(left[r] - growth * load[r], 0.0)
        for f in range(len(active)):
            if active[f] and is_held(a, f, (load, left), done_frac):
                rates[f] = level
                active[f] = False
                n_active -= 1


def count_load(a: Routes, active: NDArray[np.bool_], load: Floats) -> None:
    """How many active flows cross each resource."""
    load[:] = 0.0
    for f in range(len(active)):
        if active[f]:
            for k in range(a.first[f], a.first[f + 1]):
                load[a.resource[k]] += a.times[k]


def is_held(a: Routes, f: int, state: tuple[Floats, Floats], done_frac: float) -> bool:
    """Whether a flow crosses a resource that is full."""
    load, left = state
    for k in range(a.first[f], a.first[f + 1]):
        r = a.resource[k]
        if load[r] > 0 and left[r] <= a.capacity[r] * done_frac:
            return True
    return False
