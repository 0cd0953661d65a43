"""Events of ranks as blocks that many ranks and plans have in common; what waits for what is found for all ranks at once.

The rule is that of `events.link_events`: an op waits for the last writer of each storage that it reads and, before it writes
a storage, for that storage's last writer and its readers, where those ran on another stream; of the events on one stream only
the last counts. Here it is read off all touches of a storage, in order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import chain
from typing import get_args

import numpy as np

from perfmodel.graph import Op
from perfmodel.plan.columns import (
    EXCHANGED,
    ChainedOps,
    EventColumns,
    IntArray,
    JoinedColumns,
    LazyEvents,
    OpRun,
    exchanged_by,
    joined,
    scanned,
    waiting_as,
)
from perfmodel.plan.events import Event, Stream, with_storages
from perfmodel.plan.facts import GraphFacts

_STREAM_NUMBERS = {stream: number for number, stream in enumerate(get_args(Stream))}
_PLACE, _STORAGE, _WRITES, _STREAM = range(4)  # rows of touches


class Block:
    """A stretch of a rank's events that wait for nothing yet.

    Attributes:
        events: what stands in it.
        columns: theirs, without waits.
        crossing: storages that an event on another stream than `compute` touches.
    """

    def __init__(self, events: Sequence[Event]) -> None:
        if any(event.after for event in events):
            raise RuntimeError("events of a block wait for what follows from the storages they touch")
        self.events = tuple(map(with_storages, events))
        self.columns = scanned(self.events)
        beside = [event.reads | event.writes for event in self.events if event.stream != "compute"]
        self.crossing: frozenset[int] = frozenset().union(*beside)
        self._touches: tuple[Mapping[int, int], IntArray] | None = None

    def touches(self, numbers: Mapping[int, int]) -> IntArray:
        """Rows place, number of the storage, 1 if it is written, stream: one column for each of these storages touched."""
        if self._touches is None or self._touches[0] is not numbers:
            found = [
                (place, numbers[storage], storage in event.writes, _STREAM_NUMBERS[event.stream])
                for place, event in enumerate(self.events)
                for storage in sorted(event.reads | event.writes)
                if storage in numbers
            ]
            self._touches = numbers, np.array(found, dtype=np.int64).reshape(-1, 4).T
        return self._touches[1]


class BlockEvents(LazyEvents):
    """The events of one rank's blocks, linked; made when they are read."""

    def __init__(self, blocks: Sequence[Block], among: JoinedColumns, number: int) -> None:
        self.blocks, self.among, self.number = blocks, among, number

    @cached_property
    def columns(self) -> EventColumns:
        """Theirs."""
        return self.among.part(self.number)

    def flat(self) -> tuple[Event, ...]:
        """The events themselves."""
        return waiting_as(list(chain.from_iterable(block.events for block in self.blocks)), self.columns)

    def __len__(self) -> int:
        return int(self.among.first[self.number + 1] - self.among.first[self.number])


def linked(facts: GraphFacts, ranks: Sequence[Sequence[Block]]) -> tuple[JoinedColumns, list[BlockEvents]]:
    """The linked events of ranks that run these blocks: the columns of all, and each rank's own."""
    blocks = list(chain.from_iterable(ranks))
    # A storage that only the compute stream touches orders nothing.
    crossing = frozenset().union(*(block.crossing for block in blocks))
    numbers = facts.derived(("crossing", crossing), lambda: {s: number for number, s in enumerate(sorted(crossing))})
    columns = joined([block.columns for block in blocks])
    n_blocks = np.cumsum([0, *map(len, ranks)])
    first = np.cumsum([0, *(block.columns.size for block in blocks)])
    first_op = np.cumsum([0, *(len(block.columns.op_at) for block in blocks)])
    touches = [block.touches(numbers) for block in blocks]
    sizes = [part.shape[1] for part in touches]
    all_touches = np.concatenate(touches, axis=1)
    rank = np.repeat(np.arange(len(ranks)), np.diff(n_blocks))
    all_touches[_PLACE] += np.repeat(first[:-1], sizes)
    all_touches[_STORAGE] += np.repeat(rank * len(numbers), sizes)
    waiter, source = _waits(all_touches)
    exchanged: tuple[tuple[int, int, bool], ...] = ()
    if max(crossing, default=0) >= EXCHANGED:
        exchanged = tuple(
            (int(first[begin]) + place, storage, written)
            for begin, own in zip(n_blocks.tolist(), ranks, strict=False)
            for place, storage, written in exchanged_by(list(chain.from_iterable(block.events for block in own)))
        )
    among = JoinedColumns(
        columns=replace(columns, waiter=waiter, source=source, exchanged=exchanged),
        first=first[n_blocks],
        first_op=first_op[n_blocks],
        ops=tuple(_ops(own) for own in ranks),
    )
    return among, [BlockEvents(own, among, number) for number, own in enumerate(ranks)]


def _ops(blocks: Sequence[Block]) -> Sequence[Op]:
    return ChainedOps(*(block.columns.ops for block in blocks)) if blocks else OpRun()


def _waits(touches: IntArray) -> tuple[IntArray, IntArray]:
    """(waiter, source) by place, in order, from all touches in the order of their places."""
    if not touches.shape[1]:
        return touches[_PLACE], touches[_PLACE]
    place, _, writes, stream = touches = touches[:, np.argsort(touches[_STORAGE], kind="stable")]
    numbers = np.arange(len(place))
    opens = np.diff(touches[_STORAGE], prepend=-1) != 0
    begin = np.maximum.accumulate(np.where(opens, numbers, 0))
    ends = np.append(np.where(opens, numbers, len(place))[1:], len(place))
    end = np.minimum.accumulate(ends[::-1])[::-1]  # where the touches of the next storage begin
    # The last writer before each touch; and the next after each that only reads.
    before = np.maximum.accumulate(np.where(writes > 0, numbers, -1))
    before = np.concatenate([[-1], before[:-1]])
    after = np.minimum.accumulate(np.where(writes > 0, numbers, len(place))[::-1])[::-1]
    written = before >= begin
    overwritten = (writes == 0) & (after < end)
    waiter = np.concatenate([numbers[written], after[overwritten]])
    source = np.concatenate([before[written], numbers[overwritten]])
    crosses = stream[waiter] != stream[source]
    waiter, source = waiter[crosses], source[crosses]
    lane = place[waiter] * len(_STREAM_NUMBERS) + stream[source]
    order = np.lexsort((place[source], lane))
    last = np.diff(lane[order], append=-1) != 0
    found, cause = place[waiter[order[last]]], place[source[order[last]]]
    order = np.lexsort((cause, found))
    return found[order], cause[order]
