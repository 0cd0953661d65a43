"""A chain of pointwise ops that ends in a reduction, in one kernel as a compiler emits it."""

from __future__ import annotations

from perfmodel.graph import Op
from perfmodel.kernels.copy import total_bytes
from perfmodel.kernels.elementwise import distinct
from perfmodel.kernels.reduction import reduction_call
from perfmodel.kernels.registry import KernelCall, kernel_rule


@kernel_rule("perfmodel.fused_reduction")
def fused_reduction(op: Op) -> tuple[KernelCall, ...]:
    """Reads every input once, reduces what the largest holds and writes the outputs.

    `attrs["flops"]` counts the chain's FLOPs; `attrs["inner"]` says whether the contiguous dimension is reduced.
    """
    operands = distinct(op.inputs)
    source = max(operands, key=lambda spec: spec.n_elems)
    call = reduction_call(
        source, op.outputs, int(op.attrs["flops"]), inner=bool(op.attrs["inner"]), read_bytes=total_bytes(operands)
    )
    return (call,)
