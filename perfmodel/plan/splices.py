"""Events that stand between those of linked sequences without a copy of them: of all rank classes at once."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from perfmodel.plan.columns import ChainedOps, EventColumns, IntArray, JoinedColumns, LazyEvents, cut, waiting_as
from perfmodel.plan.events import Event


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
            self._parts[number] = cut(
                self.columns,
                (int(self.first[number]), int(self.first[number + 1])),
                np.concatenate([base_at[self.base.op_at(number)], added_at[between.op_at]]),
                ChainedOps(self.base.ops[number], between.ops),
            )
        return self._parts[number]

    def parts(self) -> list[EventColumns]:
        """The columns of each."""
        return [self.part(number) for number in range(self.n_parts)]


class SplicedEvents(LazyEvents):
    """Linked events with others between them.

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

    def flat(self) -> tuple[Event, ...]:
        """The events, with those between them."""
        base_at, added_at = self.splices.places(self.number)
        found: list[Event] = [*self.base, *map(self.splices.added.event, range(len(added_at)))]
        place = np.argsort(np.concatenate([base_at, added_at]))
        return waiting_as([found[i] for i in place.tolist()], self.columns)

    def __len__(self) -> int:
        return int(self.splices.first[self.number + 1] - self.splices.first[self.number])


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
