"""The events of a rank that repeats itself: segments, each made once, and where they stand; the flat list only when read."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import overload

import numpy as np
from numpy.typing import NDArray

from perfmodel.plan.columns import ChainedOps, EventColumns, InColumns, IntArray, OpRun, collective_of, scanned, shifted
from perfmodel.plan.events import Collective, Event, Stream, waiting

BoolArray = NDArray[np.bool_]
NO_INSTANCE = -1  # of a collective in a segment, numbered where the segment is replayed


class Segment(InColumns, Sequence[Event]):
    """Events that are replayed together; `after` of each counts from the first of them."""

    def __init__(self, events: Iterable[Event]) -> None:
        self.events = tuple(events)

    @classmethod
    def alone(cls, event: Event) -> Segment:
        """The segment of one event."""
        made = cls((event,))
        place = 0 if event.stream == "compute" else None
        here = (0,) if event.collective is not None else ()
        own = here if event.collective is not None and event.collective.instance == NO_INSTANCE else ()
        vars(made).update(first_compute=place, last_compute=place, collectives=here, unnumbered=own)
        return made

    @cached_property
    def events(self) -> tuple[Event, ...]:
        """The events one by one."""
        raise NotImplementedError

    @cached_property
    def columns(self) -> EventColumns:
        """Its columns."""
        return scanned(self.events)

    @cached_property
    def is_compute(self) -> BoolArray:
        """Which events are on the compute stream."""
        return np.array([event.stream == "compute" for event in self.events], dtype=bool)

    @cached_property
    def first_compute(self) -> int | None:
        """Place of the first event on the compute stream."""
        return int(self.is_compute.argmax()) if self.is_compute.any() else None

    @cached_property
    def last_compute(self) -> int | None:
        """Place of the last event on the compute stream."""
        return len(self) - 1 - int(self.is_compute[::-1].argmax()) if self.is_compute.any() else None

    @cached_property
    def collectives(self) -> tuple[int, ...]:
        """Places of the collectives."""
        return tuple(self.columns.collective_at.tolist())

    @cached_property
    def waiters(self) -> tuple[int, ...]:
        """Places of the events that wait for others."""
        return tuple(dict.fromkeys(self.columns.waiter.tolist()))

    @cached_property
    def unnumbered(self) -> tuple[int, ...]:
        """Places of the collectives that get their numbers where the segment stands."""
        return tuple(self.columns.collective_at[self.columns.instance == NO_INSTANCE].tolist())

    def stream(self, place: int) -> Stream:
        """The stream of the event at a place."""
        return "compute" if self.is_compute[place] else self.events[place].stream

    def numbered(self, first: int) -> list[Event]:
        """Its events, with collectives numbered from `first`."""
        events = list(self.events)
        for number, place in enumerate(self.unnumbered, first):
            events[place] = _numbered(events[place], number)
        return events

    @overload
    def __getitem__(self, index: int) -> Event: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Event, ...]: ...
    def __getitem__(self, index: int | slice) -> Event | tuple[Event, ...]:
        return self.events[index]

    def __len__(self) -> int:
        return len(self.events)

    def __iter__(self) -> Iterator[Event]:
        return iter(self.events)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Segment) and self.events == other.events

    __hash__ = None  # type: ignore[assignment]  # an op's attributes are a mapping, so its events have no hash either


class SplicedSegment(Segment):
    """A segment with other events between its own, and what waits for what then; single events are made when first read.

    Args:
        source: the segment.
        places: where its events stand here.
        added: the others, by where they stand, ascending.
        waits: rows (place of an event, place of an event that it waits for), ascending.
        is_compute: which events are on the compute stream.
    """

    def __init__(
        self, source: Segment, places: IntArray, added: Mapping[int, Event], waits: IntArray, is_compute: BoolArray
    ) -> None:
        self.source, self.places, self.added, self.waits = source, places, added, waits
        self.is_compute = is_compute

    @cached_property
    def events(self) -> tuple[Event, ...]:
        """The events one by one."""
        after: dict[int, list[int]] = {}
        for waiter, index in self.waits.tolist():
            after.setdefault(waiter, []).append(index)
        found: list[Event] = [next(iter(self.source))] * len(self)
        for place, event in zip(self.places.tolist(), self.source, strict=True):
            found[place] = event
        for place, event in self.added.items():
            found[place] = event
        for place, event in enumerate(found):
            wanted = tuple(after.get(place, ()))
            if wanted != event.after:
                found[place] = waiting(event, wanted)
        return tuple(found)

    @cached_property
    def columns(self) -> EventColumns:
        """Its columns; the ops are those of its source, then the others."""
        base = self.source.columns
        ops = {place: event.op for place, event in self.added.items() if event.op is not None}
        others = {place: event for place, event in self.added.items() if event.op is None}
        at = np.concatenate([self.places[base.collective_at], ints(others)])
        both = [*base.collectives, *others.values()]
        order = np.argsort(at)
        number = np.concatenate([base.instance, ints(collective_of(event).instance for event in others.values())])
        return EventColumns(
            size=len(self),
            op_at=np.concatenate([self.places[base.op_at], ints(ops)]),
            ops=ChainedOps(base.ops, OpRun(ops.values())),
            collective_at=at[order],
            collectives=[both[i] for i in order.tolist()],
            instance=number[order],
            waiter=self.waits[:, 0],
            source=self.waits[:, 1],
        )

    def __len__(self) -> int:
        return len(self.source) + len(self.added)


def ints(values: Iterable[int]) -> IntArray:
    """An array of these."""
    return np.fromiter(values, dtype=np.int64)


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


def _number(piece: Piece, event: Event) -> int:
    """The instance of the collective that a piece is."""
    own = collective_of(event).instance
    return piece.number if own == NO_INSTANCE else own


class EventRuns(InColumns, Sequence[Event]):
    """The events of a rank as pieces. Reads as the flat sequence, which is made when first read."""

    def __init__(self, pieces: Iterable[Piece]) -> None:
        self.pieces = tuple(pieces)

    @cached_property
    def columns(self) -> EventColumns:
        """The columns of its pieces where they stand; the ops are those of segments, then lone ones.

        No collective on a mesh fills what the iteration before asked for.
        """
        pieces = [piece for piece in self.pieces if len(piece.run) > 1]
        alone = [(piece, piece.run.events[0]) for piece in self.pieces if len(piece.run) == 1]
        ops = [(piece.first, event.op) for piece, event in alone if event.op is not None]
        others = [(piece, event) for piece, event in alone if event.op is None]
        parts = [piece.run.columns for piece in pieces]
        firsts = [piece.first for piece in pieces]
        at = np.concatenate([shifted(parts, firsts, "collective_at"), ints(piece.first for piece, _ in others)])
        both = [*chain.from_iterable(part.collectives for part in parts), *(event for _, event in others)]
        numbers = [*map(_numbers, pieces), ints(_number(piece, event) for piece, event in others)]
        order = np.argsort(at)
        waits = [(piece.first + piece.at, index) for piece in self.pieces for index in piece.waits]
        more = np.array(waits, dtype=np.int64).reshape(-1, 2)
        waiter = np.concatenate([shifted(parts, firsts, "waiter"), more[:, 0]])
        source = np.concatenate([shifted(parts, firsts, "source"), more[:, 1]])
        by_waiter = np.argsort(waiter, kind="stable")
        return EventColumns(
            size=len(self),
            op_at=np.concatenate([shifted(parts, firsts, "op_at"), ints(place for place, _ in ops)]),
            ops=ChainedOps(*(part.ops for part in parts), OpRun(op for _, op in ops)),
            collective_at=at[order],
            collectives=[both[i] for i in order.tolist()],
            instance=np.concatenate(numbers)[order],
            waiter=waiter[by_waiter],
            source=source[by_waiter],
        )

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
