"""Topology: a whole machine, its ranks and the path between any two of them."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from itertools import product
from typing import TYPE_CHECKING

from perfmodel.config.topology import NetworkSpec, NodeSpec, TopologySpec
from perfmodel.errors import TopologyError
from perfmodel.topology.bottleneck import find_bottleneck
from perfmodel.topology.check import check_host
from perfmodel.topology.fabric import fabric_name
from perfmodel.topology.flat import FlatRoutes, RankColumns, rank_columns
from perfmodel.topology.host import NVSWITCH, Host
from perfmodel.topology.link import Bottleneck, Link, PairInfo, PathKind, RankPlace
from perfmodel.topology.network import Network
from perfmodel.topology.nics import place_nics, to_nic

if TYPE_CHECKING:
    import networkx as nx


class Topology:
    """A machine. Equal hosts share one `Host`, so that a build costs one pass over the ranks and nothing per pair.

    Attributes:
        name, env: from the spec.
        spec: what it was built from.
        ranks: where each rank runs; rank r of the machine is `ranks[r]`.
        fabric: name of the collective fit to look for.
        fingerprint: digest of the spec and the ranks: two machines that differ anywhere differ here.
    """

    def __init__(self, spec: TopologySpec, ranks: Sequence[int] | None = None) -> None:
        self.spec = spec
        self.name = spec.name
        self.env: dict[str, str] = dict(spec.env)
        self._kinds = [_checked_host(spec, node) for _, node in spec.node_groups]
        self._nics = [place_nics(host) for host in self._kinds]
        self._kind_of_host = [kind for kind, (count, _) in enumerate(spec.node_groups) for _ in range(count)]
        self._domain_of_host = self._nvlink_hosts()
        places = self._places()
        self.ranks: tuple[RankPlace, ...] = (
            places if ranks is None else tuple(replace(places[old], rank=new) for new, old in enumerate(ranks))
        )
        self.network = Network(spec.network or NetworkSpec(), [self._nics[kind] for kind in self._kind_of_host])
        self.fabric = spec.fabric or fabric_name(spec)
        digest = hashlib.sha256(spec.model_dump_json().encode())
        digest.update(repr(None if ranks is None else tuple(ranks)).encode())
        self.fingerprint = digest.hexdigest()
        self._pairs: dict[tuple[int, int], PairInfo] = {}
        self._links: dict[tuple[int, str], Link] = {}
        self._graph: nx.DiGraph[str] | None = None

    def _nvlink_hosts(self) -> list[int]:
        """For every host the first host that its NVSwitches also join (itself where NVLink stays inside a host)."""
        firsts: list[int] = []
        for count, node in self.spec.node_groups:
            start = len(firsts)
            span = node.nvlink.nodes_per_domain if node.nvlink else 1
            if count % span and count > span:
                raise TopologyError(
                    f"{self.name}: {count} nodes do not fill NVLink domains of {span}; allowed a multiple of {span}"
                )
            firsts += [start + index // span * span for index in range(count)]
        return firsts

    def _places(self) -> tuple[RankPlace, ...]:
        places: list[RankPlace] = []
        domains: dict[tuple[int, str], int] = {}
        shapes = [_nvlink_components(host) for host in self._kinds]
        for host, kind in enumerate(self._kind_of_host):
            shape, nics, devices = shapes[kind], self._nics[kind], self._kinds[kind].spec.devices
            for local, name in enumerate(self._kinds[kind].ranks):
                owner = self._domain_of_host[host] if shape[local] == NVSWITCH else host
                domain = domains.setdefault((owner, shape[local]), len(domains))
                places.append(
                    RankPlace(
                        rank=len(places),
                        node=f"h{host}/{name}",
                        device=devices[local],
                        host=host,
                        local_rank=local,
                        nvlink_domain=domain,
                        nics=tuple(f"h{host}/{nic}" for nic in nics.of_rank[local]),
                    )
                )
        return tuple(places)

    @property
    def n_ranks(self) -> int:
        """Number of ranks."""
        return len(self.ranks)

    @property
    def gpus_per_host(self) -> int:
        """Ranks of the fullest host: what device numbers count over."""
        return max(len(members) for members in self.hosts())

    @property
    def gpus_per_nvlink_domain(self) -> int:
        """Ranks of the largest NVLink domain: what bandwidth counts over. 1 where there is no NVLink."""
        return max(len(members) for members in self.domains())

    def hosts(self) -> tuple[tuple[int, ...], ...]:
        """Ranks by host."""
        return _grouped([(place.host, place.rank) for place in self.ranks])

    def domains(self) -> tuple[tuple[int, ...], ...]:
        """Ranks by NVLink domain: sets that reach each other by NVLink alone; a rank without NVLink is alone."""
        return _grouped([(place.nvlink_domain, place.rank) for place in self.ranks])

    def subset(self, ranks: Sequence[int]) -> Topology:
        """The same machine with only these ranks, renumbered from 0 in the order given."""
        self.check_group(ranks)
        home = {(place.host, place.local_rank): place.rank for place in Topology(self.spec).ranks}
        return Topology(self.spec, [home[self.ranks[r].host, self.ranks[r].local_rank] for r in ranks])

    @property
    def n_rails(self) -> int:
        """NICs of a host that serve training: the smallest number over the hosts; 0 where one has none."""
        return min(len(self._nics[kind].training) for kind in self._kind_of_host)

    def host_kind(self, host: int) -> int:
        """Number of the kind of a host: hosts of one kind are equal."""
        return self._kind_of_host[host]

    def rail_of(self, place: RankPlace) -> int:
        """Which of its host's training NICs a rank uses first; -1 where it has none."""
        if not place.nics:
            return -1
        return self._nics[self._kind_of_host[place.host]].training.index(place.nics[0].split("/")[1])

    @cached_property
    def columns(self) -> RankColumns:
        """The ranks as arrays."""
        return rank_columns(self)

    @cached_property
    def flat_routes(self) -> FlatRoutes:
        """Routes of many pairs at once."""
        return FlatRoutes(self)

    def bottleneck(self, group: Sequence[int]) -> Bottleneck | None:
        """The link that limits a group when each member sends as much to every other; None for a single rank."""
        return find_bottleneck(self, group)

    def check_group(self, ranks: Sequence[int]) -> None:
        """Raises TopologyError for a rank that does not exist or appears twice, and for an empty group."""
        if not ranks:
            raise TopologyError(f"{self.name}: a group needs at least one rank")
        if min(ranks) < 0 or max(ranks) >= self.n_ranks:
            wrong = next(rank for rank in ranks if not 0 <= rank < self.n_ranks)
            raise TopologyError(f"{self.name}: rank {wrong} does not exist, allowed 0 to {self.n_ranks - 1}")
        if len(set(ranks)) != len(ranks):
            raise TopologyError(f"{self.name}: a rank is twice in the group {list(ranks)}")

    def route(self, source: int, target: int) -> tuple[Link, ...]:
        """Links that bytes from one rank to another cross, in order. Raises TopologyError where there is no path."""
        return self.pair(source, target).links

    def pair(self, source: int, target: int) -> PairInfo:
        """Path, bandwidth and latency of an ordered pair of ranks. Raises TopologyError where there is no path."""
        key = (source, target)
        if key not in self._pairs:
            self._pairs[key] = self._find_pair(source, target)
        return self._pairs[key]

    def _find_pair(self, source: int, target: int) -> PairInfo:
        first, second = self.ranks[source], self.ranks[target]
        if first.host == second.host:
            host = self._kinds[self._kind_of_host[first.host]]
            names = (host.ranks[first.local_rank], host.ranks[second.local_rank])
            kind, links = self._local_path(host, names, first.host)
            return _pair_info(kind, links, host.measured_latency_s.get(names))
        return _pair_info(*self._between_hosts(first, second), None)

    def _local_path(self, host: Host, names: tuple[str, str], number: int) -> tuple[PathKind, tuple[Link, ...]]:
        try:
            kind, links = host.path(*names)
        except TopologyError as error:
            raise TopologyError(f"{self.name}, host {number}: {error}") from None
        return kind, tuple(self._globally(number, link) for link in links)

    def _between_hosts(self, first: RankPlace, second: RankPlace) -> tuple[PathKind, tuple[Link, ...]]:
        ends = []
        for place, outward in ((first, True), (second, False)):
            host = self._kinds[self._kind_of_host[place.host]]
            name = host.ranks[place.local_rank]
            if first.nvlink_domain == second.nvlink_domain:
                edge = (name, NVSWITCH) if outward else (NVSWITCH, name)
                links: tuple[Link, ...] = (host.links[edge],)
            else:
                if not place.nics:
                    raise TopologyError(
                        f"{self.name}: ranks {first.rank} ({first.node}) and {second.rank} ({second.node}) have no "
                        f"path: host {place.host} has no NIC; give `nics` in its node"
                    )
                links = to_nic(host, name, place.nics[0].split("/")[1], outward=outward)
            ends.append(tuple(self._globally(place.host, link) for link in links))
        if first.nvlink_domain == second.nvlink_domain:
            return PathKind.NVSWITCH, (*ends[0], *ends[1])
        middle = self.network.route(first.nics[0], second.nics[0])
        return PathKind.NETWORK, (*ends[0], *middle, *ends[1])

    def _globally(self, host: int, link: Link) -> Link:
        """A host's link under its name in the machine."""
        key = (host, link.resource if link.resource.endswith(" measured") else link.name)
        if key not in self._links:
            self._links[key] = replace(
                link,
                source=self._global_name(host, link.source),
                target=self._global_name(host, link.target),
                resource=">".join(self._global_name(host, part) for part in link.resource.split(">")),
            )
        return self._links[key]

    def _global_name(self, host: int, name: str) -> str:
        node = self._kinds[self._kind_of_host[host]].spec
        if name == NVSWITCH and node.nvlink and node.nvlink.nodes_per_domain > 1:
            return (
                f"h{self._domain_of_host[host]}-{self._domain_of_host[host] + node.nvlink.nodes_per_domain - 1}/{name}"
            )
        return f"h{host}/{name}"

    @property
    def graph(self) -> nx.DiGraph[str]:
        """Every host's links and the network, made on first use. Nodes carry `kind`, edges carry `link`."""
        if self._graph is None:
            import networkx as nx

            graph: nx.DiGraph[str] = nx.DiGraph()
            for number, kind in enumerate(self._kind_of_host):
                local = self._kinds[kind].graph
                graph.add_nodes_from((self._global_name(number, name), data) for name, data in local.nodes(data=True))
                for _, _, data in local.edges(data=True):
                    moved = self._globally(number, data["link"])
                    graph.add_edge(moved.source, moved.target, link=moved)
            if len(self._kind_of_host) > 1:
                self.network.add_to(graph)
            self._graph = graph
        return self._graph


def _checked_host(spec: TopologySpec, node: NodeSpec) -> Host:
    try:
        host = Host(node, spec.env)
        check_host(host)
    except TopologyError as error:
        raise TopologyError(f"{spec.name}: {error}") from None
    return host


def _pair_info(kind: PathKind, links: tuple[Link, ...], latency_s: float | None) -> PairInfo:
    narrowest = min(links, key=lambda link: link.bandwidth_bytes_per_s, default=None)
    return PairInfo(
        kind=kind,
        bandwidth_bytes_per_s=narrowest.bandwidth_bytes_per_s if narrowest else math.inf,
        latency_s=sum(link.latency_s for link in links) if latency_s is None else latency_s,
        links=links,
        narrowest=narrowest,
    )


def _nvlink_components(host: Host) -> tuple[str, ...]:
    """For each rank a name of its NVLink component inside the host: the switch, or its lowest member."""
    peers: dict[str, list[str]] = {}
    for (source, target), link in host.links.items():
        if link.kind.startswith("nvlink"):
            peers.setdefault(source, []).append(target)
    names: dict[str, str] = {}
    for first in (NVSWITCH, *host.ranks):  # the ranks of a component bear the name of the first that reaches them
        names.setdefault(first, first)
        found = [first] if names[first] == first else []
        for part in found:
            new = [peer for peer in peers.get(part, ()) if peer not in names]
            names.update(dict.fromkeys(new, first))
            found += new
    return tuple(names[rank] for rank in host.ranks)


def _grouped(pairs: Sequence[tuple[int, int]]) -> tuple[tuple[int, ...], ...]:
    groups: dict[int, list[int]] = {}
    for key, rank in pairs:
        groups.setdefault(key, []).append(rank)
    return tuple(tuple(members) for members in groups.values())


def build_topology(spec: TopologySpec) -> Topology:
    """The machine of a spec, checked: every pair of ranks has a path, and every link goes both ways alike.

    Raises:
        TopologyError: what is wrong, naming the pair, the host or the key.
    """
    topology = Topology(spec)
    hosts = topology.hosts()
    # Hosts of one kind are equal, so the first and the last of each stand for all of them.
    firsts = {topology.host_kind(host): members[0] for host, members in reversed(list(enumerate(hosts)))}
    lasts = {topology.host_kind(host): members[0] for host, members in enumerate(hosts)}
    for first, second in product(firsts.values(), lasts.values()):
        topology.pair(first, second)
    return topology
