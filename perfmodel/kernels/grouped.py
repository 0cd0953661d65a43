"""Grouped products: as many matrix products in one kernel as there are experts, each of its own rows."""

from __future__ import annotations

from perfmodel.graph import Op
from perfmodel.kernels.gemm import GemmShape, alignment_bytes, gemm_call, is_transposed
from perfmodel.kernels.registry import KernelCall, kernel_rule


@kernel_rule("aten._grouped_mm")
def grouped_mm(op: Op) -> tuple[KernelCall, ...]:
    """`_grouped_mm` of torch: rows cut where `offs` says against a stack of matrices, or two matrices cut alike.

    Priced as a batched product with rows dealt evenly to the groups: the same FLOPs and bytes (of operands cut in groups each
    once); what uneven groups waste in tiles is left out.
    """
    a, b = op.inputs[0], op.inputs[1]
    groups = op.outputs[0].shape[0] if len(a.shape) == len(b.shape) == 2 else max(a.shape[0], b.shape[0])
    if len(a.shape) == 2 and len(b.shape) == 3:
        groups, m, k, n = b.shape[0], -(-a.shape[0] // b.shape[0]), a.shape[1], b.shape[2]
    elif len(a.shape) == 3 and len(b.shape) == 2:
        groups, m, k, n = a.shape[0], a.shape[1], a.shape[2], -(-b.shape[1] // a.shape[0])
    elif len(a.shape) == 2:
        m, k, n = a.shape[0], -(-a.shape[1] // groups), b.shape[1]
    else:
        groups, m, k, n = a.shape[0], a.shape[1], a.shape[2], b.shape[2]
    if min(groups, m, n, k) == 0:
        return ()
    shape = GemmShape(
        m=m,
        n=n,
        k=k,
        batch=groups,
        trans_a=is_transposed(a),
        trans_b=is_transposed(b),
        align_bytes=alignment_bytes((a, b)),
    )
    return (gemm_call(shape, dtype=a.dtype, itemsize_bytes=a.itemsize_bytes, out_bytes=op.outputs[0].itemsize_bytes),)
