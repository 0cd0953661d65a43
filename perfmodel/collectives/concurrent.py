"""Collectives that run at the same time share links: who slows whom, and when each ends.

Alone, a collective moves its bytes in its bandwidth part. Each link that it uses is busy for a share of that time, the
limiting one all of it. Together, the speeds of all are raised evenly until a link is full, whose users then stay (max-min
fair), until one ends and the others speed up. Latency parts do not share anything.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from perfmodel.collectives.call import CollectiveCall, CollectiveEstimate
from perfmodel.collectives.estimate import Fits, estimate_collectives
from perfmodel.collectives.flows import max_min_rates
from perfmodel.collectives.price import send_matrix
from perfmodel.collectives.regime import PAIRWISE_OPS
from perfmodel.collectives.ring_flows import ring_flows
from perfmodel.collectives.units import MAX_GROUPS
from perfmodel.topology import Topology
from perfmodel.topology.flat import FloatArray, IntArray

_DONE_S = 1e-15
_MIXER = (
    0x9E3779B97F4A7C15  # 2 ** 64 over the golden ratio, odd: multiples of it spread over all bits (Knuth, vol. 3, 6.4)
)
MAX_SETS = 256  # of groups at once, whose links in common are remembered

Groups = tuple[tuple[int, ...], ...]


class Shares(NamedTuple):
    """For each resource that a collective uses, the share of its bandwidth part during which it is busy: 1 for the busiest."""

    resource: IntArray
    busy: FloatArray


_NOTHING = Shares(np.empty(0, dtype=np.int64), np.empty(0))


def estimate_concurrent(
    calls: Sequence[CollectiveCall], topology: Topology, *, fits: Fits | None = None
) -> list[CollectiveEstimate]:
    """Estimates of collectives that all start at once, in order, each stretched by what the others do to its links.

    Raises what estimate_collective raises.
    """
    alone = estimate_collectives(calls, topology, fits=fits)
    if any(call.op in PAIRWISE_OPS for call in calls):
        uses = _uses([_busy_shares(call, topology) for call in calls])
    else:
        uses = _uses_of_rings(tuple(call.ranks for call in calls), topology)
    ends = _finish([(e.latency_s, e.bandwidth_s) for e in alone], uses)
    return [_stretched(estimate, end) for estimate, end in zip(alone, ends, strict=True)]


def _stretched(alone: CollectiveEstimate, end_s: float) -> CollectiveEstimate:
    factor = end_s / alone.time_s if alone.time_s > 0 else 1.0
    if factor <= 1.0:
        return alone
    return replace(
        alone,
        estimate=alone.estimate.scaled(factor),
        bandwidth_s=end_s - alone.latency_s,
        algbw_bytes_per_s=alone.algbw_bytes_per_s / factor,
        busbw_bytes_per_s=alone.busbw_bytes_per_s / factor,
    )


def _busy_shares(call: CollectiveCall, topology: Topology) -> Shares:
    if call.op not in PAIRWISE_OPS:
        return _ring_shares(call.ranks, topology)
    if call.n_ranks < 2:
        return _NOTHING
    matrix, ranks = send_matrix(call), np.array(call.ranks, dtype=np.int64)
    i, j = np.nonzero(matrix > 0)
    return _shares(topology, ranks[i], ranks[j], matrix[i, j])


@lru_cache(maxsize=MAX_GROUPS)
def _ring_shares(ranks: tuple[int, ...], topology: Topology) -> Shares:
    """`_busy_shares` of a collective on rings, whatever its bytes."""
    return _shares(topology, *ring_flows(topology, ranks)) if len(ranks) > 1 else _NOTHING


def _shares(topology: Topology, first: IntArray, second: IntArray, n_bytes: FloatArray) -> Shares:
    """Of so many bytes from each rank to the other at its place."""
    crossed = topology.flat_routes.of(first, second)
    resource, at = np.unique(crossed.resource, return_inverse=True)
    busy_s = np.bincount(at.reshape(-1), weights=n_bytes[crossed.pair] / crossed.bandwidth_bytes_per_s)
    return Shares(resource, busy_s / busy_s.max()) if len(resource) else _NOTHING


@lru_cache(maxsize=MAX_SETS)
def _uses_of_rings(groups: Groups, topology: Topology) -> FloatArray:
    return _uses([_ring_shares(ranks, topology) for ranks in groups])


def _uses(shares: Sequence[Shares]) -> FloatArray:
    """By collective and resource the share of its time that it keeps the resource busy.

    Resources that all use alike fill up together, so one of them stands for all. One private resource each keeps a speed at or
    below that of running alone.
    """
    names, column = np.unique(np.concatenate([share.resource for share in shares]), return_inverse=True)
    row = np.repeat(np.arange(len(shares)), [len(share.resource) for share in shares])
    uses = np.zeros((len(names), len(shares)))
    uses[column.reshape(-1), row] = np.concatenate([share.busy for share in shares])
    return np.concatenate([_different_rows(uses).T, np.eye(len(shares))], axis=1)


def _different_rows(rows: FloatArray) -> FloatArray:
    """Each row once. By a sum over its bits, which equal rows share; np.unique would sort whole rows, 20 times as slow."""
    bits = rows.view(np.int64)
    mixed = (bits ^ (bits >> 29)) @ np.array([pow(_MIXER, at + 1, 2**63) for at in range(bits.shape[1])])
    _, first, at = np.unique(mixed, return_index=True, return_inverse=True)
    if np.array_equal(rows[first][at.reshape(-1)], rows):
        return rows[first]
    return np.unique(rows, axis=0)  # different rows with one sum


def _finish(parts: Sequence[tuple[float, float]], uses: FloatArray) -> list[float]:
    """End of each collective (s) from its (latency, bandwidth) parts and its uses of resources."""
    begins = np.array([latency for latency, _ in parts])
    left = np.array([bandwidth for _, bandwidth in parts])
    ends, clock = begins.copy(), 0.0
    while (left > _DONE_S).any():
        running = np.flatnonzero((left > _DONE_S) & (begins <= clock + _DONE_S))
        waiting = begins[(left > _DONE_S) & (begins > clock + _DONE_S)]
        if not len(running):
            clock = float(waiting.min())
            continue
        speeds: FloatArray = max_min_rates(uses[running], np.ones(uses.shape[1]))
        step = float((left[running] / speeds).min())
        if len(waiting):
            step = min(step, float(waiting.min()) - clock)
        left[running] -= speeds * step
        clock += step
        ends[running] = np.where(left[running] <= _DONE_S, clock, ends[running])
    return [float(end) for end in ends]
