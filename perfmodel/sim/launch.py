"""The bounded launch queue: a host thread can be only so many kernels ahead of the device."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from perfmodel.errors import GraphError
from perfmodel.sim.program import ArrayProgram, IntArray, Program
from perfmodel.sim.steady import CarryRows

# Launches that fit between the host and one device stream before cudaLaunchKernel blocks until a kernel has completed.
# CUDA does not document it; "about 1000 a stream" is what users measure (stackoverflow.com/questions/53970187, 2018).
LAUNCH_QUEUE_DEPTH = 1024
# A queue that holds more iterations of a stream than this is left out: a busier stream of the rank holds the host first.
MAX_DISTANCE = 8


def with_launch_queue(
    programs: Sequence[Program | ArrayProgram], depth: int = LAUNCH_QUEUE_DEPTH
) -> tuple[list[ArrayProgram], CarryRows]:
    """Adds the deps by which a host task waits until the kernel launched `depth` earlier on the same stream has ended.

    A device task is launched by the last host task among its deps; one without such a dep is not counted. Returns the
    programs and, for iterations in sequence, the carry deps by which the queue reaches over their seam (over at most
    `MAX_DISTANCE` iterations). Without blocking calls, and with no more than `depth` launches on a stream in an iteration, the
    queue moves host work in time but leaves the pace as it is. With more it may lengthen an iteration: the host cannot run
    far enough ahead to have launched what the device reaches while the host is the slower of the two.

    Raises:
        GraphError: a depth below 1, or a host task that stands before a kernel it would have to wait for.
    """
    if depth < 1:
        raise GraphError(f"launch queue depth {depth}; at least 1 is needed")
    limited: list[ArrayProgram] = []
    carry: list[IntArray] = [np.empty((0, 5), dtype=np.int64)]
    for cls, program in enumerate(programs):
        part = program.arrays()
        waits: list[tuple[IntArray, IntArray]] = []
        for launchers, kernels in _launches(part):
            n = len(kernels)
            waits.append((launchers[depth:], kernels[: max(n - depth, 0)]))
            place = np.arange(min(depth, n))
            back = depth - place  # this many launches before the first of the iteration
            distance = -(-back // n)
            near = distance <= MAX_DISTANCE
            on = kernels[(n * distance - back)[near]]
            rows = np.zeros((len(on), 5), dtype=np.int64)
            rows[:, 0], rows[:, 1], rows[:, 2], rows[:, 4] = cls, launchers[place[near]], on, distance[near]
            carry.append(rows)
        limited.append(_with_deps(cls, part, waits))
    return limited, CarryRows(np.concatenate(carry))


def _launches(part: ArrayProgram) -> list[tuple[IntArray, IntArray]]:
    """Per device stream, the launching host task of each of its kernels, and the kernels, in stream order."""
    low = int(part.stream.min(initial=0))
    streams = np.flatnonzero(np.bincount(part.stream - low)) + low
    kinds = np.zeros(int(streams.max(initial=low)) - low + 1, dtype=bool)
    kinds[streams - low] = [part.kind(stream) == "host" for stream in streams.tolist()]
    is_host = kinds[part.stream - low]
    owner = np.repeat(np.arange(len(part.stream)), part.dep_count)
    by_host = is_host[part.dep_index]
    launcher = np.full(len(part.stream), -1, dtype=np.int64)
    np.maximum.at(launcher, owner[by_host], part.dep_index[by_host])
    launched = (launcher >= 0) & ~is_host
    found = []
    for stream in streams.tolist():
        kernels = np.flatnonzero(launched & (part.stream == stream))
        if len(kernels):
            found.append((launcher[kernels], kernels))
    return found


def _with_deps(cls: int, part: ArrayProgram, waits: Sequence[tuple[IntArray, IntArray]]) -> ArrayProgram:
    """The program with host tasks (first of each pair) that also wait for kernels (second)."""
    nothing = np.empty(0, dtype=np.int64)
    task = np.concatenate([nothing, *(pair[0] for pair in waits)])
    on = np.concatenate([nothing, *(pair[1] for pair in waits)])
    wrong = np.flatnonzero(on >= task)
    if len(wrong):
        raise GraphError(f"class {cls} task {task[wrong[0]]}: launches after task {on[wrong[0]]} but stands before it")
    ptr = np.concatenate([[0], np.cumsum(part.dep_count)])
    by_task = np.argsort(task, kind="stable")
    at = ptr[task[by_task]]
    return ArrayProgram(
        stream=part.stream,
        duration_ps=part.duration_ps,
        group=part.group,
        dep_count=part.dep_count + np.bincount(task, minlength=len(part.stream)),
        dep_index=np.insert(part.dep_index, at, on[by_task]),
        dep_lag_ps=np.insert(part.dep_lag_ps, at, 0),
        n_ranks=part.n_ranks,
        stream_kinds=part.stream_kinds,
    )
