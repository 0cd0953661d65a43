"""What would make a plan fit: changes that cost the least first, one or several together, each tried before it is named."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any

from perfmodel.config.plan import MESH_DIMS, PlanSpec
from perfmodel.errors import InfeasiblePlanError
from perfmodel.graph import Graph

N_CHANGES = 3
MOST_TRIED = 60  # combinations that are worked out for one refusal

Fits = Callable[[PlanSpec], bool]
States = tuple[int, int]  # bytes of all parameters, and of the optimizer's states

# What changes cost, as an order: micro-batches run the same work in smaller kernels (with stages they even shorten the bubble,
# with states gathered or scattered in each they move more); an activation function or attention computed again costs at most
# a few percent of the FLOPs and moves nothing; dividing states moves as much as copies do (optimizer, gradients) or half as
# much more (parameters); whole blocks again cost a third of the FLOPs; stages send activations; tensor parallelism reduces
# them several times a block; states on the host wait for it.
_SHARDS = {"nothing": 0, "optimizer": 2, "gradients": 3, "parameters": 4}
_ACTIVATION, _SELECTIVE, _FULL, _STAGES, _TENSOR, _HOST = 1, 1, 5, 6, 7, 20
_DOUBLINGS = range(4)
_SPLITS = 4  # doublings of the micro-batches that are tried


@dataclass(frozen=True, slots=True, kw_only=True)
class _Change:
    """A value of one axis: what it costs, in words (none: as the plan has it), and the plan with it.

    A change that holds one of the same `kind` that fits is not named either.
    """

    cost: int
    words: str
    apply: Callable[[PlanSpec], PlanSpec]
    kind: str = ""


def cheapest_changes(
    plan: PlanSpec, n_ranks: int, fits: Fits, states: States = (0, 0), room_bytes: int = 0, batch: int = 1
) -> list[str]:
    """Up to three changes to a plan, in words, with which `fits` says that it fits, the cheapest first.

    `states` of the whole model and the `room_bytes` of a rank rule out what cannot fit without a try (0: nothing is ruled
    out). A change that holds one that fits is not named. A micro-batch has `batch` samples, which may be divided further.
    """
    found: list[frozenset[str]] = []
    named: list[str] = []
    n_tried = 0
    for words, kinds, changed in _combinations(plan, n_ranks, batch):
        if len(found) == N_CHANGES or n_tried == MOST_TRIED:
            break
        if any(held <= kinds for held in found) or (room_bytes and _least_bytes(changed, n_ranks, states) > room_bytes):
            continue
        n_tried += 1
        try:
            if fits(changed):
                found.append(kinds)
                named.append(" and ".join(sorted(words)))
        except InfeasiblePlanError:
            continue  # the model does not divide so
    return named


def states_of(graph: Graph) -> States:
    """Bytes of a model's parameters and of its optimizer's states."""
    parameters = sum(p.tensor.bytes for p in graph.parameters)
    return parameters, sum(s.bytes for s in graph.storages if s.kind == "optimizer_state")


def _least_bytes(plan: PlanSpec, n_ranks: int, states: States) -> float:
    """What of the states a rank holds at least."""
    ddp = plan.data_parallel
    split = plan.size("pp") * plan.size("tp") * plan.size("ep")
    replicas = n_ranks // (split * plan.size("cp")) * plan.size("cp") * plan.size("ep")
    parameters, optimizer = (size / split for size in states)
    if ddp.shard == "parameters":
        parameters = 0.0 if ddp.offload else parameters / replicas
    if ddp.shard != "nothing":
        optimizer = 0.0 if ddp.offload else optimizer / replicas
    return parameters + optimizer


def _combinations(
    plan: PlanSpec, n_ranks: int, batch: int
) -> Iterator[tuple[frozenset[str], frozenset[str], PlanSpec]]:
    """Combinations of values of all axes in order of what they cost, fewer changes first among equals: words, kinds, plan."""
    axes = (_micro_batches(plan, batch), _recomputes(plan), _shards(plan), _meshes(plan, n_ranks), _offloads(plan))
    rows: list[tuple[int, int, int, tuple[_Change, ...]]] = []
    for chosen in product(*axes):
        changes = tuple(change for change in chosen if change.words)
        if changes:
            rows.append((sum(change.cost for change in changes), len(changes), len(rows), changes))
    for _, _, _, picked in sorted(rows, key=lambda row: row[:3]):
        changed = plan
        for change in picked:
            changed = change.apply(changed)
        if _is_plan(changed, n_ranks):
            words = frozenset(change.words for change in picked)
            yield words, frozenset(change.kind or change.words for change in picked), changed


def _is_plan(plan: PlanSpec, n_ranks: int) -> bool:
    """Whether values of different axes go together."""
    ddp = plan.data_parallel
    replicas = n_ranks // _product(plan)
    alone = replicas * plan.size("ep") * plan.size("cp") == 1
    if ddp.offload and (ddp.shard == "nothing" or alone):
        return False
    try:  # rules between sections are those of a plan file
        PlanSpec.model_validate({name: getattr(plan, name) for name in PlanSpec.model_fields})
    except ValueError:
        return False
    return True


def _product(plan: PlanSpec) -> int:
    total = 1
    for dim in MESH_DIMS:
        total *= plan.size(dim) if dim != "dp" else 1
    return total


def _keep(plan: PlanSpec) -> PlanSpec:
    return plan


_SAME = _Change(cost=0, words="", apply=_keep)


def _micro_batches(plan: PlanSpec, batch: int) -> list[_Change]:
    """The micro-batches doubled while their samples divide: passes of fewer samples keep fewer activations."""
    found = [_SAME]
    gathers_always = plan.size("pp") == 1 and plan.data_parallel.shard in ("gradients", "parameters")
    for doubling in range(1, _SPLITS + 1):
        if batch % (1 << doubling):
            break
        samples = batch >> doubling
        if plan.accumulate > 1:
            n = plan.accumulate << doubling
            words, values = f"accumulate={n} of {samples} samples each", {"accumulate": n}
        else:
            n = plan.micro_batches << doubling
            words, values = f"micro_batches={n}", {"micro_batches": n}
        cost = doubling * (1 + gathers_always)
        found.append(_Change(cost=cost, words=words, apply=_updated(values), kind="micro-batches"))
    return found


def _recomputes(plan: PlanSpec) -> list[_Change]:
    whole = _change(_FULL, "recompute=full", {"recompute": "full"})
    if plan.recompute == "full":
        return [_SAME]
    if plan.recompute is not None:
        return [_SAME, whole]
    parts = (
        _Change(cost=cost, words=f"recompute={way}", apply=_updated({"recompute": way}), kind="part recomputed")
        for way, cost in (("selective", _SELECTIVE), ("activation", _ACTIVATION))
    )
    return [_SAME, *parts, whole]


def _shards(plan: PlanSpec) -> list[_Change]:
    ddp = plan.data_parallel
    if ddp.reduce != "buckets" or ddp.compression != "none":
        return [_SAME]
    more = [shard for shard, cost in _SHARDS.items() if cost > _SHARDS[ddp.shard]]
    return [_SAME, *(_section(_SHARDS[shard], f"shard={shard}", "data_parallel", shard=shard) for shard in more)]


def _meshes(plan: PlanSpec, n_ranks: int) -> list[_Change]:
    """Stages and tensor-parallel ranks doubled up to three times each, out of the replicas."""
    found = [_SAME]
    for stages, tensor in product(_DOUBLINGS, _DOUBLINGS):
        sizes = {dim: plan.size(dim) for dim in plan.mesh if dim != "dp"}
        sizes |= {"pp": plan.size("pp") << stages, "tp": plan.size("tp") << tensor}
        named = 1
        for size in sizes.values():
            named *= size
        if stages + tensor == 0 or n_ranks % named:
            continue
        mesh = {dim: sizes[dim] for dim in MESH_DIMS if dim in sizes}
        words = [f"{dim}={mesh[dim]}" for dim in ("pp", "tp") if mesh[dim] != plan.size(dim)]
        found.append(_change(_STAGES * stages + _TENSOR * tensor, " and ".join(words), {"mesh": mesh}))
    return found


def _offloads(plan: PlanSpec) -> list[_Change]:
    if plan.data_parallel.offload:
        return [_SAME]
    return [_SAME, _section(_HOST, "offload=true", "data_parallel", offload=True)]


def _change(cost: int, words: str, values: Mapping[str, Any]) -> _Change:
    return _Change(cost=cost, words=words, apply=_updated(values))


def _updated(values: Mapping[str, Any]) -> Callable[[PlanSpec], PlanSpec]:
    return lambda plan: plan.model_copy(update=dict(values))


def _section(cost: int, words: str, name: str, **values: Any) -> _Change:
    return _Change(
        cost=cost,
        words=words,
        apply=lambda plan: plan.model_copy(update={name: getattr(plan, name).model_copy(update=values)}),
    )


def table_changes(plan: PlanSpec, fits: Fits) -> list[str]:
    """Up to three ways to spread the embedding tables, in words, with which `fits` says that a plan fits."""
    found: list[str] = []
    for strategy in ("table_wise", "column_wise", "row_wise"):
        if len(found) == N_CHANGES or strategy == plan.embeddings.strategy:
            continue
        changed = plan.model_copy(update={"embeddings": plan.embeddings.model_copy(update={"strategy": strategy})})
        try:
            if fits(changed):
                found.append(f"embeddings={strategy}")
        except InfeasiblePlanError:
            continue
    return found


def with_advice(message: str, changes: list[str]) -> str:
    """A refusal with what would help."""
    if not changes:
        return message
    return f"{message}; it would fit with {', or '.join(changes)}"
