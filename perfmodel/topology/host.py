"""One host as a graph of named parts, and the routes inside it. Equal hosts of a machine share one `Host`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING

from perfmodel.config.topology import MeasuredSpec, NodeSpec, NvlinkSpec, PortSpec
from perfmodel.errors import TopologyError
from perfmodel.topology.link import Link, LinkKind, NodeKind, PathKind
from perfmodel.topology.pcie_tree import kind_of, pcie_parents
from perfmodel.topology.speeds import (
    HOST_MEMORY_BYTES_PER_S,
    MEMORY_LINK_S,
    NVLINK,
    NVSWITCH_LINK_S,
    PCIE,
    SOCKET,
    LinkSpeed,
)

if TYPE_CHECKING:
    import networkx as nx

NVSWITCH, LOOPBACK = "nvswitch", "loopback"
_PCIE_ORDER = (PathKind.PIX, PathKind.PXB, PathKind.PHB, PathKind.NODE, PathKind.SYS)
# NCCL's own levels do not tell a NUMA node's host bridges apart: its PHB is what nvidia-smi calls PHB or NODE.
_P2P_LEVELS: Mapping[str, tuple[PathKind, ...]] = {
    "nvl": (),
    "pix": _PCIE_ORDER[:1],
    "pxb": _PCIE_ORDER[:2],
    "phb": _PCIE_ORDER[:4],
    "node": _PCIE_ORDER[:4],
    "sys": _PCIE_ORDER,
}
Path = tuple[PathKind, tuple[Link, ...]]


class Host:
    """The parts and routes of one kind of host. Complete when made; routes are found on demand and kept.

    Attributes:
        spec: what it was built from.
        env: the NCCL variables of the machine.
        parts, links: its parts by local name (`gpu0`, `switch1`) and its links by source and target.
        parents: the PCIe tree.
        ranks: local names of its ranks, in order.
    """

    def __init__(self, spec: NodeSpec, env: Mapping[str, str]) -> None:
        self.spec = spec
        self.env = dict(env)
        prefix = "cpu" if spec.cpus else "gpu"
        self.ranks = tuple(f"{prefix}{index}" for index in range(len(spec.devices)))
        self.parents = pcie_parents(spec)
        self.parts: dict[str, NodeKind] = {}
        self.links: dict[tuple[str, str], Link] = {}
        self._paths: dict[tuple[str, str], Path] = {}
        self._caps: dict[tuple[str, str], Link] = {}
        self.measured_latency_s: dict[tuple[str, str], float] = {}
        self._build()
        for measured in spec.measured:
            self._apply(measured)
        self._paths.clear()

    @cached_property
    def graph(self) -> nx.DiGraph[str]:
        """Parts and links for algorithms and pictures: nodes carry `kind`, edges `link`. What most commands do without."""
        import networkx as nx

        graph: nx.DiGraph[str] = nx.DiGraph()
        graph.add_nodes_from((name, {"kind": kind}) for name, kind in self.parts.items())
        graph.add_edges_from((*ends, {"link": link}) for ends, link in self.links.items())
        return graph

    def _build(self) -> None:
        for rank in self.ranks:
            self.parts[rank] = NodeKind.CPU if self.spec.cpus else NodeKind.GPU
        for index in range(self.spec.nics.count if self.spec.nics else 0):
            self.parts[f"nic{index}"] = NodeKind.NIC
        if self.spec.cpus:
            self._add_loopback()
        if self.spec.nvlink:
            self._add_nvlink(self.spec.nvlink)
        if self.spec.pcie:
            self._add_pcie()

    def _join(self, first: str, second: str, kind: LinkKind, speed: LinkSpeed, n_lanes: int) -> None:
        """Adds both directions of a link; `speed` is per lane."""
        for source, target in ((first, second), (second, first)):
            link = Link(
                source=source,
                target=target,
                kind=kind,
                bandwidth_bytes_per_s=speed.delivered_bytes_per_s * n_lanes,
                raw_bandwidth_bytes_per_s=speed.raw_bytes_per_s * n_lanes,
                latency_s=speed.latency_s,
                n_lanes=n_lanes,
                resource=f"{source}>{target}",
            )
            self.links[source, target] = link

    def _add_loopback(self) -> None:
        cpus = self.spec.cpus
        if cpus is None:
            return
        self.parts[LOOPBACK] = NodeKind.LOOPBACK
        speed = LinkSpeed(
            raw_bytes_per_s=cpus.loopback_bandwidth,
            delivered_bytes_per_s=cpus.loopback_bandwidth,
            latency_s=cpus.loopback_latency / 2,
        )
        for rank in self.ranks:
            self._join(rank, LOOPBACK, LinkKind.LOOPBACK, speed, 1)
        for index in range(self.spec.nics.count if self.spec.nics else 0):
            self._join(LOOPBACK, f"nic{index}", LinkKind.LOOPBACK, replace(speed, latency_s=0.0), 1)

    def _add_nvlink(self, spec: NvlinkSpec) -> None:
        base = NVLINK[spec.generation]
        raw = spec.link_bandwidth or base.raw_bytes_per_s
        share = base.delivered_bytes_per_s / base.raw_bytes_per_s
        latency_s = base.latency_s if spec.latency is None else spec.latency
        speed = LinkSpeed(
            raw_bytes_per_s=raw, delivered_bytes_per_s=spec.delivered_bandwidth or raw * share, latency_s=latency_s
        )
        kind = LinkKind(f"nvlink{spec.generation}")
        if spec.switch and spec.links_per_gpu:
            self.parts[NVSWITCH] = NodeKind.NVSWITCH
            half = NVSWITCH_LINK_S if spec.latency is None else spec.latency / 2
            for rank in self.ranks:
                self._join(rank, NVSWITCH, kind, replace(speed, latency_s=half), spec.links_per_gpu)
        for first, second, n_links in self._nvlink_pairs(spec):
            self._join(f"gpu{first}", f"gpu{second}", kind, speed, n_links)

    def _nvlink_pairs(self, spec: NvlinkSpec) -> Sequence[tuple[int, int, int]]:
        n_gpus = len(self.ranks)
        pairs = list(spec.pairs)
        if spec.mesh:
            pairs = [(a, b, spec.mesh) for a in range(n_gpus) for b in range(a + 1, n_gpus)]
        if spec.links_per_gpu and not spec.switch:
            for gpu in range(n_gpus):
                used = sum(n_links for a, b, n_links in pairs if gpu in (a, b))
                if used > spec.links_per_gpu:
                    raise TopologyError(f"gpu{gpu} has {spec.links_per_gpu} NVLinks but its pairs use {used}")
        return pairs

    def _add_pcie(self) -> None:
        pcie = self.spec.pcie
        if pcie is None:
            return
        numas = sorted({name for name in self.parents.values() if name.startswith("numa")}, key=lambda n: int(n[4:]))
        for name in (*self.parents, *numas):
            self.parts[name] = kind_of(name)
        unknown = [name for name in pcie.ports if name not in self.parents]
        if unknown:
            raise TopologyError(
                f"pcie.ports: {unknown[0]} is no part of this host; allowed {', '.join(sorted(self.parents))}"
            )
        for name in self._bottom_up():
            self._add_uplink(name)
        self._add_sockets(numas)

    def _bottom_up(self) -> list[str]:
        """Parts of the PCIe tree, children before parents."""

        def depth(name: str) -> int:
            return 0 if name not in self.parents else 1 + depth(self.parents[name])

        return sorted(self.parents, key=depth, reverse=True)

    def _add_uplink(self, name: str) -> None:
        pcie = self.spec.pcie
        if pcie is None:
            return
        port = pcie.ports.get(name, PortSpec())
        generation = port.generation or pcie.generation
        is_switch = kind_of(name) is NodeKind.PCIE_SWITCH
        lanes: int = port.lanes or ((pcie.uplink_lanes or pcie.lanes) if is_switch else pcie.lanes)
        speed = PCIE[generation]
        below = [self.links[child, name] for child, parent in self.parents.items() if parent == name]
        if kind_of(name) is NodeKind.HOST_BRIDGE and below and not (port.lanes or port.bandwidth):
            lanes, speed = _inside_the_cpu(below, speed)
        if port.bandwidth:
            rate = port.bandwidth / lanes
            speed = replace(speed, delivered_bytes_per_s=rate, raw_bytes_per_s=max(rate, speed.raw_bytes_per_s))
        self._join(name, self.parents[name], LinkKind(f"pcie{generation}"), speed, lanes)

    def _add_sockets(self, numas: Sequence[str]) -> None:
        pcie = self.spec.pcie
        if pcie is None:
            return
        between = SOCKET[pcie.inter_socket]
        if pcie.inter_socket_bandwidth:
            rate = pcie.inter_socket_bandwidth
            between = replace(between, delivered_bytes_per_s=rate, raw_bytes_per_s=max(rate, between.raw_bytes_per_s))
        memory = pcie.host_memory_bandwidth or HOST_MEMORY_BYTES_PER_S
        for index, numa in enumerate(numas):
            for other in numas[index + 1 :]:
                self._join(numa, other, LinkKind.SOCKET, between, 1)
            name = f"memory{numa[4:]}"
            self.parts[name] = NodeKind.MEMORY
            speed = LinkSpeed(raw_bytes_per_s=memory, delivered_bytes_per_s=memory, latency_s=MEMORY_LINK_S)
            self._join(numa, name, LinkKind.MEMORY, speed, 1)
            for source, target in ((numa, name), (name, numa)):
                link = self.links[source, target]
                self.links[source, target] = replace(link, resource=name)

    def _apply(self, measured: MeasuredSpec) -> None:
        """Makes the named pairs deliver what was measured: widens narrower links, caps the pair where it is wider."""
        pairs = [(f"gpu{a}", f"gpu{b}") for a, b in measured.pairs]
        if measured.path:
            kinds = {(a, b): self.wired_path(a, b)[0] for a in self.ranks for b in self.ranks if a != b}
            pairs = [pair for pair, kind in kinds.items() if kind == measured.path]
        for first, second in pairs:
            for source, target in {(first, second), (second, first)}:
                self._apply_pair(source, target, measured)

    def _apply_pair(self, source: str, target: str, measured: MeasuredSpec) -> None:
        _, links = self.wired_path(source, target)
        for link in links:
            if link.bandwidth_bytes_per_s < measured.bandwidth:
                wider = replace(link, bandwidth_bytes_per_s=measured.bandwidth)
                self.links[link.source, link.target] = wider
        narrowest = min(links, key=lambda link: link.bandwidth_bytes_per_s)
        self._caps[source, target] = replace(
            narrowest,
            source=source,
            target=target,
            bandwidth_bytes_per_s=measured.bandwidth,
            latency_s=0.0,
            resource=f"{source}>{target} measured",
        )
        if measured.latency is not None:
            self.measured_latency_s[source, target] = measured.latency

    def path(self, source: str, target: str) -> Path:
        """Kind and links from one rank to another of this host.

        Raises:
            TopologyError: no path, or one through a PCIe tree that a virtual machine hides and nobody measured.
        """
        key = (source, target)
        if key not in self._paths:
            kind, links = self.wired_path(source, target)
            cap = self._caps.get(key)
            if cap is None and kind.is_pcie and self.spec.pcie and self.spec.pcie.hidden:
                raise TopologyError(
                    f"{source} and {target}: a virtual machine hides the PCIe tree, so their bandwidth is unknown; "
                    f"measure it (p2pBandwidthLatencyTest), then set node.measured: [{{path: {kind}, bandwidth: ...}}]"
                )
            self._paths[key] = (kind, (*links, cap) if cap else links)
        return self._paths[key]

    def wired_path(self, source: str, target: str) -> Path:
        """As `path`, but by the cables alone: measured figures, and their absence, are left out."""
        if source == target:
            return PathKind.SELF, ()
        if self.spec.cpus:
            return PathKind.LOOPBACK, self._links((source, LOOPBACK, target))
        refused = self._p2p_refused(source, target)
        nvlink = None if refused else self._nvlink_path(source, target)
        if nvlink:
            return nvlink
        if not self.parents:
            raise TopologyError(
                f"{source} and {target} have no path: no NVLink joins them and the node gives no `pcie`"
            )
        kind, names = self.pcie_path(source, target)
        if refused or kind not in self._p2p_kinds():
            return PathKind.STAGED, self._links(self.staged(names))
        return kind, self._links(names)

    def _p2p_refused(self, source: str, target: str) -> bool:
        if self.env.get("NCCL_P2P_DISABLE", "0") != "0":
            return True
        pair = {int(source[3:]), int(target[3:])}
        return any(set(refused) == pair for refused in self.spec.p2p.unsupported)

    def _p2p_kinds(self) -> tuple[PathKind, ...]:
        """PCIe distances at which GPUs write to each other."""
        if self.spec.p2p.disabled:
            return ()
        level = self.env.get("NCCL_P2P_LEVEL", "").lower() or self.spec.p2p.level
        if level is None:
            # AMD CPUs forward peer-to-peer between sockets, Intel's do not (nccl src/graph/paths.cc, ncclTopoCheckP2p).
            level = "sys" if self.spec.pcie and self.spec.pcie.inter_socket.startswith("xgmi") else "phb"
        level = {"loc": "nvl", "0": "nvl", "1": "pix", "2": "pxb", "3": "phb", "4": "sys", "5": "sys"}.get(level, level)
        if level not in _P2P_LEVELS:
            raise TopologyError(f"env NCCL_P2P_LEVEL: found {level!r}, allowed LOC, NVL, PIX, PXB, PHB, SYS")
        return _P2P_LEVELS[level]

    def _nvlink_path(self, source: str, target: str) -> Path | None:
        if (source, target) in self.links:
            return PathKind.NVLINK, self._links((source, target))
        if NVSWITCH in self.parts:
            return PathKind.NVSWITCH, self._links((source, NVSWITCH, target))
        relays = [via for via in self.ranks if (source, via) in self.links and (via, target) in self.links]
        if not relays:
            return None
        best = max(relays, key=lambda via: (self._narrowest((source, via, target)), -self.ranks.index(via)))
        return PathKind.NVLINK_RELAY, self._links((source, best, target))

    def _narrowest(self, names: Sequence[str]) -> float:
        return min(link.bandwidth_bytes_per_s for link in self._links(names))

    def _links(self, names: Sequence[str]) -> tuple[Link, ...]:
        return tuple(self.links[a, b] for a, b in pairwise(names))

    def _up(self, name: str) -> list[str]:
        chain = [name]
        while chain[-1] in self.parents:
            chain.append(self.parents[chain[-1]])
        return chain

    def pcie_path(self, source: str, target: str) -> tuple[PathKind, tuple[str, ...]]:
        """Distance in `nvidia-smi topo -m` terms and the parts on the way, by PCIe alone."""
        up, down = self._up(source), self._up(target)
        common = next((name for name in up if name in down), None)
        if common is None:
            return PathKind.SYS, (*up, *reversed(down))
        names = (*up[: up.index(common) + 1], *reversed(down[: down.index(common)]))
        kind = kind_of(common)
        if kind is NodeKind.NUMA:
            return PathKind.NODE, names
        if kind is NodeKind.HOST_BRIDGE:
            return PathKind.PHB, names
        n_switches = sum(kind_of(name) is NodeKind.PCIE_SWITCH for name in names)
        return (PathKind.PIX if n_switches == 1 else PathKind.PXB), names

    def staged(self, names: Sequence[str]) -> tuple[str, ...]:
        """The way through host memory: up to the sender's NUMA node, into its memory, out, down to the receiver."""
        up, down = self._up(names[0]), self._up(names[-1])
        memory = f"memory{up[-1][4:]}"
        beyond = down if down[-1] != up[-1] else down[:-1]
        return (*up, memory, up[-1], *reversed(beyond))


def _inside_the_cpu(below: Sequence[Link], speed: LinkSpeed) -> tuple[int, LinkSpeed]:
    """Lanes and speed between a host bridge and its NUMA node: wide enough for all the bridge's root ports together."""
    lanes = sum(link.n_lanes for link in below)
    return lanes, LinkSpeed(
        raw_bytes_per_s=sum(link.raw_bandwidth_bytes_per_s for link in below) / lanes,
        delivered_bytes_per_s=sum(link.bandwidth_bytes_per_s for link in below) / lanes,
        latency_s=speed.latency_s,
    )
