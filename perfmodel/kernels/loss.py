"""Losses that are kernels of their own: negative log likelihood, squared error, cross entropy of probabilities.

Log softmax is in `softmax`; what a composite loss decomposes into (`sub`, `mean`, `sigmoid`, ...) is priced there.
"""

from __future__ import annotations

import math

from perfmodel.estimate import Work
from perfmodel.graph import Op, TensorSpec
from perfmodel.kernels.copy import moved, total_bytes
from perfmodel.kernels.registry import KernelCall, kernel_rule

# Threads of the single block that sums a negative log likelihood (ATen/native/cuda/Loss.cu, nll_loss_threads).
NLL_MIN_THREADS, NLL_MAX_THREADS, NLL_ROWS_PER_THREAD = 32, 1024, 16

Calls = tuple[KernelCall, ...]

# FLOPs an element of the pointwise part (a logarithm or exponential counts as one), forward and backward.
_FLOPS = {
    "mse_loss": (2, 3),
    "binary_cross_entropy": (6, 5),
    "smooth_l1_loss": (4, 4),
    "huber_loss": (4, 4),
    "soft_margin_loss": (4, 4),
}


def _is_reduced(op: Op) -> bool:
    """True unless `reduction` is 0 (none)."""
    return op.attrs.get("reduction", 1) not in (0, "none")


def reduced_pointwise(op: Op, flops_per_elem: int) -> Calls:
    """A pointwise kernel into a temporary of the inputs' shape, then a reduction to the scalar result."""
    first = op.inputs[0]
    point = Work(flops=flops_per_elem * first.n_elems, read_bytes=total_bytes(op.inputs), write_bytes=first.bytes)
    calls: Calls = (KernelCall(family="loss", work=point, dtype=first.dtype),)
    if _is_reduced(op):
        reduce = Work(flops=first.n_elems, read_bytes=first.bytes, write_bytes=first.itemsize_bytes)
        calls = (*calls, KernelCall(family="loss", work=reduce, dtype=first.dtype))
    return calls


@kernel_rule(*(f"aten.{name}" for name in _FLOPS))
def loss_forward(op: Op) -> Calls:
    """Pointwise, then (unless reduction is none) a mean or sum."""
    return reduced_pointwise(op, _FLOPS[op.name.removeprefix("aten.")][0])


@kernel_rule(*(f"aten.{name}_backward" for name in _FLOPS))
def loss_backward(op: Op) -> Calls:
    """One pointwise kernel that reads gradient, input and target and writes the input's gradient."""
    flops = _FLOPS[op.name.removeprefix("aten.").removesuffix("_backward")][1]
    target = op.outputs[0]
    return moved("loss", total_bytes(op.inputs), target, flops=flops * target.n_elems)


@kernel_rule("aten.binary_cross_entropy_with_logits")
def bce_with_logits(op: Op) -> Calls:
    """Five kernels (ATen/native/Loss.cpp): 1 - target, times input, log sigmoid, their difference, mean.

    A weight or a positive weight adds one pointwise kernel each.
    """
    first = op.inputs[0]
    n_elems, n_bytes = first.n_elems, first.bytes

    def point(n_reads: int, flops: int) -> KernelCall:
        work = Work(flops=flops * n_elems, read_bytes=n_reads * n_bytes, write_bytes=n_bytes)
        return KernelCall(family="loss", work=work, dtype=first.dtype)

    extra = [point(2, 1) for name in ("weight", "pos_weight") if op.arg(name) is not None]
    steps = (point(1, 1), point(2, 1), point(1, 4), point(2, 1), *extra)
    if not _is_reduced(op):
        return steps
    mean = Work(flops=n_elems, read_bytes=n_bytes, write_bytes=first.itemsize_bytes)
    return (*steps, KernelCall(family="loss", work=mean, dtype=first.dtype))


def _rows(log_probabilities: TensorSpec, target: TensorSpec | None) -> int:
    return target.n_elems if target is not None else math.prod(log_probabilities.shape[:-1])


def serial_steps(n_rows: int) -> float:
    """Loop steps of each thread of the one block that reads `n_rows` rows.

    >>> serial_steps(512), serial_steps(65536)
    (16.0, 64.0)
    """
    wanted = 2 ** round(math.log2(max(n_rows / NLL_ROWS_PER_THREAD, 1)))
    threads = min(max(wanted, NLL_MIN_THREADS), NLL_MAX_THREADS)
    return float(math.ceil(n_rows / threads))


@kernel_rule("aten.nll_loss_forward", "aten.nll_loss2d_forward", "aten.nll_loss", "aten.nll_loss_nd")
def nll_forward(op: Op) -> Calls:
    """One block gathers the target's log probability of each row and sums: bound by latency, not bytes."""
    source = op.inputs[0]
    target = op.arg("target") or (op.inputs[1] if len(op.inputs) > 1 else None)
    n_rows = _rows(source, target)
    read_bytes = n_rows * source.itemsize_bytes + (target.bytes if target is not None else 0)
    work = Work(flops=2 * n_rows, read_bytes=read_bytes, write_bytes=total_bytes(op.outputs))
    features = {"serial_steps": serial_steps(n_rows)} if _is_reduced(op) else {}
    return (KernelCall(family="loss", work=work, dtype=source.dtype, features=features),)


@kernel_rule("aten.nll_loss_backward", "aten.nll_loss2d_backward")
def nll_backward(op: Op) -> Calls:
    """The gradient is filled with zeros, then one element of each row is written."""
    gradient = op.outputs[0]
    target = op.arg("target")
    n_rows = _rows(gradient, target)
    read_bytes = target.bytes if target is not None else 0
    place = Work(flops=n_rows, read_bytes=read_bytes, write_bytes=n_rows * gradient.itemsize_bytes)
    features = {"serial_steps": serial_steps(n_rows)}
    return (
        *moved("fill", 0, gradient),
        KernelCall(family="loss", work=place, dtype=gradient.dtype, features=features),
    )
