"""Links, places and paths: the values that a topology is made of."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class NodeKind(StrEnum):
    """What a node of the graph is."""

    GPU = "gpu"
    CPU = "cpu"  # a rank that computes on the host itself
    NVSWITCH = "nvswitch"
    PCIE_SWITCH = "pcie_switch"
    HOST_BRIDGE = "host_bridge"
    NUMA = "numa"
    MEMORY = "memory"
    NIC = "nic"
    LOOPBACK = "loopback"
    LEAF = "leaf"
    SPINE = "spine"


class LinkKind(StrEnum):
    """What a link is made of; the network kinds keep their generation in `Link.title`."""

    NVLINK1 = "nvlink1"
    NVLINK2 = "nvlink2"
    NVLINK3 = "nvlink3"
    NVLINK4 = "nvlink4"
    NVLINK5 = "nvlink5"
    PCIE3 = "pcie3"
    PCIE4 = "pcie4"
    PCIE5 = "pcie5"
    PCIE6 = "pcie6"
    SOCKET = "socket"  # UPI, xGMI, NVLink-C2C between sockets or NUMA nodes
    MEMORY = "memory"
    INFINIBAND = "infiniband"
    ROCE = "roce"
    TCP = "tcp"
    LOOPBACK = "loopback"


class PathKind(StrEnum):
    """How two ranks reach each other, from best to worst; the PCIe names are those of `nvidia-smi topo -m`."""

    SELF = "self"
    NVLINK = "nvlink"  # direct
    NVSWITCH = "nvswitch"
    NVLINK_RELAY = "nvlink_relay"  # through one other GPU
    PIX = "pix"
    PXB = "pxb"
    PHB = "phb"
    NODE = "node"
    SYS = "sys"
    STAGED = "staged"  # no peer-to-peer: copied through host memory
    LOOPBACK = "loopback"
    NETWORK = "network"

    @property
    def is_nvlink(self) -> bool:
        """Whether the bytes stay on NVLink."""
        return self in (PathKind.NVLINK, PathKind.NVSWITCH, PathKind.NVLINK_RELAY)

    @property
    def is_pcie(self) -> bool:
        """Whether the bytes cross PCIe inside one host, peer-to-peer or staged."""
        return self in (PathKind.PIX, PathKind.PXB, PathKind.PHB, PathKind.NODE, PathKind.SYS, PathKind.STAGED)


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """One direction of one cable, bus or bundle of lanes.

    Attributes:
        source, target: names of the nodes, `h<host>/<name>` inside a host, `net/<name>` in the network.
        kind: what it is made of.
        bandwidth_bytes_per_s: what a large transfer gets through, this direction alone.
        raw_bandwidth_bytes_per_s: signalling rate less line coding, as datasheets give it.
        latency_s: time that the link adds to the first byte.
        n_lanes: NVLinks in the bundle, PCIe lanes, or ports.
        resource: what flows share. Two links with one resource share its bandwidth (host memory serves both
            directions); otherwise it is the link's own name, so that only flows in one direction share it.
    """

    source: str
    target: str
    kind: LinkKind
    bandwidth_bytes_per_s: float
    raw_bandwidth_bytes_per_s: float
    latency_s: float
    n_lanes: int
    resource: str

    @property
    def name(self) -> str:
        """`source>target`, unique in a topology."""
        return f"{self.source}>{self.target}"


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPlace:
    """Where one rank runs.

    Attributes:
        rank: global rank, 0-based; ranks fill a host before the next.
        node: name of its GPU (or CPU) in the graph.
        device: name in `kernels_db/`.
        host: number of the host (one operating system, one `localhost`).
        local_rank: device number on that host: what `cuda:<n>` means there.
        nvlink_domain: number of the set of GPUs it reaches by NVLink; smaller than a host (bridges) or larger (racks).
        nics: names of the NICs that it uses, nearest first; empty when the host has none.
    """

    rank: int
    node: str
    device: str
    host: int
    local_rank: int
    nvlink_domain: int
    nics: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PairInfo:
    """One ordered pair of ranks with nothing else running: path, rate of its narrowest link, summed latency.

    `bandwidth_bytes_per_s` is infinite and `narrowest` None for a rank and itself.
    """

    kind: PathKind
    bandwidth_bytes_per_s: float
    latency_s: float
    links: tuple[Link, ...]
    narrowest: Link | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Bottleneck:
    """The resource that limits a group when every member sends the same number of bytes to every other.

    Attributes:
        link: the busiest link (one of those that share the busiest resource).
        n_flows: ordered pairs whose path crosses that resource.
        pair: two ranks whose path crosses it.
        rank_bandwidth_bytes_per_s: bytes per second that each rank can send in total at that load.
    """

    link: Link
    n_flows: int
    pair: tuple[int, int]
    rank_bandwidth_bytes_per_s: float
