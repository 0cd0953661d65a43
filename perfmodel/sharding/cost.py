"""What plans cost: the interface of everything that prices a placement, and what it says.

Two costs exist. `surrogate.Surrogate` adds what parts cost on their ranks and takes the largest rank: separable, so that a
search can change one table and know the new cost at once. `simulate.PlanSimulator` runs the whole model's iteration under
the plan; it decides. An external cost (TorchRec's estimator, a table of measurements) becomes a `ShardCost`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from perfmodel.plan.shards import TableShard
from perfmodel.sharding.plan import Placements


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardTimes:
    """What one part of a table costs the rank that holds it (s): the parts of one iteration.

    `lookup_s` and `update_s` are kernels of forward and backward; `input_s`, `output_s` and `gradient_s` the rank's side of
    the exchanges.
    """

    lookup_s: float = 0.0
    update_s: float = 0.0
    input_s: float = 0.0
    output_s: float = 0.0
    gradient_s: float = 0.0

    @property
    def total_s(self) -> float:
        """Sum of the parts (s)."""
        return self.lookup_s + self.update_s + self.input_s + self.output_s + self.gradient_s


class ShardCost(Protocol):
    """Prices parts of tables one by one; the search minimises the largest sum over a rank's parts."""

    def shard_times(self, shards: Sequence[TableShard]) -> Sequence[ShardTimes]:
        """The times of each part, on the rank it lies on."""
        ...


class PlanCost(Protocol):
    """Prices whole placements."""

    def iteration_s(self, placement: Placements) -> float:
        """Seconds of one iteration under the placement (infinite if it does not fit)."""
        ...
