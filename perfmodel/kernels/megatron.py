"""Rules of Megatron-LM's fused kernels (`models/megatron_ops.py`): pointwise chains and a causal softmax in one pass."""

from __future__ import annotations

from perfmodel.estimate import Work
from perfmodel.graph import Op
from perfmodel.kernels.copy import total_bytes
from perfmodel.kernels.elementwise import pointwise_calls
from perfmodel.kernels.registry import KernelCall, kernel_rule
from perfmodel.kernels.softmax import BACKWARD_FLOPS, FORWARD_FLOPS, softmax_call

Calls = tuple[KernelCall, ...]

# FLOPs an element: bias 1 and tanh GELU 8 (cube and its factor 3, sum, factor, tanh, plus one, half of x, product); its
# derivative about twice that; bias, mask, scale and residual 4; mask and scale 2.
GELU_FLOPS, GELU_BACKWARD_FLOPS, DROPOUT_ADD_FLOPS, DROPOUT_BACKWARD_FLOPS = 9, 18, 4, 2


@kernel_rule("perfmodel.bias_gelu")
def bias_gelu(op: Op) -> Calls:
    """One pass over the activations."""
    return pointwise_calls(op.inputs, op.outputs, GELU_FLOPS, op_kind=1)


@kernel_rule("perfmodel.bias_gelu_backward")
def bias_gelu_backward(op: Op) -> Calls:
    """One pass over gradient and input."""
    return pointwise_calls(op.inputs, op.outputs, GELU_BACKWARD_FLOPS, op_kind=1)


@kernel_rule("perfmodel.bias_dropout_add")
def bias_dropout_add(op: Op) -> Calls:
    """One pass over input and residual; writes the sum and the mask."""
    return pointwise_calls(op.inputs, op.outputs, DROPOUT_ADD_FLOPS, op_kind=1)


@kernel_rule("perfmodel.bias_dropout_backward")
def bias_dropout_backward(op: Op) -> Calls:
    """One pass over gradient and mask."""
    return pointwise_calls(op.inputs, op.outputs, DROPOUT_BACKWARD_FLOPS, op_kind=0)


@kernel_rule("perfmodel.causal_softmax", "perfmodel.causal_softmax_backward")
def causal_softmax(op: Op) -> Calls:
    """Each row reads what lies before its diagonal, half of its inputs on the whole, and writes all (zeros beyond)."""
    source = op.inputs[0]
    backward = op.name.endswith("_backward")
    flops = (BACKWARD_FLOPS if backward else FORWARD_FLOPS) + 1  # and the scale
    work = Work(
        flops=flops * source.n_elems // 2, read_bytes=total_bytes(op.inputs) // 2, write_bytes=total_bytes(op.outputs)
    )
    return (softmax_call(source, -1, work, backward=backward, log=False),)
