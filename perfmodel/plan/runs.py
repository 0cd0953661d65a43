"""The events of a rank that repeats itself: segments, each made once, and where they stand; the flat list only when read."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from typing import overload

import numpy as np

from perfmodel.plan.columns import ChainedOps, EventColumns, InColumns, IntArray, OpRun, collective_of, joined, scanned
from perfmodel.plan.events import Collective, Event, waiting

NO_INSTANCE = -1  # of a collective in a segment, numbered where the segment is replayed


class Segment(tuple[Event, ...], InColumns):
    """Events that are replayed together; `after` of each counts from the first of them.

    `source`: the segment that others were put into to make this one, and where its events stand here.
    """

    source: tuple[Segment, IntArray] | None = None

    @classmethod
    def alone(cls, event: Event) -> Segment:
        """The segment of one event."""
        made = cls((event,))
        place = 0 if event.stream == "compute" else None
        here = (0,) if event.collective is not None else ()
        vars(made).update(first_compute=place, last_compute=place, collectives=here)
        return made

    @classmethod
    def spliced(cls, events: Iterable[Event], source: Segment, places: IntArray) -> Segment:
        """Events of which those at `places` are of `source`, waiting for others perhaps."""
        made = cls(events)
        made.source = source, places
        return made

    @cached_property
    def columns(self) -> EventColumns:
        """Its columns; the ops are those of its source, then the others."""
        if self.source is None:
            return scanned(self)
        source, places = self.source
        added = np.ones(len(self), dtype=bool)
        added[places] = False
        numbers = np.flatnonzero(added).tolist()
        op_at = [number for number in numbers if self[number].op is not None]
        at = sorted([*places[source.columns.collective_at].tolist(), *set(numbers).difference(op_at)])
        collectives = [self[place] for place in at]
        waits = [(place, self[place].after) for place in self.waiters]
        return EventColumns(
            size=len(self),
            op_at=np.concatenate([places[source.columns.op_at], np.array(op_at, dtype=np.int64)]),
            ops=ChainedOps(source.columns.ops, OpRun(op for n in op_at if (op := self[n].op) is not None)),
            collective_at=np.array(at, dtype=np.int64),
            collectives=collectives,
            instance=np.array([collective_of(event).instance for event in collectives], dtype=np.int64),
            waiter=np.repeat([place for place, _ in waits], [len(after) for _, after in waits]).astype(np.int64),
            source=np.array([index for _, after in waits for index in after], dtype=np.int64),
        )

    @cached_property
    def first_compute(self) -> int | None:
        """Place of the first event on the compute stream."""
        return next((i for i, event in enumerate(self) if event.stream == "compute"), None)

    @cached_property
    def last_compute(self) -> int | None:
        """Place of the last event on the compute stream."""
        return next((i for i in range(len(self) - 1, -1, -1) if self[i].stream == "compute"), None)

    @cached_property
    def collectives(self) -> tuple[int, ...]:
        """Places of the collectives."""
        return tuple(i for i, event in enumerate(self) if event.collective is not None)

    @cached_property
    def waiters(self) -> tuple[int, ...]:
        """Places of the events that wait for others."""
        return tuple(i for i, event in enumerate(self) if event.after)

    @cached_property
    def unnumbered(self) -> tuple[int, ...]:
        """Places of the collectives that get their numbers where the segment stands."""
        return tuple(i for i in self.collectives if collective_of(self[i]).instance == NO_INSTANCE)

    def numbered(self, first: int) -> list[Event]:
        """Its events, with collectives numbered from `first`."""
        events = list(self)
        for number, place in enumerate(self.unnumbered, first):
            events[place] = _numbered(events[place], number)
        return events


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A segment in its place: index of its first event, number of its first collective, and what its event `at` waits for.

    `waits` are indices of events of the rank.
    """

    run: Segment
    first: int
    number: int
    at: int
    waits: tuple[int, ...]

    def events(self) -> list[Event]:
        """Its events as they stand in the rank's list."""
        events = self.run.numbered(self.number)
        for place in self.run.waiters:
            events[place] = waiting(events[place], tuple([index + self.first for index in events[place].after]))
        if self.waits:
            events[self.at] = waiting(events[self.at], (*events[self.at].after, *self.waits))
        return events


def _numbered(event: Event, number: int) -> Event:
    """The event with its collective numbered: `dataclasses.replace` in half its time."""
    old = collective_of(event)
    collective = Collective(
        op=old.op,
        bytes=old.bytes,
        ranks=old.ranks,
        dtype=old.dtype,
        instance=number,
        purpose=old.purpose,
        send_bytes=old.send_bytes,
        siblings=old.siblings,
    )
    return Event(
        stream=event.stream,
        phase=event.phase,
        collective=collective,
        after=event.after,
        host_waits=event.host_waits,
        reads=event.reads,
        writes=event.writes,
    )


def _numbers(piece: Piece) -> IntArray:
    """The instance of each collective of a piece."""
    found = piece.run.columns.instance
    if not piece.run.unnumbered:
        return found
    own = found == NO_INSTANCE
    return np.where(own, piece.number + np.cumsum(own) - 1, found)


class EventRuns(InColumns, Sequence[Event]):
    """The events of a rank as pieces. Reads as the flat sequence, which is made when first read."""

    def __init__(self, pieces: Iterable[Piece]) -> None:
        self.pieces = tuple(pieces)

    @cached_property
    def columns(self) -> EventColumns:
        """The columns of its pieces where they stand. No collective on a mesh fills what the iteration before asked for."""
        whole = joined([piece.run.columns for piece in self.pieces])
        waits = [(piece.first + piece.at, index) for piece in self.pieces for index in piece.waits]
        more = np.array(waits, dtype=np.int64).reshape(-1, 2)
        waiter = np.concatenate([whole.waiter, more[:, 0]])
        order = np.argsort(waiter, kind="stable")
        source = np.concatenate([whole.source, more[:, 1]])
        number = np.concatenate([_numbers(piece) for piece in self.pieces])
        return replace(whole, instance=number, waiter=waiter[order], source=source[order])

    @cached_property
    def _flat(self) -> tuple[Event, ...]:
        return tuple(chain.from_iterable(piece.events() for piece in self.pieces))

    @overload
    def __getitem__(self, index: int) -> Event: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Event, ...]: ...
    def __getitem__(self, index: int | slice) -> Event | tuple[Event, ...]:
        return self._flat[index]

    def __len__(self) -> int:
        return sum(len(piece.run) for piece in self.pieces)

    def __iter__(self) -> Iterator[Event]:
        return iter(self._flat)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, EventRuns):
            return self._flat == other._flat
        return isinstance(other, tuple) and self._flat == other

    def __hash__(self) -> int:
        return hash(self._flat)
