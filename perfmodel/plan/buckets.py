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
    ready = sorted((p for p in parameters if p.grad_op is not None), key=lambda p: p.grad_op or 0)
    pending: dict[str, list[Parameter]] = {}
    pending_bytes: dict[str, int] = {}
    closed: dict[str, int] = {}
    groups: list[list[Parameter]] = []
    for parameter in ready:
        dtype = parameter.tensor.dtype
        group = pending.setdefault(dtype, [])
        group.append(parameter)
        pending_bytes[dtype] = pending_bytes.get(dtype, 0) + parameter.tensor.bytes
        cap_now_bytes = first_cap_bytes if closed.get(dtype, 0) == 0 else cap_bytes
        if pending_bytes[dtype] >= cap_now_bytes:
            groups.append(pending.pop(dtype))
            del pending_bytes[dtype]
            closed[dtype] = closed.get(dtype, 0) + 1
    groups += pending.values()
    return _in_launch_order(groups)


def _in_launch_order(groups: Sequence[Sequence[Parameter]]) -> tuple[Bucket, ...]:
    buckets: list[Bucket] = []
    latest = -1
    for group in sorted(groups, key=lambda g: min(p.grad_op or 0 for p in g)):
        latest = max(latest, *(p.grad_op or 0 for p in group))
        buckets.append(
            Bucket(
                parameters=tuple(group),
                bytes=sum(p.tensor.bytes for p in group),
                dtype=group[0].tensor.dtype,
                ready_op=latest,
            )
        )
    return tuple(buckets)
