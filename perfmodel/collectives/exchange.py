"""All-to-all and send/recv: every pair is a flow on its own route, and flows share links.

Inside one unit the flows are followed exactly (max-min fair) for small groups; larger groups, and groups over several
units, take as long as their busiest link needs, which is a lower bound that a well-scheduled exchange reaches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from perfmodel.collectives.flows import capacities, ends_of
from perfmodel.collectives.group import Group
from perfmodel.collectives.sent import Matrix, Sent
from perfmodel.collectives.units import Unit, units_of
from perfmodel.topology import Link, Topology
from perfmodel.topology.flat import FloatArray, IntArray

MAX_EXACT_RANKS = 16
MAX_GROUPS = 256  # of so few ranks, whose routes are remembered


def exchange_time(
    topology: Topology, group: Group, ranks: Sequence[int], send_bytes: Matrix | Sent
) -> tuple[float, str]:
    """Time (s) for `send_bytes[i, j]` from the i-th to the j-th rank, all pairs at once, and the busiest link's name."""
    sent = send_bytes if isinstance(send_bytes, Sent) else Sent.of_matrix(send_bytes)
    if group.n_units == 1 and len(ranks) <= MAX_EXACT_RANKS:
        return _exact(topology, ranks, sent.block(np.arange(len(ranks))))
    return _by_ends(topology, group, ranks, sent)


def uniform(n_ranks: int, n_bytes: float) -> Matrix:
    """The matrix of an all_to_all with a send buffer of `n_bytes`: an n-th of it to every rank, its own part stays."""
    matrix = np.full((n_ranks, n_ranks), n_bytes / n_ranks)
    np.fill_diagonal(matrix, 0.0)
    return matrix


def shift(n_ranks: int, n_bytes: float) -> Matrix:
    """The matrix of nccl-tests' sendrecv: every rank sends the whole buffer to the next."""
    return n_bytes * np.roll(np.eye(n_ranks), 1, axis=1)


def rooted(n_ranks: int, n_bytes: float, *, gather: bool) -> Matrix:
    """The matrix of a gather to, or a scatter from, the first rank."""
    matrix = np.zeros((n_ranks, n_ranks))
    matrix[0, 1:] = n_bytes / n_ranks
    return matrix.T if gather else matrix


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Pairs:
    """Routes between all pairs of ranks (places `first` and `second`): how often each crosses each resource.

    `limits` are the resources' bytes a second, in the order of their names.
    """

    first: IntArray
    second: IntArray
    routes: tuple[tuple[Link, ...], ...]
    crossings: Matrix
    limits: FloatArray
    names: tuple[str, ...]


@lru_cache(maxsize=MAX_GROUPS)
def _pairs(topology: Topology, ranks: tuple[int, ...]) -> _Pairs:
    places = [(i, j) for i in range(len(ranks)) for j in range(len(ranks)) if i != j]
    routes = tuple(topology.route(ranks[i], ranks[j]) for i, j in places)
    capacity = capacities(routes)
    column = {name: number for number, name in enumerate(sorted(capacity))}
    crossings = np.zeros((len(routes), len(column)))
    for row, links in enumerate(routes):
        for link in links:
            crossings[row, column[link.resource]] += 1
    return _Pairs(
        first=np.array([i for i, _ in places], dtype=np.int64),
        second=np.array([j for _, j in places], dtype=np.int64),
        routes=routes,
        crossings=crossings,
        limits=np.array([capacity[name] for name in column], dtype=float),
        names=tuple(column),
    )


def _exact(topology: Topology, ranks: Sequence[int], send_bytes: Matrix) -> tuple[float, str]:
    pairs = _pairs(topology, tuple(ranks))
    total = send_bytes[pairs.first, pairs.second]
    moves = np.flatnonzero(total > 0)
    if not len(moves):
        return 0.0, ""
    crossings = pairs.crossings[moves]
    time_s = float(ends_of(crossings, pairs.limits, total[moves]).max())
    loads_s = (total[moves, None] * crossings).sum(axis=0) / pairs.limits
    busiest = max(np.flatnonzero(loads_s == loads_s.max()).tolist())  # of several the last by name
    route = pairs.routes[moves[np.flatnonzero(crossings[:, busiest])[0]]]
    return time_s, next(link.name for link in route if link.resource == pairs.names[busiest])


class _Loads:
    """Bytes that each shared resource carries."""

    def __init__(self) -> None:
        self._bytes: dict[str, float] = {}
        self._link: dict[str, Link] = {}

    def add(self, links: Sequence[Link], n_bytes: float) -> None:
        for link in links:
            self._bytes[link.resource] = self._bytes.get(link.resource, 0.0) + n_bytes
            self._link.setdefault(link.resource, link)

    def busiest(self) -> tuple[float, str]:
        """Seconds of the resource that needs longest, and the name of a link of it."""
        times = {name: n_bytes / self._link[name].bandwidth_bytes_per_s for name, n_bytes in self._bytes.items()}
        name = max(times, key=lambda key: (times[key], key), default="")
        return (times[name], self._link[name].name) if name else (0.0, "")


def _by_ends(topology: Topology, group: Group, ranks: Sequence[int], sent: Sent) -> tuple[float, str]:
    """Loads counted at each rank's ends: inside its unit pair by pair, to other units summed. One unit of each equal sort."""
    place = {rank: index for index, rank in enumerate(ranks)}
    indices = [np.array([place[rank] for rank in unit]) for unit in group.units]
    gives, gets = sent.sent(), sent.received()
    worst: tuple[float, str] = (0.0, "")
    seen: set[object] = set()
    shapes = units_of(topology, tuple(ranks)).shape.tolist()
    for number, (unit, index) in enumerate(zip(group.units, indices, strict=True)):
        inside = sent.block(index)
        out, back = gives[index] - inside.sum(axis=1), gets[index] - inside.sum(axis=0)
        key = (shapes[number], inside.tobytes(), out.tobytes(), back.tobytes())
        if key in seen:
            continue
        seen.add(key)
        other = group.units[(number + 1) % group.n_units]
        worst = max(worst, _unit_load(topology, unit, other, (inside, out, back)))
    return max(worst, _uplink_load(topology, indices, ranks, sent)) if group.n_units > 1 else worst


def _unit_load(
    topology: Topology, unit: Unit, other: Unit, n_bytes: tuple[Matrix, Matrix, Matrix]
) -> tuple[float, str]:
    inside, out, back = n_bytes
    loads = _Loads()
    for i, first in enumerate(unit):
        for j, second in enumerate(unit):
            if i != j and inside[i, j] > 0:
                loads.add(topology.route(first, second), float(inside[i, j]))
    if other != unit:
        for i, rank in enumerate(unit):
            peer = other[i % len(other)]
            loads.add(_near_end(topology, rank, topology.route(rank, peer)), float(out[i]))
            loads.add(_near_end(topology, rank, topology.route(peer, rank)), float(back[i]))
    return loads.busiest()


def _near_end(topology: Topology, rank: int, links: Sequence[Link]) -> list[Link]:
    """The part of a route that belongs to a rank's own host, its port at the leaf included."""
    home = f"h{topology.ranks[rank].host}/"
    return [link for link in links if link.source.startswith(home) or link.target.startswith(home)]


def _uplink_load(
    topology: Topology, indices: Sequence[IntArray], ranks: Sequence[int], sent: Sent
) -> tuple[float, str]:
    """Bytes that leave each leaf switch, over its uplink; nothing where one leaf holds all NICs. `indices`: of units."""
    unit_of = np.empty(len(ranks), dtype=np.int64)
    for number, index in enumerate(indices):
        unit_of[index] = number
    leaves = [topology.network.leaf_of(topology.ranks[rank].nics[0]) for rank in ranks]
    names = sorted(set(leaves))
    if len(names) == 1:
        return 0.0, ""
    number_of = {name: number for number, name in enumerate(names)}
    leaf_of = np.array([number_of[leaf] for leaf in leaves])
    out, back = _crossing(indices, leaf_of, sent)
    worst: tuple[float, str] = (0.0, "")
    for number, name in enumerate(names):
        pair = _crossing_pair(leaf_of, unit_of, number)
        if pair is None:
            continue
        first, second = (ranks[at] for at in pair)
        for route, n_bytes in (
            (topology.route(first, second), out[number]),
            (topology.route(second, first), back[number]),
        ):
            up = [k for k in route if k.source.startswith("net/") and k.target.startswith("net/")]
            for link in (k for k in up if name in (k.source, k.target)):
                worst = max(worst, (float(n_bytes) / link.bandwidth_bytes_per_s, link.name))
    return worst


def _crossing(indices: Sequence[IntArray], leaf_of: IntArray, sent: Sent) -> tuple[FloatArray, FloatArray]:
    """Bytes that leave each leaf, and that come to it: to and from members of other units on other leaves."""
    near = sent.within(leaf_of)
    out, back = sent.sent() - near[0], sent.received() - near[1]
    for index in indices:
        leaf = leaf_of[index]
        if (leaf != leaf[0]).any():
            aside = np.where(leaf[:, None] != leaf[None, :], sent.block(index), 0.0)
            out[index] -= aside.sum(axis=1)
            back[index] -= aside.sum(axis=0)
    return np.bincount(leaf_of, out).astype(float), np.bincount(leaf_of, back).astype(float)


def _crossing_pair(leaf_of: IntArray, unit_of: IntArray, leaf: int) -> tuple[int, int] | None:
    """The first member of a leaf and of another one whose bytes cross the uplink; None where all are of one unit."""
    for at in np.flatnonzero(leaf_of == leaf).tolist():
        others = np.flatnonzero((leaf_of != leaf) & (unit_of != unit_of[at]))
        if len(others):
            return at, int(others[0])
    return None
