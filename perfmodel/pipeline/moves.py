"""How a segment of a rank's events moves its clocks: a max-plus linear map, found once and applied wherever it stands.

The clocks of a rank are when its host thread is free, and for each stream when its last kernel has ended and when the next
may start. Whatever runs in a segment starts at the largest of some sums of a clock and a constant, so the clocks after it
are such maxima of the clocks before it (Baccelli et al., Synchronization and Linearity, 1992, chapter 2). The constants are
longest paths through the segment's tasks: the same rules as the simulator's, and to the picosecond the same ends.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from perfmodel.pipeline.lower import LoweredSegment
from perfmodel.pipeline.pricebook import STREAM_NUMBERS, IntArray
from perfmodel.sim.loops import LOADED_FROM_TASKS, compiled_loop, has_numba
from perfmodel.sim.program import HOST

N_STREAMS = max(STREAM_NUMBERS.values()) + 1
N_CLOCKS = 2 * N_STREAMS  # of a rank
NO_STREAM = -1
HOST_FREE = 0
NEVER = -(1 << 60)  # ps; before every time there is, with room to add to it


def free(stream: int) -> int:
    """The clock that says when the next kernel of a stream may start."""
    return 2 * stream


def ended(stream: int) -> int:
    """The clock that says when the last kernel of a stream has ended."""
    return 2 * stream + 1


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SegmentTasks:
    """The tasks of a segment, one after the other.

    Task t waits for `before[d]` (a clock before the segment, or N_CLOCKS plus a task of it) and `lag_ps[d]`, d from ptr[t] to
    ptr[t + 1], and `launches` a kernel on a stream (NO_STREAM: none). `tail_ps` and `held` are as in `LoweredSegment`.
    """

    stream: IntArray
    duration_ps: IntArray
    ptr: IntArray
    before: IntArray
    lag_ps: IntArray
    launches: IntArray
    tail_ps: int
    held: tuple[tuple[int, int, int], ...]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Move:
    """Clock `out[i]` becomes the largest of the clocks `source[j]` plus `weight[j]`, j from ptr[i] to ptr[i + 1].

    `streams` are those whose clocks it reads or sets; `n_kernels` counts the tasks on each. It was found from `tasks`.
    """

    out: tuple[int, ...]
    ptr: tuple[int, ...]
    source: tuple[int, ...]
    weight: tuple[int, ...]
    streams: frozenset[int]
    n_kernels: dict[int, int]
    tasks: SegmentTasks


def move_of(lowered: LoweredSegment) -> Move:
    """The move of a segment's program."""
    program = lowered.program
    streams = program.stream.tolist()
    tasks = _tasks(lowered)
    weights = _longest_paths(tasks)
    last = {stream: task for task, stream in enumerate(streams)}
    kept = {ended(s): weights[task] for s, task in last.items() if s != HOST}
    nexts = {free(s): weights[task].copy() for s, task in last.items() if s != HOST}
    for stream, task, source in lowered.held:
        row = nexts.setdefault(free(stream), _unit(free(stream)))
        np.maximum(row, weights[task] if task >= 0 else _unit(ended(source)), out=row)
    host = weights[last[HOST]] if HOST in last else _unit(HOST_FREE)
    rows = {HOST_FREE: host + lowered.tail_ps, **kept, **nexts}
    found = [(out, np.flatnonzero(row > NEVER // 2), row) for out, row in sorted(rows.items())]
    sources = [at for _, at, _ in found]
    touched = {clock // 2 for at in sources for clock in at.tolist()} | {out // 2 for out in rows}
    return Move(
        out=tuple(out for out, _, _ in found),
        ptr=tuple(np.cumsum([0, *(len(at) for at in sources)]).tolist()),
        source=tuple(np.concatenate(sources).tolist()),
        weight=tuple(np.concatenate([row[at] for _, at, row in found]).tolist()),
        streams=frozenset(touched - {HOST}),
        n_kernels={s: streams.count(s) for s in set(streams) if s != HOST},
        tasks=tasks,
    )


def _unit(clock: int) -> IntArray:
    row = np.full(N_CLOCKS, NEVER, dtype=np.int64)
    row[clock] = 0
    return row


def _tasks(lowered: LoweredSegment) -> SegmentTasks:
    program = lowered.program
    n = len(program.stream)
    opens = np.array(lowered.open_waits, dtype=np.int64).reshape(-1, 2)
    inside = np.repeat(np.arange(n), program.dep_count)
    owner = np.concatenate([inside, opens[:, 0]])
    before = np.concatenate([program.dep_index + N_CLOCKS, 2 * opens[:, 1] + 1])
    lag = np.concatenate([program.dep_lag_ps, np.zeros(len(opens), dtype=np.int64)])
    by_owner = np.argsort(owner, kind="stable")
    launched = np.flatnonzero((program.stream[inside] != HOST) & (program.stream[program.dep_index] == HOST))
    launches = np.full(n, NO_STREAM, dtype=np.int64)
    launches[program.dep_index[launched]] = program.stream[inside[launched]]
    return SegmentTasks(
        stream=program.stream,
        duration_ps=program.duration_ps,
        ptr=np.concatenate([[0], np.cumsum(np.bincount(owner, minlength=n))]).astype(np.int64),
        before=before[by_owner],
        lag_ps=lag[by_owner],
        launches=launches,
        tail_ps=lowered.tail_ps,
        held=lowered.held,
    )


def _longest_paths(tasks: SegmentTasks) -> IntArray:
    """For each task the longest way (ps) from each clock before the segment to its end; NEVER where there is none."""
    n = len(tasks.stream)
    # Tasks wait for rows of one table: the clocks before the segment, then the tasks themselves.
    table = np.full((N_CLOCKS + n, N_CLOCKS), NEVER, dtype=np.int64)
    np.fill_diagonal(table[:N_CLOCKS], 0)
    columns = (tasks.stream, tasks.duration_ps, tasks.ptr, tasks.before, tasks.lag_ps)
    if n >= LOADED_FROM_TASKS and has_numba():
        compiled_loop(path_loop)(*columns, table)
    else:
        rows = table.tolist()
        stream, duration, ptr, before, lag = (column.tolist() for column in columns)
        path_loop(stream, duration, ptr, before, lag, rows)
        table = np.array(rows, dtype=np.int64)
    return table[N_CLOCKS:]


def path_loop(stream: Any, duration: Any, ptr: Any, before: Any, lag: Any, table: Any) -> None:
    """Fills the rows of the tasks in `table`, whose first rows are those of the clocks. Lists or arrays alike."""
    n_clocks = len(table[0])
    last = [2 * s for s in range(n_clocks)]  # row of what the next task on each stream follows; at first its clock
    for task in range(len(stream)):
        row = table[n_clocks + task]
        previous = table[last[stream[task]]]
        for c in range(n_clocks):
            row[c] = previous[c]
        for d in range(ptr[task], ptr[task + 1]):
            other = table[before[d]]
            for c in range(n_clocks):
                row[c] = max(row[c], other[c] + lag[d])
        for c in range(n_clocks):
            row[c] += duration[task]
        last[stream[task]] = n_clocks + task


def joined(moves: Sequence[Move]) -> tuple[IntArray, IntArray, IntArray, IntArray, IntArray]:
    """(first row of each move, clock of each row, first term of each row, source and weight of each term)."""
    row_ptr = np.cumsum([0, *(len(move.out) for move in moves)])
    shift = np.cumsum([0, *(len(move.source) for move in moves)])
    out = [clock for move in moves for clock in move.out]
    ptr = [at + base for move, base in zip(moves, shift.tolist(), strict=False) for at in move.ptr[:-1]]
    source = [clock for move in moves for clock in move.source]
    weight = [length for move in moves for length in move.weight]
    columns = (row_ptr, out, [*ptr, int(shift[-1])], source, weight)
    first, second, third, fourth, fifth = (np.array(column, dtype=np.int64) for column in columns)
    return first, second, third, fourth, fifth
