"""Runs of events that repeat: forward and backward of one micro-batch through one stage, linked once and replayed often."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from perfmodel.graph import Graph, Op
from perfmodel.plan.events import Collective, Event, link_events, op_event
from perfmodel.plan.runs import NO_INSTANCE, EventRuns, Piece, Segment
from perfmodel.plan.shard_graph import COLLECTIVE_OPS

START = -1  # in place of an op's id: before the first


@dataclass(frozen=True, slots=True, kw_only=True)
class Groups:
    """The groups of a rank class's first rank by mesh dimension, and the groups of its other ranks along it."""

    of: Mapping[str, tuple[int, ...]]
    siblings: Mapping[str, tuple[tuple[int, ...], ...]]


def segment(
    ops: Iterable[Op],
    groups: Groups,
    inserted: Mapping[int, Sequence[Event]] | None = None,
    before: Mapping[int, Sequence[Event]] | None = None,
    *,
    events: Sequence[Event] | None = None,
) -> Segment:
    """Events of ops with those `inserted` after each op and `before` it (by op id).

    `after` of an event counts from the segment's first. `events` are those of a graph's ops by id, where ops are of one.
    """
    found: list[Event] = list(before.get(START, ())) if before else []
    for op in ops:
        if before:
            found += before.get(op.id, ())
        if op.name in COLLECTIVE_OPS:
            found.append(collective_event(op, groups))
        else:
            found.append(op_event(op) if events is None else events[op.id])
        if inserted:
            found += inserted.get(op.id, ())
    return Segment(link_events(_after_compute(found)))


def _after_compute(events: Iterable[Event]) -> list[Event]:
    """A collective waits for all that its rank issued to the compute stream before it, as ProcessGroupNCCL makes it.

    Parameters are gathered ahead of compute: FSDP2 asks for them on a stream of its own.
    """
    found: list[Event] = []
    last = -1
    for event in events:
        gathers = event.stream == "comm" and event.collective is not None and event.collective.op == "all_gather"
        if event.collective is not None and last >= 0 and not gathers:
            event = replace(event, after=(last,))  # noqa: PLW2901 -- the event as it stands in this segment
        elif event.stream == "compute":
            last = len(found)
        found.append(event)
    return found


def collective_event(op: Op, groups: Groups) -> Event:
    """The event of a communication op of a local graph."""
    group = str(op.attrs["group"])
    ranks, siblings = groups.of[group], groups.siblings[group]
    if op.name == "perfmodel.send_recv":
        ring = _pairs(ranks)
        ranks, siblings = ring[0], (*ring[1:], *(pair for other in siblings for pair in _pairs(other)))
    send = _skewed(op, len(ranks))
    return Event(
        stream="context" if group == "cp" else "tensor",
        phase=op.phase,
        host_waits=bool(op.attrs.get("host_waits")),
        collective=Collective(
            op="all_to_all_v" if send else op.name.removeprefix("perfmodel."),  # type: ignore[arg-type]  # one of COLLECTIVE_OPS
            bytes=max(map(sum, send)) if send else int(op.attrs["bytes"]),
            send_bytes=send,
            ranks=ranks,
            dtype=op.inputs[0].dtype,
            instance=NO_INSTANCE,
            purpose=str(op.attrs["purpose"]),
            siblings=siblings,
        ),
        reads=frozenset(spec.storage for spec in op.inputs),
        writes=frozenset(spec.storage for spec in op.outputs),
    )


def _skewed(op: Op, n_ranks: int) -> tuple[tuple[int, ...], ...] | None:
    """What each rank sends to each where one gets more than its share of rows; None where all get the same.

    `bytes` of the way to experts is what each rank sends, of the way back what the busiest does.
    """
    imbalance = float(op.attrs.get("imbalance", 1.0))
    if imbalance == 1.0:
        return None
    back = op.attrs["way"] == "back"
    sent = int(op.attrs["bytes"]) / (imbalance if back else 1.0)
    first = sent * imbalance / n_ranks
    others = (sent - first) / (n_ranks - 1)
    shares = (round(first), *(round(others) for _ in range(n_ranks - 1)))
    rows = tuple(shares for _ in range(n_ranks))
    return tuple(zip(*rows, strict=True)) if back else rows


def _pairs(ring: tuple[int, ...]) -> list[tuple[int, int]]:
    """Each rank of a ring with the next."""
    return list(zip(ring, (*ring[1:], ring[0]), strict=True))


@dataclass(slots=True)
class Program:
    """The pieces of a rank class as they are put one after the other; collectives are numbered from `first_instance`."""

    first_instance: int
    pieces: list[Piece] = field(default_factory=list)
    n_events: int = 0
    n_collectives: int = 0
    last_compute: int | None = None  # index of the last event on the compute stream

    def extend(self, run: Segment, *, after: int | None = None) -> None:
        """Adds a segment; its first compute event also waits for the event `after`."""
        waits = () if after is None or run.first_compute is None else (after,)
        self._put(run, run.first_compute or 0, waits)
        self.n_collectives += run.n_unnumbered

    def add(self, event: Event, *, after_compute: bool = True) -> int:
        """Adds one event, which waits for what is on the compute stream, and gives its index."""
        waits = event.after
        if after_compute and self.last_compute is not None:
            waits = (self.last_compute,)
        self._put(Segment((replace(event, after=()),)) if event.after else Segment((event,)), 0, waits)
        return self.n_events - 1

    def _put(self, run: Segment, at: int, waits: tuple[int, ...]) -> None:
        number = self.first_instance + self.n_collectives
        self.pieces.append(Piece(run=run, first=self.n_events, number=number, at=at, waits=waits))
        if run.last_compute is not None:
            self.last_compute = self.n_events + run.last_compute
        self.n_events += len(run)

    def number(self) -> int:
        """The next instance number."""
        self.n_collectives += 1
        return self.first_instance + self.n_collectives - 1

    def events(self) -> EventRuns:
        """What was put together so far."""
        return EventRuns(self.pieces)


def ops_of(graph: Graph, *phases: str) -> list[Op]:
    """Ops of these phases, in order."""
    return [op for op in graph.ops if op.phase in phases]
