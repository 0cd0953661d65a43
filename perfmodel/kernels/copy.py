"""Copies, concatenations and fills: what moves bytes and computes nothing.

Families: `copy` (both sides coalesced), `transpose` (the dimension that is contiguous on one side is not on the other)
and `fill` (writes only).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache

from perfmodel.estimate import Work
from perfmodel.graph import Op, TensorSpec
from perfmodel.kernels.registry import KernelCall, kernel_rule

# Inputs of one CatArrayBatchedCopy launch (ATen/native/cuda/Shape.cu, CAT_ARRAY_BATCH_SIZE).
CAT_INPUTS_PER_LAUNCH = 128
MAX_LAYOUTS = 4096  # remembered

Calls = tuple[KernelCall, ...]


def touched_bytes(spec: TensorSpec) -> int:
    """Bytes of the distinct elements of a tensor: an expanded dimension (stride 0) is read once.

    >>> touched_bytes(TensorSpec(id=0, shape=(8, 4), dtype="float32", strides=(0, 1), storage=0))
    16
    """
    return _distinct(spec.shape, spec.strides) * spec.itemsize_bytes


@lru_cache(maxsize=MAX_LAYOUTS)
def _distinct(shape: tuple[int, ...], strides: tuple[int, ...]) -> int:
    """Distinct elements of a tensor."""
    n_elems = 1
    for size, stride in zip(shape, strides, strict=True):
        n_elems *= size if stride != 0 else min(size, 1)
    return n_elems


def total_bytes(specs: Iterable[TensorSpec]) -> int:
    """Distinct bytes of several tensors, a tensor passed twice counted twice."""
    return sum([touched_bytes(spec) for spec in specs])


def innermost(spec: TensorSpec) -> int | None:
    """The dimension whose neighbours lie next to each other in memory, or None for a tensor of one element."""
    strides = [
        (stride, -dim) for dim, (size, stride) in enumerate(zip(spec.shape, spec.strides, strict=True)) if size > 1
    ]
    return -min(strides)[1] if strides else None


def copy_family(source: TensorSpec, target: TensorSpec) -> str:
    """`copy` if both tensors are contiguous along the same dimension, else `transpose`."""
    if len(source.shape) != len(target.shape) or source.is_contiguous:
        return "copy"
    return "copy" if innermost(source) == innermost(target) else "transpose"


def moved(family: str, read_bytes: int, written: TensorSpec | Sequence[TensorSpec], flops: int = 0) -> Calls:
    """One kernel that reads `read_bytes` and writes the tensors `written`; () if there is nothing to write."""
    targets = (written,) if isinstance(written, TensorSpec) else tuple(written)
    write_bytes = total_bytes(targets)
    if write_bytes == 0:
        return ()
    work = Work(flops=flops, read_bytes=read_bytes, write_bytes=write_bytes)
    return (KernelCall(family=family, work=work, dtype=targets[0].dtype),)


@kernel_rule("aten.clone", "aten.contiguous", "aten._to_copy", "aten.to", "aten.alias_copy", "aten.expand_copy",
             "aten.permute_copy", "aten.view_copy", "aten.slice_copy", "aten.transpose_copy", "aten.t_copy",
             "aten.reshape_copy", "aten.repeat", "aten.tile", "aten.roll", "aten.flip", "aten.tril", "aten.triu",
             "aten.tril_", "aten.triu_", "aten.pixel_shuffle", "aten.pixel_unshuffle", "aten.channel_shuffle",
             "aten.fold", "aten.im2col", "aten.col2im", "aten.repeat_interleave", "aten._pin_memory")  # fmt: skip
def one_copy(op: Op) -> Calls:
    """Reads the (distinct elements of the) input once and writes the output once; a cast is a copy too."""
    source, target = op.inputs[0], op.outputs[0]
    return moved(copy_family(source, target), total_bytes(op.inputs), target)


@kernel_rule("aten.copy_", "aten.copy")
def copy_into(op: Op) -> Calls:
    """`copy_(self, src)`: reads src, writes self; self is not read."""
    target = op.arg("self") or op.inputs[0]
    source = op.arg("src") or op.inputs[-1]
    return moved(copy_family(source, target), touched_bytes(source), target)


@kernel_rule("aten.cat", "aten.concat", "aten.stack", "aten.hstack", "aten.vstack", "aten.column_stack")
def concatenate(op: Op) -> Calls:
    """Every input is read and the output written once; one launch takes up to 128 inputs."""
    inputs = [spec for spec in op.inputs if spec.n_elems]
    calls = []
    for start in range(0, len(inputs), CAT_INPUTS_PER_LAUNCH):
        batch = inputs[start : start + CAT_INPUTS_PER_LAUNCH]
        n_bytes = sum(spec.n_elems for spec in batch) * op.outputs[0].itemsize_bytes
        work = Work(read_bytes=total_bytes(batch), write_bytes=n_bytes)
        calls.append(KernelCall(family="copy", work=work, dtype=op.outputs[0].dtype))
    return tuple(calls)


@kernel_rule("aten.split_copy", "aten.split_with_sizes_copy", "aten.unbind_copy")
def split_copies(op: Op) -> Calls:
    """One copy per output."""
    return tuple(call for target in op.outputs for call in moved("copy", target.bytes, target))


@kernel_rule("aten.constant_pad_nd", "aten.slice_backward", "aten.select_backward", "aten.diagonal_backward",
             "aten.unfold_backward", "aten.as_strided_scatter", "aten.slice_scatter", "aten.select_scatter",
             "aten.diagonal_scatter")  # fmt: skip
def fill_and_place(op: Op) -> Calls:
    """A fill (or, for `_scatter`, a copy) of the whole output, then a copy of the smaller tensor into its place."""
    target = op.outputs[0]
    if op.name.endswith("_scatter"):
        base, part = op.inputs[0], op.inputs[1]
        whole = moved("copy", touched_bytes(base), target)
    else:
        part = op.inputs[0]
        whole = moved("fill", 0, target)
    placed = KernelCall(
        family="copy", work=Work(read_bytes=touched_bytes(part), write_bytes=part.bytes), dtype=target.dtype
    )
    return (*whole, placed) if part.n_elems else whole


@kernel_rule("aten.zeros", "aten.zeros_like", "aten.ones", "aten.ones_like", "aten.full", "aten.full_like",
             "aten.new_zeros", "aten.new_ones", "aten.new_full", "aten.zero_", "aten.zero", "aten.fill_", "aten.fill",
             "aten.scalar_tensor", "aten.arange", "aten.range", "aten.linspace", "aten.logspace", "aten.eye",
             "aten.tril_indices", "aten.triu_indices", "aten._efficientzerotensor", "aten.one_hot")  # fmt: skip
def fill(op: Op) -> Calls:
    """Writes the output once and reads nothing of size."""
    return moved("fill", 0, op.outputs or op.inputs[:1])
