"""Bytes that a collective puts on every link of a machine: what a picture of link load shows. No prices come from here.

The algorithms' own traffic (nccl-tests doc/PERFORMANCE.md; NCCL src/graph/trees.cc for the double binary tree): a ring passes
2 (n - 1) / n of an all_reduce's buffer over every hop, a tree sends all of it up and all of it down, in-switch reduction sends
(1 + 1 / n) of it each way between a rank and its switch, and an exchange sends every pair's bytes along the pair's route.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import pairwise

import numpy as np

from perfmodel.collectives.call import CollectiveCall, bus_factor
from perfmodel.collectives.group import Group, first_by_nic, group_of
from perfmodel.collectives.price import send_matrix
from perfmodel.collectives.regime import PAIRWISE_OPS
from perfmodel.collectives.rings import Lane, best_rings
from perfmodel.collectives.units import Unit
from perfmodel.topology import PathKind, Topology

# One transfer: sender, receiver, bytes.
Transfer = tuple[int, int, float]


def link_bytes(call: CollectiveCall, topology: Topology, algorithm: str) -> dict[str, float]:
    """Bytes by link name that one call moves when run by `algorithm` (as `CollectiveEstimate.algorithm` says)."""
    if call.n_ranks == 1 or call.op == "barrier":
        return {}
    load: dict[str, float] = {}
    group = group_of(topology, call.ranks)
    if algorithm in ("nvls", "nvls_tree"):
        _add_switched(load, call, topology, group)
    for source, target, n_bytes in _transfers(call, topology, group, algorithm):
        for link in topology.route(source, target):
            load[link.name] = load.get(link.name, 0.0) + n_bytes
    return load


def _transfers(call: CollectiveCall, topology: Topology, group: Group, algorithm: str) -> Iterator[Transfer]:
    if call.op in PAIRWISE_OPS:
        yield from _exchange(call)
    elif algorithm == "tree":
        yield from _chains(group, float(call.bytes))
        yield from _trees(topology, group, float(call.bytes))
    elif algorithm in ("nvls", "nvls_tree"):
        yield from _trees(topology, group, float(call.bytes))
    elif group.n_units == 1:
        yield from _rings(best_rings_of(topology, group.units[0]), _passed_on(call))
    else:
        yield from _rings_between(topology, group, _passed_on(call))


def _passed_on(call: CollectiveCall) -> float:
    """Bytes over every hop of a call's rings, all rings together."""
    return call.bytes * bus_factor(call.op, call.n_ranks)


def _exchange(call: CollectiveCall) -> Iterator[Transfer]:
    if call.op == "send_recv" and call.n_ranks == 2:  # what a pipeline sends: one way
        yield call.ranks[0], call.ranks[1], float(call.bytes)
        return
    matrix = send_matrix(call)
    for i, j in np.argwhere(matrix > 0):
        yield call.ranks[i], call.ranks[j], float(matrix[i, j])


@lru_cache(maxsize=256)
def best_rings_of(topology: Topology, unit: Unit) -> Lane:
    """`best_rings`, found once for a unit."""
    return best_rings(topology, unit)


def _rings(lane: Lane, n_bytes: float) -> Iterator[Transfer]:
    """Rings of one unit; those over direct NVLinks run both ways round, half of the bytes each."""
    both = lane.kind is PathKind.NVLINK and len(lane.orders[0][0]) > 2
    for order, share in lane.orders:
        for a, b in pairwise((*order, order[0])):
            if both:
                yield a, b, n_bytes * share / 2
                yield b, a, n_bytes * share / 2
            else:
                yield a, b, n_bytes * share


def _rings_between(topology: Topology, group: Group, n_bytes: float) -> Iterator[Transfer]:
    """One ring per NIC of a unit: through the ranks of each unit, then on from that NIC's rank to the next unit."""
    senders = [first_by_nic(topology, unit) for unit in group.units]
    n_rings = min(len(ranks) for ranks in senders)
    for ring in range(n_rings):
        chains = [_ending_at(unit, ranks[ring]) for unit, ranks in zip(group.units, senders, strict=True)]
        whole = [rank for chain in chains for rank in chain]
        for a, b in pairwise((*whole, whole[0])):
            yield a, b, n_bytes / n_rings


def _ending_at(unit: Unit, last: int) -> tuple[int, ...]:
    """The unit's ranks in ring order, turned so that `last` comes last."""
    cut = unit.index(last) + 1
    return unit[cut:] + unit[:cut]


def _chains(group: Group, n_bytes: float) -> Iterator[Transfer]:
    """Inside each unit a tree is a chain: everything goes up it and comes down it."""
    for unit in group.units:
        for a, b in pairwise(unit):
            yield a, b, n_bytes
            yield b, a, n_bytes


def _trees(topology: Topology, group: Group, n_bytes: float) -> Iterator[Transfer]:
    """Between units: two binary trees, each with half of the bytes up and down, spread over the NICs."""
    if group.n_units == 1:
        return
    senders = [first_by_nic(topology, unit) for unit in group.units]
    n_nics = min(len(ranks) for ranks in senders)
    for child, parent in double_binary_tree(group.n_units):
        for nic in range(n_nics):
            ends = senders[child][nic], senders[parent][nic]
            yield *ends, n_bytes / 2 / n_nics
            yield *ends[::-1], n_bytes / 2 / n_nics


def double_binary_tree(n: int) -> list[tuple[int, int]]:
    """(child, parent) edges of NCCL's two trees over `n` places, the second mirrored (n even) or shifted (n odd).

    >>> double_binary_tree(2)
    [(1, 0), (0, 1)]
    """
    first = [(rank, parent) for rank in range(1, n) if (parent := _parent(rank, n)) >= 0]
    moved = {rank: n - 1 - rank if n % 2 == 0 else (rank + 1) % n for rank in range(n)}
    return [*first, *((moved[child], moved[parent]) for child, parent in first)]


def _parent(rank: int, n: int) -> int:
    """Parent in NCCL's binary tree (ncclGetBtree): flip the lowest set bit up, or clear it where that leaves the tree."""
    bit = rank & -rank
    up = (rank ^ bit) | (bit << 1)
    return up if up < n else rank ^ bit


def _add_switched(load: dict[str, float], call: CollectiveCall, topology: Topology, group: Group) -> None:
    """In-switch reduction: (1 + 1 / n) of the bytes from each rank to its switch, and as many back."""
    for unit in group.units:
        n_bytes = call.bytes * (1 + 1 / len(unit))
        for rank, other in zip(unit, (*unit[1:], unit[0]), strict=True):
            for link in (topology.route(rank, other)[0], topology.route(other, rank)[-1]):
                load[link.name] = load.get(link.name, 0.0) + n_bytes


def total_bytes(parts: Iterable[dict[str, float]]) -> dict[str, float]:
    """The sum by link of several loads."""
    total: dict[str, float] = {}
    for part in parts:
        for name, n_bytes in part.items():
            total[name] = total.get(name, 0.0) + n_bytes
    return total


def groups_of(ranks: tuple[int, ...], siblings: Sequence[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """A collective's group and those that do the same at the same time, each once."""
    return list(dict.fromkeys((ranks, *siblings)))
