"""One graph and one plan -> the events of every rank class.

Data parallelism follows torch's DistributedDataParallel (`ddp.py`). Table-wise embeddings follow the hybrid-parallel DLRM
(Naumov et al. 2019, arXiv:1906.00091, section 4; `distributed_forward` of facebookresearch/dlrm): every rank looks up its
tables for the global batch before the dense layers, exchanges pooled rows by all-to-all while the bottom MLP runs, and
exchanges their gradients in backward; the lookups' own backward runs after the dense backward, their optimizer last.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from perfmodel.config import PlanSpec
from perfmodel.config.plan import EmbeddingPlan
from perfmodel.config.sharding import TablePlacement
from perfmodel.errors import InfeasiblePlanError
from perfmodel.graph import Graph, Parameter
from perfmodel.heap import uncollected
from perfmodel.plan import bottom
from perfmodel.plan import exchange as ex
from perfmodel.plan import sharded as sh
from perfmodel.plan.advice import advice_on
from perfmodel.plan.assign import assign_tables
from perfmodel.plan.blocks import Block, linked
from perfmodel.plan.buckets import gradients_in_order
from perfmodel.plan.buffers import buffer_events
from perfmodel.plan.columns import IntArray
from perfmodel.plan.ddp import accumulate, copies
from perfmodel.plan.dist import Distinct, dists_of
from perfmodel.plan.events import Event, MemoryUse, Placement
from perfmodel.plan.facts import GraphFacts, facts_of
from perfmodel.plan.frames import Frame, FramedClass, Frames
from perfmodel.plan.hybrid import mesh_fits, place_mesh
from perfmodel.plan.memory import MemoryShortfallError, added, check_memory, dense_memory
from perfmodel.plan.mesh import mesh_of
from perfmodel.plan.shard_memory import shard_memory
from perfmodel.plan.sharded_ops import ShardedTables, unpooled_tables
from perfmodel.plan.shards import TableShard, shards_of

WHOLE = ("table_wise", "data_parallel")
SHARDED_ALONE = ("gradient_precision", "dedup", "pipeline")  # of `embeddings`: what `exchange` has no use for
FUSED_TABLES = "fused_embedding_update"  # rewrite of graphs whose tables run as batched operators
# Bytes of an element of pooled rows on the way, by `row_precision`; None: as looked up.
ROW_BYTES = {"own": None, "fp16": 2, "bf16": 2, "fp8": 1, "int8": 1}


@dataclass(frozen=True, slots=True, kw_only=True)
class RankDevice:
    """What a plan needs to know of one rank: the device model it runs on (db name) and that device's memory (bytes)."""

    device: str
    memory_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Spread:
    """What every rank's events are built from, DDP's apart.

    `shared_out` are the tables that a rank does not have whole for its own batch; `steps` are forward to backward of each
    micro-batch, equal on all ranks; `after_op` says of each op how many events of the last step
    stand before what follows it (-1: no part of it).
    """

    facts: GraphFacts
    plan: PlanSpec
    exchange: ex.Exchange
    shared_out: frozenset[str]
    steps: tuple[tuple[Block, ...], ...]
    after_op: IntArray
    optimizer: Block
    sharded: ShardedTables | None = None

    @property
    def n_ranks(self) -> int:
        return self.exchange.n_ranks


def place(
    graph: Graph,
    plan: PlanSpec,
    ranks: Sequence[RankDevice],
    *,
    advise: bool = True,
    distinct: Distinct | None = None,
    frames: Frames | None = None,
) -> Placement:
    """Spreads a graph over ranks; `ranks[r]` says what rank r runs on.

    A plan that does not fit is refused; with `advise`, with what would make it fit, which takes seconds to find.
    `distinct` counts the distinct rows of a table that some samples look up; a plan with `embeddings.dedup` needs it.
    `frames` are of earlier placements, to use and add to.

    Raises:
        InfeasiblePlanError: a table or the rest of the model does not fit a rank, or the plan names tables or ranks that
            do not exist.
    """
    try:
        return _placed(graph, plan, ranks, distinct, frames or Frames())
    except MemoryShortfallError as refusal:
        if not advise:
            raise

        def fits(executed: Graph, changed: PlanSpec, n_ranks: int) -> bool:
            on = [*ranks] * (n_ranks // len(ranks))  # more ranks than there are repeat the machine
            if changed.is_mesh:
                return mesh_fits(executed, changed, [rank.device for rank in on], [rank.memory_bytes for rank in on])
            return bool(_placed(executed, changed, on, distinct, Frames()).classes)

        with uncollected():
            advice = advice_on(graph, plan, len(ranks), min(rank.memory_bytes for rank in ranks), fits)
        raise MemoryShortfallError(f"{refusal}; {advice}", refusal.shortfall_bytes) from None


def _placed(
    graph: Graph, plan: PlanSpec, ranks: Sequence[RankDevice], distinct: Distinct | None, frames: Frames
) -> Placement:
    if plan.is_mesh:
        return place_mesh(graph, plan, [rank.device for rank in ranks], [rank.memory_bytes for rank in ranks])
    mesh_of(plan.mesh, len(ranks))  # its replicas are the ranks
    frame = frames.of(graph, plan, ranks, partial(_frame, graph, plan, ranks, distinct))
    ddp = plan.data_parallel
    buckets = frame.buckets(ddp)
    memory = [framed.memory_with(buckets, ddp) for framed in frame.classes]
    for framed, held in zip(frame.classes, memory, strict=True):
        check_memory(framed.ranks[0], held, ranks[framed.ranks[0]].memory_bytes)
    added, flat = frame.added(buckets, ddp), graph.target == "cpu"  # what runs on a CPU is priced in order
    classes = frame.rank_classes(added, memory, flat=flat)
    return Placement(classes=classes, n_ranks=len(ranks), notes=frame.notes(), n_micro=plan.n_micro)


def _frame(graph: Graph, plan: PlanSpec, ranks: Sequence[RankDevice], distinct: Distinct | None) -> Frame:
    spread = _spread(facts_of(graph), plan, ranks, distinct)
    gradients = gradients_in_order(_dense_parameters(spread)) if spread.n_ranks > 1 else ()
    classes = list(_rank_classes(spread, ranks).items())
    parts = [_rank_blocks(spread, members[0]) for _, members in classes]
    columns, events = linked(spread.facts, [[*before, *spread.steps[-1], *after] for before, after in parts])
    return Frame(
        graph=graph,
        classes=tuple(
            _framed(spread, (device, held, members), own, sum(len(block.events) for block in before))
            for ((device, held, _), members), own, (before, _) in zip(classes, events, parts, strict=True)
        ),
        columns=columns,
        n_ranks=len(ranks),
        gradients=gradients,
        copies={id(gradient.parameter): copies(gradient.parameter) for gradient in gradients},
        first_instance=plan.n_micro * ex.N_EXCHANGES,
        notes=partial(_notes, spread, plan.embeddings),
    )


def _framed(
    spread: _Spread, cls: tuple[str, Sequence[str], tuple[int, ...]], events: Sequence[Event], n_before: int
) -> FramedClass:
    """A class (device, what it holds, its ranks) with its events, of which so many stand before the last step."""
    device, held, members = cls
    return FramedClass(
        ranks=members,
        device=device,
        events=events,
        after_op=np.where(spread.after_op < 0, -1, spread.after_op + n_before),
        end=n_before + sum(len(block.events) for block in spread.steps[-1]),
        memory=_rank_memory(spread, members[0]),
        tables=tuple(name for name in held if name != bottom.MODULE),
    )


def _spread(
    facts: GraphFacts, plan: PlanSpec, ranks: Sequence[RankDevice], distinct: Distinct | None = None
) -> _Spread:
    n_ranks = len(ranks)
    tables = facts.tables
    owner: dict[str, int] = {}
    placed: dict[str, TablePlacement] = {}
    if tables and plan.embeddings.strategy != "data_parallel":
        dense = dense_memory(facts, frozenset(tables), plan.n_micro)
        free = [rank.memory_bytes - dense.total_bytes for rank in ranks]
        accesses = [found.table for found in tables.values()]
        placed = assign_tables(plan.embeddings, accesses, facts.table_row_bytes, free)
        if facts.graph.target == "cpu":
            placed = {name: _as_own(where) for name, where in placed.items()}
        if not any(_is_new(facts.graph, where) for where in placed.values()):
            whole = placed if n_ranks > 1 else {}
            owner = {name: where.ranks[0] for name, where in whole.items() if where.sharding == "table_wise"}
            placed = {}
        tables, owner = bottom.with_bottom(facts, plan, n_ranks, (tables, owner)) if n_ranks > 1 else (tables, owner)
    exchange = ex.Exchange(
        facts=facts,
        tables=tables,
        owner=owner,
        n_ranks=n_ranks,
        index_exchange=plan.embeddings.index_exchange,
        row_itemsize_bytes=ROW_BYTES[plan.embeddings.row_precision],
    )
    sharded = _sharded(facts, plan, placed, n_ranks, distinct)
    shared_out = exchange.names | (sharded.names() if sharded else frozenset())
    skipped = facts.derived(("skipped", shared_out), lambda: frozenset(i for n in shared_out for i in tables[n].ids))
    left = [event for i, event in facts.phase_events["optimizer"] if i not in skipped]
    bare = _Spread(
        facts=facts,
        plan=plan,
        exchange=exchange,
        shared_out=shared_out,
        steps=(),
        after_op=np.zeros(0, dtype=np.int64),
        optimizer=facts.derived(("left to optimize", shared_out), lambda: Block(left)),
        sharded=sharded,
    )
    steps = [_step_blocks(bare, micro, skipped) for micro in range(plan.n_micro)]
    return replace(bare, steps=tuple(blocks for blocks, _ in steps), after_op=steps[-1][1])


def _as_own(where: TablePlacement) -> TablePlacement:
    """The placement by the model's own operators (no batched ones run on a CPU)."""
    return where if where.kernel == "own" else where.model_copy(update={"kernel": "own"})


def _is_new(graph: Graph, where: TablePlacement) -> bool:
    """Whether a table runs otherwise than the model's own operators do, whole on its ranks."""
    return where.kernel != "own" or where.sharding not in WHOLE or FUSED_TABLES in graph.rewrites


def _sharded(
    facts: GraphFacts,
    plan: PlanSpec,
    placed: Mapping[str, TablePlacement],
    n_ranks: int,
    distinct: Distinct | None,
) -> ShardedTables | None:
    """The parts of tables that do not run as whole tables by the model's own operators; None if there are none."""
    fused = FUSED_TABLES in facts.graph.rewrites
    shards: list[TableShard] = []
    for name, where in placed.items():
        batched = where.model_copy(update={"kernel": "fused"}) if fused and where.kernel == "own" else where
        if batched.sharding != "data_parallel" or batched.kernel != "own":
            shards += shards_of(facts.tables[name].table, batched, n_ranks)
    if not shards:
        return None
    if plan.embeddings.dedup and distinct is None:
        raise RuntimeError("a plan with dedup needs to know how many indices are distinct")
    return ShardedTables(
        facts=facts,
        tables=facts.tables,
        dists=dists_of(
            shards,
            plan.embeddings,
            (n_ranks, facts.graph.batch_size),
            unpooled_tables(facts.graph, facts.tables),
            distinct,
        ),
        plan=plan.embeddings,
        n_ranks=n_ranks,
        replicated=tuple(s for s in shards if s.placement.sharding == "data_parallel"),
    )


def _dense_parameters(spread: _Spread) -> list[Parameter]:
    """Parameters that every rank has: in no sharded table, not of a bottom MLP on one rank."""
    gone = spread.shared_out
    alone = f"{bottom.MODULE}." if bottom.MODULE in gone else None
    return [p for p in spread.facts.graph.parameters if p.name not in gone and not (alone and p.name.startswith(alone))]


def _rank_classes(
    spread: _Spread, ranks: Sequence[RankDevice]
) -> dict[tuple[str, tuple[str, ...], tuple[object, ...]], tuple[int, ...]]:
    """Ranks on the same device model that hold equal tables and parts, by (device, tables, parts), in rank order."""
    classes: dict[tuple[str, tuple[str, ...], tuple[object, ...]], list[int]] = {}
    parts: list[tuple[object, ...]] = [()] * len(ranks)
    names: list[tuple[str, ...]] = [()] * len(ranks)
    if spread.sharded is not None:
        parts = [sh.same_work(spread.sharded, rank) for rank in range(len(ranks))]
        names = [sh.names_on(spread.sharded, rank) for rank in range(len(ranks))]
    for rank, on in enumerate(ranks):
        held = (*(found.table.parameter for found in spread.exchange.held(rank)), *names[rank])
        key = (on.device, held, parts[rank])
        classes.setdefault(key, []).append(rank)
    return {key: tuple(members) for key, members in classes.items()}


def _rank_blocks(spread: _Spread, rank: int) -> tuple[list[Block], list[Block]]:
    """Inputs, lookups, forward, loss and backward of each micro-batch; then the optimizer: before the last step, and after."""
    exchange, sharded, facts = spread.exchange, spread.sharded, spread.facts
    inputs = facts.derived("inputs", lambda: Block([event for _, event in facts.phase_events["input"]]))
    before, blocks = list[Block](), list[Block]()
    for micro, step in enumerate(spread.steps):
        blocks.append(inputs)
        if not micro:
            blocks += _buffer_blocks(spread)
        if exchange.owner:
            blocks += ex.lookup_blocks(exchange, rank, micro * ex.N_EXCHANGES)
        if sharded is not None:
            blocks.append(Block(sh.lookup_events(sharded, rank, micro)))
        if micro == len(spread.steps) - 1:
            before, blocks = blocks, []
        else:
            blocks += step
        if exchange.owner:
            blocks += ex.table_backward(exchange, rank, micro * ex.N_EXCHANGES)
        if sharded is not None:
            blocks.append(Block(sh.backward_events(sharded, rank, micro)))
    blocks.append(spread.optimizer)
    if sharded is not None:
        blocks.append(Block(sh.optimizer_events(sharded, rank)))
    return before, blocks + ex.table_optimizer(exchange, rank)


def _buffer_blocks(spread: _Spread) -> list[Block]:
    """DDP's broadcast of buffers; jobs that spread tables do without (TorchRec wraps the dense part so)."""
    if spread.n_ranks == 1 or spread.shared_out or not spread.plan.data_parallel.broadcast_buffers:
        return []
    return [Block(buffer_events(spread.facts, tuple(range(spread.n_ranks))))]


def _step_blocks(spread: _Spread, micro: int, skipped: frozenset[int]) -> tuple[tuple[Block, ...], IntArray]:
    """Forward to backward of one micro-batch, and `_Spread.after_op` of it."""
    exchange = spread.exchange
    insertions: dict[int, list[Event]] = {}
    exchanged = ex.gradient_exchange(exchange, micro * ex.N_EXCHANGES) if exchange.owner else None
    if exchanged is not None:
        insertions.setdefault(exchanged[0], []).extend(exchanged[1])
    if spread.sharded is not None:
        for op_id, event in _exchanged(spread, spread.sharded, micro):
            insertions.setdefault(op_id, []).append(event)
    cuts = tuple(sorted(insertions))
    key = ("step", spread.shared_out, micro > 0, cuts)
    kept, after_op = spread.facts.derived(key, partial(_cut_step, spread, micro, skipped, cuts))
    blocks = [kept[0]]
    after_op = after_op.copy()
    for cut, block in zip(cuts, kept[1:], strict=True):
        blocks += [Block(insertions[cut]), block]
        after_op[cut + 1 :] += np.where(after_op[cut + 1 :] < 0, 0, len(insertions[cut]))
    return tuple(blocks), after_op


def _cut_step(
    spread: _Spread, micro: int, skipped: frozenset[int], cuts: Sequence[int]
) -> tuple[tuple[Block, ...], IntArray]:
    """A micro-batch's own events in blocks that end with these ops, and how many stand before what follows each op."""
    adds = accumulate(_dense_parameters(spread)) if micro else {}
    parts, n_events = [list[Event]()], 0
    reached = np.full(len(spread.facts.graph.ops), -1, dtype=np.int64)
    for op_id, event in spread.facts.step_events:
        found = [*([] if op_id in skipped else [event]), *adds.get(op_id, ())]
        parts[-1] += found
        n_events += len(found)
        reached[op_id] = n_events
        if op_id in cuts:
            parts.append([])
    return tuple(map(Block, parts)), reached


def _exchanged(spread: _Spread, sharded: ShardedTables, micro: int) -> Iterator[tuple[int, Event]]:
    """Row gradients, and with a pipelined input the next batch's indices between forward and backward."""
    if sharded.pipelined():
        last = max(i for i, event in spread.facts.step_events if event.phase in ("forward", "loss"))
        for event in sh.input_events(sharded, micro):
            yield last, event
    yield from sh.gradient_events(sharded, micro)


def _rank_memory(spread: _Spread, rank: int) -> MemoryUse:
    """The dense part, this rank's tables with their state, and the exchanged rows both ways; without DDP's buckets."""
    row_bytes = spread.facts.table_row_bytes
    dense = dense_memory(spread.facts, spread.shared_out - {bottom.MODULE}, spread.plan.n_micro)
    held = [found for found in spread.exchange.held(rank) if not found.batch]  # a bottom MLP is in the dense part
    weights = sum(t.table.rows * t.table.dim * t.table.itemsize_bytes for t in held)
    with_state = sum(t.table.rows * row_bytes[t.table.parameter] for t in held)
    rows = sum(t.output_bytes for t in held) * spread.n_ranks
    whole = replace(
        dense,
        parameters_bytes=dense.parameters_bytes + weights,
        optimizer_bytes=dense.optimizer_bytes + with_state - weights,
        communication_bytes=2 * rows,
    )
    return whole if spread.sharded is None else added(whole, shard_memory(spread.sharded, rank))


def _notes(spread: _Spread, embeddings: EmbeddingPlan) -> tuple[str, ...]:
    notes = list(spread.facts.graph.notes)
    left = [name for name in SHARDED_ALONE if getattr(embeddings, name) != EmbeddingPlan.model_fields[name].default]
    if left and spread.sharded is None and spread.facts.tables:
        notes.append(
            f"embeddings.{', embeddings.'.join(left)}: left out, as only tables with a kernel of TorchRec have it, and here "
            "the model's own operators look them up"
        )
    gone = spread.shared_out
    sparse = [p.name for p in spread.facts.graph.parameters if p.sparse_grad and p.name not in gone]
    if sparse and spread.n_ranks > 1:
        raise InfeasiblePlanError(
            f"data-parallel table {sparse[0]} has sparse gradients, which DDP does not all-reduce; "
            "use a dense optimizer for it (sparse_optimizer: none) or place it on one rank"
        )
    return tuple(notes)
