"""Verdicts on memory by tier: each rank's device, its host's memory, its host's SSDs."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from perfmodel.pipeline.prediction import RankSummary
from perfmodel.topology import Topology
from perfmodel.units import format_bytes

TIGHT_FRAC = 0.1  # less headroom than this of a tier is tight
Verdict = Literal["fits", "tight", "does not fit", "unknown"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Tier:
    """The fullest rank (`device`) or host (`host`, `ssd`): bytes that it needs and has (0: the topology does not say)."""

    name: str
    where: int
    needed_bytes: int
    capacity_bytes: int

    @property
    def verdict(self) -> Verdict:
        """`fits`, `tight` (little headroom), `does not fit`, or `unknown` where the capacity is."""
        if not self.capacity_bytes:
            return "unknown" if self.needed_bytes else "fits"
        if self.needed_bytes > self.capacity_bytes:
            return "does not fit"
        return "tight" if self.capacity_bytes - self.needed_bytes < TIGHT_FRAC * self.capacity_bytes else "fits"

    @property
    def text(self) -> str:
        """The verdict in words, with by how much."""
        who = f"{'rank' if self.name == 'device' else 'host'} {self.where}"
        if self.verdict == "unknown":
            return f"{self.name}: {who} needs {format_bytes(self.needed_bytes)}; the topology does not say what it has"
        spare = self.capacity_bytes - self.needed_bytes
        words = f"short by {format_bytes(-spare)}" if spare < 0 else f"{format_bytes(spare)} left"
        return (
            f"{self.name}: {self.verdict}, {who} needs {format_bytes(self.needed_bytes)} of "
            f"{format_bytes(self.capacity_bytes)}, {words}"
        )


def tiers_of(ranks: Sequence[RankSummary], topology: Topology) -> tuple[Tier, ...]:
    """The fullest place of each tier; tiers in which nothing lies are left out, but for the device."""
    fullest = max(ranks, key=lambda one: one.memory.total_bytes / max(one.memory_capacity_bytes, 1))
    live = fullest.memory.total_bytes - fullest.memory.allocator_bytes
    device = Tier(
        name="device",
        where=fullest.ranks[0],
        # What the allocator keeps besides live tensors it gives back when memory runs out: such a rank is tight.
        needed_bytes=max(live, min(fullest.memory.total_bytes, fullest.memory_capacity_bytes)),
        capacity_bytes=fullest.memory_capacity_bytes,
    )
    host: Counter[int] = Counter()
    ssd: Counter[int] = Counter()
    for summary in ranks:
        for rank in summary.ranks:
            number = topology.ranks[rank].host
            host[number] += summary.memory.host_bytes
            ssd[number] += summary.memory.ssd_bytes
    has = host_capacities(topology)
    found = [device]
    for place, (name, needs) in enumerate((("host", host), ("ssd", ssd))):
        number = max(needs, key=lambda h: needs[h] / (has[h][place] or math.inf) if has[h][place] else needs[h])
        if needs[number]:
            found.append(
                Tier(name=name, where=number, needed_bytes=needs[number], capacity_bytes=has[number][place] or 0)
            )
    return tuple(found)


def host_capacities(topology: Topology) -> list[tuple[int | None, int | None]]:
    """Bytes of memory and of SSDs of each host, as far as the topology says."""
    groups = topology.spec.node_groups
    return [(node.memory, node.ssd) for count, node in groups for _ in range(count)]


def shares_of_hosts(topology: Topology) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """A rank's even share of its host's memory and SSDs (bytes), infinite where the topology does not say."""
    has = host_capacities(topology)
    mates = Counter(place.host for place in topology.ranks)
    shares = [
        tuple(math.inf if size is None else size / mates[place.host] for size in has[place.host])
        for place in topology.ranks
    ]
    return tuple(share[0] for share in shares), tuple(share[1] for share in shares)
