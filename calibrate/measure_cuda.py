"""Device time of calls on a CUDA device: events around many launches, replayed as one CUDA graph where the op allows it.

A graph replay has no host time between kernels, so that its time per call is the device's. An operator that cannot be
captured (it waits for the device, or draws its size from data) is timed by events around eager launches. What touches the
device goes through `Clock`, so that the arithmetic here is tested without one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np

from calibrate.build import Prepared, prepare
from calibrate.cases.case import Case
from calibrate.measure_cpu import Timing

COLD_FACTOR = 4  # sets of tensors fill the L2 cache this many times
LAUNCHES = 20  # of one measured series
MIN_SERIES, MAX_SERIES, WARM_UP_CALLS = 3, 25, 3
MS_PER_S = 1e3


class Clock(Protocol):
    """What the measuring needs of a device."""

    def elapsed_s(self, work: Callable[[], None]) -> float:
        """Device seconds between before and after `work` was issued."""
        ...

    def captured(self, work: Callable[[], None]) -> Callable[[], None] | None:
        """`work` as one replayable graph, or None if it cannot be captured."""
        ...


class CudaClock:
    """Events and graphs of the current CUDA device."""

    def elapsed_s(self, work: Callable[[], None]) -> float:
        """See Clock."""
        import torch

        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]  # torch leaves it untyped
        start.record()
        work()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) / MS_PER_S

    def captured(self, work: Callable[[], None]) -> Callable[[], None] | None:
        """See Clock."""
        import torch

        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph):
                work()
        except RuntimeError:
            torch.cuda.synchronize()
            return None
        return graph.replay


def time_case(case: Case, *, budget_s: float, cache_bytes: int) -> Timing:
    """One round of one case on the current CUDA device."""
    import torch

    with torch.no_grad():
        return time_prepared(prepare(case, "cuda", COLD_FACTOR * cache_bytes), budget_s, CudaClock())


def time_prepared(prepared: Prepared, budget_s: float, clock: Clock) -> Timing:
    """Device seconds of one call: series of LAUNCHES calls over all sets of tensors, each divided by its length."""
    sets = prepared.arguments
    kept: list[Any] = [None] * len(sets)

    def series() -> None:
        for number in range(LAUNCHES):
            place = number % len(sets)
            kept[place] = prepared.call(*sets[place], **prepared.kwargs)

    for _ in range(WARM_UP_CALLS):
        clock.elapsed_s(series)
    work = clock.captured(series) or series
    clock.elapsed_s(work)
    times: list[float] = []
    while len(times) < MAX_SERIES and (len(times) < MIN_SERIES or sum(times) * LAUNCHES < budget_s):
        times.append(clock.elapsed_s(work) / LAUNCHES)
    least, quartile, median = np.quantile(np.array(times), [0.0, 0.25, 0.5]).tolist()
    return Timing(least_s=least, quartile_s=quartile, median_s=median, n_calls=len(times) * LAUNCHES)
