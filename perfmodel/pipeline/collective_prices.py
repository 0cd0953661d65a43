"""Prices of collectives, each found once for a machine however many plans issue it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from perfmodel.collectives import CollectiveCall, CollectiveEstimate, estimate_collective, estimate_concurrent
from perfmodel.plan import Collective, Placement
from perfmodel.plan.columns import collectives_of
from perfmodel.topology import Topology

Groups = tuple[tuple[int, ...], ...]
MAX_REMEMBERED = 100_000  # estimates, a few hundred bytes each


class CollectivePrices:
    """Estimates by machine, call and the groups beside it. Only ever added to, so threads may share it."""

    def __init__(self) -> None:
        self._found: dict[tuple[str, CollectiveCall, Groups], CollectiveEstimate] = {}
        self._hosts: dict[str, Sequence[int]] = {}

    def of(self, collective: Collective, topology: Topology) -> CollectiveEstimate:
        """The estimate of one collective beside its siblings."""
        call = _call(collective)
        near = self._near(collective, topology)
        key = (topology.fingerprint, call, near)
        found = self._found.get(key)
        if found is None:
            if len(self._found) >= MAX_REMEMBERED:
                self._found = {}
            found = self._found[key] = _estimate(call, near, topology)
        return found

    def of_placement(self, placement: Placement, topology: Topology) -> dict[int, CollectiveEstimate]:
        """The estimate of every collective instance of a placement."""
        found: dict[int, CollectiveEstimate] = {}
        same: dict[tuple[str, int, str, tuple[int, ...], int], CollectiveEstimate] = {}
        for rank_class in placement.classes:
            for instance, collective in collectives_of(rank_class.events):
                if instance in found:
                    continue
                if collective.send_bytes is not None:
                    found[instance] = self.of(collective, topology)
                    continue
                # Hashing thousands of siblings costs more than a price: within a placement they are known by identity.
                key = (collective.op, collective.bytes, collective.dtype, collective.ranks, id(collective.siblings))
                if key not in same:
                    same[key] = self.of(collective, topology)
                found[instance] = same[key]
        return found

    def _near(self, collective: Collective, topology: Topology) -> Groups:
        """Groups that do the same at the same time on the hosts of this one, where links between hosts may be shared."""
        if not collective.siblings:
            return ()
        hosts = self._hosts.get(topology.fingerprint)
        if hosts is None:
            hosts = self._hosts[topology.fingerprint] = [place.host for place in topology.ranks]
        first = [hosts[rank] for rank in collective.ranks]
        if len(set(first)) == 1:
            return ()
        beside = (group for group in collective.siblings if hosts[group[0]] == first[0])
        return tuple(group for group in beside if [hosts[rank] for rank in group] == first)


def _estimate(call: CollectiveCall, near: Groups, topology: Topology) -> CollectiveEstimate:
    if not near:
        return estimate_collective(call, topology)
    return estimate_concurrent([call, *(replace(call, ranks=ranks) for ranks in near)], topology)[0]


def _call(collective: Collective) -> CollectiveCall:
    return CollectiveCall(
        op=collective.op,
        bytes=collective.bytes,
        ranks=collective.ranks,
        dtype=collective.dtype,
        send_bytes=collective.send_bytes,
    )
