"""What a group of ranks looks like to a collective: units of near ranks, rings inside them, NICs between them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from perfmodel.collectives.rings import Lane, best_rings
from perfmodel.collectives.units import MAX_GROUPS, Unit, Units, units_of
from perfmodel.topology import Link, LinkKind, PathKind, Topology

_NETWORK_KINDS = frozenset({LinkKind.INFINIBAND, LinkKind.ROCE, LinkKind.TCP})
# A RoCE port slower than this is an EFA card (15.5 us half a round trip, AWS 2019), not a NIC of 1-2 us.
EFA_PORT_S = 5e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """A group of ranks on a machine.

    A unit is what NCCL calls a node: the ranks of one host, or of one NVLink domain where NVSwitches join hosts.

    Attributes:
        n_ranks: size of the group.
        units: its units, each with its ranks.
        intra: the lane inside the units (the slowest of them); None where every unit is one rank.
        inter: the lane between units; None where there is one unit.
        n_nics: NICs that a unit uses (the fewest).
        transport: what moves bytes between units: infiniband, roce, efa, tcp; empty where there is one unit.
        device: the device of its first rank, for what depends on the GPU's generation.
    """

    n_ranks: int
    units: tuple[Unit, ...]
    intra: Lane | None
    inter: Lane | None
    n_nics: int
    transport: str
    device: str

    @property
    def n_units(self) -> int:
        """Number of units."""
        return len(self.units)

    @property
    def per_unit(self) -> int:
        """Ranks of the fullest unit."""
        return max(len(unit) for unit in self.units)


@lru_cache(maxsize=MAX_GROUPS)
def group_of(topology: Topology, ranks: tuple[int, ...]) -> Group:
    """The group's units and lanes. Raises TopologyError where two members have no path."""
    flat = units_of(topology, ranks)
    units = flat.tuples()
    inter, n_nics = _inter_lane(topology, flat) if len(units) > 1 else (None, 0)
    return Group(
        n_ranks=len(ranks),
        units=units,
        intra=_intra_lane(topology, flat),
        inter=inter,
        n_nics=n_nics,
        transport=_transport(topology, units) if len(units) > 1 else "",
        device=topology.ranks[ranks[0]].device,
    )


@lru_cache(maxsize=MAX_GROUPS)
def likeness_of(topology: Topology, ranks: tuple[int, ...]) -> tuple[object, ...]:
    """What the price of a group's ring or tree follows from: everything but names and numbers of ranks, hosts and links."""
    group = group_of(topology, ranks)
    sizes = [len(unit) for unit in group.units]
    lanes = [lane and lane.likeness for lane in (group.intra, group.inter)]
    kind = topology.host_kind(topology.ranks[ranks[0]].host)
    return group.n_ranks, len(sizes), min(sizes), max(sizes), *lanes, group.n_nics, group.transport, group.device, kind


def _transport(topology: Topology, units: Sequence[Unit]) -> str:
    """The kind of the cards on the way from the first unit to the second."""
    cards = [link for link in topology.pair(units[0][0], units[1][0]).links if link.kind in _NETWORK_KINDS]
    if not cards:
        return ""
    if cards[0].kind is LinkKind.ROCE and max(card.latency_s for card in cards) >= EFA_PORT_S:
        return "efa"
    return cards[0].kind.value


def _intra_lane(topology: Topology, units: Units) -> Lane | None:
    sizes = units.size
    examples = [at for at in units.examples.tolist() if sizes[at] > 1]
    lanes = [best_rings(topology, units.at(at)) for at in examples]
    return min(lanes, key=lambda lane: (lane.bus_bytes_per_s, lane.link.name), default=None)


def _inter_lane(topology: Topology, units: Units) -> tuple[Lane, int]:
    """The lane from each unit to the next, the slowest of them, and the fewest NICs that a unit uses."""
    n_units = len(units.shape)
    following = np.roll(np.arange(n_units), -1)
    leaf = topology.columns.leaf[units.first]
    same_leaf = (leaf == leaf[following]) & (leaf >= 0)
    step = (units.shape * n_units + units.shape[following]) * 2 + same_leaf
    examples = np.sort(np.unique(step, return_index=True)[1]).tolist()
    lanes = [_step_lane(topology, units.at(at), units.at(int(following[at]))) for at in examples]
    slowest = min(lanes, key=lambda lane: (lane[0].bus_bytes_per_s, lane[0].link.name))
    return slowest[0], min(n_nics for _, n_nics in lanes)


def _step_lane(topology: Topology, unit: Unit, following: Unit) -> tuple[Lane, int]:
    """One flow per NIC of a unit to the NIC of its place in the next unit, all at once."""
    senders, receivers = first_by_nic(topology, unit), first_by_nic(topology, following)
    n_flows = min(len(senders), len(receivers))
    pairs = [topology.pair(a, b) for a, b in zip(senders[:n_flows], receivers[:n_flows], strict=True)]
    load: dict[str, int] = {}
    named: dict[str, Link] = {}
    for pair in pairs:
        for link in pair.links:
            load[link.resource] = load.get(link.resource, 0) + 1
            named.setdefault(link.resource, link)
    tightest = min(load, key=lambda name: (named[name].bandwidth_bytes_per_s / load[name], name))
    lane = Lane(
        bus_bytes_per_s=n_flows * named[tightest].bandwidth_bytes_per_s / load[tightest],
        hop_s=max(pair.latency_s for pair in pairs),
        link=named[tightest],
        kind=PathKind.NETWORK,
        orders=(),
    )
    return lane, n_flows


def first_by_nic(topology: Topology, unit: Unit) -> list[int]:
    """The first rank of each NIC that the unit's ranks use; the unit's first rank where there are no NICs."""
    firsts: dict[str, int] = {}
    for rank in unit:
        nics = topology.ranks[rank].nics
        if nics:
            firsts.setdefault(nics[0], rank)
    return list(firsts.values()) or [unit[0]]
