"""The steps by which a placement's ranks move their clocks through one iteration, in an order that every wait allows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from perfmodel.collectives import CollectiveEstimate
from perfmodel.pipeline.moves import HOST_FREE, N_CLOCKS, Move, free
from perfmodel.pipeline.pricebook import STREAM_NUMBERS, IntArray
from perfmodel.plan import Collective, Placement
from perfmodel.plan.runs import EventRuns, Piece, Segment
from perfmodel.sim.program import COMPUTE
from perfmodel.units import PS_PER_S

# What a step does; see `Script.steps`.
RUN, WAIT, WAIT_LAST, ISSUE, MEET, END = range(6)
Step = tuple[int, int, int, int, int]


class NotSegmentedError(Exception):
    """A placement whose pace does not follow from segments; its events must be simulated one by one."""


@dataclass(slots=True)
class Script:
    """One iteration.

    `steps` are (what, class, a, b, c): RUN move a; WAIT: stream a waits for slot b; WAIT_LAST: stream a for the last kernel
    of stream b; ISSUE: the host takes b ps to issue a collective on stream a, whose readiness goes to slot c; MEET: slot a
    becomes the later of a and b; END: stream a is busy until slot b plus c ps. A slot is a time.
    """

    steps: list[Step] = field(default_factory=list)
    moves: list[Move] = field(default_factory=list)
    n_slots: int = 0
    n_classes: int = 0
    n_kernels: Counter[tuple[int, int]] = field(default_factory=Counter)  # by class and stream


@dataclass(frozen=True, slots=True, kw_only=True)
class Sources:
    """Where a script's numbers come from: the move of a segment on a class's device, a collective's price, host time (ps)."""

    move: Callable[[int, Segment], Move]
    price: Callable[[Collective], CollectiveEstimate]
    issue_ps: Callable[[int], int]


@dataclass(slots=True)
class _Meeting:
    """A collective: how many classes have not come to it, and (class, stream, slot, its collective) of those that have."""

    missing: int
    came: list[tuple[int, int, int, Collective]] = field(default_factory=list)


def live_clocks(script: Script) -> IntArray:
    """Clocks (class times N_CLOCKS plus clock) that an iteration hands on: hosts, and the next start on streams in use."""
    found = {cls * N_CLOCKS + HOST_FREE for cls in range(script.n_classes)}
    found |= {cls * N_CLOCKS + free(stream) for cls, stream in script.n_kernels}
    return np.array(sorted(found), dtype=np.int64)


def script_of(placement: Placement, sources: Sources) -> Script:
    """The script of a placement. Raises NotSegmentedError."""
    writer = _Writer(placement, sources)
    writer.write()
    return writer.script


class _Writer:
    def __init__(self, placement: Placement, sources: Sources) -> None:
        self.sources, self.script = sources, Script(n_classes=len(placement.classes))
        self.pieces = [_pieces(rank_class.events) for rank_class in placement.classes]
        members = Counter(
            collective.instance for pieces in self.pieces for piece in pieces for collective in _alone(piece.run)
        )
        firsts = Counter(pieces[0].number for pieces in self.pieces)
        if max(firsts.values()) > 1:
            raise NotSegmentedError("classes share the collectives of their segments")
        self.meetings = {instance: _Meeting(missing=count) for instance, count in members.items()}
        self.number: dict[int, int] = {}  # of a move, by identity
        # By class: the slot of an event's end, and the meeting that sets it.
        self.slots: list[dict[int, tuple[int, _Meeting]]] = [{} for _ in self.pieces]
        self.busy: list[dict[int, _Meeting]] = [{} for _ in self.pieces]  # by class: the last meeting on a stream
        self.last_compute: list[int] = [-1] * len(self.pieces)

    def write(self) -> None:
        """Runs every class until it must know the end of a meeting that others have not come to."""
        waiting = {cls: self._class(cls) for cls in range(len(self.pieces))}
        while waiting:
            n_before = len(self.script.steps)
            for cls in list(waiting):
                if next(waiting[cls], None) is None:
                    del waiting[cls]
            if waiting and len(self.script.steps) == n_before:
                raise NotSegmentedError("classes wait for each other")

    def _class(self, cls: int) -> Iterator[_Meeting]:
        """Writes the steps of one class; yields the meeting whose end it waits for, until that is known."""
        for piece in self.pieces[cls]:
            yield from self._waits(cls, piece)
            alone = _alone(piece.run)
            if alone:
                yield from self._collective(cls, piece, alone[0])
            else:
                yield from self._segment(cls, piece.run)
            if piece.run.last_compute is not None:
                self.last_compute[cls] = piece.first + piece.run.last_compute

    def _waits(self, cls: int, piece: Piece) -> Iterator[_Meeting]:
        if not piece.waits:
            return
        stream = STREAM_NUMBERS[piece.run[piece.at].stream]
        yield from self._until_free(cls, stream)
        for event in piece.waits:
            if event == self.last_compute[cls]:
                self.script.steps.append((WAIT_LAST, cls, stream, COMPUTE, 0))
            elif event in self.slots[cls]:
                slot, meeting = self.slots[cls][event]
                while meeting.missing:
                    yield meeting
                self.script.steps.append((WAIT, cls, stream, slot, 0))
            else:
                raise NotSegmentedError("an event inside a segment is waited for")

    def _until_free(self, cls: int, stream: int) -> Iterator[_Meeting]:
        meeting = self.busy[cls].get(stream)
        while meeting is not None and meeting.missing:
            yield meeting

    def _segment(self, cls: int, run: Segment) -> Iterator[_Meeting]:
        move = self.sources.move(cls, run)
        for stream in move.streams:
            yield from self._until_free(cls, stream)
        number = self.number.setdefault(id(move), len(self.script.moves))
        if number == len(self.script.moves):
            self.script.moves.append(move)
        self.script.steps.append((RUN, cls, number, 0, 0))
        for stream, count in move.n_kernels.items():
            self.script.n_kernels[cls, stream] += count

    def _collective(self, cls: int, piece: Piece, collective: Collective) -> Iterator[_Meeting]:
        event = piece.run[0]
        if event.host_waits:
            raise NotSegmentedError("the host waits for a collective")
        stream = STREAM_NUMBERS[event.stream]
        yield from self._until_free(cls, stream)
        slot = self.script.n_slots
        self.script.n_slots += 1
        meeting = self.meetings[collective.instance]
        self.slots[cls][piece.first] = (slot, meeting)
        self.script.steps.append((ISSUE, cls, stream, self.sources.issue_ps(cls), slot))
        self.script.n_kernels[cls, stream] += 1
        self.busy[cls][stream] = meeting
        meeting.came.append((cls, stream, slot, collective))
        meeting.missing -= 1
        if not meeting.missing:
            self._end(meeting)

    def _end(self, meeting: _Meeting) -> None:
        """All have come: the end of the collective is the end on every member's stream, and in its slot."""
        steps = self.script.steps
        first, *others = (slot for _, _, slot, _ in meeting.came)
        steps += [(MEET, 0, first, slot, 0) for slot in others]
        steps += [(MEET, 0, slot, first, 0) for slot in others]
        _, _, _, collective = min(
            meeting.came, key=lambda row: row[0]
        )  # members see other siblings; the first class's count
        length_ps = round(self.sources.price(collective).estimate.time_s * PS_PER_S)
        for cls, stream, slot, _ in meeting.came:
            steps.append((END, cls, stream, slot, length_ps))


def _pieces(events: Sequence[object]) -> tuple[Piece, ...]:
    if not isinstance(events, EventRuns) or not events.pieces:
        raise NotSegmentedError("events that are no segments")
    return events.pieces


def _alone(run: Segment) -> list[Collective]:
    """The collective that a piece is, with a number of its own; empty for a segment of several events or an op."""
    if len(run) > 1 or run[0].collective is None:
        return []
    if run.unnumbered:
        raise NotSegmentedError("a segment of one collective")
    return [run[0].collective]
