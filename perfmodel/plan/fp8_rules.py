"""How the operators of FP8 products (`models/fp8.py`) carry splits."""

from __future__ import annotations

from collections.abc import Mapping

from perfmodel.graph import Op
from perfmodel.plan.shard_rules import product
from perfmodel.plan.splits import Outputs, Rule, Splits


def cast_transpose(op: Op, splits: Splits) -> Outputs:
    """A matrix and its transpose."""
    splits.complete(op.inputs[0])
    shard = splits.of(op.inputs[0])
    return [None, None] if shard is None else [shard, shard.at(1 - shard.dim)]


FP8_RULES: Mapping[str, Rule] = {"perfmodel.fp8_product": product, "perfmodel.cast_transpose": cast_transpose}
