"""How the operators of a mixture of experts carry splits: grouped products, and what routes rows to experts and back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from perfmodel.graph import Op, TensorSpec
from perfmodel.plan.layout import Shard
from perfmodel.plan.shard_rules import along_dim, pick
from perfmodel.plan.splits import Outputs, Rule, Splits, refuse


def grouped_product(op: Op, splits: Splits) -> Outputs:
    """Rows against a stack of matrices, or (a gradient of the stack) two matrices whose rows are cut alike."""
    left, right = op.inputs[0], op.inputs[1]
    for spec in (left, right):
        splits.complete(spec)
    if len(right.shape) == 2:
        return _stack_gradient(op, splits, left, right)
    first, second = splits.of(left), splits.of(right)
    if first is not None and second is not None and first.dim == second.dim == 1:
        splits.mark_partial(op.outputs[0])
        return [None]
    if (first is not None and first.dim == 1) or (second is not None and second.dim == 1):
        raise refuse(op, "one factor is split along the summed dimension, the other is not")
    if second is not None and second.dim == 2:
        if first is not None:
            splits.gather(left, keep=True)
        return [second.at(1)]
    return [first]


def _stack_gradient(op: Op, splits: Splits, left: TensorSpec, right: TensorSpec) -> Outputs:
    """(a, rows) x (rows, b) -> (experts, a, b): rows of split tokens leave sums over ranks, those of experts its own part."""
    first, second = splits.of(left), splits.of(right)
    kept = None
    if first is not None and first.dim == 0:
        kept = first.at(1)
    elif second is not None and second.dim == 1:
        kept = second.at(2)
    if kept is not None:
        for spec, shard, rows in ((left, first, 1), (right, second, 0)):
            if shard is not None and shard.dim == rows:
                splits.gather(spec, keep=True)
        return [kept]
    if first is None or second is None:
        return [None]
    if first.kind == "expert":
        return [splits.vocabulary(op)]
    splits.mark_partial(op.outputs[0])
    return [None]


def local_order(op: Op, splits: Splits) -> Outputs:
    """Sorting the choices of a rank's own tokens: each rank orders its part."""
    shard = splits.of(op.inputs[0])
    if shard is not None and shard.kind != "sequence":
        raise refuse(op, "works along the split dimension")
    return [shard] * len(op.outputs)


def chosen(op: Op, splits: Splits) -> Outputs:
    """The largest along the last dimension (torch's default)."""
    return along_dim(replace(op, attrs={"dim": -1, **op.attrs}), splits)


def counts(op: Op, splits: Splits) -> Outputs:
    """How many of a rank's own rows go to each expert; no other rank needs to know within this group."""
    return [None] * len(op.outputs)


def take_rows(op: Op, splits: Splits) -> Outputs:
    """`x[rows]` and its backward: places of a rank's own tokens among its own tokens."""
    for spec in op.inputs:
        splits.complete(spec)
    source, rows = op.inputs[0], splits.of(op.inputs[1])
    shard = splits.of(source)
    if shard is None or shard.dim > 0:
        return [shard if op.name != "aten.index" else _behind(shard, rows)]
    if shard.kind != "sequence":
        raise refuse(op, "takes rows of a split dimension")
    return [shard if op.name != "aten.index" else rows]


def _behind(shard: Shard | None, rows: Shard | None) -> Shard | None:
    return rows if shard is None else shard


def zeros(op: Op, splits: Splits) -> Outputs:
    """New tensors of another size for rows of the same tokens: split as those are."""
    shard = splits.of(op.inputs[0])
    return [shard if shard is not None and shard.dim < len(op.outputs[0].shape) else None]


def moved_rows(op: Op, splits: Splits) -> Outputs:
    """Rows on their way between ranks of another group: what is a sum over this one is summed first."""
    for spec in op.inputs:
        splits.complete(spec, rows=True)
    return [splits.of(op.inputs[0]) if len(spec.shape) > 1 else None for spec in op.outputs]


EXPERT_RULES: Mapping[str, Rule] = {
    "perfmodel.all_to_all": moved_rows,
    "aten._grouped_mm": grouped_product,
    "aten.sort": local_order,
    "aten.argsort": local_order,
    "aten.topk": chosen,
    "aten.histc": counts,
    "aten.index": take_rows,
    "aten._index_put_impl_": take_rows,
    "aten.new_zeros": zeros,
    "aten.scatter": pick,
}
