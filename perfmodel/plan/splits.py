"""What a rule of a split operator gives, and what it may ask and order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from perfmodel.errors import InfeasiblePlanError
from perfmodel.graph import Op, TensorSpec
from perfmodel.plan.layout import Shard

Outputs = Sequence[Shard | None]


class Splits(Protocol):
    """What a rule may ask and order."""

    def of(self, spec: TensorSpec) -> Shard | None:
        """The split of a tensor."""

    def is_partial(self, spec: TensorSpec) -> bool:
        """Whether the tensor is still to be summed over the group."""

    def sums_stay(self) -> bool:
        """Whether gradients of parameters stay sums over the group, which replicas reduce."""

    def complete(self, spec: TensorSpec, *, rows: bool = False) -> None:
        """Sums it over the group now; `rows`: its first dimension is made of tokens."""

    def mark_partial(self, spec: TensorSpec) -> None:
        """The op leaves this output to be summed."""

    def gather(self, spec: TensorSpec, *, keep: bool = False) -> None:
        """Collects the whole tensor for this op; it stays split for others. `keep`: backward reads the same copy."""

    def adopt(self, spec: TensorSpec, shard: Shard) -> None:
        """A tensor that was there before the iteration (optimizer state) turns out to be split."""

    def exchange_rows(self, spec: TensorSpec, purpose: str) -> None:
        """An all-reduce of one fp32 number for each row of a tensor."""

    def vocabulary(self, op: Op) -> Shard | None:
        """The split of the embedding weight that the op's module owns."""


Rule = Callable[[Op, Splits], Outputs]


def refuse(op: Op, why: str) -> InfeasiblePlanError:
    """The error of an op that cannot be split."""
    return InfeasiblePlanError(
        f"tensor parallel: {op.name} in {op.module or 'the loss'} ({op.phase}): {why}; name the modules to split with "
        "tensor_parallel.column and tensor_parallel.row"
    )
