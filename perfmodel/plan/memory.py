"""Peak device memory of a rank: parameters, gradients, optimizer state, activations from their lifetimes, buffers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from perfmodel.errors import InfeasiblePlanError
from perfmodel.graph import Graph, Storage
from perfmodel.plan.events import MemoryUse
from perfmodel.plan.tables import TableOps
from perfmodel.units import format_bytes


def table_row_bytes(graph: Graph, tables: Mapping[str, TableOps]) -> dict[str, int]:
    """Bytes of one row of each table with its optimizer state, by parameter name."""
    state_bytes = {s.id: s.bytes for s in graph.storages if s.kind == "optimizer_state"}
    rows: dict[str, int] = {}
    for name, found in tables.items():
        touched = {spec.storage for i in found.optimizer for spec in graph.ops[i].inputs}
        state = sum(state_bytes.get(storage, 0) for storage in touched)
        rows[name] = found.table.dim * found.table.itemsize_bytes + -(-state // found.table.rows)
    return rows


def dense_memory(graph: Graph, tables: Iterable[TableOps]) -> MemoryUse:
    """Peak of a rank that holds everything but `tables`.

    Gradients and activations are taken at the moment when their sum is largest; `Storage.born` and `dies` say when each
    lives.
    """
    gone = _table_storages(graph, tables)
    kept = [storage for storage in graph.storages if storage.id not in gone]
    alive = _at_peak([s for s in kept if s.kind in ("gradient", "activation", "input")], len(graph.ops))
    return MemoryUse(
        parameters_bytes=_sum(kept, "parameter"),
        gradients_bytes=_sum(alive, "gradient"),
        optimizer_bytes=_sum(kept, "optimizer_state"),
        activations_bytes=_sum(alive, "activation") + _sum(alive, "input"),
        buffers_bytes=_sum(kept, "buffer"),
    )


def check_memory(rank: int, memory: MemoryUse, capacity_bytes: int) -> None:
    """Raises InfeasiblePlanError, with the parts and the shortfall, if a rank needs more than its device has."""
    if memory.total_bytes <= capacity_bytes:
        return
    parts = {
        "parameters": memory.parameters_bytes,
        "gradients": memory.gradients_bytes,
        "optimizer state": memory.optimizer_bytes,
        "activations": memory.activations_bytes,
        "buffers": memory.buffers_bytes + memory.communication_bytes,
    }
    listed = ", ".join(f"{name} {format_bytes(size)}" for name, size in parts.items() if size)
    raise InfeasiblePlanError(
        f"rank {rank} needs {format_bytes(memory.total_bytes)} ({listed}) but its device has "
        f"{format_bytes(capacity_bytes)}: short by {format_bytes(memory.total_bytes - capacity_bytes)}; "
        "use a smaller batch, more ranks or a device with more memory"
    )


def _table_storages(graph: Graph, tables: Iterable[TableOps]) -> set[int]:
    """Weights, gradients and states of the tables, and what their backward and optimizer ops make."""
    weights = {p.name: p.tensor.storage for p in graph.parameters}
    held = {s.id for s in graph.storages if s.kind in ("parameter", "optimizer_state", "gradient", "activation")}
    found: set[int] = set()
    for table in tables:
        found.add(weights[table.table.parameter])
        ops = [graph.ops[i] for i in (*table.backward, *table.optimizer)]
        incoming = {spec.storage for spec in table.gradients}
        found |= {s.storage for op in ops for s in (*op.inputs, *op.outputs)} - incoming
    return found & held


def _at_peak(storages: Sequence[Storage], n_ops: int) -> list[Storage]:
    """The storages alive after the op at which their total is largest."""
    change = [0] * (n_ops + 2)
    for storage in storages:
        change[max(storage.born, 0)] += storage.bytes
        change[min(storage.dies, n_ops) + 1] -= storage.bytes
    best, best_bytes, now_bytes = 0, -1, 0
    for moment, delta in enumerate(change):
        now_bytes += delta
        if now_bytes > best_bytes:
            best, best_bytes = moment, now_bytes
    return [s for s in storages if max(s.born, 0) <= best <= min(s.dies, n_ops)]


def _sum(storages: Iterable[Storage], kind: str) -> int:
    return sum(storage.bytes for storage in storages if storage.kind == kind)
