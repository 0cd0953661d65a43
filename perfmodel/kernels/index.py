"""Gathers, scatters, sorts and scans: kernels whose addresses come from data.

Families: `index` (one gather or scatter an element), `index_accumulate` (read-modify-write in 32-byte sectors), `sort`
(radix sort, counted in passes) and `scan`. Embedding lookups have their own family, see `embedding`.
"""

from __future__ import annotations

import math

from perfmodel.estimate import Work
from perfmodel.graph import Op, TensorSpec
from perfmodel.kernels.copy import copy_family, moved, total_bytes, touched_bytes
from perfmodel.kernels.registry import KernelCall, kernel_rule

SECTOR_BYTES = 32  # smallest unit of a device memory access (CUDA C++ Best Practices Guide, "Coalesced Access")
RADIX_BITS = 8  # bits a pass of cub::DeviceRadixSort resolves (onesweep)
SINGLE_TILE_ELEMS = 4096  # up to about this many keys, cub sorts in one block without passes through memory
SINGLE_TILE_STEPS = 8  # 11-13 us on a V100 for 36 and 351 keys of 64 bits: one serial step per radix digit
INDEX_BYTES = 8  # indices are int64

Calls = tuple[KernelCall, ...]


def gathered_bytes(n_elems: int, run_elems: int, itemsize_bytes: int) -> int:
    """Bytes that move for `n_elems` elements found in contiguous runs of `run_elems`, in whole 32-byte sectors.

    >>> gathered_bytes(100, 1, 4), gathered_bytes(128, 128, 4)
    (3200, 512)
    """
    if n_elems == 0:
        return 0
    run_bytes = max(run_elems, 1) * itemsize_bytes
    sectors = math.ceil(run_bytes / SECTOR_BYTES)
    return math.ceil(n_elems / max(run_elems, 1)) * sectors * SECTOR_BYTES


def _is_index(spec: TensorSpec) -> bool:
    return spec.dtype in {"int64", "int32", "bool", "uint8"}


def _data_and_indices(op: Op) -> tuple[TensorSpec, tuple[TensorSpec, ...]]:
    """The tensor that is indexed and the index tensors."""
    data = op.arg("self") or op.inputs[0]
    named = op.args("indices") or op.args("index")
    return data, named or tuple(spec for spec in op.inputs[1:] if _is_index(spec))


def _copied(op: Op, data: TensorSpec, target: TensorSpec) -> Calls:
    """The copy that an out-of-place update starts with.

    In backward there is none: autograd updates the zeros that it has just made in place, and spells that out of place
    only while a dispatch mode watches (torch/csrc/autograd/FunctionsManual.cpp, `areAnyTensorSubclassLike`).
    """
    if op.name.endswith("_") or (op.phase == "backward" and not op.recompute):
        return ()
    return moved(copy_family(data, target), touched_bytes(data), target)


def _gather(op: Op, target: TensorSpec) -> Calls:
    """One kernel: reads indices and one element per output element, writes the output."""
    _, indices = _data_and_indices(op)
    read_bytes = target.bytes + total_bytes(indices)
    return moved("index", read_bytes, target)


@kernel_rule("aten.index", "aten._unsafe_index", "aten.index_select", "aten.gather", "aten.take",
             "aten.take_along_dim", "aten._index_select_sparse_rows")  # fmt: skip
def gather(op: Op) -> Calls:
    """Output elements looked up by index. A boolean mask first becomes indices (a scan and a compaction)."""
    _, indices = _data_and_indices(op)
    masks = [spec for spec in indices if spec.dtype in {"bool", "uint8"}]
    return (*(call for mask in masks for call in _nonzero(mask)), *_gather(op, op.outputs[0]))


def _nonzero(mask: TensorSpec) -> Calls:
    """Counting and writing the coordinates of nonzero elements: two kernels over the mask."""
    count = KernelCall(family="scan", work=Work(read_bytes=mask.bytes, write_bytes=INDEX_BYTES), dtype=mask.dtype)
    n_dims = max(len(mask.shape), 1)
    write = Work(read_bytes=mask.bytes, write_bytes=mask.n_elems * n_dims * INDEX_BYTES)
    return count, KernelCall(family="scan", work=write, dtype=mask.dtype)


@kernel_rule("aten.nonzero", "aten.argwhere", "aten.masked_select")
def nonzero(op: Op) -> Calls:
    """Mask to coordinates; `masked_select` also gathers. How many are set is not known: all are assumed."""
    mask = op.arg("mask") or op.inputs[-1]
    gathered = _gather(op, op.outputs[0]) if op.name == "aten.masked_select" else ()
    return (*_nonzero(mask), *gathered)


@kernel_rule("aten.scatter", "aten.scatter_", "aten.scatter_add", "aten.scatter_add_", "aten.scatter_reduce",
             "aten.scatter_reduce_", "aten.index_add", "aten.index_add_", "aten.index_copy", "aten.index_copy_",
             "aten.index_fill", "aten.index_fill_", "aten.index_reduce", "aten.index_reduce_")  # fmt: skip
def scatter(op: Op) -> Calls:
    """A copy of the tensor if not in place, then one read-modify-write (a plain write without a reduction) an element."""
    data, indices = _data_and_indices(op)
    target = op.outputs[0] if op.outputs else data
    source = op.arg("src") or op.arg("source")
    n_elems = source.n_elems if source is not None else max((spec.n_elems for spec in indices), default=0)
    copied = _copied(op, data, target)
    adds = "add" in op.name or "reduce" in op.name
    run = target.shape[-1] if op.name.startswith("aten.index") and len(target.shape) > 1 else 1
    touched = gathered_bytes(n_elems, run, target.itemsize_bytes)
    read_bytes = total_bytes(indices) + (touched_bytes(source) if source is not None else 0) + touched * adds
    if n_elems == 0:
        return copied
    work = Work(flops=n_elems * adds, read_bytes=read_bytes, write_bytes=touched)
    return (*copied, KernelCall(family="index", work=work, dtype=target.dtype))


@kernel_rule("aten.index_put", "aten.index_put_", "aten._index_put_impl_", "aten._unsafe_index_put")
def index_put(op: Op) -> Calls:
    """Writes values at indices. Accumulating is deterministic on CUDA: indices are linearised and sorted first.

    Kernels as in a V100 listing of `IndexBackward` (2021): a handful of tiny index kernels, a radix sort, a permuted copy
    of the values and `indexing_backward_kernel`. Where the first dimensions are the indexed ones (rows of a matrix), values
    lie as the kernel wants them, and a warp adds whole slices (torch 2, aten/src/ATen/native/cuda/Indexing.cu).
    """
    data, indices = _data_and_indices(op)
    target = op.outputs[0] if op.outputs else data
    values = op.arg("values") or op.inputs[-1]
    copied = _copied(op, data, target)
    if values.n_elems == 0 or not indices:
        return copied
    if not op.attrs.get("accumulate", False):
        work = Work(read_bytes=total_bytes(indices) + touched_bytes(values), write_bytes=values.bytes)
        return (*copied, KernelCall(family="index", work=work, dtype=target.dtype))
    n_indices = max(spec.n_elems for spec in indices)
    linear = Work(read_bytes=total_bytes(indices), write_bytes=n_indices * INDEX_BYTES)
    tiny = KernelCall(family="index", work=linear, dtype="int64")
    slice_elems = _leading_slice_elems(data, indices, values)
    sectors = gathered_bytes(values.n_elems, slice_elems or 1, values.itemsize_bytes)
    add = Work(flops=values.n_elems, read_bytes=2 * sectors, write_bytes=sectors)
    permuted = moved("transpose", touched_bytes(values), values) if slice_elems is None else ()
    return (
        *copied,
        *(tiny for _ in range(2 * len(indices))),
        *sort_calls(n_indices, key_bytes=INDEX_BYTES, value_bytes=INDEX_BYTES),
        *permuted,
        KernelCall(family="index_accumulate", work=add, dtype=target.dtype),
    )


def _leading_slice_elems(data: TensorSpec, indices: tuple[TensorSpec, ...], values: TensorSpec) -> int | None:
    """Elements of the slice that each index names if the first dimensions are the indexed ones, else None.

    Which dimensions are indexed is not recorded; the shape of the values tells.
    """
    places = max((spec.shape for spec in indices), key=len)
    rest = data.shape[len(indices) :]
    return math.prod(rest) if values.shape == (*places, *rest) else None


def sort_calls(n_elems: int, *, key_bytes: int, value_bytes: int) -> Calls:
    """A radix sort of pairs: one block for few keys, else a histogram and one kernel per 8 bits of key."""
    pair_bytes = key_bytes + value_bytes
    if n_elems == 0:
        return ()
    if n_elems <= SINGLE_TILE_ELEMS:
        work = Work(read_bytes=n_elems * pair_bytes, write_bytes=n_elems * pair_bytes)
        steps = {"serial_steps": float(SINGLE_TILE_STEPS)}
        return (KernelCall(family="sort", work=work, dtype="int64", features=steps),)
    histogram = KernelCall(family="sort", work=Work(read_bytes=n_elems * key_bytes), dtype="int64")
    one_pass = Work(read_bytes=n_elems * pair_bytes, write_bytes=n_elems * pair_bytes)
    passes = key_bytes * 8 // RADIX_BITS
    return (histogram, *(KernelCall(family="sort", work=one_pass, dtype="int64") for _ in range(passes)))


@kernel_rule("aten.sort", "aten.argsort", "aten.msort", "aten.kthvalue", "aten.median")
def sort(op: Op) -> Calls:
    """A (segmented) radix sort of the values with their positions."""
    spec = op.inputs[0]
    return sort_calls(spec.n_elems, key_bytes=spec.itemsize_bytes, value_bytes=INDEX_BYTES)


@kernel_rule("aten.topk")
def topk(op: Op) -> Calls:
    """Radix select: a pass over the input per 8 bits of key finds the k-th value, one more gathers, then a small sort."""
    spec = op.inputs[0]
    n_passes = spec.itemsize_bytes * 8 // RADIX_BITS + 1
    select = Work(read_bytes=n_passes * spec.bytes, write_bytes=total_bytes(op.outputs))
    found = op.outputs[0].n_elems if op.outputs else 0
    return (
        KernelCall(family="sort", work=select, dtype=spec.dtype),
        *sort_calls(found, key_bytes=spec.itemsize_bytes, value_bytes=INDEX_BYTES),
    )


@kernel_rule("aten._unique", "aten._unique2", "aten.unique_dim", "aten.unique_consecutive")
def unique(op: Op) -> Calls:
    """A sort, a scan that numbers the runs, and a compaction."""
    spec = op.inputs[0]
    runs = Work(read_bytes=spec.bytes, write_bytes=spec.n_elems * INDEX_BYTES)
    ordered = sort_calls(spec.n_elems, key_bytes=spec.itemsize_bytes, value_bytes=INDEX_BYTES)
    kept = KernelCall(family="scan", work=runs, dtype=spec.dtype)
    return (*ordered, kept, *moved("index", spec.bytes, op.outputs[0]))


@kernel_rule("aten.cumsum", "aten.cumsum_", "aten.cumprod", "aten.cummax", "aten.cummin", "aten.logcumsumexp",
             "aten._cummax_helper", "aten._cummin_helper")  # fmt: skip
def scan(op: Op) -> Calls:
    """Prefix sums along a dimension: one read, one write, one operation an element."""
    return moved("scan", touched_bytes(op.inputs[0]), op.outputs or op.inputs[:1], flops=op.inputs[0].n_elems)


@kernel_rule("aten.bincount", "aten.histc", "aten.searchsorted", "aten.bucketize")
def lookup_counts(op: Op) -> Calls:
    """One pass over the input with a scattered update or a search an element."""
    return moved("index", total_bytes(op.inputs), op.outputs, flops=op.inputs[0].n_elems)
