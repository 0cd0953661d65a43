"""What would make a plan fit: the changes that cost the least first, one or several together, each tried before it is named.

A try asks for memory alone: nothing is priced or simulated.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import product

from perfmodel.config.plan import PlanSpec
from perfmodel.errors import InfeasiblePlanError
from perfmodel.graph import Graph
from perfmodel.plan.changes import MOST_DOUBLINGS, Changed, Levels, changed_plans, on_more_ranks
from perfmodel.plan.facts import facts_of
from perfmodel.plan.least import Least, least_of
from perfmodel.plan.memory import MemoryShortfallError
from perfmodel.plan.recompute import recomputed

N_CHANGES = 3

Fits = Callable[[PlanSpec, int], bool]  # a plan, on so many ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """Changes with which a plan fits, in words, the cheapest first; of how many combinations, if those were all."""

    changes: tuple[str, ...]
    n_combinations: int
    of: str = "combinations of micro-batches, recomputation, divided states, mesh sizes and offload"

    def __str__(self) -> str:
        if len(self.changes) == N_CHANGES:
            return f"it would fit with {', or '.join(self.changes)}"
        tried = f"of {self.n_combinations} {self.of}, on up to {1 << MOST_DOUBLINGS} times the ranks,"
        if not self.changes:
            return f"none {tried} fits"
        return f"it would fit with {', or '.join(self.changes)}; {tried} no other does"


def advice_on(
    graph: Graph, plan: PlanSpec, n_ranks: int, room_bytes: int, fits: Callable[[Graph, PlanSpec, int], bool]
) -> Advice:
    """What would make a plan fit: its tables spread otherwise where it has some, else its states, mesh or recomputation.

    `fits` says whether a plan does, given the graph that it would spread, on so many ranks of `room_bytes` each.
    """
    facts = facts_of(graph)

    def executed(changed: PlanSpec) -> Graph:
        if facts.executed is not None:
            return facts.executed(changed, changed.n_micro // plan.n_micro)
        return recomputed(graph, changed.recompute)

    def asked(changed: PlanSpec, n_ranks: int) -> bool:
        return fits(executed(changed), changed, n_ranks)

    if graph.tables:
        return table_changes(plan, n_ranks, asked)
    batch = 1 if facts.executed is None or facts.smaller is None else graph.batch_size
    undivided = {"micro_batches": plan.micro_batches, "accumulate": plan.accumulate}
    least = least_of(graph, lambda changed: executed(changed.model_copy(update=undivided)))
    return cheapest_changes(plan, n_ranks, asked, least, room_bytes, batch)


def cheapest_changes(
    plan: PlanSpec, n_ranks: int, fits: Fits, least: Least | None = None, room_bytes: int = 0, batch: int = 1
) -> Advice:
    """Up to three changes to a plan with which `fits` says that it fits, the cheapest first; more ranks come last.

    What needs at `least` more than the `room_bytes` of a rank is not tried. A change that holds one that fits is not named.
    A micro-batch has `batch` samples, which may be divided further.
    """
    found: list[Levels] = []
    named: list[str] = []
    refused: set[object] = set()
    n_combinations = 0
    for changed in changed_plans(plan, n_ranks, batch):
        if len(found) == N_CHANGES:
            break
        n_combinations += 1
        parts = changed.plan.n_micro // plan.n_micro
        how = _structure(changed)
        if how in refused or any(changed.holds(levels) for levels in found):
            continue
        try:
            if least and least.bytes(changed.plan, changed.n_ranks, parts) > room_bytes:
                continue
            if fits(changed.plan, changed.n_ranks):
                found.append(changed.levels)
                named.append(changed.words)
        except MemoryShortfallError:
            continue
        except InfeasiblePlanError:
            refused.add(how)  # the model does not divide so, however its states are
    return Advice(changes=tuple(named), n_combinations=n_combinations)


def _structure(changed: Changed) -> object:
    """What the graph of a rank follows from."""
    plan = changed.plan
    return (tuple(plan.mesh.items()), plan.n_micro, plan.recompute, plan.tensor_parallel.sequence, changed.n_ranks)


def table_changes(plan: PlanSpec, n_ranks: int, fits: Fits) -> Advice:
    """Up to three ways to spread the embedding tables with which `fits` says that a plan fits, in words; more ranks last."""
    found: dict[str, str] = {}
    n_combinations = 0
    for doubling, strategy in product(range(MOST_DOUBLINGS + 1), ("table_wise", "column_wise", "row_wise")):
        words = f"embeddings={strategy}"
        if len(found) == N_CHANGES or words in found or (not doubling and strategy == plan.embeddings.strategy):
            continue
        n_combinations += 1
        spread = plan.embeddings.model_copy(update={"strategy": strategy, "placement": {}})
        try:
            if fits(plan.model_copy(update={"embeddings": spread}), n_ranks << doubling):
                found[words] = words + on_more_ranks(n_ranks, doubling)
        except InfeasiblePlanError:
            continue
    return Advice(changes=tuple(found.values()), n_combinations=n_combinations, of="ways to spread the tables")
