"""What would make a plan fit: changes that cost the least communication first, each tried before it is named."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from perfmodel.config.plan import PlanSpec
from perfmodel.errors import InfeasiblePlanError

N_CHANGES = 3

Fits = Callable[[PlanSpec], bool]


def cheapest_changes(plan: PlanSpec, n_ranks: int, fits: Fits) -> list[str]:
    """Up to three changes to a plan, in words, with which `fits` says that it fits."""
    found: list[str] = []
    for words, changed in _candidates(plan, n_ranks):
        if len(found) == N_CHANGES:
            break
        try:
            if fits(changed):
                found.append(words)
        except InfeasiblePlanError:
            continue  # the model does not divide so
    return found


def _candidates(plan: PlanSpec, n_ranks: int) -> Iterator[tuple[str, PlanSpec]]:
    """Changes with the plan that has them, in order of what they cost.

    Attention computed again costs a few percent of the FLOPs and moves nothing; dividing states moves as much as copies do
    (optimizer, gradients) or half as much more (parameters); whole blocks again cost a third of the FLOPs; stages send
    activations; tensor parallelism reduces them several times a block.
    """
    if plan.recompute is None:
        yield "recompute=selective", plan.model_copy(update={"recompute": "selective"})
    replicas = n_ranks // (plan.size("pp") * plan.size("cp") * plan.size("tp"))
    stages = ("nothing", "optimizer", "gradients", "parameters")
    tied_down = plan.data_parallel.reduce != "buckets"
    for shard in stages[stages.index(plan.data_parallel.shard) + 1 :] if replicas > 1 and not tied_down else ():
        if shard != "gradients" or plan.size("pp") == 1:
            yield f"shard={shard}", _with(plan, data_parallel={"shard": shard})
    if plan.recompute is None:
        yield "recompute=full", plan.model_copy(update={"recompute": "full"})
    if replicas % 2 == 0:
        for dim in ("tp",) if plan.data_parallel.shard == "gradients" else ("pp", "tp"):
            sizes = {
                name: plan.size(name) for name in ("pp", "cp", "tp") if name in ("pp", "tp") or plan.size(name) > 1
            }
            sizes[dim] *= 2
            yield f"{dim}={sizes[dim]}", _with(plan, mesh=sizes)


def _with(plan: PlanSpec, **changes: Mapping[str, object]) -> PlanSpec:
    values = {
        name: change if name == "mesh" else getattr(plan, name).model_copy(update=change)
        for name, change in changes.items()
    }
    return plan.model_copy(update=values)


def with_advice(message: str, changes: Sequence[str]) -> str:
    """A refusal with what would help."""
    if not changes:
        return message
    return f"{message}; it would fit with {', or '.join(changes)}"
