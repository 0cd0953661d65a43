"""One graph and one plan -> the events of every rank class.

Data parallelism follows torch's DistributedDataParallel (`ddp.py`). Table-wise embeddings follow the hybrid-parallel DLRM
(Naumov et al. 2019, arXiv:1906.00091, section 4; `distributed_forward` of facebookresearch/dlrm): every rank looks up its
tables for the global batch before the dense layers, exchanges pooled rows by all-to-all while the bottom MLP runs, and
exchanges their gradients in backward; the lookups' own backward runs after the dense backward, their optimizer last.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from perfmodel.config import PlanSpec
from perfmodel.errors import InfeasiblePlanError
from perfmodel.graph import Graph, Parameter
from perfmodel.plan import bottom
from perfmodel.plan import exchange as ex
from perfmodel.plan.advice import cheapest_changes, with_advice
from perfmodel.plan.assign import assign_explicit, assign_table_wise
from perfmodel.plan.buckets import Bucket, assign_buckets
from perfmodel.plan.ddp import accumulate, bucket_insertions, copy_back
from perfmodel.plan.events import Event, MemoryUse, Placement, RankClass, link_events
from perfmodel.plan.facts import GraphFacts, facts_of
from perfmodel.plan.hybrid import mesh_fits, place_mesh
from perfmodel.plan.memory import MemoryShortfallError, check_memory, dense_memory
from perfmodel.plan.mesh import mesh_of
from perfmodel.plan.tables import TableOps

# Bytes of an element of pooled rows on the way, by `row_precision`; None: as looked up.
ROW_BYTES = {"own": None, "fp16": 2, "bf16": 2, "fp8": 1, "int8": 1}


@dataclass(frozen=True, slots=True, kw_only=True)
class RankDevice:
    """What a plan needs to know of one rank: the device model it runs on (db name) and that device's memory (bytes)."""

    device: str
    memory_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Spread:
    """What every rank's events are built from. `steps` are forward to backward of each micro-batch, equal on all ranks."""

    facts: GraphFacts
    plan: PlanSpec
    exchange: ex.Exchange
    buckets: tuple[Bucket, ...]
    steps: tuple[tuple[Event, ...], ...]
    optimizer: tuple[Event, ...]

    @property
    def n_ranks(self) -> int:
        return self.exchange.n_ranks


def place(graph: Graph, plan: PlanSpec, ranks: Sequence[RankDevice], *, advise: bool = True) -> Placement:
    """Spreads a graph over ranks; `ranks[r]` says what rank r runs on.

    A plan that does not fit is refused; with `advise`, with what would make it fit, which takes a while to find.

    Raises:
        InfeasiblePlanError: a table or the rest of the model does not fit a rank, or the plan names tables or ranks that
            do not exist.
    """
    try:
        return _placed(graph, plan, ranks)
    except MemoryShortfallError as refusal:
        if not advise:
            raise
        devices, memory = [rank.device for rank in ranks], [rank.memory_bytes for rank in ranks]
        changes = (
            [] if graph.tables else cheapest_changes(plan, len(ranks), lambda p: mesh_fits(graph, p, devices, memory))
        )
        raise MemoryShortfallError(with_advice(str(refusal), changes)) from None


def _placed(graph: Graph, plan: PlanSpec, ranks: Sequence[RankDevice]) -> Placement:
    if plan.is_mesh:
        return place_mesh(graph, plan, [rank.device for rank in ranks], [rank.memory_bytes for rank in ranks])
    mesh_of(plan.mesh, len(ranks))  # its replicas are the ranks
    spread = _spread(facts_of(graph), plan, ranks)
    classes = []
    for (device, held), members in _rank_classes(spread.exchange, ranks).items():
        memory = _rank_memory(spread, members[0])
        check_memory(members[0], memory, ranks[members[0]].memory_bytes)
        classes.append(
            RankClass(
                ranks=members,
                device=device,
                events=link_events(_rank_events(spread, members[0])),
                memory=memory,
                tables=tuple(name for name in held if name != bottom.MODULE),
            )
        )
    return Placement(classes=tuple(classes), n_ranks=len(ranks), notes=_notes(spread), n_micro=plan.n_micro)


def _spread(facts: GraphFacts, plan: PlanSpec, ranks: Sequence[RankDevice]) -> _Spread:
    n_ranks = len(ranks)
    tables = facts.tables if n_ranks > 1 else {}
    owner: dict[str, int] = {}
    if tables and plan.embeddings.strategy != "data_parallel":
        dense = dense_memory(facts, frozenset(tables), plan.n_micro)
        free = [rank.memory_bytes - dense.total_bytes for rank in ranks]
        owner = _owners(plan, tables, facts.table_row_bytes, free)
        tables, owner = _with_bottom(facts, plan, n_ranks, (tables, owner))
    exchange = ex.Exchange(
        facts=facts,
        tables=tables,
        owner=owner,
        n_ranks=n_ranks,
        index_exchange=plan.embeddings.index_exchange,
        row_itemsize_bytes=ROW_BYTES[plan.embeddings.row_precision],
    )
    dense_parameters = _dense_parameters(exchange)
    ddp = plan.data_parallel
    buckets = assign_buckets(dense_parameters, ddp.first_bucket, ddp.bucket_cap) if n_ranks > 1 else ()
    skipped = exchange.skipped()
    return _Spread(
        facts=facts,
        plan=plan,
        exchange=exchange,
        buckets=buckets,
        steps=tuple(
            tuple(_step_events(exchange, plan, buckets if micro == plan.n_micro - 1 else (), micro, skipped))
            for micro in range(plan.n_micro)
        ),
        optimizer=tuple(event for i, event in facts.phase_events["optimizer"] if i not in skipped),
    )


def _with_bottom(
    facts: GraphFacts, plan: PlanSpec, n_ranks: int, found: tuple[dict[str, TableOps], dict[str, int]]
) -> tuple[dict[str, TableOps], dict[str, int]]:
    """Tables and owners with the bottom MLP among them, where the plan puts it on one rank."""
    rank = plan.embeddings.bottom_mlp
    if rank is None:
        return found
    if rank >= n_ranks:
        raise InfeasiblePlanError(f"plan puts the bottom MLP on rank {rank}; ranks are 0 to {n_ranks - 1}")
    ops = facts.derived("bottom", lambda: bottom.bottom_ops(facts.graph))
    return {**found[0], bottom.MODULE: ops}, {**found[1], bottom.MODULE: rank}


def _dense_parameters(exchange: ex.Exchange) -> list[Parameter]:
    """Parameters that every rank has: in no sharded table, not of a bottom MLP on one rank."""
    alone = f"{bottom.MODULE}." if bottom.MODULE in exchange.owner else None
    return [
        p
        for p in exchange.graph.parameters
        if p.name not in exchange.owner and not (alone and p.name.startswith(alone))
    ]


def _owners(
    plan: PlanSpec, tables: Mapping[str, TableOps], row_bytes: Mapping[str, int], free: Sequence[int]
) -> dict[str, int]:
    accesses = [found.table for found in tables.values()]
    if plan.embeddings.strategy == "table_wise":
        return assign_table_wise(accesses, row_bytes, free)
    placed = assign_explicit(accesses, plan.embeddings.placement, len(free))
    return {name: where.ranks[0] for name, where in placed.items() if where.sharding == "table_wise"}


def _rank_classes(
    exchange: ex.Exchange, ranks: Sequence[RankDevice]
) -> dict[tuple[str, tuple[str, ...]], tuple[int, ...]]:
    """Ranks on the same device model that hold the same tables, by (device, tables), in rank order."""
    classes: dict[tuple[str, tuple[str, ...]], tuple[int, ...]] = {}
    for rank, on in enumerate(ranks):
        key = (on.device, tuple(found.table.parameter for found in exchange.held(rank)))
        classes[key] = (*classes.get(key, ()), rank)
    return classes


def _rank_events(spread: _Spread, rank: int) -> list[Event]:
    """Inputs, lookups, forward, loss and backward of each micro-batch; then the optimizer."""
    exchange = spread.exchange
    sharded = bool(exchange.owner)
    inputs = [event for _, event in spread.facts.phase_events["input"]]
    events: list[Event] = []
    for micro, step in enumerate(spread.steps):
        events += inputs
        if sharded:
            events += ex.lookup_events(exchange, rank, micro * ex.N_EXCHANGES)
        events += step
        if sharded:
            events += ex.table_backward(exchange, rank)
    events += spread.optimizer
    events += ex.table_optimizer(exchange, rank)
    return events


def _step_events(
    exchange: ex.Exchange, plan: PlanSpec, buckets: Sequence[Bucket], micro: int, skipped: frozenset[int]
) -> Iterator[Event]:
    """Forward to backward of one micro-batch; gradients are reduced where `buckets` are given (`no_sync` elsewhere)."""
    insertions = bucket_insertions(buckets, tuple(range(exchange.n_ranks)), plan.n_micro * ex.N_EXCHANGES)
    if micro:
        dense = _dense_parameters(exchange)
        for op_id, added in accumulate(dense).items():
            insertions[op_id] = [*added, *insertions.get(op_id, ())]
    exchanged = ex.gradient_exchange(exchange, micro * ex.N_EXCHANGES) if exchange.owner else None
    if exchanged is not None:
        insertions.setdefault(exchanged[0], []).append(exchanged[1])
    for op_id, event in exchange.facts.step_events:
        if op_id not in skipped:
            yield event
        if op_id in insertions:
            yield from insertions[op_id]
    yield from copy_back(buckets, as_views=plan.data_parallel.gradient_as_bucket_view)


def _rank_memory(spread: _Spread, rank: int) -> MemoryUse:
    """The dense part, this rank's tables with their state, DDP's buckets and the exchanged rows both ways."""
    row_bytes = spread.facts.table_row_bytes
    dense = dense_memory(spread.facts, frozenset(spread.exchange.owner) - {bottom.MODULE}, spread.plan.n_micro)
    held = [found for found in spread.exchange.held(rank) if not found.batch]  # a bottom MLP is in the dense part
    weights = sum(t.table.rows * t.table.dim * t.table.itemsize_bytes for t in held)
    with_state = sum(t.table.rows * row_bytes[t.table.parameter] for t in held)
    buckets = sum(bucket.bytes for bucket in spread.buckets)
    as_views = spread.plan.data_parallel.gradient_as_bucket_view
    rows = sum(t.output_bytes for t in held) * spread.n_ranks
    return replace(
        dense,
        parameters_bytes=dense.parameters_bytes + weights,
        optimizer_bytes=dense.optimizer_bytes + with_state - weights,
        communication_bytes=(0 if as_views else buckets) + 2 * rows,
    )


def _notes(spread: _Spread) -> tuple[str, ...]:
    notes = list(spread.facts.graph.notes)
    sparse = [p.name for p in spread.facts.graph.parameters if p.sparse_grad and p.name not in spread.exchange.owner]
    if sparse and spread.n_ranks > 1:
        raise InfeasiblePlanError(
            f"data-parallel table {sparse[0]} has sparse gradients, which DDP does not all-reduce; "
            "use a dense optimizer for it (sparse_optimizer: none) or place it on one rank"
        )
    return tuple(notes)
