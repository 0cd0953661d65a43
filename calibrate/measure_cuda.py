"""Device time of calls on a CUDA device: events around many launches, replayed as one CUDA graph where the op allows it.

A graph replay has no host time between kernels, so that its time per call is the device's. An operator that cannot be
captured (it waits for the device, or draws its size from data) is timed by events around eager launches; where the host
takes as long to issue them as the device to run them, the reading is the host's, and the case is refused. A series visits
every set of tensors, so that a cold case meets each set when all others have gone through the L2 cache. What touches the
device goes through `Clock`, so that the arithmetic here is tested without one.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np

from calibrate.build import Prepared, prepare
from calibrate.cases.case import Case
from calibrate.measure_cpu import Timing
from perfmodel.extract.record import HOST_SYNCS

COLD_FACTOR = 4  # sets of tensors fill the L2 cache this many times
LAUNCHES = 20  # of one measured series, or as many as there are sets of tensors
SERIES_S = 2e-3  # long calls make shorter series: a clock that ticks in half microseconds needs no more
HOST_BOUND_FRAC = 0.9  # of a reading that issuing the calls took: nothing says that the device was not waiting
MIN_SERIES, MAX_SERIES = 3, 25
MS_PER_S = 1e3


class Clock(Protocol):
    """What the measuring needs of a device."""

    def elapsed_s(self, work: Callable[[], None]) -> float:
        """Device seconds between before and after `work` was issued."""
        ...

    def issue_s(self, work: Callable[[], None]) -> float:
        """Host seconds until `work` was issued to an idle device; its end is waited for afterwards."""
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

    def issue_s(self, work: Callable[[], None]) -> float:
        """See Clock."""
        return issued_s(work)

    def captured(self, work: Callable[[], None]) -> Callable[[], None] | None:
        """See Clock."""
        import torch

        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
        try:
            with torch.cuda.graph(graph):
                work()
        except RuntimeError:
            # A capture that breaks off leaves its own stream behind as the current one.
            torch.cuda.set_stream(stream)
            torch.cuda.synchronize()
            return None
        return graph.replay


def time_case(case: Case, *, budget_s: float, cache_bytes: int) -> Timing:
    """One round of one case on the current CUDA device."""
    import torch

    with torch.no_grad():
        prepared = prepare(case, "cuda", COLD_FACTOR * cache_bytes)
        return time_prepared(prepared, budget_s, CudaClock(), capture=case.op not in HOST_SYNCS)


def time_prepared(prepared: Prepared, budget_s: float, clock: Clock, *, capture: bool = True) -> Timing:
    """Device seconds of one call: series of calls over all sets of tensors, each divided by its length.

    An operator that waits for the device is not captured (`capture` False). Raises ValueError for one without a graph whose
    reading is the host's.
    """
    sets = prepared.arguments
    kept: list[Any] = [None] * len(sets)

    def lap() -> None:
        for place, arguments in enumerate(sets):
            kept[place] = prepared.call(*arguments, **prepared.kwargs)

    clock.elapsed_s(lap)  # loads kernels, chooses algorithms and fills the allocator
    laps = laps_of(len(sets), clock.elapsed_s(lap))

    def series() -> None:
        for _ in range(laps):
            lap()

    launches = laps * len(sets)
    graph = clock.captured(series) if capture else None
    work = graph or series
    first_s = clock.elapsed_s(work)
    if graph is None and clock.issue_s(series) > HOST_BOUND_FRAC * first_s:
        raise ValueError("no graph can be captured and the host is as slow as the device: the reading is the host's")
    times: list[float] = []
    while len(times) < MAX_SERIES and (len(times) < MIN_SERIES or sum(times) * launches < budget_s):
        times.append(clock.elapsed_s(work) / launches)
    least, quartile, median = np.quantile(np.array(times), [0.0, 0.25, 0.5]).tolist()
    return Timing(least_s=least, quartile_s=quartile, median_s=median, n_calls=len(times) * launches)


def laps_of(n_sets: int, lap_s: float) -> int:
    """Laps over all sets of tensors in one series: LAUNCHES calls, or fewer laps that fill SERIES_S; one at least."""
    return max(min(LAUNCHES // n_sets, int(SERIES_S / max(lap_s, 1e-9))), 1)


def round_s(call_s: float, n_sets: int, budget_s: float) -> float:
    """Device seconds of one round of a case whose call takes `call_s`: what `time_prepared` runs."""
    lap_s = n_sets * call_s
    series_s = lap_s * laps_of(n_sets, lap_s)
    return 2 * lap_s + series_s * (1 + min(max(budget_s / series_s, MIN_SERIES), MAX_SERIES))


def issued_s(work: Callable[[], object]) -> float:
    """Host time (s) until `work` returns, with an idle device before and after."""
    import torch

    torch.cuda.synchronize()
    begun = time.perf_counter()
    work()
    taken = time.perf_counter() - begun
    torch.cuda.synchronize()
    return taken
