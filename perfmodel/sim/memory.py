"""Device memory over time: storages that are born and die with tasks, on a simulated timeline.

A tensor's memory is taken when the host asks for it and given back when the host lets go of it: PyTorch's caching
allocator works in host order and reuses memory within a stream at once, however far the device is behind. So bytes are
counted in program order, and the timeline only says when the device reaches each point of it. `Allocator` rounds sizes
as that allocator does and says what it would reserve from the device.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from perfmodel.errors import GraphError
from perfmodel.sim.program import IntArray
from perfmodel.sim.timeline import Timeline
from perfmodel.units import MEBI


@dataclass(frozen=True, slots=True, kw_only=True)
class Allocation:
    """Bytes that live from before task `born` (-1: before the run) to after task `dies` (None: beyond the run)."""

    bytes: int
    born: int
    dies: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Allocator:
    """How the caching allocator of PyTorch rounds and reserves (c10/cuda/CUDACachingAllocator.cpp, torch 2.0 to 2.9).

    A request is rounded up to `round_bytes`. Requests up to `small_bytes` are cut from segments of `small_segment_bytes`;
    larger ones, up to `large_bytes`, from segments of `large_segment_bytes`; beyond, a segment is the request rounded up
    to `segment_round_bytes`. A large block is split if more than `small_bytes` remain of it, a small one if at least
    `round_bytes` do.
    """

    round_bytes: int = 512
    small_bytes: int = MEBI
    small_segment_bytes: int = 2 * MEBI
    large_bytes: int = 10 * MEBI
    large_segment_bytes: int = 20 * MEBI
    segment_round_bytes: int = 2 * MEBI

    def rounded(self, n_bytes: int) -> int:
        """Bytes that a request for `n_bytes` takes (0 takes none)."""
        return -(-n_bytes // self.round_bytes) * self.round_bytes

    def segment(self, n_bytes: int) -> int:
        """Bytes asked of the device for a rounded request that no free block can hold."""
        if n_bytes <= self.small_bytes:
            return self.small_segment_bytes
        if n_bytes < self.large_bytes:
            return self.large_segment_bytes
        return -(-n_bytes // self.segment_round_bytes) * self.segment_round_bytes


PYTORCH = Allocator()
EXACT = Allocator(round_bytes=1)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MemoryCurve:
    """Memory of one rank over its program.

    `bytes[i]` are in use from `time_ps[i]` to `time_ps[i + 1]`; times may repeat where the program takes and gives back
    within one instant. `peak_bytes` is the largest use, first at `peak_ps`. `reserved_bytes` is what the allocator holds
    at the end, its peak too as it gives nothing back.
    """

    time_ps: IntArray
    bytes: IntArray
    peak_bytes: int
    peak_ps: int
    reserved_bytes: int


def memory_over_time(
    timeline: Timeline, cls: int, allocations: Sequence[Allocation], allocator: Allocator = PYTORCH
) -> MemoryCurve:
    """Memory of a rank of class `cls` whose storages live as `allocations` say (task indices of its program).

    Raises:
        GraphError: a task that does not exist, a storage that dies before it is born, or negative bytes.
    """
    reached = np.maximum.accumulate(np.concatenate([[timeline.begin_ps], timeline.starts(cls), [timeline.finish_ps]]))
    _check(allocations, len(reached) - 2, cls)
    events = _events(allocations)
    sizes = [allocator.rounded(allocations[number].bytes) for _, _, number in events]
    # reached[i + 1] is when task i starts: births of a task happen then, deaths when the next one starts.
    time_ps = reached[[task + 1 + death for task, death, _ in events]] if events else reached[:0]
    in_use = np.cumsum(
        [-size if death else size for (_, death, _), size in zip(events, sizes, strict=True)], dtype=np.int64
    )
    peak = int(in_use.argmax()) if events else 0
    return MemoryCurve(
        time_ps=time_ps,
        bytes=in_use,
        peak_bytes=int(in_use[peak]) if events else 0,
        peak_ps=int(time_ps[peak]) if events else timeline.begin_ps,
        reserved_bytes=reserved_bytes(allocations, allocator),
    )


def _events(allocations: Sequence[Allocation]) -> list[tuple[int, int, int]]:
    """(task, 0 for a birth or 1 for a death, allocation) in program order.

    Within a task births come before deaths: a kernel's outputs exist before its inputs can be let go.
    """
    events = [(a.born, 0, number) for number, a in enumerate(allocations) if a.bytes]
    events += [(a.dies, 1, number) for number, a in enumerate(allocations) if a.bytes and a.dies is not None]
    return sorted(events)


def _check(allocations: Sequence[Allocation], n_tasks: int, cls: int) -> None:
    for number, a in enumerate(allocations):
        last = n_tasks - 1 if a.dies is None else a.dies
        if a.bytes < 0 or not -1 <= a.born < n_tasks or not max(a.born, 0) <= last < n_tasks:
            raise GraphError(f"class {cls} allocation {number}: {a}; the class has {n_tasks} tasks")


def reserved_bytes(allocations: Sequence[Allocation], allocator: Allocator = PYTORCH) -> int:
    """Bytes the caching allocator takes from the device for allocations in program order: best fit, split, merge."""
    pool = _Pool(allocator)
    for _, death, number in _events(allocations):
        if death:
            pool.free(number)
        else:
            pool.take(number, allocator.rounded(allocations[number].bytes))
    return pool.reserved


class _Pool:
    """Segments cut into blocks. A block is (segment, offset) with a size; free blocks of one segment merge."""

    def __init__(self, allocator: Allocator) -> None:
        self.allocator = allocator
        self.reserved = 0
        self.used: dict[int, tuple[int, int, int]] = {}  # by request: segment, offset, size
        self.is_small: list[bool] = []  # by segment
        self.by_size: dict[bool, list[tuple[int, int, int]]] = {
            True: [],
            False: [],
        }  # (size, segment, offset), ascending
        self.by_start: dict[tuple[int, int], int] = {}  # (segment, offset) of a free block -> its size
        self.by_end: dict[tuple[int, int], int] = {}  # (segment, end) of a free block -> its offset

    def take(self, number: int, size: int) -> None:
        small = size <= self.allocator.small_bytes
        blocks = self.by_size[small]
        fitting = bisect_left(blocks, (size, -1, -1))
        if fitting < len(blocks):
            length, segment, offset = blocks[fitting]
            self._remove(segment, offset)
        else:
            length, segment, offset = self.allocator.segment(size), len(self.is_small), 0
            self.reserved += length
            self.is_small.append(small)
        rest = length - size
        if rest >= self.allocator.round_bytes if small else rest > self.allocator.small_bytes:
            self._add(segment, offset + size, rest)
            length = size
        self.used[number] = (segment, offset, length)

    def free(self, number: int) -> None:
        segment, offset, length = self.used.pop(number)
        if (segment, offset + length) in self.by_start:
            length += self._remove(segment, offset + length)
        before = self.by_end.get((segment, offset))
        if before is not None:
            length += self._remove(segment, before)
            offset = before
        self._add(segment, offset, length)

    def _add(self, segment: int, offset: int, size: int) -> None:
        self.by_start[segment, offset] = size
        self.by_end[segment, offset + size] = offset
        insort(self.by_size[self.is_small[segment]], (size, segment, offset))

    def _remove(self, segment: int, offset: int) -> int:
        size = self.by_start.pop((segment, offset))
        del self.by_end[segment, offset + size]
        blocks = self.by_size[self.is_small[segment]]
        del blocks[bisect_left(blocks, (size, segment, offset))]
        return size
