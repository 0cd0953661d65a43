"""Reductions: sums, means, extrema, norms and variances along dimensions or over whole tensors.

PyTorch runs one kernel (ATen/native/cuda/Reduce.cuh): each block reduces some outputs; where outputs are few and long,
several blocks share one through a small buffer. Features of the family `reduction`:

- `n_elems`: elements read. `n_out`: elements written. `n_reduced`: elements that fold into one output.
- `inner`: 1 if the reduced dimensions include the one that is contiguous in memory, else 0 (column sums).
- `itemsize_bytes`: bytes of an input element.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from perfmodel.estimate import Work
from perfmodel.graph import Op, TensorSpec
from perfmodel.kernels.copy import innermost, total_bytes, touched_bytes
from perfmodel.kernels.elementwise import PIPE, pointwise_calls
from perfmodel.kernels.registry import KernelCall, kernel_rule

Calls = tuple[KernelCall, ...]

FAMILY = "reduction"

# FLOPs an element read: the addition or comparison, and what is done to the element before it.
FLOPS: Mapping[str, int] = {
    "sum": 1, "mean": 1, "nansum": 2, "nanmean": 2, "prod": 1, "amax": 1, "amin": 1, "argmax": 1, "argmin": 1, "aminmax": 2,
    "_aminmax": 2, "all": 1, "any": 1, "count_nonzero": 2, "norm": 2, "linalg_vector_norm": 2, "frobenius_norm": 2, "trace": 1,
    "std": 4, "var": 4, "std_mean": 4, "var_mean": 4, "_is_all_true": 1, "_is_any_true": 1, "dist": 3, "equal": 1,
    "linalg__powsum": 2,
}  # fmt: skip


def reduced_inner(source: TensorSpec, target: TensorSpec, dims: Sequence[int] | None) -> bool:
    """True if a dimension that is reduced is the contiguous one of `source`."""
    if not dims:
        return True
    return innermost(source) in {dim % max(len(source.shape), 1) for dim in dims}


def dims_of(op: Op) -> list[int]:
    """The dimensions that `op` reduces; empty for all of them."""
    value = op.attrs.get("dim")
    if value is None:
        return []
    return [int(value)] if isinstance(value, int | float) else [int(dim) for dim in value]


def reduction_call(
    source: TensorSpec, written: Sequence[TensorSpec], flops: int, *, inner: bool, read_bytes: int = 0
) -> KernelCall:
    """One reduction of `source` into the tensors `written`."""
    n_out = max(written[0].n_elems, 1)
    work = Work(flops=flops, read_bytes=read_bytes or touched_bytes(source), write_bytes=total_bytes(written))
    features = {
        "n_elems": float(source.n_elems),
        "n_out": float(n_out),
        "n_reduced": max(source.n_elems / n_out, 1.0),
        "inner": float(inner),
        "itemsize_bytes": float(source.itemsize_bytes),
    }
    return KernelCall(family=FAMILY, work=work, dtype=source.dtype, pipe=PIPE, features=features)


@kernel_rule(*(f"aten.{name}" for name in FLOPS))
def reduction(op: Op) -> Calls:
    """Reads every element once and writes the results once."""
    source = op.inputs[0]
    written = op.outputs
    if source.n_elems == 0 or not written:
        return ()
    flops = FLOPS[op.name.removeprefix("aten.")] * source.n_elems
    inner = reduced_inner(source, written[0], dims_of(op))
    return (reduction_call(source, written, flops, inner=inner, read_bytes=total_bytes(op.inputs)),)


@kernel_rule("aten.max", "aten.min")
def extremum(op: Op) -> Calls:
    """Of two tensors pointwise; of one a reduction, over all elements or with positions along a dimension."""
    if op.arg("other") is not None or op.overload == "other":
        return pointwise_calls(op.inputs, op.outputs, 1, op_kind=0)
    source = op.inputs[0]
    if source.n_elems == 0:
        return ()
    return (
        reduction_call(source, op.outputs, source.n_elems, inner=reduced_inner(source, op.outputs[0], dims_of(op))),
    )


@kernel_rule("aten.logsumexp")
def logsumexp(op: Op) -> Calls:
    """Four kernels (ATen/native/ReduceOps.cpp): maximum, exponentials of differences, sum, and a logarithm per output."""
    source, target = op.inputs[0], op.outputs[0]
    if source.n_elems == 0:
        return ()
    inner = reduced_inner(source, target, dims_of(op))
    return (
        reduction_call(source, (target,), source.n_elems, inner=inner),
        *pointwise_calls((source, target), (source,), 2, op_kind=1),
        reduction_call(source, (target,), source.n_elems, inner=inner),
        *pointwise_calls((target, target), (target,), 2, op_kind=1),
    )


@kernel_rule("aten.value_selecting_reduction_backward")
def selected_backward(op: Op) -> Calls:
    """A fill of the input's gradient with zeros and one element written per output."""
    gradient = op.inputs[0]
    filled = KernelCall(family="fill", work=Work(write_bytes=total_bytes(op.outputs)), dtype=gradient.dtype)
    placed = Work(read_bytes=total_bytes(op.inputs), write_bytes=gradient.bytes)
    return (filled, KernelCall(family="index", work=placed, dtype=gradient.dtype)) if gradient.n_elems else ()
