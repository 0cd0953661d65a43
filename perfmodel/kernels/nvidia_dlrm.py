"""Rules of the operators of NVIDIA's DLRM (`models/dlrm_ops.py`): one-row gathers and a whole MLP in one call.

`gather_rows` is one kernel if `fused`, else a gather of fp32 rows and a cast where the type differs; `gather_rows_backward` a
copy of the gradient into values, with one more for the row numbers if `fused` (offsets added). The MLP is a product a layer
with bias and ReLU in its epilogue (cuBLASLt), and backward a masked gradient with its column sums and two products a layer.
"""

from __future__ import annotations

from perfmodel.estimate import Work
from perfmodel.graph import Op, TensorSpec
from perfmodel.kernels.copy import moved, total_bytes
from perfmodel.kernels.elementwise import pointwise_calls
from perfmodel.kernels.embedding import POOL, gather_call
from perfmodel.kernels.gemm import GemmShape, alignment_bytes, gemm_call, math_pipe
from perfmodel.kernels.index import INDEX_BYTES
from perfmodel.kernels.registry import KernelCall, kernel_rule

Calls = tuple[KernelCall, ...]

MASK_FLOPS = 2  # a comparison and a multiplication; the column sum adds one


@kernel_rule("perfmodel.gather_rows")
def gather_rows(op: Op) -> Calls:
    """A row read and written for each index, by a warp or a block a row."""
    weight, indices = op.inputs[0], op.inputs[1]
    out = op.outputs[0]
    if out.n_elems == 0:
        return ()
    if bool(op.attrs.get("fused")) or out.dtype == weight.dtype:
        return (gather_call(op, weight, indices, out.bytes, out.n_elems, POOL),)
    rows_bytes = out.n_elems * weight.itemsize_bytes
    gathered = gather_call(op, weight, indices, rows_bytes, out.n_elems, POOL)
    return (gathered, *moved("copy", rows_bytes, out))


@kernel_rule("perfmodel.gather_rows_backward")
def gather_rows_backward(op: Op) -> Calls:
    """The gradient read, the values written; fused, the row numbers too."""
    values = op.outputs[0]
    if values.n_elems == 0:
        return ()
    copied = moved("copy", total_bytes(op.inputs[:1]), values)
    if not op.attrs.get("fused"):
        return copied
    numbers_bytes = values.shape[0] * INDEX_BYTES
    return (
        *copied,
        KernelCall(family="copy", work=Work(read_bytes=numbers_bytes, write_bytes=numbers_bytes), dtype="int64"),
    )


@kernel_rule("perfmodel.mlp")
def mlp(op: Op) -> Calls:
    """A product a layer."""
    return tuple(
        _product(op, (x.shape[0], weight.shape[0], weight.shape[1]), (x, weight), trans=(False, True), bias=True)
        for x, weight in zip((op.inputs[0], *op.outputs[:-1]), _weights(op), strict=True)
        if x.n_elems
    )


@kernel_rule("perfmodel.mlp_backward")
def mlp_backward(op: Op) -> Calls:
    """From the last layer to the first: the masked gradient, the weight's gradient and the input's."""
    weights, outputs = _weights(op), _list(op, "outputs")
    x = op.arg("x") or op.inputs[1]
    calls: list[KernelCall] = []
    for layer in reversed(range(len(weights))):
        out, below = outputs[layer], outputs[layer - 1] if layer else x
        batch, width, depth = out.shape[0], *weights[layer].shape
        calls += pointwise_calls((out, _like(out)), (_like(out),), MASK_FLOPS + 1, op_kind=0)
        calls.append(_product(op, (width, depth, batch), (out, below), trans=(True, False)))
        if layer or op.attrs.get("of_input"):
            calls.append(_product(op, (batch, depth, width), (out, weights[layer]), trans=(False, False)))
    return tuple(calls)


def _like(spec: TensorSpec) -> TensorSpec:
    """Another tensor of the same kind: the gradient of an output."""
    return TensorSpec(
        id=-spec.id - 1, shape=spec.shape, dtype=spec.dtype, strides=spec.strides, storage=-spec.storage - 1
    )


def _list(op: Op, name: str) -> tuple[TensorSpec, ...]:
    return op.args(name)


def _weights(op: Op) -> tuple[TensorSpec, ...]:
    return _list(op, "weights")


def _product(
    op: Op, size: tuple[int, int, int], operands: tuple[TensorSpec, TensorSpec], *, trans: tuple[bool, bool],
    bias: bool = False,
) -> KernelCall:  # fmt: skip
    m, n, k = size
    first = operands[0]
    shape = GemmShape(
        m=m, n=n, k=k, trans_a=trans[0], trans_b=trans[1], align_bytes=alignment_bytes(operands), bias=bias
    )
    pipe = math_pipe(first.dtype, allow_tf32=bool(op.attrs.get("allow_tf32", False)))
    return gemm_call(shape, dtype=first.dtype, itemsize_bytes=first.itemsize_bytes, pipe=pipe)
