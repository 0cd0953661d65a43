"""Wall time of calls on the CPU, with the allocator held in a known state.

glibc gives freed blocks of up to 32 MiB back from its heap and maps larger ones anew each time; which of the two an
output meets decides whether its pages fault. `warm` and `cold` cases run with all blocks from the heap, `fresh` ones with
every block mapped (mallopt(3)).
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from calibrate.build import Prepared, prepare
from calibrate.cases.case import Case, State

# mallopt parameters (malloc.h)
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_MMAP_MAX = -1, -3, -4
NEVER_TRIM_BYTES = 2**31 - 1
SMALL_MAP_BYTES = 4096
MANY_MAPS = 65536
MIN_CALLS, MAX_CALLS, WARM_UP_CALLS = 4, 200, 2
MAX_FLUSHES = 8  # calls of a case between which other memory is touched (5 ms each)
ROTATION_S = 0.02  # time of one lap over the sets of a cold case
COLD_FACTOR = 2  # sets of tensors fill the last-level cache this many times


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """Times (s) of the calls of one round: smallest, lower quartile, median; how many calls."""

    least_s: float
    quartile_s: float
    median_s: float
    n_calls: int


def set_threads(n_threads: int) -> None:
    """Threads of all operators in this process."""
    torch.set_num_threads(n_threads)


@contextlib.contextmanager
def allocator(state: State) -> Iterator[None]:
    """Blocks come from the heap without page faults, or, for `fresh`, from new maps. No change without glibc."""
    libc = ctypes.CDLL(None)
    mallopt = getattr(libc, "mallopt", None)
    if mallopt is None:
        yield
        return
    mallopt(M_TRIM_THRESHOLD, NEVER_TRIM_BYTES)
    if state == "fresh":
        mallopt(M_MMAP_MAX, MANY_MAPS)
        mallopt(M_MMAP_THRESHOLD, SMALL_MAP_BYTES)
    else:
        mallopt(M_MMAP_MAX, 0)
    try:
        yield
    finally:
        mallopt(M_MMAP_MAX, 0)


def time_case(case: Case, *, budget_s: float, cache_bytes: int) -> Timing:
    """One round of one case. Freeing the previous output of the same place in the ring is part of each call."""
    with torch.no_grad():
        prepared = prepare(case, "cpu", COLD_FACTOR * cache_bytes)
        flush = _traffic(COLD_FACTOR * cache_bytes) if case.family == "embedding" and case.state == "cold" else None
        with allocator(case.state):
            return _summary(_times(prepared, budget_s, flush))


@functools.cache
def _traffic(n_bytes: int) -> Callable[[], object]:
    """A function that reads and writes `n_bytes` of other memory: after it, nothing is found in a cache."""
    other = torch.zeros(n_bytes // 4)
    return lambda: other.add_(1.0)


def _times(prepared: Prepared, budget_s: float, flush: Callable[[], object] | None = None) -> list[float]:
    call, kwargs, sets = prepared.call, prepared.kwargs, prepared.arguments
    clock = time.perf_counter
    begun = clock()
    call(*sets[0], **kwargs)
    # Long calls are bound by arithmetic: a shorter rotation leaves them as cold as matters.
    sets = sets[: max(int(ROTATION_S / (clock() - begun)), MIN_CALLS)]
    ring: list[Any] = [None] * len(sets)
    for number in range(max(WARM_UP_CALLS, len(sets))):
        place = number % len(sets)
        ring[place] = call(*sets[place], **kwargs)
    times: list[float] = []
    most = MAX_CALLS if flush is None else MAX_FLUSHES
    started = clock()
    while len(times) < most and (len(times) < MIN_CALLS or clock() - started < budget_s):
        place = len(times) % len(sets)
        arguments = sets[place]
        if flush is not None:
            flush()
        begun = clock()
        ring[place] = call(*arguments, **kwargs)
        times.append(clock() - begun)
    return times


def _summary(times: list[float]) -> Timing:
    least, quartile, median = np.quantile(np.array(times), [0.0, 0.25, 0.5]).tolist()
    return Timing(least_s=least, quartile_s=quartile, median_s=median, n_calls=len(times))
