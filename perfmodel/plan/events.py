"""What a plan yields: the events of one iteration for every class of ranks that do the same. Not priced yet."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from perfmodel.graph import Op, Phase
from perfmodel.plan.holding import Holding

# Communicators of their own: `tensor` of a tensor-parallel or an expert-parallel group, `copies` of the holders of one shard,
# `context` of a ring; `send_next` to `recv_next` carry what pipeline stages send each other; `copy_back` is to the host.
Stream = Literal[
    "compute", "comm", "copy", "tensor", "send_next", "recv_prev", "send_prev", "recv_next", "copies", "context", "copy_back"
]  # fmt: skip
CollectiveOp = Literal[
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "broadcast",
    "reduce",
    "all_to_all",
    "all_to_all_v",
    "send_recv",
    "barrier",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Collective:
    """One collective of a group of ranks, the same object on every member.

    `bytes` follows the nccl-tests convention (all_gather: total received; reduce_scatter: total sent; all_to_all: send
    buffer of one rank). `send_bytes[i][j]`, for all_to_all_v, is what the i-th rank of `ranks` sends to the j-th.
    `instance` numbers the collectives of an iteration; `purpose` says in words what it carries. `siblings` are the groups
    that do the same at the same time, so that links which they share are shared in time too.
    """

    op: CollectiveOp
    bytes: int
    ranks: tuple[int, ...]
    dtype: str
    instance: int
    purpose: str
    send_bytes: tuple[tuple[int, ...], ...] | None = None
    siblings: tuple[tuple[int, ...], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """One op or one collective on one stream of a rank.

    `after` holds the indices of earlier events of the same rank on other streams that must have ended on the device before
    this one starts (same-stream order is implied). With `host_waits` the host thread also waits for the event's own end, as
    after a blocking exchange of sizes. `reads` and `writes` are the storages it touches; of an op that names none, those
    of its tensors.
    """

    stream: Stream
    phase: Phase
    op: Op | None = None
    collective: Collective | None = None
    after: tuple[int, ...] = ()
    host_waits: bool = False
    reads: frozenset[int] = frozenset()
    writes: frozenset[int] = frozenset()

    @property
    def label(self) -> str:
        """Name shown in reports and traces."""
        if self.op is not None:
            return self.op.name
        if self.collective is None:
            raise RuntimeError("an event carries an op or a collective")
        return f"{self.collective.op} {self.collective.purpose}"


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryUse:
    """Peak device memory of one rank (bytes) by what holds it, and what it keeps elsewhere.

    `allocator_bytes` is what PyTorch's caching allocator reserves beyond live tensors: rounding, segments and fragments.
    `host_bytes` and `ssd_bytes` lie in the host's memory and on its SSDs, and are no part of the total.
    """

    parameters_bytes: int = 0
    gradients_bytes: int = 0
    optimizer_bytes: int = 0
    activations_bytes: int = 0
    buffers_bytes: int = 0
    communication_bytes: int = 0
    allocator_bytes: int = 0
    host_bytes: int = 0
    ssd_bytes: int = 0

    @property
    def total_bytes(self) -> int:
        """Sum of the parts."""
        return (
            self.parameters_bytes
            + self.gradients_bytes
            + self.optimizer_bytes
            + self.activations_bytes
            + self.buffers_bytes
            + self.communication_bytes
            + self.allocator_bytes
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RankClass:
    """Ranks that run the same events on the same device model.

    Where they work through a schedule of micro-batches, `holding` says what its steps hold and `spans[i]` which events step i
    is: the first, and the first after it.
    """

    ranks: tuple[int, ...]
    device: str
    events: Sequence[Event]
    memory: MemoryUse = field(default_factory=MemoryUse)
    tables: tuple[str, ...] = ()
    holding: Holding | None = None
    spans: Sequence[tuple[int, int]] = ()

    @property
    def representative(self) -> int:
        """Lowest rank of the class."""
        return self.ranks[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """A model spread over ranks: the rank classes, and what was assumed in words for the report.

    `n_replicas` copies of the model have samples of their own (0: every rank is one), each `n_micro` times the graph's batch.
    """

    classes: tuple[RankClass, ...]
    n_ranks: int
    notes: tuple[str, ...] = ()
    n_replicas: int = 0
    n_micro: int = 1


def op_event(op: Op, reads: frozenset[int] | None = None, writes: frozenset[int] | None = None) -> Event:
    """The event of an op on its own stream; storages given replace those of its tensors."""
    return Event(
        stream=op.stream,
        phase=op.phase,
        op=op,
        reads=frozenset([s.storage for s in op.inputs]) if reads is None else reads,
        writes=frozenset([s.storage for s in op.outputs]) if writes is None else writes,
    )


def link_events(events: Iterable[Event]) -> tuple[Event, ...]:
    """Adds to each event's `after` the cross-stream dependencies that follow from the storages its op touches.

    An op waits for the last writer of each storage it reads and, before it writes a storage, for that storage's last
    writer and readers, where those ran on another stream. Dependencies already present are kept.
    """
    linked = list(events)
    link_among(linked, range(len(linked)))
    return tuple(linked)


def link_among(events: list[Event] | dict[int, Event], numbers: Sequence[int]) -> None:
    """`link_events` in place, of the events at these places alone (ascending): no other touches a storage of theirs."""
    # A storage that only the compute stream touches orders nothing; most events touch no other.
    shared: set[int] = set()
    for index in numbers:
        event = events[index]
        if not event.reads and not event.writes and event.op is not None:
            event = events[index] = with_storages(event)
        if event.stream != "compute":
            shared.update(event.reads, event.writes)
    writer: dict[int, int] = {}
    readers: dict[int, list[int]] = {}
    for index in numbers:
        event = events[index]
        if shared.isdisjoint(event.reads) and shared.isdisjoint(event.writes):
            continue
        reads, writes = event.reads & shared, event.writes & shared
        found = {writer[s] for s in reads if s in writer}
        for storage in writes:
            if storage in writer:
                found.add(writer[storage])
            found.update(readers.get(storage, ()))
        found = {i for i in found if events[i].stream != event.stream}
        _record(index, reads, writes, writer, readers)
        if found:
            events[index] = waiting(event, _latest_per_stream(found.union(event.after), events))


def waiting(event: Event, after: tuple[int, ...]) -> Event:
    """The event waiting for others: `dataclasses.replace` in half its time."""
    return Event(
        stream=event.stream,
        phase=event.phase,
        op=event.op,
        collective=event.collective,
        after=after,
        host_waits=event.host_waits,
        reads=event.reads,
        writes=event.writes,
    )


def with_storages(event: Event) -> Event:
    """The event touching the storages of its op's tensors, if it names none."""
    if event.op is None or event.reads or event.writes:
        return event
    reads, writes = (frozenset(s.storage for s in specs) for specs in (event.op.inputs, event.op.outputs))
    return replace(event, reads=reads, writes=writes) if reads or writes else event


def _record(
    index: int, reads: frozenset[int], writes: frozenset[int], writer: dict[int, int], readers: dict[int, list[int]]
) -> None:
    for storage in reads - writes:
        readers.setdefault(storage, []).append(index)
    for storage in writes:
        writer[storage] = index
        readers.pop(storage, None)


def _latest_per_stream(indices: Iterable[int], events: list[Event] | dict[int, Event]) -> tuple[int, ...]:
    """Of the events on one stream only the last matters, since a stream is first-in first-out."""
    last: dict[Stream, int] = {}
    for index in sorted(indices):
        last[events[index].stream] = index
    return tuple(sorted(last.values()))
