"""estimate_collective: the one door of this room."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

import numpy as np

from perfmodel.collectives import exchange, gloo
from perfmodel.collectives import nccl_tables as nccl
from perfmodel.collectives.call import CollectiveCall, CollectiveEstimate, bus_factor, check_call
from perfmodel.collectives.candidates import Candidate, Setting, candidates, hop_s, n_channels
from perfmodel.collectives.group import Group, group_of
from perfmodel.collectives.nccl_tables import Algorithm, Generation, Protocol
from perfmodel.collectives.settings import Settings, read_settings
from perfmodel.db import load_device
from perfmodel.errors import ConfigError, MissingCalibrationError
from perfmodel.estimate import ZERO, Estimate, Source
from perfmodel.topology import Topology

# Range of an uncalibrated collective. Inside a node: NCCL's constants against nccl-tests tables of 8 fabrics. Between nodes:
# equal runs alone spread by 15 % (64 H200 over RoCE, ten runs, mlcommons/training_results_v5.0).
INTRA_RANGE = (0.75, 1.35)
INTER_RANGE = (0.75, 1.5)
PAIRWISE_OPS = ("all_to_all", "all_to_all_v", "send_recv", "gather", "scatter")
# Unknown to the database: NCCL's middle row. Only latency ceilings depend on it.
DEFAULT_GENERATION = Generation.AMPERE
# Bytes of the all_reduce that torch runs for a barrier (one element).
BARRIER_BYTES = 4


def estimate_collective(
    call: CollectiveCall, topology: Topology, *, algo: str | None = None, proto: str | None = None
) -> CollectiveEstimate:
    """How long one collective takes, once its last rank has arrived, with nothing else on the links.

    Args:
        call: what is asked.
        topology: the machine; its NCCL_* variables count.
        algo: ring, tree, nvls or nvls_tree instead of NCCL's choice.
        proto: ll, ll128 or simple instead of NCCL's choice.

    Raises:
        ConfigError: an operation, size or setting that does not exist or cannot run.
        TopologyError: ranks that do not exist or have no path.
    """
    check_call(call, topology)
    if call.op == "barrier":
        found = _estimate(replace(call, op="all_reduce", bytes=BARRIER_BYTES), topology, algo, proto)
        return replace(found, algbw_bytes_per_s=0.0, busbw_bytes_per_s=0.0)
    return _estimate(call, topology, algo, proto)


def estimate_collectives(calls: Sequence[CollectiveCall], topology: Topology) -> list[CollectiveEstimate]:
    """estimate_collective of every call, in order; equal calls are priced once."""
    return [estimate_collective(call, topology) for call in calls]


@lru_cache(maxsize=65536)
def _estimate(call: CollectiveCall, topology: Topology, algo: str | None, proto: str | None) -> CollectiveEstimate:
    if call.n_ranks == 1:
        return _answer(call, _NOTHING, ZERO)
    group = group_of(topology, call.ranks)
    settings = read_settings(topology.env, algo, proto)
    if _is_cpu(topology, call.ranks[0]):
        found = gloo.candidate(call, topology, group)
    elif call.op in PAIRWISE_OPS:
        found = _exchange(call, topology, group, settings)
    else:
        found = _chosen(call, _setting(call, topology, group, settings))
    low, high = INTER_RANGE if group.inter is not None else INTRA_RANGE
    time_s = found.time_s
    source = Source.ROOFLINE
    return _answer(call, found, Estimate(time_s=time_s, low_s=time_s * low, high_s=time_s * high, source=source))


_NOTHING = Candidate(
    algorithm=Algorithm.NONE, protocol=Protocol.NONE, latency_s=0.0, bandwidth_s=0.0, n_channels=0, bottleneck=""
)


def _answer(call: CollectiveCall, found: Candidate, estimate: Estimate) -> CollectiveEstimate:
    algbw = call.bytes / estimate.time_s if estimate.time_s > 0 else 0.0
    return CollectiveEstimate(
        estimate=estimate,
        algorithm=found.algorithm.value,
        protocol=found.protocol.value,
        n_channels=found.n_channels,
        latency_s=found.latency_s,
        bandwidth_s=found.bandwidth_s,
        bottleneck=found.bottleneck,
        algbw_bytes_per_s=algbw,
        busbw_bytes_per_s=algbw * bus_factor(call.op, call.n_ranks),
    )


def _is_cpu(topology: Topology, rank: int) -> bool:
    kind = topology.host_kind(topology.ranks[rank].host)
    return topology.spec.node_groups[kind][1].cpus is not None


@lru_cache(maxsize=256)
def _generation(device: str) -> Generation:
    try:
        return nccl.generation_of(load_device(device).compute_capability)
    except MissingCalibrationError:
        return DEFAULT_GENERATION


def _setting(call: CollectiveCall, topology: Topology, group: Group, settings: Settings) -> Setting:
    node = topology.spec.node_groups[topology.host_kind(topology.ranks[call.ranks[0]].host)][1]
    return Setting(
        op=call.op,
        n_bytes=call.bytes,
        group=group,
        generation=_generation(group.device),
        settings=settings,
        amd_host=node.pcie is not None and node.pcie.inter_socket.startswith("xgmi"),
    )


def _chosen(call: CollectiveCall, setting: Setting) -> Candidate:
    found = candidates(setting)
    if not found:
        raise ConfigError(
            f"{call.op} on {call.n_ranks} ranks: found settings {', '.join(sorted(setting.settings.algorithms))} with "
            f"{', '.join(sorted(setting.settings.protocols))}, none of which can run it here"
        )
    return min(found, key=lambda candidate: candidate.time_s)


def _exchange(call: CollectiveCall, topology: Topology, group: Group, settings: Settings) -> Candidate:
    """Pairs at once, Simple protocol: one base latency, one hop, and the busiest link."""
    bandwidth_s, link = exchange.exchange_time(topology, group, call.ranks, send_matrix(call))
    setting = _setting(call, topology, group, settings)
    # Pairs poll flags as LL does where messages are small; one hop, whichever the slowest is.
    hop = max(hop_s(lane, Algorithm.RING, Protocol.LL) for lane in (group.intra, group.inter))
    return Candidate(
        algorithm=Algorithm.DIRECT,
        protocol=Protocol.SIMPLE,
        latency_s=nccl.BASE_S[Algorithm.RING][Protocol.LL] + hop,
        bandwidth_s=bandwidth_s,
        n_channels=n_channels(setting),
        bottleneck=link,
    )


def send_matrix(call: CollectiveCall) -> exchange.Matrix:
    """Bytes from each member to each other."""
    if call.send_bytes is not None:
        matrix = np.array(call.send_bytes, dtype=float)
        np.fill_diagonal(matrix, 0.0)
        return matrix
    if call.op == "all_to_all":
        return exchange.uniform(call.n_ranks, call.bytes)
    if call.op == "send_recv":
        return exchange.shift(call.n_ranks, call.bytes)
    return exchange.rooted(call.n_ranks, call.bytes, gather=call.op == "gather")
