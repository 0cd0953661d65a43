"""The pace of a segmented plan behind a bounded launch queue: segments replayed task by task.

A host thread that is `depth` launches ahead of a stream waits for its kernels (`sim.launch`), and which kernel it meets
depends on all that was launched before. So clocks do not move by whole segments here (`moves`): every task takes its place,
read from the arrays that its segment was lowered to once; no program of the whole iteration is ever made.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from typing import Any, NamedTuple

import numpy as np

from perfmodel.pipeline.moves import N_CLOCKS, N_STREAMS, NEVER, Move
from perfmodel.pipeline.pricebook import IntArray
from perfmodel.pipeline.script import END, ISSUE, MEET, RUN, WAIT, Script, live_clocks
from perfmodel.sim.loops import compiled_loop, has_numba
from perfmodel.sim.steady import cycle_of

MAX_ITERATIONS = 64


class Replay(NamedTuple):
    """What the loop reads, as int64 arrays or lists.

    Per move (segment): its tasks task_ptr[m]:task_ptr[m + 1], its host `tail`, what it leaves waiting
    held_ptr[m]:held_ptr[m + 1] (stream, task of the segment or -1, source stream). Per task: `stream`, `duration`, the
    stream that it `launches` a kernel on (-1: none), what it waits for dep_ptr[t]:dep_ptr[t + 1] (`before`: a clock, or
    N_CLOCKS plus a task of the segment) and `lag`. Per class: launch `latency`. Per class and stream: where its kernels
    are in `now` (kernel_ptr).
    """

    steps: Any
    task_ptr: Any
    tail: Any
    held_ptr: Any
    held: Any
    stream: Any
    duration: Any
    launches: Any
    dep_ptr: Any
    before: Any
    lag: Any
    latency: Any
    kernel_ptr: Any


class State(NamedTuple):
    """What changes; `ends` and `ended` are workspace.

    Clocks by class; slots; host time `pending` by class; how many kernels this iteration has launched by class and stream
    (`count`); ends of all kernels in this iteration (`now`) and in the one before (`then`).
    """

    clocks: Any
    slots: Any
    pending: Any
    count: Any
    now: Any
    then: Any
    ends: Any
    ended: Any


def queued_ps(script: Script, lag_ps: Sequence[int], depth: int) -> Fraction | None:
    """Iteration time (ps) behind queues of `depth` launches a stream; None if it does not settle in MAX_ITERATIONS."""
    replay = _replay(script, lag_ps)
    state = _state(script, replay)
    live = live_clocks(script)
    kept = _kept(replay.kernel_ptr, depth)
    compiled = has_numba()
    if not compiled:
        replay = Replay(*(array.tolist() for array in replay))
        state = State(*(array.tolist() for array in state))
    loop = compiled_loop(replay_loop) if compiled else replay_loop
    states: list[IntArray] = []
    for number in range(MAX_ITERATIONS):
        loop(replay, state, depth, number == 0)
        ends = np.asarray(state.now, dtype=np.int64)[kept]
        clocks = np.asarray(state.clocks, dtype=np.int64).reshape(-1)[live]
        last = max(int(clocks.max()), int(ends.max(initial=NEVER)))
        states.append(np.concatenate([clocks, ends, [last]]))
        cycle = cycle_of(states, 1)
        if cycle:
            return Fraction(int((states[-1] - states[-1 - cycle]).max()), cycle)
    return None


def _replay(script: Script, lag_ps: Sequence[int]) -> Replay:
    moves = script.moves
    counts = np.zeros((script.n_classes, N_STREAMS), dtype=np.int64)
    for (cls, stream), count in script.n_kernels.items():
        counts[cls, stream] = count
    n_deps = [len(move.tasks.before) for move in moves]
    shifts = np.cumsum([0, *n_deps])[:-1]
    held = [np.array(move.tasks.held, dtype=np.int64).reshape(-1, 3) for move in moves]
    return Replay(
        steps=np.array(script.steps, dtype=np.int64).reshape(-1, 5),
        task_ptr=_pointers(len(move.tasks.stream) for move in moves),
        tail=np.array([move.tasks.tail_ps for move in moves], dtype=np.int64),
        held_ptr=_pointers(len(rows) for rows in held),
        held=np.concatenate([np.empty((0, 3), dtype=np.int64), *held]),
        stream=_joined(moves, "stream"),
        duration=_joined(moves, "duration_ps"),
        launches=_joined(moves, "launches"),
        dep_ptr=np.concatenate(
            [*(move.tasks.ptr[:-1] + shift for move, shift in zip(moves, shifts, strict=True)), [sum(n_deps)]]
        ).astype(np.int64),
        before=_joined(moves, "before"),
        lag=_joined(moves, "lag_ps"),
        latency=np.array(lag_ps, dtype=np.int64),
        kernel_ptr=_pointers(counts.reshape(-1)),
    )


def _pointers(counts: Any) -> IntArray:
    return np.cumsum([0, *counts], dtype=np.int64)


def _joined(moves: Sequence[Move], name: str) -> IntArray:
    return np.concatenate([np.empty(0, dtype=np.int64), *(getattr(move.tasks, name) for move in moves)])


def _state(script: Script, replay: Replay) -> State:
    def zeros(*shape: int) -> IntArray:
        return np.zeros(shape, dtype=np.int64)

    n_kernels = int(replay.kernel_ptr[-1])
    return State(
        clocks=zeros(script.n_classes, N_CLOCKS),
        slots=zeros(max(script.n_slots, 1)),
        pending=zeros(script.n_classes),
        count=zeros(script.n_classes * N_STREAMS),
        now=zeros(n_kernels),
        then=zeros(n_kernels),
        ends=zeros(int(np.diff(replay.task_ptr).max(initial=1))),
        ended=zeros(N_CLOCKS),
    )


def _kept(kernel_ptr: IntArray, depth: int) -> IntArray:
    """The kernels of an iteration that launches of the next one may wait for."""
    number = np.arange(int(kernel_ptr[-1]))
    sizes = np.diff(kernel_ptr)
    left = np.repeat(kernel_ptr[1:], sizes) - number  # with itself, kernels to the end of its stream
    return number[left <= depth]


def replay_loop(a: Replay, s: State, depth: int, is_first: bool) -> None:  # noqa: C901, PLR0912, PLR0915 -- see below
    """One iteration. One flat function on local names, as `sim.overlap_loop` explains."""
    steps, task_ptr, tail, held_ptr, held = a.steps, a.task_ptr, a.tail, a.held_ptr, a.held
    stream_of, duration, launches, dep_ptr, before, lag = a.stream, a.duration, a.launches, a.dep_ptr, a.before, a.lag
    latency, kernel_ptr = a.latency, a.kernel_ptr
    clocks, slots, pending, count, now, then = s.clocks, s.slots, s.pending, s.count, s.now, s.then
    ends, ended = s.ends, s.ended
    n_clocks = len(ended)
    n_streams = n_clocks // 2
    for i in range(len(now)):
        then[i] = now[i]
    for i in range(len(count)):
        count[i] = 0
    for cls in range(len(pending)):
        for stream in range(n_streams):
            clocks[cls][2 * stream + 1] = NEVER
    for i in range(len(steps)):
        step = steps[i]
        what, cls, first, second, third = step[0], step[1], step[2], step[3], step[4]
        clock = clocks[cls]
        base = cls * n_streams
        if what == RUN:
            begin = task_ptr[first]
            for c in range(n_clocks):
                ended[c] = clock[c]
            for t in range(begin, task_ptr[first + 1]):
                stream = stream_of[t]
                at = clock[2 * stream]
                for d in range(dep_ptr[t], dep_ptr[t + 1]):
                    other = before[d]
                    reached = (ended[other] if other < n_clocks else ends[other - n_clocks]) + lag[d]
                    if reached > at:  # noqa: PLR1730 -- a call of max doubles the time of the plain Python loop
                        at = reached
                if stream == 0:
                    launched = launches[t]
                    if launched >= 0:
                        low = kernel_ptr[base + launched]
                        k = count[base + launched] - depth
                        if k >= 0:
                            at = max(at, now[low + k])
                        elif k + kernel_ptr[base + launched + 1] - low >= 0 and not is_first:
                            at = max(at, then[kernel_ptr[base + launched + 1] + k])
                    at += pending[cls]
                    pending[cls] = 0
                at += duration[t]
                ends[t - begin] = at
                clock[2 * stream] = at
                clock[2 * stream + 1] = at
                if stream != 0:
                    now[kernel_ptr[base + stream] + count[base + stream]] = at
                    count[base + stream] += 1
            pending[cls] += tail[first]
            for h in range(held_ptr[first], held_ptr[first + 1]):
                row = held[h]
                reached = ends[row[1]] if row[1] >= 0 else ended[2 * row[2] + 1]
                clock[2 * row[0]] = max(clock[2 * row[0]], reached)
        elif what == WAIT:
            clock[2 * first] = max(clock[2 * first], slots[second])
        elif what == ISSUE:
            low = kernel_ptr[base + first]
            k = count[base + first] - depth
            if k >= 0:
                clock[0] = max(clock[0], now[low + k])
            elif k + kernel_ptr[base + first + 1] - low >= 0 and not is_first:
                clock[0] = max(clock[0], then[kernel_ptr[base + first + 1] + k])
            clock[0] += pending[cls] + second
            pending[cls] = 0
            count[base + first] += 1
            slots[third] = max(clock[2 * first], clock[0] + latency[cls])
        elif what == MEET:
            slots[first] = max(slots[first], slots[second])
        elif what == END:
            slots[second] += third
            clock[2 * first] = slots[second]
            clock[2 * first + 1] = slots[second]
            now[kernel_ptr[base + first] + count[base + first] - 1] = slots[second]
        else:  # WAIT_LAST
            clock[2 * first] = max(clock[2 * first], clock[2 * second + 1])
