"""Dot-product feature interaction of a DLRM as one fused kernel, forward and backward.

The kernel stages the stacked vectors (batch, n, dim) of a sample in shared memory, multiplies them with themselves on tensor
cores and writes first vector, pairs and padding (NVIDIA DeepLearningExamples, DLRM, `dotBasedInteract`). Traffic is the
stacked vectors once and the output once; FLOPs are those of the full n x n product, as the kernel computes whole tiles.
"""

from __future__ import annotations

from perfmodel.estimate import Work
from perfmodel.graph import Op, TensorSpec
from perfmodel.kernels.copy import total_bytes
from perfmodel.kernels.gemm import math_pipe
from perfmodel.kernels.registry import KernelCall, kernel_rule

FAMILY = "interaction"

Calls = tuple[KernelCall, ...]


def _call(op: Op, stacked: TensorSpec, n_products: int) -> Calls:
    batch, n_vectors, dim = stacked.shape
    if stacked.n_elems == 0:
        return ()
    work = Work(
        flops=n_products * 2 * batch * n_vectors * n_vectors * dim,
        read_bytes=total_bytes(op.inputs),
        write_bytes=total_bytes(op.outputs),
    )
    pipe = math_pipe(stacked.dtype, allow_tf32=bool(op.attrs.get("allow_tf32", False)))
    return (KernelCall(family=FAMILY, work=work, dtype=stacked.dtype, pipe=pipe),)


@kernel_rule("perfmodel.dot_interaction")
def interaction(op: Op) -> Calls:
    """Reads the stacked vectors, writes the first one, all pairs' products and the padding."""
    return _call(op, op.inputs[0], 1)


@kernel_rule("perfmodel.dot_interaction_backward")
def interaction_backward(op: Op) -> Calls:
    """Reads the output's gradient and the stacked vectors, writes the vectors' gradient: one product, (G + Gᵀ) times them."""
    return _call(op, op.arg("stacked") or op.inputs[-1], 1)
