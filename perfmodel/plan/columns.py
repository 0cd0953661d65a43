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
from perfmodel.plan.events import Collective, Event

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


class Added:
    """Events that stand between others, and touch no storage of theirs; `columns` are of these events alone."""

    columns: EventColumns

    def event(self, number: int) -> Event:
        """One of them; `after` is left to the columns."""
        raise NotImplementedError


class SplicedEvents(InColumns, Sequence[Event]):
    """Linked events with others between them. Reads as the flat sequence, whose events are made when they are read.

    Args:
        base: linked events.
        columns: theirs.
        added: what stands between them.
        slot: of each of those, how many of the base stand before it; ascending.
    """

    def __init__(self, base: Sequence[Event], columns: EventColumns, added: Added, slot: IntArray) -> None:
        self.base, self.base_columns, self.added = base, columns, added
        numbers = np.arange(len(base), dtype=np.int64)
        self.base_at: IntArray = numbers + np.searchsorted(slot, numbers, side="right")
        self.added_at: IntArray = slot + np.arange(len(slot), dtype=np.int64)
        self.columns = _spliced(columns, self.base_at, added.columns, self.added_at)

    @cached_property
    def _flat(self) -> tuple[Event, ...]:
        found: list[Event] = [*self.base, *(self.added.event(i) for i in range(len(self.added_at)))]
        place = np.argsort(np.concatenate([self.base_at, self.added_at]))
        flat = [found[i] for i in place.tolist()]
        after: dict[int, tuple[int, ...]] = {}
        for waiter, source in zip(self.columns.waiter.tolist(), self.columns.source.tolist(), strict=True):
            after[waiter] = (*after.get(waiter, ()), source)
        for number, sources in after.items():
            flat[number] = replace(flat[number], after=sources)
        return tuple(flat)

    @overload
    def __getitem__(self, index: int) -> Event: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Event, ...]: ...
    def __getitem__(self, index: int | slice) -> Event | tuple[Event, ...]:
        return self._flat[index]

    def __len__(self) -> int:
        return self.columns.size

    def __iter__(self) -> Iterator[Event]:
        return iter(self._flat)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, SplicedEvents):
            return self._flat == other._flat
        return isinstance(other, tuple) and self._flat == other

    __hash__ = None  # type: ignore[assignment]  # an op's attributes are a mapping, so a tuple of events has no hash either


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

    def together(name: str) -> IntArray:
        return np.concatenate([getattr(part, name) + begin for part, begin in zip(parts, first, strict=True)])

    return EventColumns(
        size=sum(sizes),
        op_at=together("op_at"),
        ops=ChainedOps(*(part.ops for part in parts)),
        collective_at=together("collective_at"),
        collectives=[event for part in parts for event in part.collectives],
        instance=np.concatenate([part.instance for part in parts]),
        waiter=together("waiter"),
        source=together("source"),
        exchanged=tuple(
            (place + begin, storage, written)
            for part, begin in zip(parts, first, strict=True)
            for place, storage, written in part.exchanged
        ),
    )
