"""What the simulator runs: one `Program` per rank class. It knows no tensors, devices or YAML."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

HOST, COMPUTE, COMM, COPY = 0, 1, 2, 3  # conventional stream numbers; a program may use more (second comm stream: 4, ...)
NO_GROUP = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One thing on one stream of one rank: a kernel, a host interval, a transfer, or a rank's part of a collective.

    Attributes:
        stream: queue it runs on, first-in first-out in program order (HOST is the host thread itself).
        duration_ps: how long it occupies the stream; of a collective, from the last member's readiness to the end.
        deps: (task index, lag_ps) pairs: it cannot start before each of them has ended plus the lag. A kernel depends on
            the host task that launched it with lag = launch latency; a host sync depends on kernels.
        group: instance number of the collective it takes part in (shared with the other rank classes), or NO_GROUP.
            All members start together, when the last of them is ready, and end together.
    """

    stream: int
    duration_ps: int
    deps: tuple[tuple[int, int], ...] = ()
    group: int = NO_GROUP


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """Tasks of one rank class in program order (deps point backwards), and how many ranks run it."""

    tasks: Sequence[Task]
    n_ranks: int = 1
