"""Gloo over loopback or TCP, for CPU ranks: rings and pairwise exchanges, one message after the other.

all_reduce is a segmented ring (gloo/allreduce.cc), all_gather a ring, reduce_scatter an all_reduce that keeps a part
(ProcessGroupGloo), all_to_all pairwise, broadcast and reduce binomial trees. Every hop costs the loopback's latency, every
byte its bandwidth.
"""

from __future__ import annotations

import math

from perfmodel.collectives.call import CollectiveCall
from perfmodel.collectives.candidates import Candidate
from perfmodel.collectives.group import Group
from perfmodel.collectives.nccl_tables import Algorithm, Protocol
from perfmodel.collectives.price import Price
from perfmodel.estimate import Source


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


def price(call: CollectiveCall, group: Group) -> Price:
    """The time by the links' own figures."""
    lane = min((lane for lane in (group.intra, group.inter) if lane is not None), key=lambda lane: lane.bus_bytes_per_s)
    hop_s = max(lane.hop_s for lane in (group.intra, group.inter) if lane is not None)
    rounds, moved = rounds_and_bytes(call.op, call.n_ranks, call.bytes)
    candidate = Candidate(
        algorithm=Algorithm.RING if call.op in ("all_reduce", "all_gather", "reduce_scatter") else Algorithm.DIRECT,
        protocol=Protocol.NONE,
        latency_s=rounds * hop_s,
        bandwidth_s=moved / lane.bus_bytes_per_s,
        n_channels=1,
        bottleneck=lane.link.name,
    )
    return Price(candidate=candidate, source=Source.ROOFLINE, range_frac=(0.75, 1.35))
