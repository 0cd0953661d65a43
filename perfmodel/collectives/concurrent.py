"""Collectives that run at the same time share links: who slows whom, and when each ends.

Alone, a collective moves its bytes in its bandwidth part. Each link that it uses is busy for a share of that time, the
limiting one all of it. Together, the speeds of all are raised evenly until a link is full, whose users then stay (max-min
fair), until one ends and the others speed up. Latency parts do not share anything.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from perfmodel.collectives.call import CollectiveCall, CollectiveEstimate
from perfmodel.collectives.estimate import Fits, estimate_collectives
from perfmodel.collectives.flows import max_min_rates
from perfmodel.collectives.group import Group, first_by_nic, group_of
from perfmodel.collectives.price import send_matrix
from perfmodel.collectives.regime import PAIRWISE_OPS
from perfmodel.topology import Link, Topology

_DONE_S = 1e-15
MAX_GROUPS = 4096  # of ranks, whose shares are remembered


def estimate_concurrent(
    calls: Sequence[CollectiveCall], topology: Topology, *, fits: Fits | None = None
) -> list[CollectiveEstimate]:
    """Estimates of collectives that all start at once, in order, each stretched by what the others do to its links.

    Raises what estimate_collective raises.
    """
    alone = estimate_collectives(calls, topology, fits=fits)
    shares = [_busy_shares(call, topology) for call in calls]
    ends = _finish([(e.latency_s, e.bandwidth_s) for e in alone], shares)
    return [_stretched(estimate, end) for estimate, end in zip(alone, ends, strict=True)]


def _stretched(alone: CollectiveEstimate, end_s: float) -> CollectiveEstimate:
    factor = end_s / alone.time_s if alone.time_s > 0 else 1.0
    if factor <= 1.0:
        return alone
    return replace(
        alone,
        estimate=alone.estimate.scaled(factor),
        bandwidth_s=end_s - alone.latency_s,
        algbw_bytes_per_s=alone.algbw_bytes_per_s / factor,
        busbw_bytes_per_s=alone.busbw_bytes_per_s / factor,
    )


@dataclass(slots=True)
class _Load:
    """Seconds that each shared resource is busy with one collective."""

    busy_s: dict[str, float]

    def add(self, links: Sequence[Link], n_bytes: float) -> None:
        for link in links:
            self.busy_s[link.resource] = self.busy_s.get(link.resource, 0.0) + n_bytes / link.bandwidth_bytes_per_s

    def shares(self) -> dict[str, float]:
        """Of the busiest resource's seconds."""
        most = max(self.busy_s.values(), default=0.0)
        return {name: busy / most for name, busy in self.busy_s.items()} if most else {}


def _busy_shares(call: CollectiveCall, topology: Topology) -> dict[str, float]:
    """For each resource the share of the collective's bandwidth part during which it is busy; 1 for the busiest."""
    if call.n_ranks < 2:
        return {}
    if call.op not in PAIRWISE_OPS:
        return _ring_shares(call.ranks, topology)
    load = _Load(busy_s={})
    matrix = send_matrix(call)
    for i, j in np.argwhere(matrix > 0):
        load.add(topology.route(call.ranks[int(i)], call.ranks[int(j)]), float(matrix[i, j]))
    return load.shares()


@lru_cache(maxsize=MAX_GROUPS)
def _ring_shares(ranks: tuple[int, ...], topology: Topology) -> dict[str, float]:
    """`_busy_shares` of a collective on rings, whatever its bytes."""
    load = _Load(busy_s={})
    _add_rings(load, topology, group_of(topology, ranks))
    return load.shares()


def _add_rings(load: _Load, topology: Topology, group: Group) -> None:
    """One byte round every ring of every unit, and from each unit to the next over its NICs."""
    orders = group.intra.orders if group.intra else ()
    for unit in group.units:
        for order, share in _orders_of(unit, group.units[0], orders):
            directions = 2 if len(orders) > 1 else 1
            for first, second in pairwise((*order, order[0])):
                load.add(topology.route(first, second), share / directions)
                if directions == 2:
                    load.add(topology.route(second, first), share / directions)
    if group.n_units < 2:
        return
    for unit, following in zip(group.units, (*group.units[1:], group.units[0]), strict=True):
        senders, receivers = first_by_nic(topology, unit), first_by_nic(topology, following)
        n_flows = min(len(senders), len(receivers))
        for first, second in zip(senders[:n_flows], receivers[:n_flows], strict=True):
            load.add(topology.route(first, second), 1.0 / n_flows)


def _orders_of(
    unit: Sequence[int], model: Sequence[int], orders: Sequence[tuple[tuple[int, ...], float]]
) -> list[tuple[tuple[int, ...], float]]:
    """The rings of a unit: those of the unit that was searched, by place; the ranks in order where units differ in size."""
    if len(unit) < 2:
        return []
    place = {rank: index for index, rank in enumerate(model)}
    known = [(order, share) for order, share in orders if len(order) == len(unit) and set(order) <= set(place)]
    return [(tuple(unit[place[rank]] for rank in order), share) for order, share in known] or [(tuple(unit), 1.0)]


def _finish(parts: Sequence[tuple[float, float]], shares: Sequence[Mapping[str, float]]) -> list[float]:
    """End of each collective (s) from its (latency, bandwidth) parts and the shares of links that it keeps busy."""
    names = sorted({name for share in shares for name in share})
    column = {name: number for number, name in enumerate(names)}
    n = len(parts)
    # One private column each keeps a speed at or below that of running alone.
    uses = np.zeros((n, len(names) + n))
    for row, share in enumerate(shares):
        uses[row, len(names) + row] = 1.0
        for name, value in share.items():
            uses[row, column[name]] = value
    begins = np.array([latency for latency, _ in parts])
    left = np.array([bandwidth for _, bandwidth in parts])
    ends, clock = begins.copy(), 0.0
    while (left > _DONE_S).any():
        running = np.flatnonzero((left > _DONE_S) & (begins <= clock + _DONE_S))
        waiting = begins[(left > _DONE_S) & (begins > clock + _DONE_S)]
        if not len(running):
            clock = float(waiting.min())
            continue
        speeds: NDArray[np.float64] = max_min_rates(uses[running], np.ones(uses.shape[1]))
        step = float((left[running] / speeds).min())
        if len(waiting):
            step = min(step, float(waiting.min()) - clock)
        left[running] -= speeds * step
        clock += step
        ends[running] = np.where(left[running] <= _DONE_S, clock, ends[running])
    return [float(end) for end in ends]
