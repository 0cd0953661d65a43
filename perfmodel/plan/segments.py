"""Runs of events that repeat: forward and backward of one micro-batch through one stage, linked once and replayed often."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from perfmodel.graph import Graph, Op
from perfmodel.plan.events import Collective, Event, link_among, link_events, op_event, waiting
from perfmodel.plan.runs import NO_INSTANCE, EventRuns, Piece, Segment
from perfmodel.plan.shard_graph import COLLECTIVE_OPS

START = -1  # in place of an op's id: before the first

Inserted = Mapping[int, Sequence[Event]]  # by op id


@dataclass(frozen=True, slots=True, kw_only=True)
class Groups:
    """The groups of a rank class's first rank by mesh dimension, and the groups of its other ranks along it."""

    of: Mapping[str, tuple[int, ...]]
    siblings: Mapping[str, tuple[tuple[int, ...], ...]]


class Linked:
    """Ops of one part of an iteration as linked events, between which others are put (`between`).

    `run` are they alone; `after` of an event counts from the first.
    """

    def __init__(self, ops: Iterable[Op], groups: Groups, events: Sequence[Event] | None = None) -> None:
        """`events` are those of a graph's ops by id, where ops are of one."""
        ops = list(ops)
        found = [
            collective_event(op, groups)
            if op.name in COLLECTIVE_OPS
            else (op_event(op) if events is None else events[op.id])
            for op in ops
        ]
        self.run = Segment(link_events(_after_compute(found)))
        self.place = {op.id: number for number, op in enumerate(ops)}

    @cached_property
    def _bound(self) -> tuple[int, ...]:
        """Places of the events that wait for others, or that would for what is put before them."""
        return tuple(i for i, event in enumerate(self.run) if event.after or event.collective is not None)

    @cached_property
    def _storages(self) -> frozenset[int]:
        return frozenset().union(*(event.reads for event in self.run), *(event.writes for event in self.run))

    def between(self, inserted: Inserted, before: Inserted | None = None, ends: Sequence[Event] = ()) -> Segment:
        """With events `inserted` after each op and `before` it (by op id; START for the beginning), and `ends` behind all."""
        extra = self._at(inserted, before or {})
        if not extra and not ends:
            return self.run
        events: list[Event] = []
        added: list[int] = []
        cuts = sorted(extra)
        begin = 0
        for cut in cuts:
            events += self.run[begin:cut]
            added += range(len(events), len(events) + len(extra[cut]))
            events += extra[cut]
            begin = cut
        events += self.run[begin:]
        n_before_ends = len(events)
        events += ends
        touched = {s for i in added for s in _touched(events[i])} | {s for event in ends for s in _touched(event)}
        if not self._storages.isdisjoint(touched):
            plain = [waiting(event, ()) if event.after else event for event in events[:n_before_ends]]
            return Segment(link_events((*link_events(_after_compute(plain)), *ends)))
        shifts = np.cumsum([0, *(len(extra[cut]) for cut in cuts)])
        places = np.arange(len(self.run)) + shifts[np.searchsorted(cuts, np.arange(len(self.run)), side="right")]
        self._moved(events, places.tolist())
        for number in added:
            if _waits_for_compute(events[number]):
                last = _last_compute(events, number)
                events[number] = waiting(events[number], (last,)) if last >= 0 else events[number]
        link_among(events, [*added, *range(n_before_ends, len(events))])
        return Segment.spliced(events, self.run, places)

    def _at(self, inserted: Inserted, before: Inserted) -> dict[int, list[Event]]:
        """What is put before each place."""
        found: dict[int, list[Event]] = {}
        for op, events in inserted.items():
            if op in self.place and events:
                found.setdefault(self.place[op] + 1, []).extend(events)
        for op in sorted(before, key=lambda op: op != START):
            if before[op] and (op == START or op in self.place):
                found.setdefault(0 if op == START else self.place[op], []).extend(before[op])
        return found

    def _moved(self, events: list[Event], at: Sequence[int]) -> None:
        """Events of the run wait for what they waited for where that stands now, collectives for what is last on compute."""
        for place in self._bound:
            event, number = self.run[place], at[place]
            if _waits_for_compute(event):
                others = [at[i] for i in event.after if self.run[i].stream != "compute"]
                last = _last_compute(events, number)
                after = tuple(sorted([*others, last] if last >= 0 else others))
            else:
                after = tuple([at[i] for i in event.after])
            if after != event.after:
                events[number] = waiting(event, after)


def segment(ops: Iterable[Op], groups: Groups) -> Segment:
    """Events of ops, linked."""
    return Linked(ops, groups).run


def _touched(event: Event) -> Iterable[int]:
    """Storages that linking gives an event."""
    if event.reads or event.writes or event.op is None:
        return event.reads | event.writes
    return {spec.storage for spec in (*event.op.inputs, *event.op.outputs)}


def _waits_for_compute(event: Event) -> bool:
    """A collective waits for all that its rank issued to the compute stream before it, as ProcessGroupNCCL makes it.

    Parameters are gathered ahead of compute: FSDP2 asks for them on a stream of its own.
    """
    collective = event.collective
    return collective is not None and not (event.stream == "comm" and collective.op == "all_gather")


def _last_compute(events: Sequence[Event], before: int) -> int:
    """The last event on the compute stream before a place (-1: none)."""
    return next((i for i in range(before - 1, -1, -1) if events[i].stream == "compute"), -1)


def _after_compute(events: Iterable[Event]) -> list[Event]:
    """Events with collectives waiting for what is on the compute stream before them."""
    found: list[Event] = []
    last = -1
    for event in events:
        if event.collective is not None and last >= 0 and _waits_for_compute(event):
            event = waiting(event, (last,))  # noqa: PLW2901 -- the event as it stands in this segment
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
        self.n_collectives += len(run.unnumbered)

    def add(self, event: Event, *, after_compute: bool = True) -> int:
        """Adds one event, which waits for what is on the compute stream, and gives its index."""
        waits = event.after
        if after_compute and self.last_compute is not None:
            waits = (self.last_compute,)
        self._put(Segment.alone(waiting(event, ()) if event.after else event), 0, waits)
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
