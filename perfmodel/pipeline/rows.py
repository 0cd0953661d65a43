"""Segments of a rank's events as rows that `pipeline.replay` runs: a launch by the host and the kernel that it launched.

A row is what a program (`lower_segment`) has as two tasks that follow each other, a host task and its only kernel, or any
other task alone. Rows of all segments met stand in one table, which only grows: a plan is a list of places in it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from threading import Lock
from typing import NamedTuple

import numpy as np

from perfmodel.pipeline.lower import LoweredSegment
from perfmodel.pipeline.pricebook import STREAM_NUMBERS, IntArray
from perfmodel.sim.overlap_loop import FULL_PACE
from perfmodel.sim.program import COMPUTE, HOST, NO_GROUP

N_STREAMS = max(STREAM_NUMBERS.values()) + 1
N_CLOCKS = 2 * N_STREAMS  # of a rank: see `free` and `ended`
HOST_FREE = 0
NO_STREAM = -1
NO_LAUNCH = -1
# Columns of a row.
STREAM, HOST_PS, WORK_PS, MEMORY, HELD, TRAFFIC, FIRST_DEP, END_DEP, END_RUN, RUN_HOST, WORK_SUM, AREA_SUM = range(12)
N_COLUMNS = 12
LONGEST_RUN = 16  # rows; the host must have launched all of them before the first begins
# Columns of a segment.
FIRST_ROW, END_ROW, TAIL_PS, FIRST_HELD, END_HELD = range(5)


def free(stream: int) -> int:
    """The clock that says when the next kernel of a stream may start."""
    return 2 * stream


def ended(stream: int) -> int:
    """The clock that says when the last kernel of a stream has ended."""
    return 2 * stream + 1


class RowArrays(NamedTuple):
    """The table as the loop reads it, int64.

    Attributes:
        rows: [12, n]. Stream of the kernel (HOST: host work alone); host time of its launch (ps; NO_LAUNCH: launched by
            another row); work (ps; of a host row its time is the one before); share of the work that memory takes, of a
            host row the stream on which it launches (or NO_STREAM); shares held and of traffic, of a collective
            (permille: see `sim.overlap`); where its waits stand in `waits`, first and behind the last; and of kernels of the
            compute stream that wait for their launches alone, the row behind the last that follow each other from here on, and
            the host time of those (of other rows: the row itself, and 0); and of the rows of the segment before this one, the
            sums of their work and of their work times the share that memory takes of it (permille).
        waits: [2, n]. What the kernel (of a host row: the host) waits for, and the lag (ps). Below N_CLOCKS a clock before
            the segment, from there on 2 x row of the segment for the end of its host time, one more for its kernel's.
        segments: [n, 5]. Its first row, behind its last; host time (ps) that the next host task after it takes over; and
            where what it leaves waiting stands in `held`.
        held: [n, 3]. The next kernel on the stream waits for a row of the segment (its kernel), or where that is -1 for
            what ran last on the source stream before the segment.
    """

    rows: IntArray
    waits: IntArray
    segments: IntArray
    held: IntArray


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SegmentRows:
    """A segment in the table: its number, the streams whose clocks it reads or sets, its kernels on each, how many rows.

    `slows` says whether its collectives take anything from kernels beside them, or these from them.
    """

    number: int
    streams: frozenset[int]
    n_kernels: Mapping[int, int]
    n_rows: int
    slows: bool


class RowTable:
    """Rows of segments, added one segment at a time. Threads may share it: what was added stays where it is."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._full = [np.zeros(shape, dtype=np.int64) for shape in ((N_COLUMNS, 64), (2, 64), (5, 64), (3, 64))]
        self._used = [0, 0, 0, 0]

    def __len__(self) -> int:
        """How many rows there are."""
        return self._used[0]

    @property
    def arrays(self) -> RowArrays:
        """The table as it is now."""
        with self._lock:
            rows, waits, segments, held = (full[:, :n] for full, n in zip(self._full, self._used, strict=True))
        return RowArrays(rows=rows, waits=waits, segments=segments.T.copy(), held=held.T.copy())

    def add(self, lowered: LoweredSegment, shares: Mapping[int, tuple[int, int]]) -> SegmentRows:
        """Adds a segment. `shares` are (held, traffic) of its collectives by instance."""
        streams = lowered.program.stream
        found, waits, held = _rows(lowered, shares)
        with self._lock:
            n_rows, n_waits, number, n_held = self._used
            found[[FIRST_DEP, END_DEP]] += n_waits
            found[END_RUN] += n_rows
            segment = (n_rows, n_rows + found.shape[1], lowered.tail_ps, n_held, n_held + held.shape[1])
            parts = (found, waits, np.array([segment], dtype=np.int64).T, held)
            self._full = [_with(old, at, new) for old, at, new in zip(self._full, self._used, parts, strict=True)]
            self._used = [at + new.shape[1] for at, new in zip(self._used, parts, strict=True)]
        counts = Counter(streams[streams != HOST].tolist())
        touched = {*counts, *(stream for _, stream in lowered.open_waits)}
        touched |= {stream for target, _, source in lowered.held for stream in (target, source)}
        return SegmentRows(
            number=number,
            streams=frozenset(touched - {HOST}),
            n_kernels=dict(counts),
            n_rows=found.shape[1],
            slows=bool(found[[HELD, TRAFFIC]].any()),
        )


def _with(old: IntArray, at: int, new: IntArray) -> IntArray:
    size, end = old.shape[1], at + new.shape[1]
    if end > size:
        old = np.concatenate([old, np.zeros((len(old), max(size, end - size)), dtype=np.int64)], axis=1)
    old[:, at:end] = new
    return old


def _rows(lowered: LoweredSegment, shares: Mapping[int, tuple[int, int]]) -> tuple[IntArray, IntArray, IntArray]:
    """Rows, waits (counted from the segment's first) and what is left waiting, of one segment."""
    program = lowered.program
    stream, n = program.stream, len(program.stream)
    owner, source, lag = _waits(lowered)
    launched = (stream[owner] != HOST) & (source >= 0)
    launched[launched] = stream[source[launched]] == HOST
    launches = np.full(n, NO_STREAM, dtype=np.int64)
    launches[source[launched]] = stream[owner[launched]]
    fused = _fused(stream, owner, source, launched)
    row_of = np.cumsum(~fused) - 1
    rows = np.zeros((N_COLUMNS, int(row_of[-1]) + 1 if n else 0), dtype=np.int64)
    heads = np.flatnonzero(~fused)
    is_host = stream[heads] == HOST
    joined = np.zeros(n, dtype=bool)
    joined[np.flatnonzero(fused) - 1] = True
    kernel = heads + joined[heads]  # the task whose kernel, waits and shares the row has
    rows[STREAM] = stream[kernel]
    rows[HOST_PS] = np.where(is_host, program.duration_ps[heads], NO_LAUNCH)
    alone = stream[kernel] == HOST
    rows[WORK_PS] = np.where(alone, 0, program.duration_ps[kernel])
    memory = np.minimum(np.rint(lowered.tasks.memory_frac * FULL_PACE), FULL_PACE).astype(np.int64)
    rows[MEMORY] = np.where(alone, launches[kernel], np.where(stream[kernel] == COMPUTE, memory[kernel], 0))
    rows[[HELD, TRAFFIC]] = _loads(lowered, shares)[:, kernel]
    kept = ~((source == owner - 1) & fused[owner]) & ~_behind(stream, owner, source, lag)
    inside = np.maximum(source, 0)
    before = np.where(source >= 0, N_CLOCKS + 2 * row_of[inside] + (stream[inside] != HOST), -1 - source)
    order = np.argsort(owner[kept], kind="stable")
    waits = np.stack([before[kept][order], lag[kept][order]])
    ends = np.cumsum(np.bincount(row_of[owner[kept]], minlength=rows.shape[1]))
    rows[FIRST_DEP] = np.concatenate([[0], ends])[:-1]
    rows[END_DEP] = ends
    rows[END_RUN], rows[RUN_HOST] = _runs(rows)
    rows[WORK_SUM] = np.cumsum(rows[WORK_PS]) - rows[WORK_PS]
    area = rows[WORK_PS] * np.where(rows[STREAM] == COMPUTE, rows[MEMORY], 0)
    rows[AREA_SUM] = np.cumsum(area) - area
    left = [(s, int(row_of[task]) if task >= 0 else -1, source) for s, task, source in lowered.held]
    return rows, waits, np.array(left, dtype=np.int64).reshape(-1, 3).T


def _waits(lowered: LoweredSegment) -> tuple[IntArray, IntArray, IntArray]:
    """Task, what it waits for (a task, or -1 minus a clock before the segment) and lag, of every wait."""
    program = lowered.program
    opens = np.array(lowered.open_waits, dtype=np.int64).reshape(-1, 2)
    owner = np.concatenate([np.repeat(np.arange(len(program.stream)), program.dep_count), opens[:, 0]])
    source = np.concatenate([program.dep_index, -1 - (2 * opens[:, 1] + 1)])
    lag = np.concatenate([program.dep_lag_ps, np.zeros(len(opens), dtype=np.int64)])
    return owner, source, lag


def _fused(stream: IntArray, owner: IntArray, source: IntArray, launched: IntArray) -> IntArray:
    """Which tasks are kernels right behind the host task that launches them and no other, and waits for nothing."""
    n = len(stream)
    n_launched = np.bincount(source[launched], minlength=n)
    n_waits = np.bincount(owner, minlength=n)
    found = np.zeros(n, dtype=bool)
    mine = owner[launched & (source == owner - 1)]
    found[mine] = (n_launched[mine - 1] == 1) & (n_waits[mine - 1] == 0)
    return found


def _behind(stream: IntArray, owner: IntArray, source: IntArray, lag: IntArray) -> IntArray:
    """Which waits are for tasks before on the same stream, that first-in first-out keeps anyway."""
    found: IntArray = (source >= 0) & (lag == 0) & (stream[np.maximum(source, 0)] == stream[owner])
    return found


def _runs(rows: IntArray) -> tuple[IntArray, IntArray]:
    """END_RUN and RUN_HOST of rows."""
    plain = (rows[STREAM] == COMPUTE) & (rows[HOST_PS] >= 0) & (rows[FIRST_DEP] == rows[END_DEP])
    number = np.arange(rows.shape[1])
    breaks = np.append(np.flatnonzero(~plain), rows.shape[1])
    end = np.minimum(breaks[np.searchsorted(breaks, number)], number + LONGEST_RUN)
    host = np.concatenate([[0], np.cumsum(rows[HOST_PS])])
    return np.where(plain, end, number), np.where(plain, host[end] - host[number], 0)


def _loads(lowered: LoweredSegment, shares: Mapping[int, tuple[int, int]]) -> IntArray:
    """Rows held and traffic with a column a task."""
    group = lowered.program.group
    found = np.zeros((2, len(group)), dtype=np.int64)
    for task in np.flatnonzero(group != NO_GROUP).tolist():
        found[:, task] = shares[int(group[task])]
    return found
