"""Gloo over loopback or TCP, for CPU ranks: rings and pairwise exchanges, one message after the other.

Beside its duration a collective costs a CPU rank the call itself, and processor time of gloo's threads while it runs; both
were measured with it (`calibrate.collectives`).

all_reduce is a segmented ring (gloo/allreduce.cc), all_gather a ring, reduce_scatter an all_reduce that keeps a part
(ProcessGroupGloo), all_to_all pairwise, broadcast and reduce binomial trees. Every hop costs the loopback's latency, every
byte its bandwidth.
"""

from __future__ import annotations

import math
from dataclasses import replace

from perfmodel.collectives import fitted
from perfmodel.collectives.call import CollectiveCall, CollectiveEstimate
from perfmodel.collectives.candidates import Candidate
from perfmodel.collectives.group import Group
from perfmodel.collectives.nccl_tables import Algorithm, Protocol
from perfmodel.collectives.price import Price, fitted_price
from perfmodel.db.fabric import FabricFit
from perfmodel.estimate import Source

GLOO_REGIME = f"{Algorithm.DIRECT}_{Protocol.NONE}"
# Range by the links' figures alone: processes share cores with each other, so three times is common.
UNFITTED_RANGE = (0.5, 3.0)


def rounds_and_bytes(op: str, n_ranks: int, n_bytes: float) -> tuple[int, float]:
    """Messages that one rank sends one after the other, and the bytes that it sends in all.

    >>> rounds_and_bytes("all_reduce", 4, 400.0)
    (6, 600.0)
    """
    share = (n_ranks - 1) / n_ranks
    if op in ("all_reduce", "reduce_scatter"):
        return 2 * (n_ranks - 1), 2 * share * n_bytes
    if op in ("broadcast", "reduce", "gather", "scatter"):
        return math.ceil(math.log2(n_ranks)), n_bytes
    if op == "send_recv":
        return 1, n_bytes
    return n_ranks - 1, share * n_bytes


def price(call: CollectiveCall, group: Group, fit: FabricFit | None) -> Price:
    """By the fit of the loopback where the group is on one host and the operation was measured, else by the links' figures."""
    candidate = _modelled(call, group)
    key = ("all_to_all" if call.op == "all_to_all_v" else call.op, GLOO_REGIME)
    if fit is None or group.n_units > 1 or key not in fit.regimes:
        return Price(candidate=candidate, source=Source.ROOFLINE, range_frac=UNFITTED_RANGE)
    lane = group.intra
    scale = fitted.reference_bus(fit, call.n_ranks) / lane.bus_bytes_per_s if lane else 1.0
    ask = fitted.Question(
        n_ranks=call.n_ranks,
        n_bytes=float(call.bytes),
        dtype=call.dtype,
        version="",
        link_scale=scale,
        bus_bytes_per_s=math.inf,  # memory copies between processes are not bound by what one TCP stream gets
    )
    return fitted_price(candidate, fitted.regime_time(fit, key, ask), fit, key[0], ask)


def with_host_costs(found: CollectiveEstimate, call: CollectiveCall, fit: FabricFit | None) -> CollectiveEstimate:
    """The estimate with what the ranks' processors spend, by the nearest operation and group size that were measured.

    Asking is what the smallest measured group pays, whose threads had cores to themselves.
    """
    op = "all_to_all" if call.op in ("all_to_all_v", "send_recv") else call.op
    if fit is None or not any(f"issue_s.{op}.n{n}" in fit.fit.parameters for n in fit.group_sizes):
        return found
    sizes = [n for n in fit.group_sizes if f"issue_s.{op}.n{n}" in fit.fit.parameters]
    nearest = min(sizes, key=lambda n: (abs(math.log2(n / call.n_ranks)), n))
    issue_s = _host_s(fit, f"issue_s{{}}.{op}.n{sizes[0]}", call.bytes)
    busy_s = _host_s(fit, f"busy_s{{}}.{op}.n{nearest}", call.bytes)
    return replace(found, issue_s=issue_s, busy_frac=busy_s / found.time_s)


def _host_s(fit: FabricFit, name: str, n_bytes: int) -> float:
    values = fit.fit.parameters
    return values[name.format("")] + values[name.format("_per_byte")] * n_bytes


def _modelled(call: CollectiveCall, group: Group) -> Candidate:
    lanes = [lane for lane in (group.intra, group.inter) if lane is not None]
    lane = min(lanes, key=lambda lane: lane.bus_bytes_per_s)
    hop_s = max(lane.hop_s for lane in lanes)
    rounds, moved = rounds_and_bytes(call.op, call.n_ranks, call.bytes)
    return Candidate(
        algorithm=Algorithm.DIRECT,
        protocol=Protocol.NONE,
        latency_s=rounds * hop_s,
        bandwidth_s=moved / lane.bus_bytes_per_s,
        n_channels=1,
        bottleneck=lane.link.name,
    )
