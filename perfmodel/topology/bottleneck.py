"""Which link limits a group when every member sends as much to every other."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import permutations
from typing import TYPE_CHECKING

from perfmodel.topology.link import Bottleneck, Link, RankPlace
from perfmodel.topology.network import SPINE

if TYPE_CHECKING:
    from perfmodel.topology.machine import Topology


def find_bottleneck(topology: Topology, group: Sequence[int]) -> Bottleneck | None:
    """The busiest link of a uniform all-to-all over `group`; None for a single rank.

    Every ordered pair is one flow of s bytes on its own route. A resource of bandwidth B with c flows needs c s / B
    seconds; the largest of these is the time T, and each rank sends (n - 1) s / T bytes per second. Flows between hosts
    are counted by rank and by leaf, not by pair, so that 16,384 ranks take a fraction of a second.
    """
    topology.check_group(group)
    if len(group) < 2:
        return None
    loads = _Loads()
    places = [topology.ranks[rank] for rank in group]
    _inside_hosts(topology, places, loads)
    _between_hosts(topology, places, loads)
    link, n_flows, pair = loads.busiest()
    rate = (len(group) - 1) * link.bandwidth_bytes_per_s / n_flows
    return Bottleneck(link=link, n_flows=n_flows, pair=pair, rank_bandwidth_bytes_per_s=rate)


class _Loads:
    """Flows per shared resource, with one link and one pair to name it by."""

    def __init__(self) -> None:
        self._flows: Counter[str] = Counter()
        self._named: dict[str, tuple[Link, tuple[int, int]]] = {}

    def add(self, links: Iterable[Link], n_flows: int, pair: tuple[int, int]) -> None:
        for link in links:
            self._flows[link.resource] += n_flows
            self._named.setdefault(link.resource, (link, pair))

    def busiest(self) -> tuple[Link, int, tuple[int, int]]:
        """The resource with the most seconds per byte; the first by name among equals."""
        resource = min(
            self._flows, key=lambda name: (-self._flows[name] / self._named[name][0].bandwidth_bytes_per_s, name)
        )
        link, pair = self._named[resource]
        return link, self._flows[resource], pair


def _inside_hosts(topology: Topology, places: Sequence[RankPlace], loads: _Loads) -> None:
    """Pairs of one host, one by one, for the first of the hosts that hold the same part of the group."""
    by_host: dict[int, list[RankPlace]] = {}
    for place in places:
        by_host.setdefault(place.host, []).append(place)
    seen: set[tuple[str | int, ...]] = set()
    many = len(by_host) > 1
    for host, members in by_host.items():
        shape = (topology.host_kind(host), *sorted(place.local_rank for place in members))
        if many and shape in seen:
            continue
        seen.add(shape)
        for first, second in permutations(members, 2):
            loads.add(topology.route(first.rank, second.rank), 1, (first.rank, second.rank))


class _Near:
    """Of some members: how many a rank reaches without the network (its host, or its NVLink domain), itself included."""

    def __init__(self, members: Sequence[RankPlace]) -> None:
        self._host = Counter(place.host for place in members)
        self._domain = Counter(place.nvlink_domain for place in members)
        self._both = Counter((place.host, place.nvlink_domain) for place in members)

    def on_other_hosts(self, place: RankPlace) -> int:
        """Members of its NVLink domain on other hosts."""
        return self._domain[place.nvlink_domain] - self._both[place.host, place.nvlink_domain]

    def count(self, place: RankPlace) -> int:
        """Members on its host or in its NVLink domain."""
        return self._host[place.host] + self.on_other_hosts(place)


def _between_hosts(topology: Topology, places: Sequence[RankPlace], loads: _Loads) -> None:
    near = _Near(places)
    by_leaf: dict[str, list[RankPlace]] = {}
    for place in places:
        counts = {True: near.on_other_hosts(place), False: len(places) - near.count(place)}
        for by_nvlink, n_flows in counts.items():
            if n_flows:
                _add_ends(topology, place, _a_peer(places, place, by_nvlink=by_nvlink), n_flows, loads)
        if counts[False]:
            by_leaf.setdefault(topology.network.leaf_of(place.nics[0]), []).append(place)
    for leaf, members in by_leaf.items():
        n_crossing = _n_crossing(len(places), near, members) if len(by_leaf) > 1 else 0
        if n_crossing:
            _add_uplinks(topology, places, leaf, members, n_crossing, loads)


def _a_peer(places: Sequence[RankPlace], place: RankPlace, *, by_nvlink: bool) -> RankPlace:
    """Some member on another host, inside the NVLink domain or outside it."""
    return next(o for o in places if o.host != place.host and (o.nvlink_domain == place.nvlink_domain) == by_nvlink)


def _add_ends(topology: Topology, place: RankPlace, peer: RankPlace, n_flows: int, loads: _Loads) -> None:
    """The links on this rank's side of its routes to other hosts: its host's parts, its NVLinks, its NIC."""
    home = f"h{place.host}/"
    for first, second in ((place.rank, peer.rank), (peer.rank, place.rank)):
        links = topology.route(first, second)
        loads.add(
            [k for k in links if home in (k.source[: len(home)], k.target[: len(home)])], n_flows, (first, second)
        )


def _n_crossing(n_places: int, near: _Near, members: Sequence[RankPlace]) -> int:
    """Flows from the ranks of a leaf to ranks of other leaves (as many come back)."""
    near_here = _Near(members)
    return sum(n_places - near.count(m) - (len(members) - near_here.count(m)) for m in members)


def _add_uplinks(
    topology: Topology,
    places: Sequence[RankPlace],
    leaf: str,
    members: Sequence[RankPlace],
    n_flows: int,
    loads: _Loads,
) -> None:
    here = {place.rank for place in members}
    first, second = next(
        (place, other)
        for place in members
        for other in places
        if other.rank not in here and other.host != place.host and other.nvlink_domain != place.nvlink_domain
    )
    for source, target in ((first.rank, second.rank), (second.rank, first.rank)):
        uplinks = [k for k in topology.route(source, target) if {k.source, k.target} == {leaf, SPINE}]
        loads.add(uplinks, n_flows, (source, target))
