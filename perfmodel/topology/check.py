"""Checks of a host: links that go both ways alike, and a path between every two ranks."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import combinations

from perfmodel.errors import TopologyError
from perfmodel.topology.host import Host
from perfmodel.topology.link import Link


def check_symmetric(links: Mapping[tuple[str, str], Link]) -> None:
    """Raises TopologyError naming the first two neighbours whose link differs by direction or goes one way only."""
    for (source, target), link in links.items():
        back = links.get((target, source))
        if back is None:
            raise TopologyError(f"{source} and {target}: the link from {source} has no way back")
        if (link.kind, link.n_lanes) != (back.kind, back.n_lanes):
            raise TopologyError(
                f"{source} and {target}: {link.kind} x{link.n_lanes} one way, {back.kind} x{back.n_lanes} the other"
            )


def check_host(host: Host) -> None:
    """Raises TopologyError naming a pair of ranks of one host without a path, or with a one-way link."""
    check_symmetric(host.links)
    if host.parents or host.spec.cpus:
        return  # the PCIe tree holds every GPU (pcie_parents checks that), the loopback every process
    for source, target in combinations(host.ranks, 2):
        host.wired_path(source, target)
