"""What joins hosts: NICs to leaf switches to a spine, and the way between two NICs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from perfmodel.config.topology import NetworkSpec
from perfmodel.errors import TopologyError
from perfmodel.topology.link import Link, LinkKind, NodeKind
from perfmodel.topology.nics import HostNics
from perfmodel.topology.speeds import SWITCH_S, LinkSpeed

if TYPE_CHECKING:
    import networkx as nx

SPINE = "net/spine"


class Network:
    """Leaves and one spine that stands for the whole non-blocking upper part of a fat tree.

    A leaf's uplink is one link with the summed bandwidth of its NICs divided by the oversubscription, so that flows
    which leave it share that sum (no loss from unlucky hashing).
    """

    def __init__(self, spec: NetworkSpec, nics: Sequence[HostNics]) -> None:
        self.spec = spec
        self._nics = nics
        self._most_rails = max((len(host.training) for host in nics), default=0)
        self._switch_s = SWITCH_S if spec.switch_latency is None else spec.switch_latency
        self._uplinks: dict[str, tuple[float, float, int, LinkKind]] = {}
        for host, host_nics in enumerate(nics):
            for rail in range(len(host_nics.training)):
                self._count_uplink(self._leaf(host, rail), host_nics)

    def _count_uplink(self, leaf: str, nics: HostNics) -> None:
        if nics.speed is None or nics.kind is None:
            return
        delivered, raw, ports, _ = self._uplinks.get(leaf, (0.0, 0.0, 0, nics.kind))
        self._uplinks[leaf] = (
            delivered + nics.speed.delivered_bytes_per_s,
            raw + nics.speed.raw_bytes_per_s,
            ports + 1,
            nics.kind,
        )

    def _leaf(self, host: int, rail: int) -> str:
        if self.spec.kind == "switch":
            return "net/leaf0"
        block = host // self.spec.nodes_per_leaf
        return f"net/leaf{block}.{rail}" if self.spec.rails else f"net/leaf{block}"

    def leaf_numbers(self, host: NDArray[np.int64], rail: NDArray[np.int64]) -> NDArray[np.int64]:
        """A number for the leaf of each host's NIC at a rail, equal where `leaf_of` is equal."""
        if self.spec.kind == "switch":
            return np.zeros_like(host)
        block = host // self.spec.nodes_per_leaf
        return block * max(self._most_rails, 1) + rail if self.spec.rails else block

    def uplink_bytes_per_s(self, nic: str) -> float:
        """Bandwidth of the uplink of a NIC's leaf, each way."""
        return self._uplink(self.leaf_of(nic), outward=True).bandwidth_bytes_per_s

    def leaf_of(self, nic: str) -> str:
        """Leaf switch of a NIC named `h<host>/<nic>`."""
        host, name = nic.split("/")
        number = int(host[1:])
        return self._leaf(number, self._nics[number].training.index(name))

    def route(self, source: str, target: str) -> tuple[Link, ...]:
        """Links from one NIC to another. Raises TopologyError where their kinds do not speak to each other."""
        kinds = {self._of(source)[0], self._of(target)[0]}
        if len(kinds) > 1:
            raise TopologyError(
                f"{source} and {target} have no path: {' and '.join(sorted(kinds))} do not speak to each other"
            )
        up, down = self.leaf_of(source), self.leaf_of(target)
        if up == down:
            return self._port(source, up, outward=True), self._port(target, down, outward=False)
        return (
            self._port(source, up, outward=True),
            self._uplink(up, outward=True),
            self._uplink(down, outward=False),
            self._port(target, down, outward=False),
        )

    def _of(self, nic: str) -> tuple[LinkKind, LinkSpeed]:
        nics = self._nics[int(nic.partition("/")[0][1:])]
        if nics.kind is None or nics.speed is None:
            raise TopologyError(f"{nic}: its speed is unknown; set `kind` and `bandwidth` of the node's `nics`")
        return nics.kind, nics.speed

    def _port(self, nic: str, leaf: str, *, outward: bool) -> Link:
        kind, speed = self._of(nic)
        source, target = (nic, leaf) if outward else (leaf, nic)
        # The switch's own latency is counted once a leaf, on the way in.
        return Link(
            source=source,
            target=target,
            kind=kind,
            bandwidth_bytes_per_s=speed.delivered_bytes_per_s,
            raw_bandwidth_bytes_per_s=speed.raw_bytes_per_s,
            latency_s=speed.latency_s + (self._switch_s if outward else 0.0),
            n_lanes=1,
            resource=f"{source}>{target}",
        )

    def _uplink(self, leaf: str, *, outward: bool) -> Link:
        delivered, raw, ports, kind = self._uplinks[leaf]
        source, target = (leaf, SPINE) if outward else (SPINE, leaf)
        return Link(
            source=source,
            target=target,
            kind=kind,
            bandwidth_bytes_per_s=delivered / self.spec.oversubscription,
            raw_bandwidth_bytes_per_s=raw / self.spec.oversubscription,
            latency_s=self._switch_s,
            n_lanes=ports,
            resource=f"{source}>{target}",
        )

    def add_to(self, graph: nx.DiGraph[str]) -> None:
        """Adds leaves, spine and their links to a machine's graph."""
        for host, nics in enumerate(self._nics):
            for rail, name in enumerate(nics.training if nics.speed else ()):
                nic, leaf = f"h{host}/{name}", self._leaf(host, rail)
                graph.add_node(leaf, kind=NodeKind.LEAF)
                graph.add_edge(nic, leaf, link=self._port(nic, leaf, outward=True))
                graph.add_edge(leaf, nic, link=self._port(nic, leaf, outward=False))
        if len(self._uplinks) > 1:
            graph.add_node(SPINE, kind=NodeKind.SPINE)
            for leaf in self._uplinks:
                graph.add_edge(leaf, SPINE, link=self._uplink(leaf, outward=True))
                graph.add_edge(SPINE, leaf, link=self._uplink(leaf, outward=False))
