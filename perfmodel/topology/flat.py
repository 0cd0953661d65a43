"""Ranks and routes of a machine as arrays: what a question about many pairs at once reads instead of objects and names.

Pairs of one sort (equal hosts, equal places on them, near or far alike) have the same route but for the numbers of the hosts
and the leaves that it crosses. Each sort is looked up once, by the plain route of its first pair.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from perfmodel.topology.link import Link
from perfmodel.topology.network import SPINE

if TYPE_CHECKING:
    from perfmodel.topology.machine import Topology

IntArray = NDArray[np.int64]
FloatArray = NDArray[np.float64]

_STRIDE = 2**20  # numbers for the resources of one host or leaf, far more than one has
_NOWHERE = -1
# Whose resource a link of a route is.
_FIRST_HOST, _SECOND_HOST, _FIRST_LEAF, _SECOND_LEAF = range(4)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RankColumns:
    """Of each rank: host, kind of the host, device number on it, NVLink domain, and leaf of its first NIC (-1: none).

    `place` is a number that is equal for ranks at the same place of equal hosts, `n_places` more than any.
    """

    host: IntArray
    kind: IntArray
    local: IntArray
    domain: IntArray
    leaf: IntArray
    place: IntArray
    n_places: int


class Crossings(NamedTuple):
    """Links of the routes of many pairs, one entry each, in the order of the pairs and along each route.

    `pair` is the number of the pair, `resource` a number of the link's resource, equal for links that share one.
    """

    pair: IntArray
    resource: IntArray
    bandwidth_bytes_per_s: FloatArray


def rank_columns(topology: Topology) -> RankColumns:
    """The ranks of a machine as arrays."""
    places = topology.ranks
    host = np.array([place.host for place in places], dtype=np.int64)
    rail_of: dict[tuple[int, int], int] = {}
    kinds, rails = [], []
    for place in places:
        kind = topology.host_kind(place.host)
        key = kind, place.local_rank
        if key not in rail_of:
            rail_of[key] = topology.rail_of(place)
        kinds.append(kind)
        rails.append(rail_of[key])
    rail, kind_of = np.array(rails, dtype=np.int64), np.array(kinds, dtype=np.int64)
    local = np.array([place.local_rank for place in places], dtype=np.int64)
    at = kind_of * (int(local.max(initial=0)) + 1) + local
    return RankColumns(
        host=host,
        kind=kind_of,
        local=local,
        place=at,
        n_places=int(at.max(initial=0)) + 1,
        domain=np.array([place.nvlink_domain for place in places], dtype=np.int64),
        leaf=np.where(rail >= 0, topology.network.leaf_numbers(host, rail), _NOWHERE),
    )


class FlatRoutes:
    """Routes of many pairs of a machine at once."""

    def __init__(self, topology: Topology) -> None:
        self._topology = topology
        self._columns = topology.columns
        self._n_hosts = int(self._columns.host.max(initial=0)) + 1
        self._sorts: dict[int, list[tuple[int, int, float]]] = {}  # per link: whose, number there, bytes per second
        self._numbers: dict[tuple[int, str], int] = {}  # of the resources of a kind of host
        self._next = count()
        self._uplinks: dict[int, float] = {}  # bytes per second by leaf

    def of(self, first: IntArray, second: IntArray) -> Crossings:
        """The links from each rank of `first` to the rank of `second` at the same place.

        Raises TopologyError where there is no path.
        """
        code = self._sort_numbers(first, second)
        sorts, example, sort = np.unique(code, return_index=True, return_inverse=True)
        rows = [self._links(int(s), int(first[at]), int(second[at])) for s, at in zip(sorts, example, strict=True)]
        width = max((len(row) for row in rows), default=0)
        table = np.full((len(rows), max(width, 1), 3), float(_NOWHERE))
        for row, links in zip(table, rows, strict=True):
            row[: len(links)] = links or np.empty((0, 3))
        whose, number, rate = table[sort.reshape(-1)].transpose(2, 0, 1)
        c = self._columns
        owners = np.stack(
            [c.host[first], c.host[second], c.leaf[first] + self._n_hosts, c.leaf[second] + self._n_hosts]
        )
        pair, at = np.nonzero(whose >= 0)
        owner = owners[whose[pair, at].astype(np.int64), pair]
        rate = rate[pair, at]
        leaves = np.flatnonzero(whose[pair, at] >= _FIRST_LEAF)
        if len(leaves):
            rate[leaves] = self._of_leaves(owner[leaves] - self._n_hosts, pair[leaves], (first, second))
        return Crossings(pair, owner * _STRIDE + number[pair, at].astype(np.int64), rate)

    def _sort_numbers(self, first: IntArray, second: IntArray) -> IntArray:
        c = self._columns
        near = np.where(c.domain[first] == c.domain[second], 1, np.where(c.leaf[first] == c.leaf[second], 2, 3))
        near = np.where(c.host[first] == c.host[second], 0, near)
        found: IntArray = (c.place[first] * c.n_places + c.place[second]) * 4 + near
        return found

    def _links(self, sort: int, first: int, second: int) -> list[tuple[int, int, float]]:
        if sort not in self._sorts:
            route = self._topology.route(first, second)
            self._sorts[sort] = [(*self._whose(link, first, second), link.bandwidth_bytes_per_s) for link in route]
        return self._sorts[sort]

    def _whose(self, link: Link, first: int, second: int) -> tuple[int, int]:
        """Whose resource a link of a route is, and its number there."""
        names = [part.split("/") for part in link.resource.split(">")]
        if all(place == "net" for place, _ in names):
            outward = link.target == SPINE
            return (_FIRST_LEAF, 0) if outward else (_SECOND_LEAF, 1)
        host = next(int(place[1:]) for place, _ in names if place[1:].isdigit())
        owner = _FIRST_HOST if host == self._columns.host[first] else _SECOND_HOST
        # What is outside a host has no part in the name of a link of it: ports of equal hosts are equal.
        local = ">".join("net" if place == "net" else name for place, name in names)
        key = self._topology.host_kind(host), local
        return owner, self._numbers.setdefault(key, next(self._next))

    def _of_leaves(self, leaf: IntArray, pair: IntArray, ends: tuple[IntArray, IntArray]) -> FloatArray:
        """Bytes per second of the uplinks of leaves that pairs cross."""
        found, at, inverse = np.unique(leaf, return_index=True, return_inverse=True)
        for number, example in zip(found.tolist(), pair[at].tolist(), strict=True):
            if number not in self._uplinks:
                ranks = [int(side[example]) for side in ends]
                rank = next(rank for rank in ranks if self._columns.leaf[rank] == number)
                nic = self._topology.ranks[rank].nics[0]
                self._uplinks[number] = self._topology.network.uplink_bytes_per_s(nic)
        return np.array([self._uplinks[number] for number in found.tolist()])[inverse.reshape(-1)]
