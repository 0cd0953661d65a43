"""Operators that sharded embedding tables run on one rank, and what all ranks have in common to find them by.

Parts whose kernel is `own` run the model's operators, reshaped to the part. All others run as one batched operator for each
sharding module and kind of kernel on a rank, however many tables it holds, as FBGEMM's table-batched operators do.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any, Literal

from perfmodel.config.plan import EmbeddingPlan
from perfmodel.graph import Graph, Op, Phase
from perfmodel.plan.dist import Dist
from perfmodel.plan.events import Collective
from perfmodel.plan.facts import GraphFacts
from perfmodel.plan.shards import TableShard
from perfmodel.plan.tables import TableOps, shard_op

PLACEMENT = {"fused": "hbm", "dense": "hbm", "uvm": "uvm", "uvm_caching": "uvm_caching", "key_value": "key_value"}
_OPTIMIZER = {"adamw": "adam", "": "sgd"}


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardedTables:
    """What all ranks have in common: the modules, the graph's ops of each table, the plan.

    `replicated` are the parts of data-parallel tables whose kernel is batched; each rank has its own copy.
    """

    facts: GraphFacts
    tables: Mapping[str, TableOps]
    dists: tuple[Dist, ...]
    plan: EmbeddingPlan
    n_ranks: int
    replicated: tuple[TableShard, ...] = ()
    made: dict[int, Collective] = field(default_factory=dict)
    ops: dict[Any, Op] = field(default_factory=dict)

    @property
    def graph(self) -> Graph:
        """The graph that is spread."""
        return self.facts.graph

    def names(self) -> frozenset[str]:
        """Tables whose ops a rank does not run for its local batch."""
        return frozenset([*(n for dist in self.dists for n in dist.tables), *(s.name for s in self.replicated)])

    def pipelined(self) -> bool:
        """Whether indices travel one batch ahead."""
        return self.plan.pipeline != "none"

    def copies(self, rank: int) -> list[TableShard]:
        """Data-parallel parts on one rank."""
        return [shard for shard in self.replicated if shard.rank == rank]


def replace_stream(sharded: ShardedTables, op: Op) -> Op:
    """The op on the copy stream, the same object every time."""
    return remembered(sharded, ("copy", id(op)), replace(op, stream="copy"))


def rank_ops(sharded: ShardedTables, dist: Dist, rank: int, phase: Literal["forward", "backward"]) -> list[Op]:
    """Operators of a rank's parts in one sharding module."""
    held = dist.of_rank(rank)
    if not dist.own:
        return batched_ops(sharded, held, dist.batch * sharded.n_ranks, backward=phase == "backward")
    return [own_op(sharded, i, shard) for shard in held for i in getattr(sharded.tables[shard.name], phase)]


def own_op(sharded: ShardedTables, op_id: int, shard: TableShard) -> Op:
    """An operator of the model, reshaped to a part of its table."""
    key = ("sharded", "own", op_id, shard.access, sharded.n_ranks)
    make = partial(shard_op, sharded.graph.ops[op_id], sharded.tables[shard.name], shard.access, sharded.n_ranks)
    return sharded.facts.derived(key, make)


def batched_ops(sharded: ShardedTables, held: Sequence[TableShard], batch: int, *, backward: bool) -> list[Op]:
    """One operator for each kind of kernel, rows' type and cache ratio among the parts; behind a cache a fetch before it."""
    groups: dict[tuple[Any, ...], list[TableShard]] = {}
    for shard in held:
        where = shard.placement
        cached = where.cache_load_factor if where.kernel in ("uvm_caching", "key_value") else 0.0
        groups.setdefault(
            (where.kernel, shard.access.itemsize_bytes, cached, shard.name in _unpooled(sharded)), []
        ).append(shard)
    found = []
    for (kernel, *_), members in sorted(groups.items(), key=lambda item: str(item[0])):
        if backward:
            found.append(table_op(sharded, "perfmodel.batched_embedding_backward", members, batch, "backward"))
            if kernel == "dense" and members[0].placement.sharding != "data_parallel":
                found.append(table_op(sharded, "perfmodel.dense_table_update", members, batch, "optimizer"))
            continue
        if kernel in ("uvm_caching", "key_value"):
            found.append(table_op(sharded, "perfmodel.batched_embedding", members, batch, "prefetch"))
        found.append(table_op(sharded, "perfmodel.batched_embedding", members, batch, "lookup"))
    return found


def _unpooled(sharded: ShardedTables) -> frozenset[str]:
    return unpooled_tables(sharded.graph, sharded.tables)


def unpooled_tables(graph: Graph, tables: Mapping[str, TableOps]) -> frozenset[str]:
    """Tables that give one row a lookup."""
    return frozenset(
        name for name, ops in tables.items() if ops.forward and graph.ops[ops.forward[0]].name == "aten.embedding"
    )


def optimizer_of(graph: Graph) -> str:
    """The optimizer of a graph's tables, as batched operators name it."""
    name = graph.sparse_optimizer or graph.optimizer
    return _OPTIMIZER.get(name, name)


def table_op(sharded: ShardedTables, name: str, members: Sequence[TableShard], batch: int, part: str) -> Op:
    """One batched operator on parts of equal kernels; `part` says which half of its work it does."""
    first = members[0].placement
    accesses = tuple(shard.access for shard in members)
    unpooled = members[0].name in _unpooled(sharded)
    key = (name, accesses, batch, part, first.kernel, first.cache_load_factor)
    if key in sharded.ops:
        return sharded.ops[key]
    attrs: dict[str, Any] = {
        "tables": [asdict(access) for access in accesses],
        "batch": batch,
        "placement": PLACEMENT[first.kernel],
        "cache_load_factor": first.cache_load_factor,
        "optimizer": optimizer_of(sharded.graph),
        "pooled": not unpooled,
        "dense": first.kernel == "dense",
        "part": part,
        "storage_bytes_per_s": sharded.plan.ssd,
    }
    phase: Phase = "optimizer" if part == "optimizer" else "backward" if part == "backward" else "forward"
    return remembered(sharded, key, Op(id=-1, name=name, attrs=attrs, phase=phase, module="sharded_tables"))


def remembered(sharded: ShardedTables, key: Any, op: Op) -> Op:
    """The op under a key, the same object for every rank and plan of the graph, so that it is priced once."""
    kept = sharded.facts.derived(("sharded", key), lambda: op)
    sharded.ops[key] = kept
    return kept
