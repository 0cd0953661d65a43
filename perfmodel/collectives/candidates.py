"""Each algorithm and protocol that could run a collective, with its time by NCCL's own model on this group's lanes.

time = latency + bytes / algorithm bandwidth. Latencies, protocol ceilings and factors are NCCL's (nccl_tables); bandwidths
are those of the group's lanes, so that a badly wired box is slow for the right reason.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from perfmodel.collectives import nccl_tables as nccl
from perfmodel.collectives.call import bus_factor
from perfmodel.collectives.group import Group
from perfmodel.collectives.nccl_tables import Algorithm, Generation, Protocol
from perfmodel.collectives.rings import Lane
from perfmodel.collectives.settings import Settings
from perfmodel.topology import PathKind
from perfmodel.units import US_PER_S

RING_OPS = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "reduce")
# Fewest GPUs with which NCCL takes in-switch reduction on one node: 8x H200 and 8x B200, all-reduce of 8 GiB with 4 to 8 GPUs
# (stas00/ml-engineering, network/README.md, SHARP section).
NVLS_MIN_RANKS = {Generation.HOPPER: 5, Generation.BLACKWELL: 6}
# What a hop of each medium costs by NCCL's LL ring row; a lane's own latency replaces it in every protocol's figure.
# A route between hosts also crosses PCIe on both sides (1.0 us).
_REFERENCE_S = {"nvlink": 0.6, "pcie": 1.0, "net": 3.7}
# A hop is never cheaper than this share of NCCL's figure: the protocol's own work stays however short the wire.
_MIN_HOP_FRAC = 0.25


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One way to run a collective: its latency (s), its bandwidth part (s), channels and limiting link."""

    algorithm: Algorithm
    protocol: Protocol
    latency_s: float
    bandwidth_s: float
    n_channels: int
    bottleneck: str

    @property
    def time_s(self) -> float:
        """Latency plus bandwidth part."""
        return self.latency_s + self.bandwidth_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What all candidates of one collective share."""

    op: str
    n_bytes: int
    group: Group
    generation: Generation
    settings: Settings
    amd_host: bool

    @property
    def nodes_index(self) -> int:
        """Column of NCCL's per-node-count tables: one, two, or more nodes."""
        return min(self.group.n_units, 3) - 1


def candidates(setting: Setting) -> list[Candidate]:
    """Every allowed candidate. Empty if the settings forbid all that could run this operation."""
    allowed = setting.settings
    return [
        candidate
        for make in (_rings, _trees, _nvls)
        for candidate in make(setting)
        if candidate.algorithm in allowed.algorithms and candidate.protocol in allowed.protocols
    ]


def medium(lane: Lane) -> str:
    """Row of NCCL's latency table: nvlink, pcie or net."""
    if lane.kind is PathKind.NETWORK:
        return "net"
    return "nvlink" if lane.kind.is_nvlink else "pcie"


def hop_s(lane: Lane | None, algorithm: Algorithm, protocol: Protocol) -> float:
    """One step of an algorithm over a lane (s): NCCL's figure, moved by how far the lane's own latency is off its default."""
    if lane is None:
        return 0.0
    row = medium(lane)
    table_s = nccl.HOP_S[row].get(algorithm, nccl.HOP_S[row][Algorithm.RING])[protocol]
    return max(table_s + lane.hop_s - _REFERENCE_S[row] / US_PER_S, table_s * _MIN_HOP_FRAC)


def n_channels(setting: Setting) -> int:
    """Channels of a ring or tree, within NCCL_MIN_NCHANNELS and NCCL_MAX_NCHANNELS."""
    group = setting.group
    if group.intra is None:
        found = nccl.CHANNELS_PER_RING * max(group.n_nics, 1)
    elif group.intra.kind is PathKind.NVSWITCH:
        found = nccl.SWITCH_CHANNELS[setting.generation]
    elif group.intra.kind.is_nvlink:
        lane_bytes_per_s = group.intra.link.bandwidth_bytes_per_s / group.intra.link.n_lanes
        found = nccl.CHANNELS_PER_RING * max(round(group.intra.bus_bytes_per_s / lane_bytes_per_s), 1)
    else:
        found = nccl.CHANNELS_PER_RING
    return min(max(found, setting.settings.min_channels), setting.settings.max_channels)


def search_channels(setting: Setting) -> int:
    """Channels of the graph that NCCL's search finds, by which its tuner counts what channels carry at most.

    Between nodes that is one a NIC (ncclTopoTuneModel, graphs[a]->nChannels): two A100 nodes with four HDR cards each reach
    86 to 93 GB/s of bus bandwidth (NVIDIA/nccl-tests issues 100, 152, 175), the 4 x 23.6 GB/s of a tree and no more.
    """
    return n_channels(setting) if setting.group.inter is None else setting.group.n_nics


def narrow(group: Group) -> Lane:
    """The lane with less bandwidth."""
    lanes = [lane for lane in (group.intra, group.inter) if lane is not None]
    return min(lanes, key=lambda lane: lane.bus_bytes_per_s)


def _channel_limit(setting: Setting) -> float:
    """Bytes per second that the channels' thread blocks move, at most."""
    return n_channels(setting) * nccl.TREE_PER_CHANNEL[setting.generation][0]


def _ll_limit(setting: Setting) -> float:
    if setting.group.n_units == 1:
        return nccl.LL_MAX_BYTES_PER_S[setting.generation]
    return nccl.LL_MAX_NET_BYTES_PER_S["amd" if setting.amd_host else "intel"][setting.nodes_index - 1]


def _ll128_runs(setting: Setting) -> bool:
    """LL128 needs NVLink inside the node, a GPU from Volta on, and no PCIe host bridge on the way to a NIC."""
    intra = setting.group.intra
    return intra is None or intra.kind.is_nvlink


def _rings(setting: Setting) -> Iterator[Candidate]:
    if setting.op not in RING_OPS:
        return
    group, limit = setting.group, narrow(setting.group)
    full = min(limit.bus_bytes_per_s, _channel_limit(setting))
    per_channel = nccl.RING_LL128_PER_CHANNEL[setting.generation][setting.nodes_index]
    bus = {
        Protocol.LL: min(_ll_limit(setting), full * nccl.LL_RING_FRAC),
        Protocol.LL128: min(full * nccl.LL128_FRAC, search_channels(setting) * per_channel),
        Protocol.SIMPLE: full,
    }
    for protocol, rate in bus.items():
        if protocol is Protocol.LL128 and not _ll128_runs(setting):
            continue
        yield Candidate(
            algorithm=Algorithm.RING,
            protocol=protocol,
            latency_s=_ring_latency(setting, protocol),
            bandwidth_s=setting.n_bytes * bus_factor(setting.op, group.n_ranks) / rate,
            n_channels=n_channels(setting),
            bottleneck=limit.link.name,
        )


def _ring_latency(setting: Setting, protocol: Protocol) -> float:
    group = setting.group
    rounds = 2 if setting.op == "all_reduce" else 1
    n_inter = rounds * (group.n_units - 1)
    n_intra = rounds * (group.n_ranks - 1) - n_inter
    inter_s = hop_s(group.inter, Algorithm.TREE if group.intra is None else Algorithm.RING, protocol)
    steps_s = n_intra * hop_s(group.intra, Algorithm.RING, protocol) + n_inter * inter_s
    total = nccl.BASE_S[Algorithm.RING][protocol] + steps_s
    plateau = (
        protocol is Protocol.SIMPLE
        and setting.op == "all_reduce"
        and group.n_units > 1
        and setting.n_bytes >= nccl.PLATEAU_BYTES * group.n_ranks * n_channels(setting)
    )
    return total * nccl.PLATEAU[setting.generation] if plateau else total


def _trees(setting: Setting) -> Iterator[Candidate]:
    """Double binary tree between nodes, a chain inside each: all_reduce only.

    Up and down both cross every inner link, so algbw is half of a lane; between two nodes each NIC carries one half up and
    the other half down, so algbw is all of it (two nodes may beat the wire in busbw), as far as channels carry it.
    """
    if setting.op != "all_reduce":
        return
    group = setting.group
    index = setting.nodes_index
    channels = n_channels(setting)
    inside = group.intra.bus_bytes_per_s / 2 if group.intra else math.inf
    outside = group.inter.bus_bytes_per_s / (1 if group.n_units == 2 else 2) if group.inter else math.inf
    found = search_channels(setting)
    per_channel = found * nccl.TREE_PER_CHANNEL[setting.generation][index] / 2
    full = min(min(inside, outside) * nccl.TREE_FRAC, per_channel)
    bus = {
        Protocol.LL: min(full * nccl.LL_TREE_FRAC, _ll_limit(setting) / 2),
        Protocol.LL128: min(
            full * (nccl.TREE_LL128_ONE_NODE_FRAC if group.n_units == 1 else 120 / 128),
            found * nccl.TREE_LL128_PER_CHANNEL[setting.generation][index] / 2,
        ),
        Protocol.SIMPLE: full,
    }
    link = group.intra if group.inter is None or inside < outside else group.inter
    for protocol, rate in bus.items():
        if protocol is Protocol.LL128 and not _ll128_runs(setting):
            continue
        chain_s = (group.per_unit - 1) * hop_s(group.intra, Algorithm.TREE, protocol)
        depth = math.floor(math.log2(group.n_units))
        yield Candidate(
            algorithm=Algorithm.TREE,
            protocol=protocol,
            latency_s=nccl.BASE_S[Algorithm.TREE][protocol]
            + 2 * (chain_s + depth * hop_s(group.inter, Algorithm.TREE, protocol)),
            bandwidth_s=setting.n_bytes / (rate * _tree_correction(protocol, setting.n_bytes)),
            n_channels=channels,
            bottleneck=link.link.name if link else "",
        )


def _tree_correction(protocol: Protocol, n_bytes: int) -> float:
    """NCCL's share of a tree's bandwidth at a size, between its powers of two by straight lines."""
    table = nccl.TREE_CORRECTION[protocol]
    place = math.log2(max(n_bytes, 1) / nccl.TREE_CORRECTION_START_BYTES)
    low = min(max(math.floor(place), 0), len(table) - 1)
    high = min(low + 1, len(table) - 1)
    share = min(max(place - low, 0.0), 1.0)
    return table[low] + (table[high] - table[low]) * share


def nvls_algbw(lane_bytes_per_s: float, n_ranks: int, efficiency: float) -> float:
    """Algorithm bandwidth of an in-switch all-reduce.

    Each rank gives all S bytes to the switch (which sums), and sends its summed S / n on for everybody: (1 + 1/n) S cross its
    link each way. Of the link's rate the switch's arithmetic leaves `efficiency`. 8 H200: 1.75 x 0.85 x 365 / 1.125 = 483 GB/s
    of bus bandwidth, measured 480.
    """
    return lane_bytes_per_s * efficiency / (1 + 1 / n_ranks)


def _nvls(setting: Setting) -> Iterator[Candidate]:
    group, efficiency = setting.group, nccl.NVLS_EFFICIENCY.get(setting.generation)
    switched = group.intra is not None and group.intra.kind is PathKind.NVSWITCH
    if setting.op != "all_reduce" or efficiency is None or not switched or group.intra is None:
        return
    if min(len(unit) for unit in group.units) < NVLS_MIN_RANKS[setting.generation]:
        return
    algorithm = Algorithm.NVLS if group.n_units == 1 else Algorithm.NVLS_TREE
    algbw = nvls_algbw(group.intra.bus_bytes_per_s, group.per_unit, efficiency)
    latency_s = hop_s(group.intra, algorithm, Protocol.SIMPLE)
    link = group.intra.link
    if group.inter is not None:
        outside = group.inter.bus_bytes_per_s / (1 if group.n_units == 2 else 2)
        latency_s += 2 * math.floor(math.log2(group.n_units)) * hop_s(group.inter, algorithm, Protocol.SIMPLE)
        if outside < algbw:
            algbw, link = outside, group.inter.link
    yield Candidate(
        algorithm=algorithm,
        protocol=Protocol.SIMPLE,
        latency_s=latency_s,
        bandwidth_s=setting.n_bytes / algbw,
        n_channels=min(16, setting.settings.max_channels),
        bottleneck=link.name,
    )
