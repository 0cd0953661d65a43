"""The least memory that a rank of a plan can need, from sums over the whole graph alone: what cannot fit is not worked out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from perfmodel.config.plan import PlanSpec
from perfmodel.graph import Graph
from perfmodel.plan.facts import facts_of
from perfmodel.plan.memory import dense_memory
from perfmodel.plan.stage_memory import kept_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Least:
    """Bytes of the whole model: parameters, optimizer states, gradients that wait for the optimizer.

    `kept` says what forward leaves for backward of the model as a plan runs it, per replica and micro-batch.
    """

    parameters_bytes: float
    optimizer_bytes: float
    gradients_bytes: float
    kept: Callable[[PlanSpec], float] = lambda _: 0.0

    def bytes(self, plan: PlanSpec, n_ranks: int, parts: int = 1) -> float:
        """At least what the fullest rank holds, with micro-batches of one of `parts` of the graph's samples.

        The fullest stage has at least the mean of all, a rank at least its even share of what is divided.
        """
        ddp = plan.data_parallel
        split = plan.size("pp") * plan.size("tp") * plan.size("ep")
        replicas = n_ranks // (split * plan.size("cp")) * plan.size("cp") * plan.size("ep")
        parameters, optimizer = self.parameters_bytes / split, self.optimizer_bytes / split
        gradients = self.gradients_bytes / split
        if ddp.shard != "nothing":
            optimizer = 0.0 if ddp.offload else optimizer / replicas
        if ddp.shard in ("gradients", "parameters"):
            gradients = 0.0 if ddp.offload else gradients / replicas
        if ddp.shard == "parameters":
            parameters = 0.0 if ddp.offload else parameters / replicas
        kept = 0.0
        if plan.size("ep") == 1 and plan.expert_parallel.capacity_factor is None:  # those drop or move tokens
            kept = self.kept(plan) / (split * plan.size("cp") * parts)
        passing = kept + gradients if plan.n_micro > 1 else max(kept, gradients)
        return parameters + optimizer + passing


def least_of(graph: Graph, executed: Callable[[PlanSpec], Graph]) -> Least:
    """What a plan of this graph needs at least; `executed` gives the graph that a plan spreads."""
    facts = facts_of(graph)
    waiting = dense_memory(facts, frozenset(), 1, "optimizer")

    def kept(plan: PlanSpec) -> float:
        run = executed(plan)
        if facts_of(run).compiler is not None:
            return 0.0  # chains that are fused once the graph is split keep less
        return facts_of(run).derived("kept", partial(kept_bytes, run))

    return Least(
        parameters_bytes=waiting.parameters_bytes,
        optimizer_bytes=waiting.optimizer_bytes,
        gradients_bytes=waiting.gradients_bytes,
        kept=kept,
    )
