"""The bounded launch queue: a host thread can be only so many kernels ahead of the device."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from perfmodel.errors import GraphError
from perfmodel.sim.program import ArrayProgram, Program
from perfmodel.sim.steady import CarryDep

# Launches that fit between the host and one device stream before cudaLaunchKernel blocks until a kernel has completed.
# CUDA does not document it; "about 1000 a stream" is what users measure (stackoverflow.com/questions/53970187, 2018).
LAUNCH_QUEUE_DEPTH = 1024
# A queue that holds more iterations of a stream than this is left out: a busier stream of the rank holds the host first.
MAX_DISTANCE = 8


def with_launch_queue(
    programs: Sequence[Program | ArrayProgram], depth: int = LAUNCH_QUEUE_DEPTH
) -> tuple[list[ArrayProgram], list[CarryDep]]:
    """Adds the deps by which a host task waits until the kernel launched `depth` earlier on the same stream has ended.

    A device task is launched by the last host task among its deps; one without such a dep is not counted. Returns the
    programs and, for iterations in sequence, the carry deps by which the queue reaches over their seam (over at most
    `MAX_DISTANCE` iterations). Without blocking calls the queue moves host work in time but leaves the pace as it is.

    Raises:
        GraphError: a depth below 1, or a host task that stands before a kernel it would have to wait for.
    """
    if depth < 1:
        raise GraphError(f"launch queue depth {depth}; at least 1 is needed")
    limited: list[ArrayProgram] = []
    carry: list[CarryDep] = []
    for cls, program in enumerate(programs):
        part = program.arrays()
        waits: dict[int, list[int]] = {}
        for launchers, kernels in _launches(part):
            n = len(kernels)
            for i in range(depth, n):
                waits.setdefault(launchers[i], []).append(kernels[i - depth])
            for i in range(min(depth, n)):
                back = depth - i  # this many launches before the first of the iteration
                distance = -(-back // n)
                if distance > MAX_DISTANCE:
                    continue
                carry.append(CarryDep(cls=cls, task=launchers[i], on=kernels[n * distance - back], distance=distance))
        limited.append(_with_deps(cls, part, waits))
    return limited, carry


def _launches(part: ArrayProgram) -> list[tuple[list[int], list[int]]]:
    """Per device stream, the launching host task of each of its kernels, and the kernels, in stream order."""
    is_host = [part.kind(stream) == "host" for stream in part.stream.tolist()]
    ptr = np.concatenate([[0], np.cumsum(part.dep_count)]).tolist()
    index = part.dep_index.tolist()
    found: dict[int, tuple[list[int], list[int]]] = {}
    for task, stream in enumerate(part.stream.tolist()):
        hosts = [d for d in index[ptr[task] : ptr[task + 1]] if is_host[d]]
        if hosts and not is_host[task]:
            launchers, kernels = found.setdefault(stream, ([], []))
            launchers.append(max(hosts))
            kernels.append(task)
    return list(found.values())


def _with_deps(cls: int, part: ArrayProgram, more: dict[int, list[int]]) -> ArrayProgram:
    for task, deps in more.items():
        if max(deps) >= task:
            raise GraphError(f"class {cls} task {task}: launches after task {max(deps)} but stands before it")
    ptr = np.concatenate([[0], np.cumsum(part.dep_count)])
    at = np.array([ptr[task] for task, deps in more.items() for _ in deps], dtype=np.int64)
    new = np.array([dep for deps in more.values() for dep in deps], dtype=np.int64)
    count = part.dep_count.copy()
    for task, deps in more.items():
        count[task] += len(deps)
    return ArrayProgram(
        stream=part.stream,
        duration_ps=part.duration_ps,
        group=part.group,
        dep_count=count,
        dep_index=np.insert(part.dep_index, at, new),
        dep_lag_ps=np.insert(part.dep_lag_ps, at, 0),
        n_ranks=part.n_ranks,
        stream_kinds=part.stream_kinds,
    )
