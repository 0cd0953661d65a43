"""Peak device memory of a rank: parameters, gradients, optimizer state, activations from their lifetimes, buffers."""

from __future__ import annotations

from dataclasses import fields
from functools import partial
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from perfmodel.errors import InfeasiblePlanError
from perfmodel.plan.events import MemoryUse
from perfmodel.plan.facts import KINDS, GraphFacts, IntArray
from perfmodel.units import format_bytes

BoolArray = NDArray[np.bool_]
Part = Literal["iteration", "passes", "optimizer"]


class MemoryShortfallError(InfeasiblePlanError):
    """A rank needs `shortfall_bytes` more memory than its device has."""

    def __init__(self, message: str, shortfall_bytes: int = 0) -> None:
        super().__init__(message)
        self.shortfall_bytes = shortfall_bytes


def dense_memory(facts: GraphFacts, sharded: frozenset[str], n_micro: int = 1, part: Part = "iteration") -> MemoryUse:
    """Peak of a rank that holds everything but the tables `sharded` (parameter names); found once per graph and set.

    Gradients and activations are taken at the moment when their sum is largest; `Storage.born` and `dies` say when each
    lives. With several micro-batches gradients wait for the last one, so they are all there when activations peak. `part`:
    of the whole iteration, of its passes before the optimizer, or of the optimizer's step alone, in which activations are
    what it makes for itself.
    """
    return facts.dense_memory((sharded, n_micro, part), partial(_dense_memory, facts, sharded, n_micro, part))


def _dense_memory(facts: GraphFacts, sharded: frozenset[str], n_micro: int, part: Part) -> MemoryUse:
    columns = facts.storages
    kept = ~np.isin(columns["id"], sorted(table_storages(facts, sharded)))
    if part != "iteration":
        kept &= _within(facts, part)
    kind, size, born, dies = (columns[name][kept] for name in ("kind", "bytes", "born", "dies"))
    n_ops = len(facts.graph.ops)
    passing = np.isin(kind, [KINDS.index("gradient"), KINDS.index("activation"), KINDS.index("input")])
    born = np.where((kind == KINDS.index("gradient")) & (n_micro > 1), -1, born)
    alive = passing & _alive_at_peak(size * passing, born, dies, n_ops)

    def held(name: str, of: BoolArray) -> int:
        return int(size[of & (kind == KINDS.index(name))].sum())

    always = ~passing
    return MemoryUse(
        parameters_bytes=held("parameter", always),
        gradients_bytes=held("gradient", alive),
        optimizer_bytes=held("optimizer_state", always),
        activations_bytes=held("activation", alive) + held("input", alive),
        buffers_bytes=held("buffer", always),
    )


def _within(facts: GraphFacts, part: Part) -> BoolArray:
    """Storages that live in a part of the iteration, those for ever apart: activations of the passes, or of the optimizer."""
    columns = facts.storages
    start = facts.optimizer_start
    made = np.isin(columns["kind"], [KINDS.index("activation"), KINDS.index("input")])
    return ~made | ((columns["born"] < start) if part == "passes" else (columns["born"] >= start))


def _alive_at_peak(size_bytes: IntArray, born: IntArray, dies: IntArray, n_ops: int) -> BoolArray:
    """True for what is alive after the op at which the total is largest, the first such."""
    first, last = np.maximum(born, 0), np.minimum(dies, n_ops)
    change = np.zeros(n_ops + 2, dtype=np.int64)
    np.add.at(change, first, size_bytes)
    np.add.at(change, last + 1, -size_bytes)
    peak = int(np.cumsum(change).argmax())
    alive: BoolArray = (first <= peak) & (peak <= last)
    return alive


def added(first: MemoryUse, second: MemoryUse) -> MemoryUse:
    """Both together, part by part."""
    return MemoryUse(**{f.name: getattr(first, f.name) + getattr(second, f.name) for f in fields(MemoryUse)})


def check_memory(rank: int, memory: MemoryUse, capacity_bytes: int) -> None:
    """Raises MemoryShortfallError, with the parts and the shortfall, if a rank needs more than its device has."""
    if memory.total_bytes <= capacity_bytes:
        return
    parts = {
        "parameters": memory.parameters_bytes,
        "gradients": memory.gradients_bytes,
        "optimizer state": memory.optimizer_bytes,
        "activations": memory.activations_bytes,
        "buffers": memory.buffers_bytes + memory.communication_bytes,
        "allocator": memory.allocator_bytes,
    }
    listed = ", ".join(f"{name} {format_bytes(size)}" for name, size in parts.items() if size)
    raise MemoryShortfallError(
        f"rank {rank} needs {format_bytes(memory.total_bytes)} ({listed}) but its device has "
        f"{format_bytes(capacity_bytes)}: short by {format_bytes(memory.total_bytes - capacity_bytes)}; "
        "use a smaller batch, more ranks or a device with more memory",
        memory.total_bytes - capacity_bytes,
    )


def table_storages(facts: GraphFacts, names: frozenset[str]) -> set[int]:
    """Weights, gradients and states of the tables, and what their backward and optimizer ops make."""
    found: set[int] = set()
    if not names:
        return found
    for name in names:
        table = facts.tables[name]
        incoming = {spec.storage for spec in table.gradients}
        ops = [facts.graph.ops[i] for i in table.backward]
        made = {spec.storage for op in ops for spec in (*op.inputs, *op.outputs)}
        found |= (made | table.own) - incoming
    kinds = ("parameter", "optimizer_state", "gradient", "activation")
    return found & {s.id for s in facts.graph.storages if s.kind in kinds}
