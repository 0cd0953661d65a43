"""Events of table-wise embedding parallelism on one rank: index and row exchanges around lookups of the global batch.

On a CPU what travels is put into one tensor first and taken apart again (`rearrange`).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Literal, TypeVar

from perfmodel.graph import Graph, Op, Phase, TensorSpec
from perfmodel.plan.blocks import Block
from perfmodel.plan.bottom import scale_batch
from perfmodel.plan.events import Collective, Event, op_event
from perfmodel.plan.facts import GraphFacts
from perfmodel.plan.rearrange import RECEIVED_STORAGE, SENT_STORAGE, flat, offsets_of, packed, unpacked
from perfmodel.plan.tables import TableOps, drop_tensors, scale_op

GLOBAL_STORAGE = 1 << 40  # a storage of the global batch: the local one's id plus this
LENGTHS, INDICES, POOLED, GRADIENTS = range(4)  # instances of the four exchanges; buckets are numbered from N_EXCHANGES
N_EXCHANGES = 4
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Exchange:
    """What the exchanges of all ranks have in common.

    `owner` maps each sharded table to its rank. `index_exchange` is False if every rank loads the global batch's indices of
    its own tables itself. `row_dtype` is the type in which pooled rows travel (None: their own).
    """

    facts: GraphFacts
    tables: Mapping[str, TableOps]
    owner: Mapping[str, int]
    n_ranks: int
    index_exchange: bool
    row_itemsize_bytes: int | None = None
    made: dict[int, Collective] = field(default_factory=dict)
    sent: dict[int, Block] = field(default_factory=dict)

    @property
    def graph(self) -> Graph:
        """The graph that is spread."""
        return self.facts.graph

    @property
    def rearranges(self) -> bool:
        """Whether the host orders what travels."""
        return self.graph.target == "cpu"

    @cached_property
    def names(self) -> frozenset[str]:
        """The sharded tables."""
        return frozenset(self.owner)

    @cached_property
    def _held(self) -> Mapping[int, list[TableOps]]:
        found: dict[int, list[TableOps]] = {}
        for name, owner in self.owner.items():
            found.setdefault(owner, []).append(self.tables[name])
        return found

    def by_owner(self) -> list[TableOps]:
        """All sharded tables in the order of their owners."""
        return [table for rank in range(self.n_ranks) for table in self.held(rank) if not table.batch]

    def held(self, rank: int) -> list[TableOps]:
        """Tables of one rank."""
        return self._held.get(rank, [])

    def derived(self, key: Hashable, make: Callable[[], T]) -> T:
        """What follows from the graph and which tables are sharded, wherever they are; made when first asked for."""
        return self.facts.derived(("exchange", key, self.names), make)

    def own(self) -> frozenset[int]:
        """Storages that belong to the sharded tables alone."""
        return self.derived("own", lambda: frozenset().union(*(self.tables[name].own for name in self.owner)))

    def storages(self, which: Literal["inputs", "outputs", "gradients"]) -> frozenset[int]:
        """Storages of what the sharded tables read, give or receive."""
        return self.derived(
            which, lambda: frozenset(s.storage for name in self.owner for s in getattr(self.tables[name], which))
        )


def lookup_blocks(exchange: Exchange, rank: int, first_instance: int) -> list[Block]:
    """Before the dense forward: indices to the tables' owners, lookups of the global batch, pooled rows back."""
    blocks = [_index_block(exchange, rank, first_instance)] if exchange.index_exchange else []
    held = exchange.held(rank)
    blocks += [_table_block(exchange, table, "forward") for table in held]
    events: list[Event] = []
    rows = [_of_all(exchange, spec) for table in held for spec in table.outputs if not table.batch]
    if exchange.rearranges and rows:
        events.append(packed(rows, exchange.n_ranks, first_instance + POOLED, "forward"))
    reads = frozenset(GLOBAL_STORAGE + s.storage for t in held for s in t.outputs)
    events.append(_row_exchange(exchange, first_instance + POOLED, reads, exchange.storages("outputs")))
    return [*blocks, Block(events)]


def gradient_exchange(exchange: Exchange, first_instance: int) -> tuple[int, list[Event]] | None:
    """The all-to-all of pooled rows' gradients, with what makes it ready, and the op after which it can start.

    None without a backward pass.
    """
    gradients = exchange.storages("gradients")

    def writers() -> list[int]:
        return [op.id for op in exchange.graph.ops if op.phase == "backward" and _writes(op) & gradients]

    found = exchange.derived("writers", writers)
    if not found:
        return None
    arrived = exchange.derived("arrived", lambda: frozenset(GLOBAL_STORAGE + s for s in gradients))
    events = [_row_exchange(exchange, first_instance + GRADIENTS, gradients, arrived)]
    if exchange.rearranges:
        sources = [spec for table in exchange.by_owner() for spec in table.gradients]
        events.insert(0, packed(sources, 1, first_instance + GRADIENTS, "backward"))
    return max(found), events


def table_backward(exchange: Exchange, rank: int, first_instance: int) -> list[Block]:
    """Backward of the rank's lookups, for the global batch."""
    held = exchange.held(rank)
    blocks: list[Block] = []
    if exchange.rearranges and any(table.backward for table in held):
        gradients = [_of_all(exchange, spec) for table in held for spec in table.gradients if not table.batch]
        blocks = [Block(unpacked(gradients, exchange.n_ranks, first_instance + GRADIENTS, "backward"))]
    return blocks + [_table_block(exchange, table, "backward") for table in held]


def table_optimizer(exchange: Exchange, rank: int) -> list[Block]:
    """Optimizer step of the rank's tables; of an op on many tables at once only the rank's own tensors."""
    held, facts, factor = exchange.held(rank), exchange.facts, exchange.n_ranks
    foreign = exchange.own().difference(*(table.own for table in held))
    fixed = {(table.table.rows, table.table.dim) for table in held}
    blocks = []
    for number in sorted({i for table in held for i in table.optimizer}):
        op = exchange.graph.ops[number]
        storages, shapes = facts.derived(("touched", number), partial(_touched, op))
        gone, kept = storages & foreign, frozenset(shapes & fixed)
        key = ("table optimizer", number, factor, gone, kept)
        blocks.append(facts.derived(key, lambda: Block([op_event(scale_op(drop_tensors(op, gone), factor, kept, {}))])))  # noqa: B023 -- called at once
    return blocks


def _touched(op: Op) -> tuple[frozenset[int], frozenset[tuple[int, ...]]]:
    """Storages and shapes of an op's tensors."""
    specs = (*op.inputs, *op.outputs)
    return frozenset(spec.storage for spec in specs), frozenset(spec.shape for spec in specs)


def _table_block(exchange: Exchange, table: TableOps, phase: Literal["forward", "backward"]) -> Block:
    """A table's ops of a phase for the global batch: the same on every rank that may hold it."""
    key = ("table", exchange.n_ranks, table.table.parameter, phase)
    numbers = table.forward if phase == "forward" else table.backward
    return exchange.facts.derived(key, lambda: Block([_global_op(exchange, table, i) for i in numbers]))


def _index_block(exchange: Exchange, rank: int, first: int) -> Block:
    """Bag lengths first (the host waits, to size the next buffers), then the indices themselves."""
    if not exchange.rearranges:  # the same on every rank
        if first not in exchange.sent:
            exchange.sent[first] = Block(_index_exchanges(exchange, first))
        return exchange.sent[first]
    lengths, indices = _index_exchanges(exchange, first)
    tables, held = exchange.by_owner(), [table for table in exchange.held(rank) if not table.batch]
    events = [
        packed([table.inputs[-1] for table in tables], 1, first + LENGTHS, "forward"),
        lengths,
        packed([spec for table in tables for spec in table.inputs[:-1]], 1, first + INDICES, "forward"),
        indices,
    ]
    if held:
        each = _of_all(exchange, held[0].inputs[-1])
        events += offsets_of(flat(each.dtype, each.n_elems * len(held), each.storage), exchange.n_ranks, "forward")
        wanted = [_of_all(exchange, spec) for table in held for spec in table.inputs[:-1]]
        events += unpacked(wanted, exchange.n_ranks, first + INDICES, "forward")
    return Block(events)


def _index_exchanges(exchange: Exchange, first: int) -> tuple[Event, Event]:
    """The exchanges of bag lengths and of indices."""

    def sizes() -> tuple[dict[str, int], dict[str, int]]:
        inputs = {name: exchange.tables[name].inputs for name in exchange.owner}
        offsets_bytes = {name: specs[-1].bytes for name, specs in inputs.items()}
        return offsets_bytes, {name: sum(s.bytes for s in specs[:-1]) for name, specs in inputs.items()}

    offsets_bytes, indices_bytes = exchange.derived("index bytes", sizes)
    read = exchange.storages("inputs")
    arrived = exchange.derived("indices", lambda: frozenset(GLOBAL_STORAGE + s for s in read))
    return (
        _all_to_all(exchange, first + LENGTHS, offsets_bytes, (read, frozenset()), scatter=True),
        _all_to_all(exchange, first + INDICES, indices_bytes, (read, arrived), scatter=True),
    )


def _of_all(exchange: Exchange, spec: TensorSpec) -> TensorSpec:
    """A tensor of the local batch, as long as that of the global batch."""
    return flat(spec.dtype, spec.n_elems * exchange.n_ranks, GLOBAL_STORAGE + spec.storage)


def _row_exchange(exchange: Exchange, instance: int, reads: frozenset[int], writes: frozenset[int]) -> Event:
    key = "row bytes", exchange.row_itemsize_bytes
    sizes = exchange.derived(
        key, lambda: {name: _row_bytes(exchange, exchange.tables[name].outputs) for name in exchange.owner}
    )
    return _all_to_all(exchange, instance, sizes, (reads, writes), scatter=instance % N_EXCHANGES == GRADIENTS)


def _row_bytes(exchange: Exchange, rows: Sequence[TensorSpec]) -> int:
    return sum(s.n_elems * (exchange.row_itemsize_bytes or s.itemsize_bytes) for s in rows)


def _all_to_all(
    exchange: Exchange,
    instance: int,
    sizes: Mapping[str, int],
    touched: tuple[frozenset[int], frozenset[int]],
    *,
    scatter: bool,
) -> Event:
    """Each table moves `sizes[table]` bytes between every rank and its owner: to the owner if `scatter`, else from it."""
    kind = instance % N_EXCHANGES
    if instance not in exchange.made:
        send = _send_bytes(exchange, sizes, scatter=scatter)
        exchange.made[instance] = Collective(
            op="all_to_all_v",
            bytes=max(sum(row) for row in {id(row): row for row in send}.values()),
            ranks=tuple(range(exchange.n_ranks)),
            dtype="int64" if kind in (LENGTHS, INDICES) else "float32",
            instance=instance,
            purpose=("bag lengths", "indices", "pooled rows", "row gradients")[kind],
            send_bytes=send,
        )
    reads, writes = touched
    if exchange.rearranges:
        reads, writes = reads | {SENT_STORAGE + instance}, writes | {RECEIVED_STORAGE + instance}
    phase: Phase = "backward" if kind == GRADIENTS else "forward" if kind == POOLED else "input"
    return Event(
        stream="comm",
        phase=phase,
        collective=exchange.made[instance],
        host_waits=kind == LENGTHS,
        reads=reads,
        writes=writes,
    )


def _send_bytes(exchange: Exchange, sizes: Mapping[str, int], *, scatter: bool) -> tuple[tuple[int, ...], ...]:
    owned_bytes = [0] * exchange.n_ranks
    for name, owner in exchange.owner.items():
        owned_bytes[owner] += sizes[name]
    if scatter:
        return (tuple(owned_bytes),) * exchange.n_ranks
    rows = {size: (size,) * exchange.n_ranks for size in set(owned_bytes)}  # most ranks own nothing: one row for all
    return tuple(rows[size] for size in owned_bytes)


def _writes(op: Op) -> set[int]:
    return {spec.storage for spec in op.outputs}


def _global_op(exchange: Exchange, table: TableOps, op_id: int) -> Event:
    local = {s.storage for s in (*table.inputs, *table.outputs, *table.gradients)}
    rename = {storage: GLOBAL_STORAGE + storage for storage in local}
    op = exchange.graph.ops[op_id]
    if table.batch:
        return op_event(scale_batch(op, exchange.n_ranks, table.batch, rename))
    return op_event(scale_op(op, exchange.n_ranks, {(table.table.rows, table.table.dim)}, rename))
