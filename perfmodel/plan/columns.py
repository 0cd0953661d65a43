"""Events of a rank as columns, which pricing and lowering read, and events that stand between others without being copied."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, chain
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
    return replace(found, exchanged=tuple(exchanged_by(events)))


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


def exchanged_by(events: Sequence[Event]) -> Iterator[tuple[int, int, bool]]:
    """`EventColumns.exchanged` of events."""
    filled = frozenset(s for event in events if event.collective is not None for s in event.writes if s >= EXCHANGED)
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
        return cut(self.columns, window, self.op_at(number), self.ops[number])


def joined_columns(parts: Sequence[EventColumns]) -> JoinedColumns:
    """Sequences one behind the other."""
    return JoinedColumns(
        columns=joined(parts),
        first=np.cumsum([0, *(part.size for part in parts)]),
        first_op=np.cumsum([0, *(len(part.op_at) for part in parts)]),
        ops=tuple(part.ops for part in parts),
    )


def cut(columns: EventColumns, window: tuple[int, int], op_at: IntArray, ops: Sequence[Op]) -> EventColumns:
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


class LazyEvents(InColumns, Sequence[Event]):
    """Events that know their columns; they themselves are made when they are read."""

    def flat(self) -> tuple[Event, ...]:
        """The events."""
        raise NotImplementedError

    @cached_property
    def _flat(self) -> tuple[Event, ...]:
        return self.flat()

    @overload
    def __getitem__(self, index: int) -> Event: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Event, ...]: ...
    def __getitem__(self, index: int | slice) -> Event | tuple[Event, ...]:
        return self._flat[index]

    def __iter__(self) -> Iterator[Event]:
        return iter(self._flat)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, tuple | LazyEvents) and self._flat == tuple(other)

    __hash__ = None  # type: ignore[assignment]  # an op's attributes are a mapping, so a tuple of events has no hash either


def waiting_as(events: list[Event], columns: EventColumns) -> tuple[Event, ...]:
    """The events, each waiting for those that the columns say."""
    after: dict[int, tuple[int, ...]] = {}
    for waiter, source in zip(columns.waiter.tolist(), columns.source.tolist(), strict=True):
        after[waiter] = (*after.get(waiter, ()), source)
    for number, sources in after.items():
        if events[number].after != sources:
            events[number] = waiting(events[number], sources)
    return tuple(events)


class ChainedOps(Sequence[Op]):
    """Sequences of ops, one behind the other, which stay as they are."""

    def __init__(self, *parts: Sequence[Op]) -> None:
        self.parts: tuple[Sequence[Op], ...] = tuple(
            chain.from_iterable(part.parts if type(part) is ChainedOps else (part,) for part in parts)
        )
        self._first = [0, *accumulate(map(len, self.parts))]

    @overload
    def __getitem__(self, index: int) -> Op: ...
    @overload
    def __getitem__(self, index: slice) -> list[Op]: ...
    def __getitem__(self, index: int | slice) -> Op | list[Op]:
        if isinstance(index, slice):
            return list(self)[index]
        place = range(len(self))[index]
        part = bisect_right(self._first, place) - 1
        return self.parts[part][place - self._first[part]]

    def __len__(self) -> int:
        return self._first[-1]

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
    values = [getattr(part, name) for part in parts]
    found: IntArray = np.concatenate(values) + np.repeat(np.array(firsts, dtype=np.int64), list(map(len, values)))
    return found
