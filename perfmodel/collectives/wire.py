"""Collectives between hosts: NCCL's model, corrected by what posted tables show of each transport.

A transport is a way of moving bytes between hosts (InfiniBand, RoCE, Amazon's EFA, TCP with GPUDirect). Four figures each:

    time = latency + hops x port_s + bandwidth part / bandwidth_frac + levels x fill_s x bytes / (bytes + half_bytes)

`hops` are the network crossings of the first byte, `levels` the stages of the pipeline between hosts that must fill before it
runs at full rate; latency and bandwidth part are NCCL's model on the machine's links. In-switch trees also cannot pass
`channel_bytes_per_s` for each of their channels between hosts.
"""

from __future__ import annotations

import math
from dataclasses import replace

from perfmodel.collectives.candidates import Candidate
from perfmodel.collectives.group import Group
from perfmodel.collectives.nccl_tables import Algorithm
from perfmodel.db.wire import WireFit, WireFits

USUAL_RANKS = 8


def n_hops(candidate: Candidate, op: str, n_units: int) -> int:
    """Network crossings of the first byte.

    Trees go up and down; rings of an all_reduce go round twice; an exchange asks and answers.
    """
    if candidate.algorithm in (Algorithm.TREE, Algorithm.NVLS_TREE):
        return 2 * math.floor(math.log2(n_units))
    if candidate.algorithm is Algorithm.DIRECT:
        return 2
    return (2 if op == "all_reduce" else 1) * (n_units - 1)


def n_levels(candidate: Candidate, group: Group) -> float:
    """Stages of the pipeline: a tree's levels (one for a ring), each as long as the chain of ranks in a unit.

    In units of eight ranks, the node that most tables have.
    """
    trees = (Algorithm.TREE, Algorithm.NVLS_TREE)
    depth = math.floor(math.log2(group.n_units)) if candidate.algorithm in trees else 1
    return depth * group.per_unit / USUAL_RANKS


def over_wire(candidate: Candidate, op: str, n_bytes: float, group: Group, fit: WireFit) -> Candidate:
    """The candidate with this transport's latency, share of bandwidth and filling of the pipeline."""
    fill_s = n_levels(candidate, group) * fit.fill_s * n_bytes / (n_bytes + fit.half_bytes)
    bandwidth_s = candidate.bandwidth_s / fit.bandwidth_frac
    if candidate.algorithm is Algorithm.NVLS_TREE:
        algbw = candidate.n_channels * fit.channel_bytes_per_s / (1 if group.n_units == 2 else 2)
        bandwidth_s = max(bandwidth_s, n_bytes / algbw)
    return replace(
        candidate,
        latency_s=candidate.latency_s + n_hops(candidate, op, group.n_units) * fit.port_s,
        bandwidth_s=bandwidth_s + fill_s,
    )


def wire_of(group: Group, fits: WireFits | None) -> WireFit | None:
    """The figures of the group's transport; None inside one unit, or for a transport without tables."""
    if fits is None or group.inter is None:
        return None
    return fits.get(group.transport)
