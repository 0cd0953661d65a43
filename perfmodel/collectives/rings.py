"""Rings inside a unit of ranks: the best that its links allow.

Direct NVLinks: the largest set of rings that no two of which share a lane, as a linear programme over all Hamiltonian cycles.
Anything else (switches, PCIe trees, bridges, loopback): one order of the ranks, searched so that its busiest shared link is
as little busy as can be.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from perfmodel.topology import Link, PathKind, Topology

MAX_ENUMERATED = 8  # ranks: 2,520 cycles of a complete graph of 8; larger meshes are searched as trees are
_SWAPS = 200  # rounds of the order search, far more than 16 ranks need

Order = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Lane:
    """Where a collective's bytes run, as one number each.

    Attributes:
        bus_bytes_per_s: what each rank (or unit) passes on per second, all rings together.
        hop_s: latency of the slowest hop, by the links' own figures.
        link: the link that limits.
        kind: path kind of the slowest hop.
        orders: the rings, each with the share of bytes it carries.
    """

    bus_bytes_per_s: float
    hop_s: float
    link: Link
    kind: PathKind
    orders: tuple[tuple[Order, float], ...]

    @property
    def likeness(self) -> tuple[object, ...]:
        """All but the names of links and the numbers of ranks."""
        link = self.link
        rates = link.bandwidth_bytes_per_s, link.raw_bandwidth_bytes_per_s, link.latency_s, link.n_lanes
        return self.bus_bytes_per_s, self.hop_s, self.kind, link.kind, *rates


def best_rings(topology: Topology, ranks: Sequence[int]) -> Lane:
    """The rings of one unit of two ranks or more. Raises TopologyError where two of them have no path."""
    order = tuple(ranks)
    if _one_kind(topology, order):
        return _lane(topology, [(order, 1.0)])
    direct = _direct_lanes(topology, order)
    cycles = _cycles(order, direct) if len(order) <= MAX_ENUMERATED else []
    if cycles:
        return _packed(topology, cycles, direct)
    return _lane(topology, [(_best_order(topology, order), 1.0)])


def _one_kind(topology: Topology, ranks: Order) -> bool:
    """True where every order is as good as any other: all behind one NVSwitch, or processes of one host."""
    kinds = {topology.pair(ranks[0], other).kind for other in ranks[1:]}
    return kinds <= {PathKind.NVSWITCH} or kinds <= {PathKind.LOOPBACK}


def _hops(order: Order) -> list[tuple[int, int]]:
    return list(pairwise((*order, order[0])))


def _direct_lanes(topology: Topology, ranks: Order) -> dict[frozenset[int], Link]:
    lanes: dict[frozenset[int], Link] = {}
    for index, first in enumerate(ranks):
        for second in ranks[index + 1 :]:
            pair = topology.pair(first, second)
            if pair.kind is PathKind.NVLINK and pair.narrowest is not None:
                lanes[frozenset((first, second))] = pair.narrowest
    return lanes


def _cycles(ranks: Order, lanes: dict[frozenset[int], Link]) -> list[Order]:
    """All Hamiltonian cycles over direct lanes, one direction of each."""
    if len(ranks) == 2:
        return [ranks] if frozenset(ranks) in lanes else []
    found: list[Order] = []

    def extend(path: list[int], left: frozenset[int]) -> None:
        if not left:
            if frozenset((path[-1], path[0])) in lanes and path[1] < path[-1]:
                found.append(tuple(path))
            return
        for nxt in sorted(left):
            if frozenset((path[-1], nxt)) in lanes:
                extend([*path, nxt], left - {nxt})

    extend([ranks[0]], frozenset(ranks[1:]))
    return found


def _packed(topology: Topology, cycles: Sequence[Order], lanes: dict[frozenset[int], Link]) -> Lane:
    """Rings in both directions: the most bytes per second such that no link carries more than it can."""
    from scipy.optimize import linprog

    edges = list(lanes)
    column = {edge: index for index, edge in enumerate(edges)}
    uses = np.zeros((len(edges), len(cycles)))
    for j, cycle in enumerate(cycles):
        for hop in _hops(cycle):
            uses[column[frozenset(hop)], j] = 1.0
    limits = np.array([lanes[edge].bandwidth_bytes_per_s for edge in edges])
    scale = float(limits.max())
    solved = linprog(-np.ones(len(cycles)), A_ub=uses, b_ub=limits / scale, method="highs")
    weights = np.asarray(solved.x) * scale
    n_directions = 1 if len(cycles[0]) == 2 else 2  # two ranks: the only ring already uses both directions
    used = [(cycle, float(w)) for cycle, w in zip(cycles, weights, strict=True) if w > scale * 1e-9]
    total = n_directions * float(weights.sum())
    # The limiting link in the sense of the programme: a full one, the narrowest of them.
    slack = limits - uses @ weights
    full = [edges[i] for i in np.flatnonzero(slack <= scale * 1e-6)]
    link = min((lanes[edge] for edge in full), key=lambda item: (item.bandwidth_bytes_per_s, item.name))
    hops = [topology.pair(*hop) for order, _ in used for hop in _hops(order)]
    slowest = max(hops, key=lambda pair: pair.latency_s)
    share = sum(weight for _, weight in used)
    return Lane(
        bus_bytes_per_s=total,
        hop_s=slowest.latency_s,
        link=link,
        kind=slowest.kind,
        orders=tuple((order, weight / share) for order, weight in used),
    )


def _lane(topology: Topology, orders: Sequence[tuple[Order, float]]) -> Lane:
    """The lane of one order, by the flows that share each resource."""
    order = orders[0][0]
    pairs = [topology.pair(*hop) for hop in _hops(order)]
    rate, link = _ring_rate(topology, order)
    slowest = max(pairs, key=lambda pair: pair.latency_s)
    return Lane(bus_bytes_per_s=rate, hop_s=slowest.latency_s, link=link, kind=slowest.kind, orders=tuple(orders))


def _ring_rate(topology: Topology, order: Order) -> tuple[float, Link]:
    """Bytes per second that every hop of one ring can move at once, and the link that limits."""
    load: dict[str, int] = {}
    named: dict[str, Link] = {}
    for hop in _hops(order):
        for link in topology.route(*hop):
            load[link.resource] = load.get(link.resource, 0) + 1
            named.setdefault(link.resource, link)
    tightest = min(load, key=lambda name: (named[name].bandwidth_bytes_per_s / load[name], name))
    return named[tightest].bandwidth_bytes_per_s / load[tightest], named[tightest]


def _best_order(topology: Topology, ranks: Order) -> Order:
    """Nearest neighbour from each start, then pairwise exchanges while they help."""
    starts = [_nearest_first(topology, ranks, start) for start in ranks]
    best = max((ranks, *starts), key=lambda order: _merit(topology, order))
    for _ in range(_SWAPS):
        better = max(_reversals(best), key=lambda order: _merit(topology, order), default=best)
        if _merit(topology, better) <= _merit(topology, best):
            break
        best = better
    return best


def _merit(topology: Topology, order: Order) -> tuple[float, float]:
    rate, _ = _ring_rate(topology, order)
    return rate, -sum(topology.pair(*hop).latency_s for hop in _hops(order))


def _nearest_first(topology: Topology, ranks: Order, start: int) -> Order:
    path, left = [start], [rank for rank in ranks if rank != start]
    while left:
        pairs = [(topology.pair(path[-1], rank), rank) for rank in left]
        _, nearest = max(pairs, key=lambda item: (item[0].bandwidth_bytes_per_s, -item[0].latency_s, -item[1]))
        path.append(nearest)
        left.remove(nearest)
    return tuple(path)


def _reversals(order: Order) -> list[Order]:
    """Every order that differs by turning one stretch round (2-opt)."""
    n = len(order)
    return [
        order[: i + 1] + tuple(reversed(order[i + 1 : j + 1])) + order[j + 1 :]
        for i in range(n - 1)
        for j in range(i + 2, n)
    ]
