"""Changes to a plan that may save memory: values of a few axes, what they cost as an order, and how they combine."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import combinations, product
from math import prod
from typing import Any

from perfmodel.config.plan import MESH_DIMS, PlanSpec

MOST_TOGETHER = 3  # changes at once, more ranks apart

# What changes cost, as an order: micro-batches run the same work in smaller kernels (with stages they even shorten the bubble,
# with states gathered or scattered in each they move more); an activation function or attention computed again costs at most
# a few percent of the FLOPs and moves nothing; tokens of tensor-parallel ranks divided between the products move no more;
# dividing states moves as much as copies do (optimizer, gradients) or half as much more (parameters); whole blocks again
# cost a third of the FLOPs; stages send activations; a ring sends keys and values in every block; tensor parallelism reduces
# activations several times a block; states on the host wait for it; more machines are what nothing else makes up for.
_SHARDS = {"nothing": 0, "optimizer": 2, "gradients": 3, "parameters": 4}
_ACTIVATION, _SELECTIVE, _SEQUENCE, _FULL, _STAGES, _RING, _TENSOR, _HOST = 1, 1, 1, 5, 6, 6, 7, 20
MOST_DOUBLINGS = 3  # of a dimension of the mesh, or of the ranks
_DOUBLINGS = range(1, MOST_DOUBLINGS + 1)
_SPLITS = 4  # doublings of the micro-batches that are tried

Levels = Mapping[str, int]  # of each kind of change how far it goes


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """A value of one axis: what it costs, in words, and the plan with it.

    Of one `kind`, a higher `level` saves no less.
    """

    cost: int
    words: str
    apply: Callable[[PlanSpec], PlanSpec]
    kind: str
    level: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Changed:
    """A plan with changes, on so many ranks."""

    plan: PlanSpec
    n_ranks: int
    words: str
    levels: Levels

    def holds(self, other: Levels) -> bool:
        """Whether it has all that another has, and as far."""
        return all(self.levels.get(kind, 0) >= level for kind, level in other.items())


def changed_plans(plan: PlanSpec, n_ranks: int, batch: int) -> Iterator[Changed]:
    """All combinations of up to three changes in order of what they cost, fewer first among equals; then with more ranks.

    A micro-batch has `batch` samples, which may be divided further.
    """
    axes = axes_of(plan, batch)
    rows: list[tuple[int, int, int, tuple[Change, ...]]] = []
    for n_together in range(1, MOST_TOGETHER + 1):
        for chosen in combinations(axes, n_together):
            for picked in product(*chosen):
                rows.append((sum(change.cost for change in picked), n_together, len(rows), picked))
    ordered = [picked for *_, picked in sorted(rows, key=lambda row: row[:3])]
    for picked in ordered:
        yield from _made(plan, picked, n_ranks, 0)
    for doubling in _DOUBLINGS:
        for picked in ((), *ordered):
            yield from _made(plan, picked, n_ranks, doubling)


def axes_of(plan: PlanSpec, batch: int) -> list[list[Change]]:
    """The values of each axis that change a plan."""
    meshes = (_doubled(plan, dim, cost) for dim, cost in (("pp", _STAGES), ("cp", _RING), ("tp", _TENSOR)))
    found = [_micro_batches(plan, batch), _recomputes(plan), _shards(plan), *meshes, _sequences(plan), _offloads(plan)]
    return [axis for axis in found if axis]


def _made(plan: PlanSpec, picked: tuple[Change, ...], n_before: int, doubling: int) -> Iterator[Changed]:
    """The plan with some changes on more ranks, if that is one."""
    n_ranks = n_before << doubling
    changed = plan
    for change in picked:
        changed = change.apply(changed)
    if "dp" in changed.mesh:  # replicas are what the other dimensions leave
        changed = changed.model_copy(update={"mesh": {d: size for d, size in changed.mesh.items() if d != "dp"}})
    if not _is_plan(changed, n_ranks):
        return
    words = " and ".join(sorted(change.words for change in picked))
    levels = {change.kind: change.level for change in picked}
    if doubling:
        words = f"{words}{on_more_ranks(n_before, doubling)}".strip()
        levels["ranks"] = doubling
    yield Changed(plan=changed, n_ranks=n_ranks, words=words, levels=levels)


def on_more_ranks(n_ranks: int, doubling: int) -> str:
    """That a change needs more ranks than there are, in words; empty where it does not."""
    return f" on {n_ranks << doubling} ranks, {1 << doubling} times the machine" if doubling else ""


def _is_plan(plan: PlanSpec, n_ranks: int) -> bool:
    """Whether values of different axes go together on so many ranks."""
    ddp = plan.data_parallel
    named = prod(plan.size(dim) for dim in MESH_DIMS if dim != "dp")
    if n_ranks % named:
        return False
    alone = n_ranks // named * plan.size("ep") * plan.size("cp") == 1
    if alone and ddp.shard != "nothing":
        return False
    if (ddp.offload and ddp.shard == "nothing") or (plan.tensor_parallel.sequence and plan.size("tp") == 1):
        return False
    try:  # rules between sections are those of a plan file
        PlanSpec.model_validate({name: getattr(plan, name) for name in PlanSpec.model_fields})
    except ValueError:
        return False
    return True


def _micro_batches(plan: PlanSpec, batch: int) -> list[Change]:
    """The micro-batches doubled while their samples divide: passes of fewer samples keep fewer activations."""
    found: list[Change] = []
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
        found.append(Change(cost=cost, words=words, apply=partial(_with, values), kind="micro-batches", level=doubling))
    return found


def _recomputes(plan: PlanSpec) -> list[Change]:
    whole = Change(cost=_FULL, words="recompute=full", apply=partial(_with, {"recompute": "full"}), kind="full")
    if plan.recompute == "full":
        return []
    if plan.recompute is not None:
        return [whole]
    parts = (
        Change(cost=cost, words=f"recompute={way}", apply=partial(_with, {"recompute": way}), kind="part recomputed")
        for way, cost in (("selective", _SELECTIVE), ("activation", _ACTIVATION))
    )
    return [*parts, whole]


def _shards(plan: PlanSpec) -> list[Change]:
    ddp = plan.data_parallel
    if ddp.reduce != "buckets" or ddp.compression != "none":
        return []
    more = [shard for shard, cost in _SHARDS.items() if cost > _SHARDS[ddp.shard]]
    return [_section(_SHARDS[shard], f"shard={shard}", "data_parallel", shard=shard) for shard in more]


def _doubled(plan: PlanSpec, dim: str, cost: int) -> list[Change]:
    """A dimension of the mesh doubled up to three times, out of the replicas."""
    return [
        Change(
            cost=cost * doubling,
            words=f"{dim}={plan.size(dim) << doubling}",
            apply=partial(_meshed, dim, plan.size(dim) << doubling),
            kind=dim,
            level=doubling,
        )
        for doubling in _DOUBLINGS
    ]


def _sequences(plan: PlanSpec) -> list[Change]:
    if plan.tensor_parallel.sequence:
        return []
    return [_section(_SEQUENCE, "sequence=true", "tensor_parallel", sequence=True)]


def _offloads(plan: PlanSpec) -> list[Change]:
    if plan.data_parallel.offload:
        return []
    return [_section(_HOST, "offload=true", "data_parallel", offload=True)]


def _with(values: Mapping[str, Any], plan: PlanSpec) -> PlanSpec:
    return plan.model_copy(update=dict(values))


def _meshed(dim: str, size: int, plan: PlanSpec) -> PlanSpec:
    sizes = {**plan.mesh, dim: size}
    return _with({"mesh": {d: sizes[d] for d in (*plan.mesh, *MESH_DIMS) if d in sizes}}, plan)


def _section(cost: int, words: str, name: str, **values: Any) -> Change:
    def apply(plan: PlanSpec) -> PlanSpec:
        return _with({name: getattr(plan, name).model_copy(update=values)}, plan)

    return Change(cost=cost, words=words, apply=apply, kind=words)
