"""What the simulator runs: one `Program` per rank class. It knows no tensors, devices or YAML."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray

# Conventional stream numbers; a program may use more (second communication stream: 4, ...).
HOST, COMPUTE, COMM, COPY = 0, 1, 2, 3
# Of a stream that `stream_kinds` names so: what makes the next input beside the host thread. No stream has this number.
INPUT = -1
COPY_BACK = 11  # copies from the device to the host, which run beside those to it
NO_GROUP = -1

IntArray = NDArray[np.int64]
StreamKind = Literal["host", "compute", "comm", "copy", "input"]
KIND_CODES: Mapping[StreamKind, int] = {"host": HOST, "compute": COMPUTE, "comm": COMM, "copy": COPY, "input": INPUT}
_KIND_OF_STREAM: Mapping[int, StreamKind] = {
    **{code: kind for kind, code in KIND_CODES.items() if code != INPUT},
    COPY_BACK: "copy",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One thing on one stream of one rank: a kernel, a host interval, a transfer, or a rank's part of a collective.

    Attributes:
        stream: queue it runs on, first-in first-out in program order (HOST is the host thread itself).
        duration_ps: how long it occupies the stream; of a collective, from the last member's readiness to the end.
        deps: (task index, lag_ps) pairs: it cannot start before each of them has ended plus the lag. A kernel depends
            on the host task that launched it with lag = launch latency; a host sync depends on kernels.
        group: instance number of the collective it takes part in (shared with the other rank classes), or NO_GROUP.
            All members start together, when the last of them is ready, and end together.
    """

    stream: int
    duration_ps: int
    deps: tuple[tuple[int, int], ...] = ()
    group: int = NO_GROUP


def _kind(stream: int, given: Mapping[int, StreamKind]) -> StreamKind:
    return given.get(stream) or _KIND_OF_STREAM.get(stream) or ("host" if stream < 0 else "comm")


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """Tasks of one rank class in program order (deps point backwards), and how many ranks run it.

    `stream_kinds` says what a stream carries where its number does not: 0 and negative numbers are host threads, 1 is
    compute, 2 and every number from 4 up communication but COPY_BACK, 3 and that copies.
    """

    tasks: Sequence[Task]
    n_ranks: int = 1
    stream_kinds: Mapping[int, StreamKind] = field(default_factory=dict)

    def kind(self, stream: int) -> StreamKind:
        """What `stream` carries."""
        return _kind(stream, self.stream_kinds)

    def arrays(self) -> ArrayProgram:
        """The same program as flat arrays."""
        deps = [dep for task in self.tasks for dep in task.deps]
        return ArrayProgram(
            stream=_array([task.stream for task in self.tasks]),
            duration_ps=_array([task.duration_ps for task in self.tasks]),
            group=_array([task.group for task in self.tasks]),
            dep_count=_array([len(task.deps) for task in self.tasks]),
            dep_index=_array([index for index, _ in deps]),
            dep_lag_ps=_array([lag for _, lag in deps]),
            n_ranks=self.n_ranks,
            stream_kinds=self.stream_kinds,
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ArrayProgram:
    """A `Program` as int64 arrays, for programs too large to build task by task. Meanings as in `Task` and `Program`.

    `dep_count[i]` is how many entries of `dep_index` and `dep_lag_ps`, taken in order, belong to task i.
    """

    stream: IntArray
    duration_ps: IntArray
    group: IntArray
    dep_count: IntArray
    dep_index: IntArray
    dep_lag_ps: IntArray
    n_ranks: int = 1
    stream_kinds: Mapping[int, StreamKind] = field(default_factory=dict)

    def kind(self, stream: int) -> StreamKind:
        """What `stream` carries."""
        return _kind(stream, self.stream_kinds)

    def arrays(self) -> ArrayProgram:
        """Itself."""
        return self


def _array(values: Sequence[int]) -> IntArray:
    return np.array(values, dtype=np.int64)
