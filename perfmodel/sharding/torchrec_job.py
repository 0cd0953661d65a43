"""Plans inside a TorchRec job: real `ShardingPlan`s, a `PlanLoader`, and our prices for TorchRec's own planner.

Everything here imports TorchRec when it is called. TorchRec is no dependency: a job that uses this has it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from perfmodel.config.sharding import TablePlacement
from perfmodel.errors import InfeasiblePlanError
from perfmodel.graph import TableAccess
from perfmodel.plan.shards import shards_of
from perfmodel.sharding.cost import ShardCost
from perfmodel.sharding.torchrec import (
    SHARDING_TYPES,
    Ranks,
    Shard,
    TableSize,
    TorchRecPlan,
    from_torchrec,
    our_kernel,
    our_sharding,
    to_torchrec,
    torchrec_shards,
)
from perfmodel.units import MS_PER_S


def sharding_plan(
    placement: Mapping[str, TablePlacement], tables: Mapping[str, TableSize], ranks: Ranks, modules: Mapping[str, str]
) -> Any:
    """A `torchrec.distributed.types.ShardingPlan` for `DistributedModelParallel(plan=...)`; arguments of `to_torchrec`."""
    from torchrec.distributed.embedding_types import EmbeddingComputeKernel
    from torchrec.distributed.types import (
        CacheParams,
        EmbeddingModuleShardingPlan,
        EnumerableShardingSpec,
        ParameterSharding,
        ShardingPlan,
        ShardMetadata,
    )

    caching = EmbeddingComputeKernel.FUSED_UVM_CACHING.value
    plan: dict[str, Any] = {}
    for module, entries in to_torchrec(placement, tables, ranks, modules)["plan"].items():
        plan[module] = EmbeddingModuleShardingPlan()
        for name, entry in entries.items():
            shards = [ShardMetadata(**shard) for shard in entry.get("shards", ())]
            cached = entry["compute_kernel"] == caching and "cache_load_factor" in placement[name].model_fields_set
            plan[module][name] = ParameterSharding(
                sharding_type=entry["sharding_type"],
                compute_kernel=entry["compute_kernel"],
                ranks=entry["ranks"],
                sharding_spec=EnumerableShardingSpec(shards) if shards else None,
                cache_params=CacheParams(load_factor=placement[name].cache_load_factor) if cached else None,
            )
    return ShardingPlan(plan)


def read_sharding_plan(plan: Any) -> TorchRecPlan:
    """A TorchRec `ShardingPlan` object (a planner's, for one) as ours, with the cache sizes that it names."""
    found = from_torchrec(plan._serialize())
    placement = dict(found.placement)
    for entries in plan.plan.values():
        for name, sharding in entries.items():
            cache = getattr(sharding.cache_params, "load_factor", None)
            if cache is not None:
                placement[name] = placement[name].model_copy(update={"cache_load_factor": cache})
    return TorchRecPlan(placement=placement, tables=found.tables, modules=found.modules)


def plan_loader(placement: Mapping[str, TablePlacement], module: Any, sharders: Sequence[Any], enumerator: Any) -> Any:
    """A TorchRec `PlanLoader` that makes `EmbeddingShardingPlanner(plan_loader=...)` use this placement.

    Args:
        placement: where each table lies.
        module: the module that the planner plans.
        sharders: its sharders.
        enumerator: an `EmbeddingEnumerator` of the planner's topology, batch and constraints; not the planner's own.

    The loaded options are those of the enumerator's search space, so constraints must allow what the plan uses. The loader's
    `load` raises InfeasiblePlanError naming tables whose plan is not among them.
    """
    from torchrec.distributed.planner.types import PlanLoader, Storage

    class PlacementLoader(PlanLoader):  # type: ignore[misc]  # torchrec is untyped here
        def load(self) -> dict[int, Any]:
            options = enumerator.enumerate(module, list(sharders))
            chosen, missing = _choose(options, placement)
            if missing:
                raise InfeasiblePlanError("\n".join(missing))
            free = Storage(hbm=0, ddr=0)
            for option, shards in chosen:
                for ours, theirs in zip(shards, option.shards, strict=True):
                    theirs.size, theirs.offset, theirs.rank = list(ours.size), list(ours.offset), ours.rank
                    theirs.storage = theirs.storage or free
            return {option.storage_hash(): option for option, _ in chosen}

        def plan_context_hash(self) -> None:
            """None: the plan is for whatever the planner is asked."""

        def get_plan_id(self) -> str:
            return "perfmodel"

    return PlacementLoader()


def _choose(
    options: Sequence[Any], placement: Mapping[str, TablePlacement]
) -> tuple[list[tuple[Any, tuple[Shard, ...]]], list[str]]:
    """The option of each placed table with our shards, and a line for each table without one."""
    chosen: list[tuple[Any, tuple[Shard, ...]]] = []
    missing = []
    for name, where in placement.items():
        mine = [option for option in options if option.name == name]
        for option in mine:
            size = TableSize(rows=option.tensor.shape[0], dim=option.tensor.shape[1])
            shards = _option_shards(option, where, size)
            if len(shards) == len(option.shards) and _same_way(option, where):
                chosen.append((option, shards))
                break
        else:
            kinds = sorted({f"{option.sharding_type} by {option.compute_kernel}" for option in mine})
            missing.append(
                f"table {name}: found {where.sharding} by {where.kernel} in {max(len(where.ranks), 1)} part(s), "
                f"allowed by the enumerator: {', '.join(kinds) or 'nothing'}"
            )
    return chosen, missing


def _same_way(option: Any, where: TablePlacement) -> bool:
    kernels = {our_kernel(option.compute_kernel), "own" if option.compute_kernel == "dense" else None}
    theirs = SHARDING_TYPES.get(where.sharding, where.sharding)
    return bool(option.sharding_type == theirs and where.kernel in kernels)


def _option_shards(option: Any, where: TablePlacement, size: TableSize) -> tuple[Shard, ...]:
    if where.sharding == "data_parallel":
        whole = Shard(size=(size.rows, size.dim), offset=(0, 0), rank=0)
        return tuple(Shard(size=whole.size, offset=whole.offset, rank=rank) for rank in range(len(option.shards)))
    if where.sharding != "row_wise" and len(where.ranks) != len(option.shards):
        return ()
    return torchrec_shards(option.name, size, where, len(option.shards))


def shard_estimator(cost: ShardCost, tables: Mapping[str, TableAccess]) -> Any:
    """A TorchRec `ShardEstimator` class with our prices, one of an `EmbeddingEnumerator(estimator=[...])`.

    `tables` describes each table (its indices too) by name. TorchRec's `Perf` is in milliseconds; lookups are forward
    compute, updates backward compute. Prices are of the first rank: TorchRec gives shards to ranks later.
    """
    from torchrec.distributed.planner.types import Perf, ShardEstimator

    class PricedEstimator(ShardEstimator):  # type: ignore[misc]  # torchrec is untyped here
        def __init__(self, topology: Any, constraints: Any = None) -> None:
            self.topology, self.constraints = topology, constraints

        def estimate(self, sharding_options: list[Any], sharder_data_map: Any = None) -> None:
            for option in sharding_options:
                shards = shards_of(tables[option.name], option_placement(option), self.topology.world_size)
                prices = {shard.part: price for shard, price in zip(shards, cost.shard_times(shards), strict=True)}
                for part, shard in enumerate(option.shards):
                    price = prices.get(part)
                    shard.perf = Perf(
                        fwd_compute=price.lookup_s * MS_PER_S if price else 0.0,
                        fwd_comms=price.output_s * MS_PER_S if price else 0.0,
                        bwd_compute=price.update_s * MS_PER_S if price else 0.0,
                        bwd_comms=price.gradient_s * MS_PER_S if price else 0.0,
                        input_dist_comms=price.input_s * MS_PER_S if price else 0.0,
                    )

    return PricedEstimator


def option_placement(option: Any) -> TablePlacement:
    """An enumerated `ShardingOption` as a placement; shards without a rank take ranks in order."""
    sharding = our_sharding(option.sharding_type)
    fields: dict[str, Any] = {"sharding": sharding, "kernel": our_kernel(option.compute_kernel)}
    if option.cache_load_factor is not None:
        fields["cache_load_factor"] = option.cache_load_factor
    if sharding == "data_parallel":
        return TablePlacement.model_validate(fields)
    ranks = tuple(number if shard.rank is None else shard.rank for number, shard in enumerate(option.shards))
    fields["ranks"] = ranks if len(ranks) > 1 else (ranks[0],)
    if sharding in ("column_wise", "table_column_wise", "grid"):
        fields["widths"] = tuple(s.size[1] for s in option.shards if s.offset[0] == 0)
    return TablePlacement.model_validate(fields)
