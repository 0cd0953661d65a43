"""Peak of a CPU's rank under `fully_shard`: every copy that FSDP2 and gloo make, from when it is made until it is freed.

The same tensors whose time `plan/host_states.py` accounts for, read from torch 2.13 (`_fsdp_param_group.py`,
`_fsdp_collectives.py`, `_fsdp_state.py`, `ProcessGroupGloo.cpp`). Gathers are not asynchronous, so a unit that is fetched
ahead lies there flat until its turn; in forward a flat tensor stays until the next unit's gather is over, or forward is. Gloo
gathers into a copy of the flat tensor and reduces a copy of the gradients. Gradients of a unit stay whole until its last one
is made: those of the rest (the head's is the first of all) until backward is over.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from perfmodel.graph import Graph, Storage
from perfmodel.plan.host_states import gradients_of
from perfmodel.plan.segments import START
from perfmodel.plan.sharded_states import Unit

Kind = Literal["activations", "gradients", "communication"]
Change = tuple[float, int, Kind]  # moment, bytes, of what

# Moments beside op i, which is at i and frees what it was the last to need at i + 0.5: gathers are before it, reductions
# after it and before the next op's gathers.
_GATHER, _GATHERED, _FREE_LAST, _COPY, _COPIED, _AHEAD, _THERE = (-0.22, -0.20, -0.18, -0.16, -0.14, -0.12, -0.10)
_FREE, _RESHARD, _LAY, _LAID, _SCATTER, _SCATTERED = 0.5, 0.55, 0.60, 0.65, 0.70, 0.75
_LAST = 0.2  # the rest, after the last op's own


@dataclass(frozen=True, slots=True, kw_only=True)
class HostPeak:
    """Bytes at the moment when a rank holds the most, of what is not there all the time."""

    activations_bytes: int
    gradients_bytes: int
    communication_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class HostPasses:
    """Forward and backward of one batch with states divided over `n_shards`; `stays`: forward frees no unit.

    `fetches`: backward gathers a unit while the one after it is at work.
    """

    graph: Graph
    units: Sequence[Unit]
    n_shards: int
    stays: bool
    fetches: bool

    def peak(self) -> HostPeak:
        """What is held at the peak; the rest's whole parameters, which stay, are left out."""
        held: dict[Kind, int] = {"activations": 0, "gradients": 0, "communication": 0}
        best, most = dict(held), 0
        for _, size, kind in sorted(self._changes(), key=lambda change: (change[0], change[1])):
            held[kind] += size
            if sum(held.values()) > most:
                best, most = dict(held), sum(held.values())
        return HostPeak(
            activations_bytes=best["activations"],
            gradients_bytes=best["gradients"],
            communication_bytes=best["communication"],
        )

    def _changes(self) -> Iterator[Change]:
        start = self._first("optimizer")
        for s in self.graph.storages:
            if s.kind in ("activation", "input") and s.born < start:
                yield from _lives(s.bytes, max(s.born, 0), s.dies + _FREE, "activations")
        yield from self._forward()
        yield from self._backward(start)
        yield from self._reductions(start)

    def _first(self, phase: str) -> int:
        return next((i for i, op in enumerate(self.graph.ops) if op.phase == phase), len(self.graph.ops))

    @property
    def _parts(self) -> list[Unit]:
        return [unit for unit in self.units if not unit.is_root]

    def _forward(self) -> Iterator[Change]:
        """Gathers, each flat tensor until the next one's is over, and whole parameters until their unit's forward is."""
        order = sorted(self.units, key=lambda unit: (not unit.is_root, unit.first))
        begins = [0 if unit.is_root else unit.first for unit in order]
        over = self._forward_end() + _FREE
        for number, (unit, begin) in enumerate(zip(order, begins, strict=True)):
            shift = -1 if unit.is_root else 0  # before anything else
            yield from _lives(unit.bytes, begin + shift + _GATHER, begin + shift + _GATHERED)
            after = begins[number + 1] + _FREE_LAST if number + 1 < len(order) else over
            yield from _lives(unit.bytes, begin + shift + _GATHER, after)
            if not unit.is_root:
                end = unit.complete + _RESHARD if self.stays else self._last_op(unit) + _RESHARD
                yield from _lives(unit.bytes, begin + _COPY, end)

    def _forward_end(self) -> int:
        return max((i for i, op in enumerate(self.graph.ops) if op.phase == "forward"), default=0)

    def _last_op(self, unit: Unit) -> int:
        """The last op of a unit's forward."""
        under = (unit.path, f"{unit.path}.")
        return max(
            (
                i
                for i, op in enumerate(self.graph.ops)
                if op.phase == "forward" and (op.module == under[0] or op.module.startswith(under[1]))
            ),
            default=unit.first,
        )

    def _backward(self, start: int) -> Iterator[Change]:
        """Units gathered again: the first when its turn comes, the others ahead where they are fetched."""
        if self.stays:
            return
        before: Unit | None = None
        for unit in sorted((u for u in self._parts if u.backward != START), key=lambda u: u.backward):
            ahead = before is not None and self.fetches
            asked = before.backward + _AHEAD if before is not None and ahead else unit.backward + _GATHER
            yield from _lives(unit.bytes, asked, asked + _THERE - _AHEAD)
            yield from _lives(unit.bytes, asked, unit.backward + _COPIED)
            end = unit.complete if unit.complete != START else start
            yield from _lives(unit.bytes, unit.backward + _COPY, end + _RESHARD)
            before = unit

    def _reductions(self, start: int) -> Iterator[Change]:
        """Gradients until they are laid by rank, that tensor until the next reduction, gloo's copy of it, the shard."""
        storages = {s.id: s for s in self.graph.storages}
        order = sorted(self.units, key=lambda unit: (unit.is_root, unit.complete))
        ends = [start - 1 + _LAST if unit.is_root else float(unit.complete) for unit in order]
        for number, (unit, end) in enumerate(zip(order, ends, strict=True)):
            if unit.complete == START:
                continue
            gradients = _storages_of(self.graph, unit, storages)
            size = sum(s.bytes for s in gradients)
            for s in gradients:
                yield from _lives(s.bytes, s.born, end + _LAID, "gradients")
            yield end + _SCATTER, -(-size // self.n_shards), "gradients"
            following = ends[number + 1] + _RESHARD if number + 1 < len(ends) else end + 1
            yield from _lives(size, end + _LAY, following)
            yield from _lives(size, end + _SCATTER, end + _SCATTERED)


def _storages_of(graph: Graph, unit: Unit, storages: dict[int, Storage]) -> list[Storage]:
    found = {spec.storage for spec in gradients_of(graph, unit.parameters)}
    return [storages[storage] for storage in sorted(found) if storage in storages]


def _lives(size: int, born: float, dies: float, kind: Kind = "communication") -> Iterator[Change]:
    yield born, size, kind
    yield dies, -size, kind
