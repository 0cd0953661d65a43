"""Gradients of one value that several column-parallel linears read: added where they are made, summed over the group once.

Autograd adds them one by one to the gradient that came first, and that may be complete already (a residual beside query, key
and value, as in BERT). A module that takes its input from the group has them meet at that input: Megatron-LM's one product of
query, key and value sums inside, torch's PrepareModuleInput at the gathered tensor; what is complete is added after the sum.
"""

from __future__ import annotations

from dataclasses import dataclass

from perfmodel.graph import Op, TensorSpec

_ADDS = frozenset({"aten.add", "aten.add_"})


@dataclass(frozen=True, slots=True, kw_only=True)
class LateSum:
    """`result` is `complete` and `partial`, which is still to be summed over the group; `op` adds them."""

    op: Op
    complete: TensorSpec
    partial: TensorSpec
    result: TensorSpec

    def addition(self, complete: TensorSpec, partial: TensorSpec, result: TensorSpec) -> Op:
        """The op on tensors of one rank."""
        in_place = complete.storage == result.storage
        return _added(self.op, (complete, partial), result, "aten.add_" if in_place else "aten.add")

    def joined(self, op: Op, partial: TensorSpec, other: TensorSpec) -> Op:
        """In place of an op that adds another sum to the result: it is added to the first one."""
        return _added(op, (partial, other), partial, "aten.add_")


def _added(op: Op, inputs: tuple[TensorSpec, TensorSpec], result: TensorSpec, name: str) -> Op:
    return Op(
        id=op.id, name=name, overload="Tensor", inputs=inputs, input_names=("self", "other"), outputs=(result,),
        module=op.module, phase=op.phase, recompute=op.recompute, stream=op.stream,
    )  # fmt: skip


def adds_sum(op: Op) -> bool:
    """Whether an op adds two tensors of one shape in backward, as autograd does with gradients."""
    if op.name not in _ADDS or op.phase != "backward" or op.recompute or len(op.inputs) != 2:
        return False
    return op.attrs.get("alpha", 1) == 1 and all(
        (spec.shape, spec.dtype) == (op.outputs[0].shape, op.outputs[0].dtype) for spec in op.inputs
    )
