"""Which network card each rank of a host uses, and the way to it."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from perfmodel.config.topology import NicSpec
from perfmodel.errors import TopologyError
from perfmodel.topology.host import LOOPBACK, Host
from perfmodel.topology.link import Link, LinkKind, PathKind
from perfmodel.topology.speeds import NIC_DELIVERED_FRAC, NIC_LATENCY_S, NIC_RATES, LinkSpeed

_ORDER = (PathKind.PIX, PathKind.PXB, PathKind.PHB, PathKind.NODE, PathKind.SYS)
# GPUDirect RDMA up to PXB by default (nccl src/graph/paths.cc, ncclTopoCheckGdr); NCCL_NET_GDR_LEVEL moves it.
_GDR_LEVELS = {"loc": 0, "pix": 1, "pxb": 2, "phb": 4, "sys": 5, "0": 0, "1": 1, "2": 2, "3": 4, "4": 5, "5": 5}


@dataclass(frozen=True, slots=True, kw_only=True)
class HostNics:
    """NICs of one kind of host.

    Attributes:
        of_rank: per rank the NICs it uses, first choice first; empty tuples where the host has none.
        training: NICs that some rank uses, in order: the position is the rail.
        speed, kind: of each port; None where nobody has said.
    """

    of_rank: tuple[tuple[str, ...], ...]
    training: tuple[str, ...]
    speed: LinkSpeed | None
    kind: LinkKind | None


def place_nics(host: Host) -> HostNics:
    """Gives every rank the nearest NICs; ranks equally near to the same NICs take turns. Storage NICs are left out."""
    spec = host.spec.nics
    if spec is None:
        return HostNics(of_rank=((),) * len(host.ranks), training=(), speed=None, kind=None)
    nics = [f"nic{index}" for index in range(spec.count) if index not in spec.storage]
    nearest = [_nearest(host, rank, nics) for rank in host.ranks]
    turns: dict[tuple[str, ...], int] = {}
    chosen = []
    for group in nearest:
        turn = turns.get(group, 0)
        turns[group] = turn + 1
        n_sharers = nearest.count(group)
        first = turn * len(group) // n_sharers if group else 0
        chosen.append(group[first:] + group[:first])
    used = {name for group in chosen for name in group}
    training = tuple(name for name in nics if name in used)
    if spec.kind == "unknown":
        return HostNics(of_rank=tuple(chosen), training=training, speed=None, kind=None)
    kind, speed = _nic_speed(spec)
    return HostNics(of_rank=tuple(chosen), training=training, speed=speed, kind=kind)


def _nearest(host: Host, rank: str, nics: list[str]) -> tuple[str, ...]:
    if host.spec.cpus:
        return tuple(nics)
    distance = {nic: _ORDER.index(host.pcie_path(rank, nic)[0]) for nic in nics}
    best = min(distance.values(), default=0)
    return tuple(nic for nic in nics if distance[nic] == best)


def _nic_speed(spec: NicSpec) -> tuple[LinkKind, LinkSpeed]:
    kind, line_rate = NIC_RATES[spec.kind] if spec.kind in NIC_RATES else (LinkKind(spec.kind), None)
    raw = spec.bandwidth or line_rate
    if raw is None:
        raise TopologyError(f"nics: kind {spec.kind} needs a bandwidth")
    speed = LinkSpeed(
        raw_bytes_per_s=raw,
        delivered_bytes_per_s=spec.delivered_bandwidth or raw * NIC_DELIVERED_FRAC[kind],
        latency_s=NIC_LATENCY_S[kind] if spec.latency is None else spec.latency,
    )
    return kind, speed


def to_nic(host: Host, rank: str, nic: str, *, outward: bool) -> tuple[Link, ...]:
    """Links from a rank to a NIC of its host (or back): direct where GPUDirect RDMA works, else through host memory."""
    if host.spec.cpus:
        names: tuple[str, ...] = (rank, LOOPBACK, nic)
    else:
        kind, names = host.pcie_path(rank, nic)
        if not _gdr(host, kind):
            names = host.staged(names)
    if not outward:
        names = tuple(reversed(names))
    return tuple(host.links[a, b] for a, b in pairwise(names))


def _gdr(host: Host, kind: PathKind) -> bool:
    spec = host.spec.nics
    if spec is None or spec.kind == "tcp":
        return False
    level = host.env.get("NCCL_NET_GDR_LEVEL", "pxb").lower()
    if level not in _GDR_LEVELS:
        raise TopologyError(f"env NCCL_NET_GDR_LEVEL: found {level!r}, allowed LOC, PIX, PXB, PHB, SYS")
    return _ORDER.index(kind) < _GDR_LEVELS[level]
