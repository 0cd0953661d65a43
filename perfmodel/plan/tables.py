"""Which ops of a graph belong to an embedding table, and what they become when the table serves the whole global batch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace

from perfmodel.errors import GraphError
from perfmodel.graph import Graph, Op, TableAccess, TensorSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class TableOps:
    """Ops of one table by phase (ids in graph order), what it reads and gives, and the gradients it receives.

    `own` are the storages that belong to it alone: weight, gradients, optimizer state and what its ops make. An optimizer
    op that works on many tensors at once may be shared with other tables. `batch` is not 0 for what is no table: the length
    of the axis that grows with the global batch.
    """

    table: TableAccess
    forward: tuple[int, ...]
    backward: tuple[int, ...]
    optimizer: tuple[int, ...]
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    gradients: tuple[TensorSpec, ...]
    own: frozenset[int]
    batch: int = 0

    @property
    def ids(self) -> frozenset[int]:
        """All op ids of the table."""
        return frozenset((*self.forward, *self.backward, *self.optimizer))

    @property
    def output_bytes(self) -> int:
        """Bytes of pooled results for one rank's batch."""
        return sum(spec.bytes for spec in self.outputs)

    @property
    def input_bytes(self) -> int:
        """Bytes of indices and offsets for one rank's batch."""
        return sum(spec.bytes for spec in self.inputs)


def find_table_ops(graph: Graph) -> dict[str, TableOps]:
    """Maps each table's parameter name to its ops.

    Forward ops read the table's weight; backward ops carry the module that owns the weight (`emb.3` of `emb.3.weight`);
    optimizer ops touch the weight, its gradients or its state. Raises GraphError if a table is never looked up.
    """
    found = {}
    weights = {p.name: p.tensor.storage for p in graph.parameters}
    states = {s.id for s in graph.storages if s.kind == "optimizer_state"}
    for table in graph.tables:
        weight = weights[table.parameter]
        owner = table.parameter.rpartition(".")[0]
        forward = [op for op in graph.ops if op.phase == "forward" and weight in _read(op)]
        if not forward:
            raise GraphError(f"table {table.parameter} is never looked up in the forward pass")
        backward = [op for op in graph.ops if op.phase == "backward" and op.module == owner]
        made = {spec.storage for op in backward for spec in op.outputs}
        made |= {spec.storage for op in backward for spec in op.inputs if spec.storage in states}
        optimizer, own = _closure((op for op in graph.ops if op.phase == "optimizer"), {weight} | made)
        found[table.parameter] = TableOps(
            table=table,
            forward=tuple(op.id for op in forward),
            backward=tuple(op.id for op in backward),
            optimizer=tuple(op.id for op in optimizer),
            inputs=_unique(spec for op in forward for spec in op.inputs if spec.storage != weight),
            outputs=tuple(op.outputs[0] for op in forward),
            gradients=incoming(forward, backward, made),
            own=frozenset(own),
        )
    return found


def _read(op: Op) -> set[int]:
    return {spec.storage for spec in op.inputs}


def _closure(ops: Iterable[Op], storages: set[int]) -> tuple[list[Op], set[int]]:
    """Ops that touch the storages, or anything those ops make, in order; and all these storages.

    Scalars (loss scale, step count) are shared by all parameters and connect nothing; of an op on many tensors at once
    only the tensors already reached belong to the table.
    """
    reached = set(storages)
    members = []
    for op in ops:
        tensors = [spec for spec in (*op.inputs, *op.outputs) if spec.n_elems > 1]
        if any(spec.storage in reached for spec in tensors):
            members.append(op)
            if not is_multi_tensor(op):
                reached |= {spec.storage for spec in op.outputs if spec.n_elems > 1}
    return members, reached


def is_multi_tensor(op: Op) -> bool:
    """True for an op that works on a list of parameters at once."""
    return "foreach" in op.name or "fused" in op.name


def incoming(forward: Sequence[Op], backward: Sequence[Op], made: set[int]) -> tuple[TensorSpec, ...]:
    """Tensors that the backward ops read and that no table op made or looked up with: gradients of the results."""
    own = made | {spec.storage for op in forward for spec in (*op.inputs, *op.outputs)}
    return _unique(
        spec
        for op in backward
        for spec in op.inputs
        if spec.storage not in own and spec.dtype.startswith(("float", "bfloat"))
    )


def _unique(specs: Iterable[TensorSpec]) -> tuple[TensorSpec, ...]:
    return tuple({spec.storage: spec for spec in specs}.values())


def scale_op(op: Op, factor: int, fixed_shapes: Set[tuple[int, ...]], rename: Mapping[int, int]) -> Op:
    """The op as it runs for `factor` times the batch: the batch or index dimension of its tensors grows.

    Tensors of a shape in `fixed_shapes` (weights and their states) and scalars keep their size. `rename` maps storages of
    the local batch to storages of the global batch.
    """

    def scale(spec: TensorSpec) -> TensorSpec:
        shape = spec.shape
        if shape not in fixed_shapes and spec.n_elems > 1:
            axis = 1 if len(shape) == 2 and shape[0] == 1 else 0
            shape = (*shape[:axis], shape[axis] * factor, *shape[axis + 1 :])
        storage = rename.get(spec.storage, spec.storage)
        return replace(spec, shape=shape, strides=row_major(shape), storage=storage)

    return replace(op, inputs=tuple(map(scale, op.inputs)), outputs=tuple(map(scale, op.outputs)))


def shard_op(op: Op, found: TableOps, part: TableAccess, factor: int) -> Op:
    """A table's op as it runs on one part of the table for `factor` times the batch.

    Rows and columns become the part's; an axis as long as the batch's indices grows by the part's share of them, any other
    by `factor`. Scalars keep their size.
    """
    table = found.table
    share = part.pooling_factor / table.pooling_factor
    n_indices = found.inputs[0].n_elems if found.inputs else 0
    bags = {spec.storage for spec in (*found.inputs[1:2], *found.outputs, *found.gradients)}

    def scale(spec: TensorSpec) -> TensorSpec:
        shape = spec.shape
        if spec.n_elems <= 1:
            return spec
        if shape[0] == table.rows and len(shape) <= 2 and shape[1:] in ((), (1,), (table.dim,)):
            shape = (part.rows, *(part.dim if size == table.dim else size for size in shape[1:]))
        else:
            axis = 1 if len(shape) == 2 and shape[0] == 1 else 0
            grown = factor * (share if shape[axis] == n_indices and spec.storage not in bags else 1.0)
            width = tuple(part.dim if size == table.dim else size for size in shape[axis + 1 :])
            shape = (*shape[:axis], max(round(shape[axis] * grown), 1), *width)
        return replace(spec, shape=shape, strides=row_major(shape))

    facts = {"rows": part.rows, "pooling_factor": part.pooling_factor, "histogram": [list(p) for p in part.histogram]}
    known = {key: value for key, value in facts.items() if key in op.attrs}
    return replace(
        op,
        inputs=tuple(map(scale, op.inputs)),
        outputs=tuple(map(scale, op.outputs)),
        attrs={**op.attrs, **known},
    )


def scale_pooling(graph: Graph, factor: float) -> Graph:
    """The graph with every table's pooling factor multiplied: what batched operators and exchanges of indices see.

    Operators of single tables keep their shapes.
    """
    tables = tuple(replace(table, pooling_factor=table.pooling_factor * factor) for table in graph.tables)
    return replace(graph, tables=tables)


def drop_tensors(op: Op, storages: Set[int]) -> Op:
    """The op without the tensors of these storages."""
    kept = [(s, n) for s, n in zip(op.inputs, op.input_names, strict=True) if s.storage not in storages]
    return replace(
        op,
        inputs=tuple(spec for spec, _ in kept),
        input_names=tuple(name for _, name in kept),
        outputs=tuple(spec for spec in op.outputs if spec.storage not in storages),
    )


def row_major(shape: Sequence[int]) -> tuple[int, ...]:
    """Strides (elements) of a contiguous tensor."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= size
    return tuple(reversed(strides))
