"""Ops without a rule: priced from the bytes of their inputs and outputs, never zero, and reported as unmodelled."""

from __future__ import annotations

from collections.abc import Sequence

from perfmodel.db.device import Device
from perfmodel.estimate import Estimate, Source, Work
from perfmodel.graph import Op, TensorSpec
from perfmodel.kernels.registry import KernelCall, kernel_family
from perfmodel.kernels.roofline import estimates, roofline_s

FAMILY = "unmodelled"
LOW_FRAC = 0.25  # it may be a view after all, or touch a few rows of a large operand
HIGH_FRAC = 10.0  # it may be several kernels, or bound by arithmetic that nobody counted


def unmodelled(op: Op) -> tuple[KernelCall, ...]:
    """One kernel that reads every input and writes every output once. Its FLOPs are not known and count as 0."""
    work = Work(read_bytes=_distinct_bytes(op.inputs), write_bytes=_distinct_bytes(op.outputs))
    return (KernelCall(family=FAMILY, work=work),)


def _distinct_bytes(specs: Sequence[TensorSpec]) -> int:
    """Bytes of the tensors, each tensor counted once however often it is passed."""
    return sum({spec.id: spec.bytes for spec in specs}.values())


@kernel_family(FAMILY)
def unmodelled_law(calls: Sequence[KernelCall], device: Device) -> list[Estimate]:
    """Bytes over memory bandwidth, at least the kernel floor; range 0.25 to 10 times."""
    return estimates(roofline_s(calls, device), (LOW_FRAC, HIGH_FRAC), Source.UNMODELLED)
