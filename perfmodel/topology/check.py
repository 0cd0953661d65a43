"""Checks of a host's graph: links that go both ways alike, and a path between every two ranks."""

from __future__ import annotations

from itertools import combinations

import networkx as nx

from perfmodel.errors import TopologyError
from perfmodel.topology.host import Host


def check_symmetric(graph: nx.DiGraph[str]) -> None:
    """Raises TopologyError naming the first two neighbours whose link differs by direction or goes one way only."""
    for source, target, data in graph.edges(data=True):
        link = data["link"]
        if not graph.has_edge(target, source):
            raise TopologyError(f"{source} and {target}: the link from {source} has no way back")
        back = graph.edges[target, source]["link"]
        if (link.kind, link.n_lanes) != (back.kind, back.n_lanes):
            raise TopologyError(
                f"{source} and {target}: {link.kind} x{link.n_lanes} one way, {back.kind} x{back.n_lanes} the other"
            )


def check_host(host: Host) -> None:
    """Raises TopologyError naming a pair of ranks of one host without a path, or with a one-way link."""
    check_symmetric(host.graph)
    if host.parents or host.spec.cpus:
        return  # the PCIe tree holds every GPU (pcie_parents checks that), the loopback every process
    for source, target in combinations(host.ranks, 2):
        host.wired_path(source, target)
