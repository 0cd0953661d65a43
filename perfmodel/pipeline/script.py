"""The steps by which a placement's ranks move their clocks through one iteration, in an order that every wait allows."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from perfmodel.pipeline.pricebook import STREAM_NUMBERS, IntArray
from perfmodel.pipeline.rows import HOST_FREE, N_CLOCKS, SegmentRows, free
from perfmodel.plan import Collective, Placement
from perfmodel.plan.runs import EventRuns, Piece, Segment
from perfmodel.sim.program import COMPUTE

# What a step does; see `Script.steps`.
RUN, WAIT, WAIT_LAST, ISSUE, END = range(5)
STEP_WIDTH = 5
MEMBER_WIDTH = 5


class NotSegmentedError(Exception):
    """A placement whose pace does not follow from segments; its events must be simulated one by one."""


class CollectiveTime(NamedTuple):
    """How long a collective takes alone (ps), and what it holds and moves beside kernels (permille: `sim.overlap`)."""

    length_ps: int
    held: int
    traffic: int


@dataclass(slots=True)
class Script:
    """One iteration.

    `steps` are (what, class, a, b, c), one after the other: RUN segment a; WAIT: stream a waits for slot b; WAIT_LAST:
    stream a for the last kernel of stream b; ISSUE: the host takes b ps to issue a collective on stream a, whose readiness
    goes to slot c; END: the members a to b - 1 of a collective, all ready, run it for c ps. A slot is a time, in the end that
    of the collective's end. `members` are (class, stream, slot, held, traffic).
    """

    steps: array[int] = field(default_factory=lambda: array("q"))
    members: array[int] = field(default_factory=lambda: array("q"))
    n_slots: int = 0
    n_classes: int = 0
    n_kernels: Counter[tuple[int, int]] = field(default_factory=Counter)  # by class and stream
    n_rows: int = 0  # of the longest segment
    slows: bool = False  # whether some collective takes something from kernels beside it, or they from it


@dataclass(frozen=True, slots=True, kw_only=True)
class Sources:
    """Where a script's numbers come from: segments as rows and collectives' times on a class's device, host time (ps)."""

    segment: Callable[[int, Segment], SegmentRows]
    time: Callable[[int, Collective], CollectiveTime]
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
        firsts = Counter(pieces[0].number for pieces in self.pieces)
        if max(firsts.values()) > 1:
            raise NotSegmentedError("classes share the collectives of their segments")
        self.issue_ps = [sources.issue_ps(cls) for cls in range(len(placement.classes))]
        self.meetings: dict[int, _Meeting] = {}
        for pieces in self.pieces:
            for piece in pieces:
                if len(piece.run) == 1 and (collective := _alone(piece.run)) is not None:
                    self.meetings.setdefault(collective.instance, _Meeting(missing=0)).missing += 1
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
            run = piece.run
            if piece.waits:
                yield from self._waits(cls, piece)
            collective = _alone(run) if len(run) == 1 else None
            if collective is None:
                segment = self.sources.segment(cls, run)
                for stream in segment.streams:
                    if stream in self.busy[cls] and self.busy[cls][stream].missing:
                        yield from self._until_free(cls, stream)
                self._run(cls, segment)
            else:
                stream = STREAM_NUMBERS[run[0].stream]
                if stream in self.busy[cls] and self.busy[cls][stream].missing:
                    yield from self._until_free(cls, stream)
                self._issue(cls, stream, piece, collective)
            if run.last_compute is not None:
                self.last_compute[cls] = piece.first + run.last_compute

    def _waits(self, cls: int, piece: Piece) -> Iterator[_Meeting]:
        stream = STREAM_NUMBERS[piece.run.stream(piece.at)]
        yield from self._until_free(cls, stream)
        for event in piece.waits:
            if event == self.last_compute[cls]:
                self.script.steps.extend((WAIT_LAST, cls, stream, COMPUTE, 0))
            elif event in self.slots[cls]:
                slot, meeting = self.slots[cls][event]
                while meeting.missing:
                    yield meeting
                self.script.steps.extend((WAIT, cls, stream, slot, 0))
            else:
                raise NotSegmentedError("an event inside a segment is waited for")

    def _until_free(self, cls: int, stream: int) -> Iterator[_Meeting]:
        meeting = self.busy[cls].get(stream)
        while meeting is not None and meeting.missing:
            yield meeting

    def _run(self, cls: int, segment: SegmentRows) -> None:
        script = self.script
        script.steps.extend((RUN, cls, segment.number, 0, 0))
        script.n_rows = max(script.n_rows, segment.n_rows)
        script.slows = script.slows or segment.slows
        for stream, count in segment.n_kernels.items():
            script.n_kernels[cls, stream] += count

    def _issue(self, cls: int, stream: int, piece: Piece, collective: Collective) -> None:
        if piece.run[0].host_waits:
            raise NotSegmentedError("the host waits for a collective")
        script = self.script
        slot = script.n_slots
        script.n_slots += 1
        meeting = self.meetings[collective.instance]
        self.slots[cls][piece.first] = (slot, meeting)
        script.steps.extend((ISSUE, cls, stream, self.issue_ps[cls], slot))
        script.n_kernels[cls, stream] += 1
        self.busy[cls][stream] = meeting
        meeting.came.append((cls, stream, slot, collective))
        meeting.missing -= 1
        if not meeting.missing:
            self._end(meeting)

    def _end(self, meeting: _Meeting) -> None:
        """All have come: members see other siblings; the first class's count."""
        script, came = self.script, meeting.came
        first = len(script.members) // MEMBER_WIDTH
        collective = came[0][3] if len(came) == 1 else min(came, key=lambda row: row[0])[3]
        length_ps = 0
        for cls, stream, slot, _ in came:
            length_ps, held, traffic = self.sources.time(cls, collective)
            script.members.extend((cls, stream, slot, held, traffic))
            script.slows = script.slows or held + traffic > 0
        script.steps.extend((END, came[0][0], first, first + len(came), length_ps))


def _pieces(events: Sequence[object]) -> tuple[Piece, ...]:
    if not isinstance(events, EventRuns) or not events.pieces:
        raise NotSegmentedError("events that are no segments")
    return events.pieces


def _alone(run: Segment) -> Collective | None:
    """The collective that a segment of one event is, with a number of its own; None for an op."""
    collective = run[0].collective
    if collective is not None and run.unnumbered:
        raise NotSegmentedError("a segment of one collective")
    return collective
