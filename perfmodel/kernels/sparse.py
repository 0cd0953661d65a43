"""Sparse COO gradients of embedding tables: what PyTorch runs to merge, read and apply them.

A sparse tensor argument arrives as two tensors, `<name>.indices` [1, nnz] int64 and `<name>.values` [nnz, dim]. Rules for
ops that take one are registered under the op's name with `@sparse` behind it; the dense rule of the same op is another.
Sources: ATen/native/sparse/cuda/SparseCUDATensor.cu (`coalesce_sparse_cuda`) and SparseCUDATensorMath.cu
(`add_out_dense_sparse_cuda`) of PyTorch 2.
"""

from __future__ import annotations

from perfmodel.estimate import Work
from perfmodel.graph import Op, TensorSpec
from perfmodel.kernels.copy import moved, total_bytes, touched_bytes
from perfmodel.kernels.index import INDEX_BYTES, gathered_bytes, sort_calls
from perfmodel.kernels.registry import KernelCall, kernel_rule

Calls = tuple[KernelCall, ...]


def parts(op: Op) -> tuple[TensorSpec, TensorSpec]:
    """Indices and values of the sparse argument of `op`."""
    found = dict(zip((name.rpartition(".")[2] for name in op.input_names), op.inputs, strict=True))
    return found["indices"], found["values"]


def _row_elems(values: TensorSpec) -> int:
    """Elements of one row of values."""
    return values.n_elems // values.shape[0] if values.shape and values.shape[0] else 0


@kernel_rule("aten._coalesce@sparse", "aten.coalesce@sparse")
def coalesce(op: Op) -> Calls:
    """Sort row numbers with their positions, number the runs, add up the rows of each run, and copy the unique indices."""
    indices, values = parts(op)
    nnz = values.shape[0] if values.shape else 0
    if nnz == 0:
        return ()
    position = moved("fill", 0, indices)
    runs = Work(read_bytes=2 * nnz * INDEX_BYTES, write_bytes=2 * nnz * INDEX_BYTES)
    row = _row_elems(values)
    rows = gathered_bytes(values.n_elems, row, values.itemsize_bytes)
    add = Work(flops=values.n_elems, read_bytes=rows + 2 * nnz * INDEX_BYTES, write_bytes=values.bytes)
    return (
        *position,
        *sort_calls(nnz, key_bytes=INDEX_BYTES, value_bytes=INDEX_BYTES),
        KernelCall(family="scan", work=runs, dtype="int64"),
        KernelCall(family="index", work=add, dtype=values.dtype),
        *moved("copy", touched_bytes(indices), indices),
    )


@kernel_rule("aten.add_@sparse", "aten.sub_@sparse", "aten.add@sparse", "aten.sub@sparse")
def add_rows(op: Op) -> Calls:
    """`dense += alpha * sparse`: one read-modify-write of each row that the sparse tensor names.

    An uncoalesced tensor with alpha other than 1 first multiplies its values; out of place, the dense tensor is copied.
    Two sparse operands are concatenated.
    """
    indices, values = parts(op)
    dense = op.arg("self") or op.arg("other")
    if dense is None:
        return moved("copy", total_bytes(op.inputs), op.outputs)
    copied = () if op.name.endswith("_") else moved("copy", touched_bytes(dense), dense)
    if values.n_elems == 0:
        return copied
    scaled = op.attrs.get("alpha", 1) not in (1, 1.0)
    multiplied = moved("copy", values.bytes, values, flops=values.n_elems) if scaled else ()
    rows = gathered_bytes(values.n_elems, _row_elems(values), values.itemsize_bytes)
    work = Work(flops=values.n_elems, read_bytes=values.bytes + touched_bytes(indices) + rows, write_bytes=rows)
    return (*copied, *multiplied, KernelCall(family="index", work=work, dtype=values.dtype))


@kernel_rule("aten.sparse_mask@sparse")
def rows_of_dense(op: Op) -> Calls:
    """The rows of a dense tensor that a sparse mask names: a gather of whole rows, and a copy of the indices."""
    indices, values = parts(op)
    if values.n_elems == 0:
        return ()
    rows = gathered_bytes(values.n_elems, _row_elems(values), values.itemsize_bytes)
    work = Work(read_bytes=rows + touched_bytes(indices), write_bytes=values.bytes)
    gathered = KernelCall(family="index", work=work, dtype=values.dtype)
    return (*moved("copy", touched_bytes(indices), indices), gathered)


@kernel_rule("aten.clone@sparse", "aten.copy_@sparse", "aten._to_copy@sparse")
def copy_sparse(op: Op) -> Calls:
    """One copy of the indices and one of the values."""
    indices, values = parts(op)
    return (*moved("copy", touched_bytes(indices), indices), *moved("copy", touched_bytes(values), values))


@kernel_rule("aten._to_dense@sparse", "aten.to_dense@sparse")
def to_dense(op: Op) -> Calls:
    """A fill of the whole dense tensor, then the rows are added."""
    indices, values = parts(op)
    rows = gathered_bytes(values.n_elems, _row_elems(values), values.itemsize_bytes)
    work = Work(flops=values.n_elems, read_bytes=values.bytes + touched_bytes(indices) + rows, write_bytes=rows)
    placed = (KernelCall(family="index", work=work, dtype=values.dtype),) if values.n_elems else ()
    return (*moved("fill", 0, op.outputs), *placed)


@kernel_rule("aten._indices@sparse", "aten._values@sparse", "aten.indices@sparse", "aten.values@sparse",
             "aten._nnz@sparse", "aten.is_coalesced@sparse", "aten._coalesced_@sparse", "aten.detach@sparse",
             "aten.alias@sparse", "aten._sparse_coo_tensor_unsafe@sparse", "aten.sparse_dim@sparse",
             "aten.dense_dim@sparse", "aten.is_same_size@sparse")  # fmt: skip
def no_kernel(op: Op) -> Calls:
    """A handle on memory that is there already."""
    return ()


@kernel_rule("aten.mul_@sparse", "aten.mul@sparse", "aten.div_@sparse", "aten.div@sparse", "aten.neg@sparse",
             "aten.neg_@sparse", "aten.zero_@sparse", "aten.pow@sparse", "aten.sqrt@sparse", "aten.sum@sparse")  # fmt: skip
def on_values(op: Op) -> Calls:
    """A scalar operation on the values."""
    _, values = parts(op)
    return moved("copy", touched_bytes(values), values, flops=values.n_elems)
