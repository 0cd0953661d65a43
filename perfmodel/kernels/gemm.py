"""Matrix products: which gemm kernels an op runs, and how much work each is. The law is in `gemm_law`.

A call computes `batch` products out[m, n] = A[m, k] B[k, n]. Features of the family `gemm`:

- `m`, `n`, `k`, `batch`: the sizes.
- `trans_a`, `trans_b`: 1 if the operand is read transposed, that is stored with its first index contiguous. A linear
  layer's forward product has (0, 1), its input gradient (0, 0), its weight gradient (1, 0): what cuBLAS, which is
  column-major, calls TN, NN and NT.
- `align_bytes`: largest power of two, at most 16, that divides every leading dimension in bytes (tensor cores load 16
  bytes).
- `bias`: 1 if a vector is added in the epilogue. `beta`: 1 if the result is added to a matrix.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from perfmodel.estimate import Work
from perfmodel.graph import Op, TensorSpec
from perfmodel.kernels.copy import copy_family, moved, touched_bytes
from perfmodel.kernels.reduction import reduction_call
from perfmodel.kernels.registry import KernelCall, kernel_rule

MAX_ALIGN_BYTES = (
    16  # one 128-bit load, the widest a CUDA thread issues (CUDA C++ Programming Guide, "Device Memory Accesses")
)

PADDED = "shape_padding"  # attribute of a product whose operands compiled code pads to whole loads

_PIPES = {
    "float64": "fp64",
    "float32": "fp32",
    "float16": "fp16_tensor",
    "bfloat16": "bf16_tensor",
    "float8_e4m3fn": "fp8_tensor",
    "float8_e5m2": "fp8_tensor",
    "int8": "int8_tensor",
    "uint8": "int8_tensor",
    "complex64": "fp32",
    "complex128": "fp64",
}


def math_pipe(dtype: str, *, allow_tf32: bool = False) -> str:
    """The entry of `Device.peak_flops_per_s` that bounds matrix arithmetic on `dtype`.

    >>> math_pipe("float32"), math_pipe("float32", allow_tf32=True), math_pipe("bfloat16")
    ('fp32', 'tf32_tensor', 'bf16_tensor')
    """
    if dtype == "float32" and allow_tf32:
        return "tf32_tensor"
    return _PIPES.get(dtype, "fp32")


@dataclass(frozen=True, slots=True, kw_only=True)
class GemmShape:
    """Sizes and layout of one (batched) product; see the module for the meaning of each field."""

    m: int
    n: int
    k: int
    batch: int = 1
    trans_a: bool = False
    trans_b: bool = False
    align_bytes: int = MAX_ALIGN_BYTES
    bias: bool = False
    beta: bool = False


def gemm_work(shape: GemmShape, in_bytes: int, out_bytes: int) -> Work:
    """FLOPs (2 m n k per product) and bytes of one product.

    An added vector or matrix is not counted as FLOPs, as in `torch.utils.flop_counter`.
    `in_bytes` and `out_bytes` are the sizes of one element of the operands and of the result. Each operand is read
    once.
    """
    outputs = shape.batch * shape.m * shape.n
    operands = shape.batch * (shape.m * shape.k + shape.k * shape.n)
    added = shape.n * shape.bias + outputs * shape.beta
    return Work(
        flops=2 * outputs * shape.k,
        read_bytes=operands * in_bytes + added * out_bytes,
        write_bytes=outputs * out_bytes,
    )


def gemm_call(shape: GemmShape, *, dtype: str, itemsize_bytes: int, out_bytes: int = 0, pipe: str = "") -> KernelCall:
    """The kernel call of one product. `out_bytes` defaults to the operands' element size, `pipe` to that of `dtype`."""
    return KernelCall(
        family="gemm",
        work=gemm_work(shape, itemsize_bytes, out_bytes or itemsize_bytes),
        dtype=dtype,
        pipe=pipe or math_pipe(dtype),
        features={
            "m": float(shape.m),
            "n": float(shape.n),
            "k": float(shape.k),
            "batch": float(shape.batch),
            "trans_a": float(shape.trans_a),
            "trans_b": float(shape.trans_b),
            "align_bytes": float(shape.align_bytes),
            "bias": float(shape.bias),
            "beta": float(shape.beta),
            "itemsize_bytes": float(itemsize_bytes),
        },
    )


def bias_grad_call(grad: TensorSpec, channels: int, *, inner: bool) -> KernelCall:
    """The kernel that sums an output gradient to one value per channel; `inner` unless channels are contiguous."""
    return reduction_call(grad, (_matrix(grad, (channels,)),), grad.n_elems, inner=inner)


def is_transposed(spec: TensorSpec) -> bool:
    """True if the last two dimensions are stored with the first of them contiguous (and not also the last)."""
    row, column = spec.strides[-2], spec.strides[-1]
    if column == 1 or spec.shape[-1] == 1:
        return False
    return row == 1 or spec.shape[-2] == 1


def alignment_bytes(specs: Sequence[TensorSpec]) -> int:
    """Largest power of two, at most 16, dividing every leading dimension in bytes."""
    aligned = MAX_ALIGN_BYTES
    for spec in specs:
        if len(spec.shape) >= 2:
            leading = max(spec.strides[-1], spec.strides[-2], 1)
            aligned = math.gcd(aligned, leading * spec.itemsize_bytes)
    return aligned


def _operands(op: Op, *names: str) -> tuple[TensorSpec, ...]:
    """Tensor arguments by schema name, or by position where an importer lost the names."""
    found = tuple(op.arg(name) for name in names)
    if all(spec is not None for spec in found):
        return tuple(spec for spec in found if spec is not None)
    return op.inputs[: len(names)]


def _padded(spec: TensorSpec) -> TensorSpec:
    """The matrices with rows and columns of whole 16-byte loads, as a copy of their own if they had not.

    What torch/_inductor/fx_passes/pad_mm.py makes of the operands of a product whose sizes are unaligned.
    """
    unit = MAX_ALIGN_BYTES // spec.itemsize_bytes
    rows, columns = (-(-size // unit) * unit if size > 1 else size for size in spec.shape[-2:])
    if (rows, columns) == spec.shape[-2:]:
        return spec
    last = (1, rows) if is_transposed(spec) else (columns, 1)
    outer = [rows * columns * math.prod(spec.shape[i + 1 : -2]) for i in range(len(spec.shape) - 2)]
    return replace(spec, shape=(*spec.shape[:-2], rows, columns), strides=(*outer, *last))


def _nonzero(value: Any) -> bool:
    return not isinstance(value, int | float) or value != 0


def _product(op: Op, a: TensorSpec, b: TensorSpec, added: TensorSpec | None = None) -> tuple[KernelCall, ...]:
    """One product of the last two dimensions of `a` and `b`; `added` is the vector or matrix of an addmm."""
    given = (a, b)
    is_vector = added is not None and added.n_elems < math.prod(a.shape[:-1]) * b.shape[-1]
    if op.attrs.get(PADDED):
        a, b = _padded(a), _padded(b)
    m, k, n = a.shape[-2], a.shape[-1], b.shape[-1]
    batch = math.prod(a.shape[:-2])
    if min(m, n, batch) == 0:
        return ()
    present = added is not None and _nonzero(op.attrs.get("beta", 1))
    shape = GemmShape(
        m=m,
        n=n,
        k=k,
        batch=batch,
        trans_a=is_transposed(a),
        trans_b=is_transposed(b),
        align_bytes=alignment_bytes((a, b)),
        bias=present and is_vector,
        beta=present and not is_vector,
    )
    out = op.outputs[0] if op.outputs else a
    copies = [
        call
        for source, target in zip(given, (a, b), strict=True)
        if target is not source
        for call in moved(copy_family(source, target), touched_bytes(source), target)
    ]
    return (
        *copies,
        gemm_call(
            shape,
            dtype=a.dtype,
            itemsize_bytes=a.itemsize_bytes,
            out_bytes=out.itemsize_bytes,
            pipe=math_pipe(a.dtype, allow_tf32=bool(op.attrs.get("allow_tf32", False))),
        ),
    )


def _matrix(spec: TensorSpec, shape: tuple[int, ...]) -> TensorSpec:
    """The same memory seen as a matrix of `shape`, row-major."""
    return TensorSpec(
        id=spec.id,
        shape=shape,
        dtype=spec.dtype,
        strides=(*shape[1:], 1) if len(shape) == 2 else (1,),
        storage=spec.storage,
    )


@kernel_rule("aten.mm", "aten._int_mm", "aten._scaled_mm", "perfmodel.fp8_product")
def mm_rule(op: Op) -> tuple[KernelCall, ...]:
    """One product."""
    a, b = _operands(op, "self", "mat2")[:2]
    return _product(op, a, b)


@kernel_rule("aten.bmm")
def bmm_rule(op: Op) -> tuple[KernelCall, ...]:
    """One strided-batched product."""
    a, b = _operands(op, "self", "mat2")
    return _product(op, a, b)


@kernel_rule("aten.addmm", "aten.addmm_", "aten._addmm_activation")
def addmm_rule(op: Op) -> tuple[KernelCall, ...]:
    """One product with a vector or a matrix added."""
    added, a, b = _operands(op, "self", "mat1", "mat2")
    return _product(op, a, b, added)


@kernel_rule("aten.baddbmm", "aten.baddbmm_")
def baddbmm_rule(op: Op) -> tuple[KernelCall, ...]:
    """One strided-batched product added to a batch of matrices."""
    added, a, b = _operands(op, "self", "batch1", "batch2")
    return _product(op, a, b, added)


@kernel_rule("aten.linear", "aten.mkldnn_linear")
def linear_rule(op: Op) -> tuple[KernelCall, ...]:
    """out[..., n] = x[..., k] weight[n, k]^T (+ bias[n]): one product over all leading dimensions."""
    x, weight = op.inputs[0], op.inputs[1]
    bias = op.inputs[2] if len(op.inputs) > 2 else None
    rows = math.prod(x.shape[:-1])
    return _product(op, _matrix(x, (rows, x.shape[-1])), _transposed(weight), bias)


@kernel_rule("aten.matmul")
def matmul_rule(op: Op) -> tuple[KernelCall, ...]:
    """torch.matmul undecomposed: a matrix right operand folds the batch into rows, as torch does."""
    a, b = op.inputs[0], op.inputs[1]
    if len(b.shape) == 1:
        b = _matrix(b, (b.shape[0], 1))
    if len(a.shape) == 1:
        a = _matrix(a, (1, a.shape[0]))
    if len(b.shape) == 2:
        return _product(op, _matrix(a, (math.prod(a.shape[:-1]), a.shape[-1])) if len(a.shape) > 2 else a, b)
    batch = math.prod(op.outputs[0].shape[:-2]) if op.outputs else math.prod(b.shape[:-2])
    wide = TensorSpec(
        id=a.id,
        shape=(batch, *a.shape[-2:]),
        dtype=a.dtype,
        strides=(a.shape[-1] * a.shape[-2], *a.strides[-2:]),
        storage=a.storage,
    )
    return _product(op, wide, b)


@kernel_rule("aten.mv", "aten.addmv", "aten.addmv_")
def mv_rule(op: Op) -> tuple[KernelCall, ...]:
    """Matrix times vector: a product with n = 1."""
    matrix, vector = op.inputs[-2], op.inputs[-1]
    return _product(op, matrix, _matrix(vector, (vector.shape[0], 1)))


@kernel_rule("aten.dot", "aten.vdot")
def dot_rule(op: Op) -> tuple[KernelCall, ...]:
    """Inner product of two vectors: m = n = 1."""
    a, b = op.inputs[:2]
    return _product(op, _matrix(a, (1, a.n_elems)), _matrix(b, (b.n_elems, 1)))


@kernel_rule("aten.addr", "aten.ger", "aten.outer")
def outer_rule(op: Op) -> tuple[KernelCall, ...]:
    """Outer product of two vectors: k = 1."""
    a, b = op.inputs[-2:]
    return _product(op, _matrix(a, (a.n_elems, 1)), _matrix(b, (1, b.n_elems)))


@kernel_rule("aten.linear_backward")
def linear_backward_rule(op: Op) -> tuple[KernelCall, ...]:
    """By `output_mask`: input gradient dY W, weight gradient dY^T X, bias gradient (a sum of dY over rows)."""
    x, grad, weight = op.inputs[:3]
    mask = op.attrs.get("output_mask") or [True, True, True]
    rows = math.prod(x.shape[:-1])
    flat_x, flat_grad = _matrix(x, (rows, x.shape[-1])), _matrix(grad, (rows, grad.shape[-1]))
    calls: tuple[KernelCall, ...] = ()
    if mask[0]:
        calls += _product(op, flat_grad, weight)
    if mask[1]:
        calls += _product(op, _transposed(flat_grad), flat_x)
    return (*calls, bias_grad_call(grad, grad.shape[-1], inner=False)) if mask[2] else calls


def _transposed(spec: TensorSpec) -> TensorSpec:
    return TensorSpec(
        id=spec.id, shape=spec.shape[::-1], dtype=spec.dtype, strides=spec.strides[::-1], storage=spec.storage
    )
