"""Bytes between ranks when a group passes one byte round its rings, from which its shares of links follow."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from perfmodel.collectives.group import Group, first_by_nic, group_of
from perfmodel.collectives.units import Units, units_of
from perfmodel.topology import Topology
from perfmodel.topology.flat import FloatArray, IntArray

Flows = tuple[IntArray, IntArray, FloatArray]  # senders, receivers, bytes


def ring_flows(topology: Topology, ranks: tuple[int, ...]) -> Flows:
    """One byte round every ring of every unit, and from each unit to the next over its NICs."""
    group, units = group_of(topology, ranks), units_of(topology, ranks)
    first, second, n_bytes = _inside(group, units)
    if group.n_units == 1:
        return first, second, n_bytes
    between = _between(topology, units)
    return (
        np.concatenate([first, between[0]]),
        np.concatenate([second, between[1]]),
        np.concatenate([n_bytes, between[2]]),
    )


def _inside(group: Group, units: Units) -> Flows:
    orders = group.intra.orders if group.intra else ()
    numbers: list[IntArray] = [np.empty(0, dtype=np.int64)]
    ends: list[IntArray] = [np.empty((2, 0), dtype=np.int64)]
    n_bytes: list[FloatArray] = [np.empty(0)]
    sizes = units.size
    for size in np.unique(sizes[sizes > 1]).tolist():
        places, shares = _hops(size, group.units[0], orders)
        at = np.flatnonzero(sizes == size)
        numbers.append(np.repeat(at, len(shares)))
        ends.append(units.ranks[units.begin[at, np.newaxis] + places[:, np.newaxis]].reshape(2, -1))
        n_bytes.append(np.tile(shares, len(at)))
    by_unit = np.argsort(np.concatenate(numbers), kind="stable")
    first, second = np.concatenate(ends, axis=1)[:, by_unit]
    return first, second, np.concatenate(n_bytes)[by_unit]


def _hops(
    size: int, model: Sequence[int], orders: Sequence[tuple[tuple[int, ...], float]]
) -> tuple[IntArray, FloatArray]:
    """The hops of a unit's rings by place in the unit, [2, hops], and the bytes over each.

    Rings are those of the unit that was searched, else the ranks in order.
    """
    place = {rank: index for index, rank in enumerate(model)}
    known = [
        ([place[rank] for rank in order], share)
        for order, share in orders
        if len(order) == size and set(order) <= set(place)
    ]
    both = len(orders) > 1  # rings over direct links run both ways round
    hops: list[tuple[int, int, float]] = []
    for order, share in known or [(list(range(size)), 1.0)]:
        for a, b in pairwise((*order, order[0])):
            hops += [(a, b, share / 2), (b, a, share / 2)] if both else [(a, b, share)]
    first, second, n_bytes = zip(*hops, strict=True)
    return np.array([first, second]), np.array(n_bytes)


def _between(topology: Topology, units: Units) -> Flows:
    """One flow per NIC of a unit to the NIC of its place in the next unit."""
    senders = [_places_by_nic(topology, units, at) for at in units.examples.tolist()]
    n_nics = np.array([len(places) for places in senders])
    table = np.zeros((len(senders), int(n_nics.max())), dtype=np.int64)
    for row, places in zip(table, senders, strict=True):
        row[: len(places)] = places
    following = np.roll(np.arange(len(units.shape)), -1)
    n_flows = np.minimum(n_nics[units.shape], n_nics[units.shape[following]])
    unit = np.repeat(np.arange(len(n_flows)), n_flows)
    number = np.arange(len(unit)) - np.repeat(np.cumsum(n_flows) - n_flows, n_flows)
    first = units.ranks[units.begin[unit] + table[units.shape[unit], number]]
    second = units.ranks[units.begin[following[unit]] + table[units.shape[following[unit]], number]]
    return first, second, 1.0 / n_flows[unit]


def _places_by_nic(topology: Topology, units: Units, at: int) -> list[int]:
    """Places in a unit of the first rank of each NIC."""
    unit = units.at(at)
    return [unit.index(rank) for rank in first_by_nic(topology, unit)]
