"""DistributedDataParallel's gradient buckets.

Rule (torch.nn.parallel.DistributedDataParallel; `compute_bucket_assignment_by_size` in the reducer): after the first
iteration parameters are bucketed in the order in which their gradients became ready; a bucket closes as soon as its bytes
reach its cap; the first bucket has a smaller cap so that communication starts early; one bucket holds one dtype.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from perfmodel.graph import Parameter


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """Gradients reduced together. It is ready after op `ready_op`, when its last gradient is complete."""

    parameters: tuple[Parameter, ...]
    bytes: int
    dtype: str
    ready_op: int


def assign_buckets(parameters: Sequence[Parameter], first_cap_bytes: int, cap_bytes: int) -> tuple[Bucket, ...]:
    """Buckets in launch order. Parameters without a gradient are left out.

    DDP launches bucket i only after bucket i-1, so a bucket's `ready_op` is never before its predecessor's.
    """
    return fill_buckets(gradients_in_order(parameters), first_cap_bytes, cap_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Gradient:
    """A parameter's gradient: its size and type, and the op after which it is complete."""

    parameter: Parameter
    bytes: int
    dtype: str
    op: int


def gradients_in_order(parameters: Sequence[Parameter]) -> tuple[Gradient, ...]:
    """Gradients in the order in which they become ready."""
    found = [
        Gradient(parameter=p, bytes=p.tensor.bytes, dtype=p.tensor.dtype, op=p.grad_op)
        for p in parameters
        if p.grad_op is not None
    ]
    return tuple(sorted(found, key=lambda gradient: gradient.op))


def fill_buckets(gradients: Sequence[Gradient], first_cap_bytes: int, cap_bytes: int) -> tuple[Bucket, ...]:
    """`assign_buckets` of the parameters of `gradients_in_order`."""
    pending: dict[str, list[Gradient]] = {}
    pending_bytes: dict[str, int] = {}
    closed: set[str] = set()
    groups: list[list[Gradient]] = []
    for gradient in gradients:
        dtype = gradient.dtype
        if dtype not in pending:
            pending[dtype], pending_bytes[dtype] = [], 0
        pending[dtype].append(gradient)
        pending_bytes[dtype] += gradient.bytes
        if pending_bytes[dtype] >= (cap_bytes if dtype in closed else first_cap_bytes):
            groups.append(pending.pop(dtype))
            closed.add(dtype)
    groups += pending.values()
    return _in_launch_order(groups)


def _in_launch_order(groups: Sequence[Sequence[Gradient]]) -> tuple[Bucket, ...]:
    buckets: list[Bucket] = []
    latest = -1
    for group in sorted(groups, key=lambda gradients: gradients[0].op):  # the first of a group is the first to be ready
        latest = max(latest, group[-1].op)
        buckets.append(
            Bucket(
                parameters=tuple([gradient.parameter for gradient in group]),
                bytes=sum([gradient.bytes for gradient in group]),
                dtype=group[0].dtype,
                ready_op=latest,
            )
        )
    return tuple(buckets)
