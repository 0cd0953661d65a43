"""Machines: links, hosts, networks, and the path between any two ranks."""

from perfmodel.topology.link import Bottleneck, Link, LinkKind, NodeKind, PairInfo, PathKind, RankPlace
from perfmodel.topology.machine import Topology, build_topology

__all__ = [
    "Bottleneck",
    "Link",
    "LinkKind",
    "NodeKind",
    "PairInfo",
    "PathKind",
    "RankPlace",
    "Topology",
    "build_topology",
]
