"""Events of sharded embedding tables on one rank, for every kind of sharding and kernel (`dist` says what travels).

Parts whose kernel is `own` run the model's operators, reshaped to the part. All others run as one batched operator for each
sharding module and kind of kernel on a rank, however many tables it holds, as FBGEMM's table-batched operators do; its
indices are first made ready (TorchRec's permutes and, for rows over ranks, bucketing).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from perfmodel.graph import Op, Phase, TensorSpec
from perfmodel.plan.dist import Dist, Matrix
from perfmodel.plan.events import Collective, CollectiveOp, Event
from perfmodel.plan.sharded_ops import (
    ShardedTables,
    batched_ops,
    own_op,
    rank_ops,
    remembered,
    replace_stream,
    table_op,
)
from perfmodel.plan.shards import TableShard
from perfmodel.plan.tables import drop_tensors, is_multi_tensor

FIRST_INSTANCE = 1 << 30  # instance numbers of a sharded exchange: this, a block for each module, a number inside it
BLOCK = 1 << 12
STORAGE = 1 << 43  # storages of the global batch: this plus a few for each module
ROLES = 8
INDICES, ROWS, GRADIENTS, DENSE = range(4)  # roles of a module's storages
SPLITS, LENGTHS, VALUES, OUT, BACK, REDUCED, DOMAINS = range(
    7
)  # collectives of a module; domains have two numbers each


def input_events(sharded: ShardedTables, micro: int) -> list[Event]:
    """Sizes, bag lengths and indices to the ranks that hold parts; the host waits for the sizes."""
    if not sharded.plan.index_exchange or sharded.n_ranks == 1:
        return []
    events: list[Event] = []
    for number, dist in enumerate(sharded.dists):
        reads = frozenset() if sharded.pipelined() else _local(sharded, dist, "inputs")
        arrived = frozenset({_storage(number, INDICES)})
        if dist.own:
            events.append(
                _exchange(sharded, (micro, number, LENGTHS), dist.length_bytes(), (reads, frozenset()), waits=True)
            )
        else:
            n = sharded.n_ranks
            sizes = ((2 * 8,) * n,) * n  # an int64 for each of the two tensors
            events.append(_exchange(sharded, (micro, number, SPLITS), sizes, (reads, frozenset()), waits=True))
            events.append(_exchange(sharded, (micro, number, LENGTHS), dist.length_bytes(), (reads, arrived)))
        events.append(_exchange(sharded, (micro, number, VALUES), dist.index_bytes(), (reads, arrived)))
    return events


def lookup_events(sharded: ShardedTables, rank: int, micro: int) -> list[Event]:
    """Lookups of the rank's parts for the global batch, and their rows to the samples' ranks."""
    events: list[Event] = []
    if not sharded.pipelined():
        events += input_events(sharded, micro)
    for number in range(len(sharded.dists)):
        events += _prepared(sharded, number, rank)
        events += _lookups(sharded, number, rank)
        events += _outputs(sharded, number, rank, micro)
    if sharded.replicated:
        reads, writes = (_named(sharded, sharded.replicated, which) for which in ("inputs", "outputs"))
        for op in batched_ops(sharded, sharded.copies(rank), sharded.graph.batch_size, backward=False):
            events.append(_compute(op, "forward", reads, writes))
    return events


def gradient_events(sharded: ShardedTables, micro: int) -> list[tuple[int, Event]]:
    """All-to-alls and all-gathers of rows' gradients that all ranks join, each with the op after which it can start."""
    found = []
    for number, dist in enumerate(sharded.dists):
        gradients = _local(sharded, dist, "gradients")
        ready = _last_writer(sharded, gradients)
        if ready is None or sharded.n_ranks == 1:
            continue
        arrived = frozenset({_storage(number, GRADIENTS)})
        key = (micro, number, BACK)
        if dist.kind == "row_wise":
            n_bytes = dist.reduced_elems() * dist.gradient_bytes
            event = _collective(
                sharded, key, ("all_gather", n_bytes, tuple(range(sharded.n_ranks))), (gradients, arrived)
            )
        elif dist.kind == "domain_row_wise":
            sent = tuple(zip(*dist.cross_bytes(dist.gradient_bytes), strict=True))
            event = _exchange(sharded, key, sent, (gradients, arrived))
        else:
            sent = tuple(zip(*dist.rows_bytes(dist.gradient_bytes), strict=True))
            event = _exchange(sharded, key, sent, (gradients, arrived))
        found.append((ready, event))
    return found


def backward_events(sharded: ShardedTables, rank: int, micro: int) -> list[Event]:
    """Backward of the rank's lookups with its updates; data-parallel copies reduce their gradients first."""
    events: list[Event] = []
    for number, dist in enumerate(sharded.dists):
        arrived = frozenset({_storage(number, GRADIENTS)})
        if _last_writer(sharded, _local(sharded, dist, "gradients")) is None:
            continue
        if dist.kind == "domain_row_wise" and sharded.n_ranks > 1:
            for place, domain in enumerate(dist.domains()):
                if rank in domain and len(domain) > 1:
                    n_bytes = dist.reduced_elems(domain) * dist.gradient_bytes
                    key = (micro, number, DOMAINS + 2 * place + 1)
                    events.append(_collective(sharded, key, ("all_gather", n_bytes, domain), (arrived, arrived)))
        events += [_compute(op, "backward", arrived, frozenset()) for op in rank_ops(sharded, dist, rank, "backward")]
    return events + _replicated_backward(sharded, rank, micro)


def optimizer_events(sharded: ShardedTables, rank: int) -> list[Event]:
    """Optimizer ops of parts that run the model's own operators; an op on many tensors at once goes on without the rest."""
    held = {shard.name: shard for dist in sharded.dists if dist.own for shard in dist.of_rank(rank)}
    foreign = frozenset().union(*(sharded.tables[name].own for name in sharded.names() - set(held)))
    ids = sorted({i for name in sharded.names() for i in sharded.tables[name].optimizer})
    ops: list[Op] = []
    for op_id in ids:
        op = sharded.graph.ops[op_id]
        if is_multi_tensor(op):
            key = ("rest", op_id, foreign)
            kept = sharded.facts.derived(("sharded", key), partial(drop_tensors, op, foreign))
            ops += [kept] if kept.inputs else []
            continue
        for name, shard in held.items():
            if op_id in sharded.tables[name].optimizer:
                ops.append(own_op(sharded, op_id, shard))
    return [_compute(op, "optimizer", frozenset(), frozenset()) for op in ops]


def _replicated_backward(sharded: ShardedTables, rank: int, micro: int) -> list[Event]:
    copies = sharded.copies(rank)
    if not copies:
        return []
    gradient = frozenset({_storage(len(sharded.dists), DENSE)})
    ready = _named(sharded, sharded.replicated, "gradients")
    batch = sharded.graph.batch_size
    events = [_compute(op, "backward", ready, gradient) for op in batched_ops(sharded, copies, batch, backward=True)]
    if sharded.n_ranks > 1:
        n_bytes = sum(shard.access.rows * shard.access.dim for shard in copies) * 4
        call: tuple[CollectiveOp, int, tuple[int, ...]] = ("all_reduce", n_bytes, tuple(range(sharded.n_ranks)))
        events.append(_collective(sharded, (micro, len(sharded.dists), BACK), call, (gradient, gradient)))
    update = table_op(sharded, "perfmodel.dense_table_update", copies, batch, "optimizer")
    events.append(_compute(update, "optimizer", gradient, frozenset()))
    return events


def _prepared(sharded: ShardedTables, number: int, rank: int) -> list[Event]:
    """The batch's indices in the order that the batched operator reads (own operators read them as they come)."""
    dist = sharded.dists[number]
    held = dist.of_rank(rank)
    if dist.own or not held or sharded.n_ranks == 1:
        return []
    bucketed = dist.kind in ("row_wise", "domain_row_wise")
    attrs = {
        "n_lookups": sum(dist.lookups(s) for s in held) * sharded.n_ranks,
        "n_bags": dist.batch * sharded.n_ranks * len(held),
        "bucketed": bucketed,
    }
    key = ("prepare", tuple(attrs.items()))
    op = remembered(sharded, key, Op(id=-1, name="perfmodel.permute_sparse_features", attrs=attrs, phase="forward"))
    arrived = frozenset({_storage(number, INDICES)})
    return [_compute(op, "forward", arrived, arrived)]


def _lookups(sharded: ShardedTables, number: int, rank: int) -> list[Event]:
    dist = sharded.dists[number]
    reads, writes = frozenset({_storage(number, INDICES)}), frozenset({_storage(number, ROWS)})
    if not sharded.plan.index_exchange or sharded.n_ranks == 1:
        reads = _local(sharded, dist, "inputs")
    if sharded.n_ranks == 1:
        writes = _local(sharded, dist, "outputs")
    events = []
    for op in rank_ops(sharded, dist, rank, "forward"):
        if op.attrs.get("part") == "prefetch" and sharded.plan.pipeline == "prefetch":
            events.append(Event(stream="copy", phase="forward", op=replace_stream(sharded, op)))
        else:
            events.append(_compute(op, "forward", reads, writes))
    return events


def _outputs(sharded: ShardedTables, number: int, rank: int, micro: int) -> list[Event]:
    dist = sharded.dists[number]
    if sharded.n_ranks == 1:
        return []
    rows, here = frozenset({_storage(number, ROWS)}), _local(sharded, dist, "outputs")
    ranks = tuple(range(sharded.n_ranks))
    if dist.kind == "row_wise":
        call: tuple[CollectiveOp, int, tuple[int, ...]] = (
            "reduce_scatter",
            dist.reduced_elems() * dist.row_bytes,
            ranks,
        )
        return [_collective(sharded, (micro, number, OUT), call, (rows, here))]
    if dist.kind != "domain_row_wise":
        return [_exchange(sharded, (micro, number, OUT), dist.rows_bytes(dist.row_bytes), (rows, here))]
    events = []
    for place, domain in enumerate(dist.domains()):
        if rank in domain and len(domain) > 1:
            call = ("reduce_scatter", dist.reduced_elems(domain) * dist.row_bytes, domain)
            events.append(_collective(sharded, (micro, number, DOMAINS + 2 * place), call, (rows, rows)))
    events.append(_exchange(sharded, (micro, number, OUT), dist.cross_bytes(dist.row_bytes), (rows, here)))
    return events


def _compute(op: Op, phase: Phase, reads: frozenset[int], writes: frozenset[int]) -> Event:
    return Event(stream="compute", phase=phase, op=op, reads=reads, writes=writes)


def _exchange(
    sharded: ShardedTables,
    key: tuple[int, int, int],
    send: Matrix,
    touched: tuple[frozenset[int], frozenset[int]],
    *,
    waits: bool = False,
) -> Event:
    instance = instance_of(key)
    if instance not in sharded.made:
        sharded.made[instance] = Collective(
            op="all_to_all_v",
            bytes=max(sum(row) for row in send),
            ranks=tuple(range(sharded.n_ranks)),
            dtype="int64" if key[2] in (SPLITS, LENGTHS, VALUES) else "float32",
            instance=instance,
            purpose=_purpose(sharded, key),
            send_bytes=send,
        )
    return _event(sharded.made[instance], key[2], touched, waits=waits)


def _collective(
    sharded: ShardedTables,
    key: tuple[int, int, int],
    call: tuple[CollectiveOp, int, tuple[int, ...]],
    touched: tuple[frozenset[int], frozenset[int]],
) -> Event:
    instance = instance_of(key)
    if instance not in sharded.made:
        op, n_bytes, ranks = call
        sharded.made[instance] = Collective(
            op=op, bytes=n_bytes, ranks=ranks, dtype="float32", instance=instance, purpose=_purpose(sharded, key)
        )
    return _event(sharded.made[instance], key[2], touched)


def _event(
    collective: Collective, kind: int, touched: tuple[frozenset[int], frozenset[int]], *, waits: bool = False
) -> Event:
    backward = kind == BACK or (kind >= DOMAINS and (kind - DOMAINS) % 2 == 1)
    phase: Phase = "input" if kind in (SPLITS, LENGTHS, VALUES) else "backward" if backward else "forward"
    return Event(
        stream="comm", phase=phase, collective=collective, host_waits=waits, reads=touched[0], writes=touched[1]
    )


def _purpose(sharded: ShardedTables, key: tuple[int, int, int]) -> str:
    _, number, kind = key
    if number == len(sharded.dists):
        return "gradients of data-parallel tables"
    what = {SPLITS: "sizes", LENGTHS: "bag lengths", VALUES: "indices", OUT: "rows", BACK: "row gradients"}.get(kind)
    if what is None:
        what = "row gradients in a domain" if (kind - DOMAINS) % 2 else "partial sums in a domain"
    return f"{what} ({sharded.dists[number].kind.replace('_', ' ')})"


def instance_of(key: tuple[int, int, int]) -> int:
    """The number of a collective by micro-batch, module and kind."""
    micro, number, kind = key
    return FIRST_INSTANCE + (micro * ROLES + number) * BLOCK + kind


def _storage(number: int, role: int) -> int:
    return STORAGE + number * ROLES + role


def _local(sharded: ShardedTables, dist: Dist, which: str) -> frozenset[int]:
    return _named(sharded, dist.shards, which)


def _named(sharded: ShardedTables, shards: Sequence[TableShard], which: str) -> frozenset[int]:
    names = {shard.name for shard in shards}
    specs: list[TensorSpec] = [spec for name in names for spec in getattr(sharded.tables[name], which)]
    return frozenset(spec.storage for spec in specs)


def _last_writer(sharded: ShardedTables, gradients: frozenset[int]) -> int | None:
    def find() -> int | None:
        writers = [
            op.id
            for op in sharded.graph.ops
            if op.phase == "backward" and any(spec.storage in gradients for spec in op.outputs)
        ]
        return max(writers, default=None)

    found: int | None = sharded.facts.derived(("last writer", gradients), find)
    return found


def same_work(sharded: ShardedTables, rank: int) -> tuple[object, ...]:
    """Equal for ranks that do the same: equal parts, and the same domains to reduce in."""
    parts = [
        (number, shard.access, shard.placement.kernel, shard.placement.cache_load_factor)
        for number, dist in enumerate(sharded.dists)
        for shard in dist.of_rank(rank)
    ]
    domains = [d for dist in sharded.dists if dist.kind == "domain_row_wise" for d in dist.domains() if rank in d]
    return (*parts, *domains)


def names_on(sharded: ShardedTables, rank: int) -> tuple[str, ...]:
    """Tables of which a rank holds parts, once each."""
    held = [s.name for dist in sharded.dists for s in dist.of_rank(rank)] + [s.name for s in sharded.copies(rank)]
    return tuple(dict.fromkeys(held))
