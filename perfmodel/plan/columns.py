"""Events of a rank as columns, which pricing and lowering read, and events that stand between others without being copied."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

from perfmodel.graph import Op
from perfmodel.plan.events import Collective, Event, waiting

EXCHANGED = 1 << 43  # storages from here on may be filled by an exchange of the iteration before

IntArray = NDArray[np.int64]
NONE: IntArray = np.empty(0, dtype=np.int64)


class OpRun(tuple[Op, ...]):
    """Ops that many sequences of events have in common; what is found of each of them is kept with them (`kept`)."""

    @cached_property
    def kept(self) -> dict[Hashable, Any]:
        """By what it is."""
        return {}


class InColumns:
    """Events that know their columns."""

    @cached_property
    def columns(self) -> EventColumns:
        """The columns."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EventColumns:
    """What a sequence of events is, by place.

    Attributes:
        size: number of events.
        op_at, ops: places of the events that carry an op, and the ops.
        collective_at, collectives: places of the others, and those events.
        instance: of each collective; what the events say of it holds for one of the sequences that they are in.
        waiter, source: one row for each event that another waits for, in the order of those that wait.
        exchanged: (place, storage, written) of storages that a collective fills, in order: written by a collective, else read
            by an op on the compute stream.
    """

    size: int
    op_at: IntArray
    ops: Sequence[Op]
    collective_at: IntArray
    collectives: Sequence[Event]
    instance: IntArray
    waiter: IntArray
    source: IntArray
    exchanged: tuple[tuple[int, int, bool], ...] = ()


def columns_of(events: Sequence[Event]) -> EventColumns:
    """The columns of events."""
    if isinstance(events, InColumns):
        return events.columns
    found = scanned(events)
    return replace(found, exchanged=tuple(_exchanged(events, found.collectives)))


def collectives_of(events: Sequence[Event]) -> Iterator[tuple[int, Collective]]:
    """(instance, collective) of the events that carry one, in order."""
    if isinstance(events, InColumns):
        columns = events.columns
        for instance, event in zip(columns.instance.tolist(), columns.collectives, strict=True):
            yield instance, collective_of(event)
        return
    for event in events:
        if event.collective is not None:
            yield event.collective.instance, event.collective


def collective_of(event: Event) -> Collective:
    """The collective of an event that carries one."""
    if event.collective is None:
        raise RuntimeError("an event carries an op or a collective")
    return event.collective


def scanned(events: Sequence[Event]) -> EventColumns:
    """The columns of events, read one by one, without `exchanged`."""
    op_at: list[int] = []
    ops: list[Op] = []
    at: list[int] = []
    collectives: list[Event] = []
    waiter: list[int] = []
    source: list[int] = []
    for number, event in enumerate(events):
        if event.op is not None:
            op_at.append(number)
            ops.append(event.op)
        else:
            at.append(number)
            collectives.append(event)
        if event.after:
            waiter += [number] * len(event.after)
            source += event.after
    return EventColumns(
        size=len(events),
        op_at=np.array(op_at, dtype=np.int64),
        ops=OpRun(ops),
        collective_at=np.array(at, dtype=np.int64),
        collectives=collectives,
        instance=np.array([collective_of(event).instance for event in collectives], dtype=np.int64),
        waiter=np.array(waiter, dtype=np.int64),
        source=np.array(source, dtype=np.int64),
    )


def _exchanged(events: Sequence[Event], collectives: Sequence[Event]) -> Iterator[tuple[int, int, bool]]:
    filled = frozenset(storage for event in collectives for storage in event.writes if storage >= EXCHANGED)
    if not filled:
        return
    for number, event in enumerate(events):
        if event.collective is not None:
            yield from ((number, storage, True) for storage in sorted(event.writes & filled))
        elif event.stream == "compute":
            yield from ((number, storage, False) for storage in sorted(event.reads & filled))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class JoinedColumns:
    """Columns of sequences of events that stand one behind the other.

    Attributes:
        columns: of all.
        first, first_op: the place of the first event of each sequence, and of the first of its ops among all; the last entry
            is the number of all.
        ops: of each sequence, in its own order.
    """

    columns: EventColumns
    first: IntArray
    first_op: IntArray
    ops: tuple[Sequence[Op], ...]

    def op_at(self, number: int) -> IntArray:
        """Where the ops of one sequence stand in it."""
        found: IntArray = self.columns.op_at[self.first_op[number] : self.first_op[number + 1]] - self.first[number]
        return found

    def part(self, number: int) -> EventColumns:
        """The columns of one sequence."""
        window = int(self.first[number]), int(self.first[number + 1])
        return _cut(self.columns, window, self.op_at(number), self.ops[number])


def joined_columns(parts: Sequence[EventColumns]) -> JoinedColumns:
    """Sequences one behind the other."""
    return JoinedColumns(
        columns=joined(parts),
        first=np.cumsum([0, *(part.size for part in parts)]),
        first_op=np.cumsum([0, *(len(part.op_at) for part in parts)]),
        ops=tuple(part.ops for part in parts),
    )


def _cut(columns: EventColumns, window: tuple[int, int], op_at: IntArray, ops: Sequence[Op]) -> EventColumns:
    """The columns of the events in a window, none of which waits for one before it; `op_at` and `ops` are given."""
    begin, end = window
    at = slice(*columns.collective_at.searchsorted(window).tolist())
    waits = slice(*columns.waiter.searchsorted(window).tolist())
    return EventColumns(
        size=end - begin,
        op_at=op_at,
        ops=ops,
        collective_at=columns.collective_at[at] - begin,
        collectives=columns.collectives[at],
        instance=columns.instance[at],
        waiter=columns.waiter[waits] - begin,
        source=columns.source[waits] - begin,
        exchanged=tuple(
            (place - begin, storage, written) for place, storage, written in columns.exchanged if begin <= place < end
        ),
    )


class Added:
    """Events that stand between others, and touch no storage of theirs; `columns` are of these events alone."""

    columns: EventColumns

    def event(self, number: int) -> Event:
        """One of them; `after` is left to the columns."""
        raise NotImplementedError


class Splices:
    """The same events between those of each of several sequences: the columns of all, one sequence behind the other.

    Args:
        base: the linked sequences.
        added: what stands between the events of each.
        slots: for each sequence, how many of its events stand before each of those; ascending.
    """

    def __init__(self, base: JoinedColumns, added: Added, slots: Sequence[IntArray]) -> None:
        self.base, self.added, self.n_parts = base, added, len(slots)
        n_added = added.columns.size
        slot = np.concatenate([own + begin for own, begin in zip(slots, base.first.tolist(), strict=False)])
        numbers = np.arange(base.columns.size, dtype=np.int64)
        self._base_at: IntArray = numbers + np.searchsorted(slot, numbers, side="right")
        self._added_at: IntArray = slot + np.arange(len(slot), dtype=np.int64)
        self.first: IntArray = base.first + n_added * np.arange(self.n_parts + 1)
        between = added.columns if self.n_parts == 1 else _repeated(added.columns, self.n_parts)
        self.columns = _spliced(base.columns, self._base_at, between, self._added_at)
        self._parts: dict[int, EventColumns] = {}

    def places(self, number: int) -> tuple[IntArray, IntArray]:
        """Where the events of a sequence stand in it, and where those between them."""
        begin, n_added = int(self.first[number]), self.added.columns.size
        own = slice(int(self.base.first[number]), int(self.base.first[number + 1]))
        return self._base_at[own] - begin, self._added_at[number * n_added : (number + 1) * n_added] - begin

    def part(self, number: int) -> EventColumns:
        """The columns of one sequence with what stands between its events."""
        if number not in self._parts:
            between, (base_at, added_at) = self.added.columns, self.places(number)
            self._parts[number] = _cut(
                self.columns,
                (int(self.first[number]), int(self.first[number + 1])),
                np.concatenate([base_at[self.base.op_at(number)], added_at[between.op_at]]),
                ChainedOps(self.base.ops[number], between.ops),
            )
        return self._parts[number]

    def parts(self) -> list[EventColumns]:
        """The columns of each."""
        return [self.part(number) for number in range(self.n_parts)]


class SplicedEvents(InColumns, Sequence[Event]):
    """Linked events with others between them. Reads as the flat sequence, whose events are made when they are read.

    Args:
        base: linked events.
        splices: what stands between them, and between those of other sequences.
        number: which of those sequences this is.
    """

    def __init__(self, base: Sequence[Event], splices: Splices, number: int) -> None:
        self.base, self.splices, self.number = base, splices, number

    @property
    def columns(self) -> EventColumns:
        """Theirs."""
        return self.splices.part(self.number)

    @cached_property
    def _flat(self) -> tuple[Event, ...]:
        base_at, added_at = self.splices.places(self.number)
        found: list[Event] = [*self.base, *map(self.splices.added.event, range(len(added_at)))]
        place = np.argsort(np.concatenate([base_at, added_at]))
        return waiting_as([found[i] for i in place.tolist()], self.columns)

    @overload
    def __getitem__(self, index: int) -> Event: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Event, ...]: ...
    def __getitem__(self, index: int | slice) -> Event | tuple[Event, ...]:
        return self._flat[index]

    def __len__(self) -> int:
        return int(self.splices.first[self.number + 1] - self.splices.first[self.number])

    def __iter__(self) -> Iterator[Event]:
        return iter(self._flat)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, SplicedEvents):
            return self._flat == other._flat
        return isinstance(other, tuple) and self._flat == other

    __hash__ = None  # type: ignore[assignment]  # an op's attributes are a mapping, so a tuple of events has no hash either


def splices_of(sequences: Sequence[Sequence[Event]]) -> Splices | None:
    """What the sequences are all parts of, in order; None if there is no such thing."""
    first = sequences[0] if sequences else None
    if not isinstance(first, SplicedEvents) or first.splices.n_parts != len(sequences):
        return None
    together = all(
        isinstance(events, SplicedEvents) and events.splices is first.splices and events.number == number
        for number, events in enumerate(sequences)
    )
    return first.splices if together else None


def waiting_as(events: list[Event], columns: EventColumns) -> tuple[Event, ...]:
    """The events, each waiting for those that the columns say."""
    after: dict[int, tuple[int, ...]] = {}
    for waiter, source in zip(columns.waiter.tolist(), columns.source.tolist(), strict=True):
        after[waiter] = (*after.get(waiter, ()), source)
    for number, sources in after.items():
        if events[number].after != sources:
            events[number] = waiting(events[number], sources)
    return tuple(events)


def _repeated(columns: EventColumns, n: int) -> EventColumns:
    """The columns of the same events `n` times, one behind the other."""
    begin = columns.size * np.arange(n)[:, None]

    def again(places: IntArray) -> IntArray:
        return (begin + places[None, :]).ravel()

    return EventColumns(
        size=n * columns.size,
        op_at=again(columns.op_at),
        ops=ChainedOps(*[columns.ops] * n),
        collective_at=again(columns.collective_at),
        collectives=[*columns.collectives] * n,
        instance=np.tile(columns.instance, n),
        waiter=again(columns.waiter),
        source=again(columns.source),
    )


def _spliced(base: EventColumns, base_at: IntArray, added: EventColumns, added_at: IntArray) -> EventColumns:
    """The columns of both; ops are those of the base, then the others."""
    at = np.concatenate([base_at[base.collective_at], added_at[added.collective_at]])
    both = [*base.collectives, *added.collectives]
    order = np.argsort(at)
    waiter = np.concatenate([base_at[base.waiter], added_at[added.waiter]])
    source = np.concatenate([base_at[base.source], added_at[added.source]])
    by_waiter = np.argsort(waiter, kind="stable")
    return EventColumns(
        size=base.size + added.size,
        op_at=np.concatenate([base_at[base.op_at], added_at[added.op_at]]),
        ops=ChainedOps(base.ops, added.ops),
        collective_at=at[order],
        collectives=[both[i] for i in order.tolist()],
        instance=np.concatenate([base.instance, added.instance])[order],
        waiter=waiter[by_waiter],
        source=source[by_waiter],
        exchanged=tuple((int(base_at[place]), storage, written) for place, storage, written in base.exchanged),
    )


class ChainedOps(Sequence[Op]):
    """Sequences of ops, one behind the other, which stay as they are."""

    def __init__(self, *parts: Sequence[Op]) -> None:
        self.parts: tuple[Sequence[Op], ...] = tuple(
            chain.from_iterable(part.parts if isinstance(part, ChainedOps) else (part,) for part in parts)
        )

    @overload
    def __getitem__(self, index: int) -> Op: ...
    @overload
    def __getitem__(self, index: slice) -> list[Op]: ...
    def __getitem__(self, index: int | slice) -> Op | list[Op]:
        return list(self)[index]

    def __len__(self) -> int:
        return sum(map(len, self.parts))

    def __iter__(self) -> Iterator[Op]:
        return chain.from_iterable(self.parts)


def joined(parts: Sequence[EventColumns]) -> EventColumns:
    """The columns of sequences that stand one behind the other."""
    if len(parts) == 1:
        return parts[0]
    sizes = [part.size for part in parts]
    first = np.cumsum([0, *sizes[:-1]]).tolist()
    return EventColumns(
        size=sum(sizes),
        op_at=shifted(parts, first, "op_at"),
        ops=ChainedOps(*(part.ops for part in parts)),
        collective_at=shifted(parts, first, "collective_at"),
        collectives=[event for part in parts for event in part.collectives],
        instance=np.concatenate([part.instance for part in parts]),
        waiter=shifted(parts, first, "waiter"),
        source=shifted(parts, first, "source"),
        exchanged=tuple(
            (place + begin, storage, written)
            for part, begin in zip(parts, first, strict=True)
            for place, storage, written in part.exchanged
        ),
    )


def shifted(parts: Sequence[EventColumns], firsts: Sequence[int], name: str) -> IntArray:
    """A column of places of sequences whose first events stand at `firsts`."""
    if not parts:
        return NONE
    return np.concatenate([getattr(part, name) + first for part, first in zip(parts, firsts, strict=True)])
