"""Units of a group: the ranks of one host, or of one NVLink domain where NVSwitches join hosts. NCCL calls them nodes."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import numpy as np

from perfmodel.topology import Topology
from perfmodel.topology.flat import IntArray

Unit = tuple[int, ...]
MAX_GROUPS = 1024  # remembered: a mesh of 16 stages of 8 tensor ranks asks for 128 of replicas alone


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Units:
    """Units as arrays: their ranks one after the other, where each begins (and the last ends), and a number for its shape.

    Equal numbers: equal parts of equal hosts, in equal order; numbered by first appearance.
    """

    ranks: IntArray
    begin: IntArray
    shape: IntArray

    @property
    def size(self) -> IntArray:
        """Ranks of each unit."""
        return np.diff(self.begin)

    @property
    def first(self) -> IntArray:
        """The first rank of each unit."""
        return self.ranks[self.begin[:-1]]

    @property
    def examples(self) -> IntArray:
        """The first unit of each shape."""
        return np.unique(self.shape, return_index=True)[1]

    def at(self, number: int) -> Unit:
        """The ranks of one unit."""
        return tuple(self.ranks[self.begin[number] : self.begin[number + 1]].tolist())

    def tuples(self) -> tuple[Unit, ...]:
        """The ranks of each unit."""
        ranks, begin = self.ranks.tolist(), self.begin.tolist()
        return tuple(tuple(ranks[start:end]) for start, end in pairwise(begin))


@lru_cache(maxsize=MAX_GROUPS)
def units_of(topology: Topology, ranks: tuple[int, ...]) -> Units:
    """The units of a group, by first member."""
    if len(ranks) == 2:  # the two sides of a transfer
        return _units_of_pair(topology, *ranks)
    columns, members = topology.columns, np.array(ranks, dtype=np.int64)
    host, domain = columns.host[members], columns.domain[members]
    n_hosts = int(columns.host.max()) + 1
    of_domain, n_of = np.unique(np.unique(domain * n_hosts + host) // n_hosts, return_counts=True)
    wide = of_domain[n_of > 1]
    key = np.where(np.isin(domain, wide), n_hosts + domain, host) if len(wide) else host
    _, first, unit = np.unique(key, return_index=True, return_inverse=True)
    place = np.empty(len(first), dtype=np.int64)
    place[np.argsort(first)] = np.arange(len(first))
    unit = place[unit.reshape(-1)]
    flat = members[np.argsort(unit, kind="stable")]
    begin = np.concatenate([[0], np.cumsum(np.bincount(unit))])
    return Units(ranks=flat, begin=begin, shape=_shapes(topology, flat, begin))


def _units_of_pair(topology: Topology, first: int, second: int) -> Units:
    """`units_of` two ranks, of which a pipeline has hundreds of pairs, without its sorting."""
    columns, members = topology.columns, np.array([first, second], dtype=np.int64)
    (host, other_host), (domain, other_domain) = columns.host[members].tolist(), columns.domain[members].tolist()
    if host == other_host or domain == other_domain:
        return Units(ranks=members, begin=np.array([0, 2]), shape=np.array([0]))
    differs = int(columns.place[first] != columns.place[second])
    return Units(ranks=members, begin=np.array([0, 1, 2]), shape=np.array([0, differs]))


def _shapes(topology: Topology, flat: IntArray, begin: IntArray) -> IntArray:
    columns = topology.columns
    host = columns.host[flat]
    offset = host - np.repeat(host[begin[:-1]], np.diff(begin))
    parts = np.stack([columns.place[flat], offset], axis=1)
    data, width = parts.tobytes(), parts.itemsize * 2
    numbers: dict[bytes, int] = {}
    ends = (begin * width).tolist()
    return np.array([numbers.setdefault(data[start:end], len(numbers)) for start, end in pairwise(ends)])
