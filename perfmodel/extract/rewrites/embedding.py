"""Embedding tables whose optimizer runs inside the backward kernel (FBGEMM's table-batched operators, as in TorchRec)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, replace
from typing import Any

from perfmodel.graph import Graph, Op, Parameter, Storage, TableAccess, TensorSpec

_LOOKUP, _GRADIENT = "aten._embedding_bag", "aten._embedding_bag_backward"
LOOKUP, UPDATE = "perfmodel.batched_embedding", "perfmodel.batched_embedding_backward"


def fused_embedding_update(graph: Graph, states: Mapping[str, tuple[TensorSpec, ...]]) -> Graph:
    """One op a lookup and one op for gradient and update together; no gradient tensor and no optimizer ops of tables.

    Each op works on one table and says so in `tables`, with `batch` and `optimizer`, so a plan can still place tables one
    by one; the tables that end up on one rank run as one kernel there. `states` are the optimizer's tensors of each table by
    parameter name: what the update reads and writes beside the table.
    """
    tables = {table.parameter: table for table in graph.tables}
    ops: list[Op] = []
    for op in graph.ops:
        table = tables.get(op.attrs.get("parameter", ""))
        if table is None or op.phase == "loss":
            ops.append(op)
        elif op.name == _LOOKUP:
            ops.append(_with_table(op, LOOKUP, table, graph))
        elif op.name == _GRADIENT:
            ops.append(_update(op, table, graph, states.get(table.parameter, ())))
    return _renumbered(replace(graph, rewrites=tuple(sorted({*graph.rewrites, "fused_embedding_update"}))), ops)


def _with_table(op: Op, name: str, table: TableAccess, graph: Graph) -> Op:
    offsets = op.arg("offsets")
    facts: dict[str, Any] = {
        "tables": [asdict(table)],
        "batch": graph.batch_size if offsets is None else offsets.n_elems,
        "optimizer": graph.sparse_optimizer,
    }
    shared = facts["batch"] / graph.batch_size  # features that share the table are looked up as further samples
    facts["tables"][0]["pooling_factor"] = table.pooling_factor / shared
    return replace(op, name=name, overload="default", attrs={**op.attrs, **facts})


def _update(op: Op, table: TableAccess, graph: Graph, states: tuple[TensorSpec, ...]) -> Op:
    """Reads the results' gradients, indices and offsets; reads and writes rows of the table and of its optimizer's state."""
    weight = next(p.tensor for p in graph.parameters if p.name == table.parameter)
    made = _with_table(op, UPDATE, table, graph)
    names = ("weight", *(f"state.{number}" for number in range(len(states))))
    return replace(
        made,
        inputs=(*op.inputs, weight, *states),
        input_names=(*op.input_names, *names),
        outputs=(weight, *states),
    )


def _renumbered(graph: Graph, ops: list[Op]) -> Graph:
    """The graph with only these of its ops; lifetimes and gradients are counted in the new numbers."""
    last: list[int] = []
    kept = {op.id for op in ops}
    position = -1
    for old in range(len(graph.ops)):
        position += old in kept
        last.append(position)
    used = {spec.storage for op in ops for spec in (*op.inputs, *op.outputs)}
    return replace(
        graph,
        ops=tuple(replace(op, id=index) for index, op in enumerate(ops)),
        parameters=tuple(_moved_parameter(p, last) for p in graph.parameters),
        storages=tuple(_moved_storages(graph.storages, last, used, len(ops))),
    )


def _moved_parameter(parameter: Parameter, last: list[int]) -> Parameter:
    return parameter if parameter.grad_op is None else replace(parameter, grad_op=last[parameter.grad_op])


def _moved_storages(storages: Iterable[Storage], last: list[int], used: set[int], n_ops: int) -> Iterable[Storage]:
    for storage in storages:
        if storage.born >= 0 and storage.id not in used:
            continue
        born = storage.born if storage.born < 0 else last[min(storage.born, len(last) - 1)]
        dies = n_ops if storage.dies >= len(last) else last[storage.dies] if storage.dies >= 0 else storage.dies
        yield replace(storage, born=born, dies=max(born, dies))
