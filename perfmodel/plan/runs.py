"""The events of a rank that repeats itself: segments, each made once, and where they stand; the flat list only when read."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import overload

from perfmodel.plan.events import Event

NO_INSTANCE = -1  # of a collective in a segment, numbered where the segment is replayed


class Segment(tuple[Event, ...]):
    """Events that are replayed together; `after` of each counts from the first of them."""

    @cached_property
    def first_compute(self) -> int | None:
        """Place of the first event on the compute stream."""
        return next((i for i, event in enumerate(self) if event.stream == "compute"), None)

    @cached_property
    def last_compute(self) -> int | None:
        """Place of the last event on the compute stream."""
        return next((i for i in range(len(self) - 1, -1, -1) if self[i].stream == "compute"), None)

    @cached_property
    def n_unnumbered(self) -> int:
        """Collectives that get their numbers where the segment stands."""
        return sum(e.collective is not None and e.collective.instance == NO_INSTANCE for e in self)


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

    def events(self) -> Iterator[Event]:
        """Its events as they stand in the rank's list."""
        number = self.number
        for place, event in enumerate(self.run):
            waits = tuple(index + self.first for index in event.after)
            if place == self.at:
                waits = (*waits, *self.waits)
            collective = event.collective
            if collective is not None and collective.instance == NO_INSTANCE:
                collective = replace(collective, instance=number)
                number += 1
            if waits or collective is not event.collective:
                yield replace(event, after=waits, collective=collective)
            else:
                yield event


class EventRuns(Sequence[Event]):
    """The events of a rank as pieces. Reads as the flat sequence, which is made when first read."""

    def __init__(self, pieces: Iterable[Piece]) -> None:
        self.pieces = tuple(pieces)

    @cached_property
    def _flat(self) -> tuple[Event, ...]:
        return tuple(event for piece in self.pieces for event in piece.events())

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
