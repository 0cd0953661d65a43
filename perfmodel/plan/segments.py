"""Runs of events that repeat: forward and backward of one micro-batch through one stage, linked once and replayed often."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from perfmodel.graph import Graph, Op
from perfmodel.plan.columns import IntArray
from perfmodel.plan.events import Collective, Event, link_among, link_events, op_event, waiting
from perfmodel.plan.resized import COLLECTIVE_OPS
from perfmodel.plan.runs import NO_INSTANCE, EventRuns, Piece, Segment, SplicedSegment

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
    def _behind(self) -> IntArray:
        """Places of the collectives that wait for what is on the compute stream before them."""
        columns = self.run.columns
        wait = [_waits_for_compute(event) for event in columns.collectives]
        found: IntArray = columns.collective_at[np.array(wait, dtype=bool)]
        return found

    @cached_property
    def _waits(self) -> IntArray:
        """Rows (event, event it waits for) without those waits for the compute stream."""
        columns = self.run.columns
        gone = np.isin(columns.waiter, self._behind) & self.run.is_compute[columns.source]
        return np.stack([columns.waiter[~gone], columns.source[~gone]], axis=1)

    @cached_property
    def _storages(self) -> frozenset[int]:
        return frozenset().union(*(event.reads for event in self.run), *(event.writes for event in self.run))

    def between(self, inserted: Inserted, before: Inserted | None = None, ends: Sequence[Event] = ()) -> Segment:
        """With events `inserted` after each op and `before` it (by op id; START for the beginning), and `ends` behind all."""
        extra = self._at(inserted, before or {})
        if not extra and not ends:
            return self.run
        cuts = sorted(extra)
        shifts = np.cumsum([0, *(len(extra[cut]) for cut in cuts)])
        numbers = np.arange(len(self.run))
        places = numbers + shifts[np.searchsorted(cuts, numbers, side="right")]
        n_before_ends = len(self.run) + int(shifts[-1])
        added: dict[int, Event] = {}
        for cut, shift in zip(cuts, shifts.tolist(), strict=False):
            added.update(enumerate(extra[cut], cut + shift))
        added.update(enumerate(ends, n_before_ends))
        if not self._storages.isdisjoint({s for event in added.values() for s in _touched(event)}):
            return self._linked_again(places, added, n_before_ends)
        is_compute = np.zeros(len(self.run) + len(added), dtype=bool)
        is_compute[places] = self.run.is_compute
        is_compute[list(added)] = [event.stream == "compute" for event in added.values()]
        last = np.maximum.accumulate(np.where(is_compute, np.arange(len(is_compute)), -1))
        added = self._among(places, added, n_before_ends, last)
        return SplicedSegment(self.run, places, added, self._all_waits(places, added, last), is_compute)

    def _linked_again(self, places: IntArray, added: Mapping[int, Event], n_before_ends: int) -> Segment:
        """All events linked anew, where those added touch storages of the others."""
        at = {**dict(zip(places.tolist(), self.run, strict=True)), **added}
        plain = [waiting(event, ()) if event.after else event for event in (at[i] for i in range(n_before_ends))]
        ends = [at[i] for i in range(n_before_ends, len(at))]
        return Segment(link_events((*link_events(_after_compute(plain)), *ends)))

    def _among(
        self, places: IntArray, added: Mapping[int, Event], n_before_ends: int, last: IntArray
    ) -> dict[int, Event]:
        """The events added, waiting for each other and collectives for what is last on the compute stream before them."""
        found = dict(added)
        known: dict[int, Event] = {}  # what they wait for that is not among them
        for number, event in added.items():
            before = int(last[number - 1]) if number and number < n_before_ends else -1
            if before >= 0 and _waits_for_compute(event):
                found[number] = waiting(event, (before,))
                if before not in added:
                    known[before] = self.run[int(np.searchsorted(places, before))]
        events = found | known
        link_among(events, list(added))
        return {number: events[number] for number in added}

    def _all_waits(self, places: IntArray, added: Mapping[int, Event], last: IntArray) -> IntArray:
        """Rows (event, event it waits for), ascending, of the run's events and of those added."""
        behind = places[self._behind]
        behind = behind[behind > 0]
        before = last[behind - 1]
        compute = np.stack([behind, before], axis=1)[before >= 0]
        more = [(number, index) for number, event in added.items() for index in event.after]
        rows = np.concatenate([places[self._waits], compute, np.array(more, dtype=np.int64).reshape(-1, 2)])
        return rows[np.lexsort((rows[:, 1], rows[:, 0]))]

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
