"""Rules of Megatron-LM's fused kernels (`models/megatron_ops.py`): pointwise chains and a causal softmax in one pass.

The softmax kernel takes some shapes only (megatron/model/fused_softmax.py, `FusedScaleMaskSoftmax.is_kernel_available`):
rows of 17 to 2048 scores, queries and matrices in fours. Other scores go through plain operators in fp32: conversion, scale,
mask, softmax, conversion. How many matrices a rank has follows from the plan, so the choice is made here.
"""

from __future__ import annotations

from dataclasses import replace

from perfmodel.estimate import Work
from perfmodel.graph import Op, TensorSpec
from perfmodel.kernels.copy import total_bytes
from perfmodel.kernels.elementwise import pointwise_calls
from perfmodel.kernels.registry import KernelCall, kernel_rule
from perfmodel.kernels.softmax import BACKWARD_FLOPS, FORWARD_FLOPS, softmax_call

Calls = tuple[KernelCall, ...]

SOFTMAXES = ("perfmodel.causal_softmax", "perfmodel.causal_softmax_backward")
FUSED_ROWS = (17, 2048)  # scores a row that the kernel takes, first and last
FUSED_MULTIPLE = 4  # of queries and of matrices: a block of the kernel has four warps, each with a row

# FLOPs an element: bias 1 and tanh GELU 8 (cube and its factor 3, sum, factor, tanh, plus one, half of x, product); its
# derivative about twice that; bias, mask, scale and residual 4; mask and scale 2. An element of SwiGLU's result: sigmoid 4,
# two products; of its gradients: sigmoid 4, slope 3, five products. Rotary positions: two products and a sum.
GELU_FLOPS, GELU_BACKWARD_FLOPS, DROPOUT_ADD_FLOPS, DROPOUT_BACKWARD_FLOPS = 9, 18, 4, 2
SWIGLU_FLOPS, SWIGLU_BACKWARD_FLOPS, ROTARY_FLOPS = 6, 6, 3
CAST_FLOPS = 2  # scale and the running maximum


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


@kernel_rule("perfmodel.swiglu")
def swiglu(op: Op) -> Calls:
    """One pass over gate and up; half as much is written."""
    return pointwise_calls(op.inputs, op.outputs, SWIGLU_FLOPS, op_kind=1)


@kernel_rule("perfmodel.swiglu_backward")
def swiglu_backward(op: Op) -> Calls:
    """One pass over gradient, gate and up."""
    return pointwise_calls(op.inputs, op.outputs, SWIGLU_BACKWARD_FLOPS, op_kind=1)


@kernel_rule("perfmodel.rotary")
def rotary(op: Op) -> Calls:
    """One pass, forward and backward alike."""
    return pointwise_calls(op.inputs, op.outputs, ROTARY_FLOPS, op_kind=0)


@kernel_rule("perfmodel.cast_transpose")
def cast_transpose(op: Op) -> Calls:
    """TransformerEngine's cast to FP8: one read, the matrix and its transpose written; the largest value on the way."""
    return pointwise_calls(op.inputs, op.outputs, CAST_FLOPS, op_kind=0)


def has_fused_softmax(scores: TensorSpec) -> bool:
    """Whether the fused kernel takes (matrices, queries, keys) scores."""
    matrices, queries, keys = scores.shape
    in_range = FUSED_ROWS[0] <= keys <= FUSED_ROWS[1]
    return in_range and queries % FUSED_MULTIPLE == 0 and matrices % FUSED_MULTIPLE == 0


@kernel_rule(*SOFTMAXES)
def causal_softmax(op: Op) -> Calls:
    """Each row reads what lies before its diagonal, half of its inputs on the whole, and writes all (zeros beyond)."""
    source = op.inputs[0]
    backward = op.name.endswith("_backward")
    if not has_fused_softmax(source):
        return _plain_softmax(source, op.inputs[-1], backward=backward)
    flops = (BACKWARD_FLOPS if backward else FORWARD_FLOPS) + 1  # and the scale
    work = Work(
        flops=flops * source.n_elems // 2, read_bytes=total_bytes(op.inputs) // 2, write_bytes=total_bytes(op.outputs)
    )
    return (softmax_call(source, -1, work, backward=backward, log=False),)


def _plain_softmax(source: TensorSpec, chances: TensorSpec, *, backward: bool) -> Calls:
    """Conversion to fp32, scale, mask, softmax and conversion back, or their backwards in reverse."""
    wide = replace(source, dtype="float32")
    there, back = (pointwise_calls(*pair, 0, op_kind=0) for pair in (((source,), (wide,)), ((wide,), (source,))))
    scaled = pointwise_calls((wide,), (wide,), 1, op_kind=0)
    if not backward:
        work = Work(flops=FORWARD_FLOPS * wide.n_elems, read_bytes=wide.bytes, write_bytes=wide.bytes)
        return (*there, *scaled, *scaled, softmax_call(wide, -1, work, backward=False, log=False), *back)
    kept = replace(chances, dtype="float32")
    work = Work(flops=BACKWARD_FLOPS * wide.n_elems, read_bytes=wide.bytes + kept.bytes, write_bytes=wide.bytes)
    product = pointwise_calls((wide, kept), (wide,), 1, op_kind=0)
    return (*there, *product, softmax_call(wide, -1, work, backward=True, log=False), *scaled, *scaled, *back)
