"""How much compute kernels slow down while communication runs beside them, measured on a trace of several steps.

A kernel of a step is compared with the same kernel (name, grid, occurrence) of steps where it ran alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from statistics import median

import numpy as np

from perfmodel.errors import ConfigError
from perfmodel.traces.spans import DeviceSpan, KinetoTrace

_FULLY = 0.95  # share of a kernel's time beside communication from which it counts as overlapped

_Key = tuple[str, float, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class OverlapSlowdown:
    """Durations of the same kernels with communication beside them over without.

    `time_weighted` is the ratio of summed durations; `median_ratio`, `low_ratio` and `high_ratio` (10th and 90th percentile)
    are over kernels. `n_kernels` were seen both ways.
    """

    time_weighted: float
    median_ratio: float
    low_ratio: float
    high_ratio: float
    n_kernels: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ChannelSlowdown:
    """Kernels that ran beside one sort of collective all the time: how often, and for how long alone and beside it (s).

    `n_channels` is the number of thread blocks of the collective's kernel, each of which keeps a multiprocessor.
    """

    op: str
    n_channels: int
    n_kernels: int
    alone_s: float
    beside_s: float

    @property
    def ratio(self) -> float:
        """How many times as long the kernels took."""
        return self.beside_s / self.alone_s


def measure_overlap(trace: KinetoTrace) -> OverlapSlowdown:
    """The slowdown of kernels seen both ways, each counted once.

    Raises:
        ConfigError: no kernel was seen both with and without communication beside it.
    """
    alone: dict[_Key, list[float]] = {}
    beside: dict[_Key, list[float]] = {}
    for key, span, near in _runs(trace):
        share = sum(length_s for length_s, _ in near) / span.duration_s
        if share > _FULLY:
            beside.setdefault(key, []).append(span.duration_s)
        elif share == 0.0:
            alone.setdefault(key, []).append(span.duration_s)
    pairs = [(median(alone[key]), median(beside[key])) for key in beside if key in alone]
    if not pairs:
        raise ConfigError(f"{trace.path}: no kernel ran both with and without communication beside it")
    ratios = np.array([slow / fast for fast, slow in pairs])
    return OverlapSlowdown(
        time_weighted=sum(slow for _, slow in pairs) / sum(fast for fast, _ in pairs),
        median_ratio=float(np.median(ratios)),
        low_ratio=float(np.quantile(ratios, 0.1)),
        high_ratio=float(np.quantile(ratios, 0.9)),
        n_kernels=len(pairs),
    )


def measure_by_channels(trace: KinetoTrace) -> tuple[ChannelSlowdown, ...]:
    """The slowdown by operation and channels of the one collective beside; every run of a kernel counts."""
    runs = list(_runs(trace))
    alone: dict[_Key, list[float]] = {}
    for key, span, near in runs:
        if not near:
            alone.setdefault(key, []).append(span.duration_s)
    found: dict[tuple[str, int], list[tuple[float, float]]] = {}
    for key, span, near in runs:
        if key in alone and len(near) == 1 and near[0][0] > _FULLY * span.duration_s:
            other = near[0][1]
            op = other.collective.op if other.collective else other.name
            blocks = prod(other.launch.grid) if other.launch else 0
            found.setdefault((op, blocks), []).append((median(alone[key]), span.duration_s))
    return tuple(
        ChannelSlowdown(
            op=op,
            n_channels=blocks,
            n_kernels=len(pairs),
            alone_s=sum(fast for fast, _ in pairs),
            beside_s=sum(slow for _, slow in pairs),
        )
        for (op, blocks), pairs in sorted(found.items())
    )


def _runs(trace: KinetoTrace) -> Iterator[tuple[_Key, DeviceSpan, list[tuple[float, DeviceSpan]]]]:
    """Every run of a kernel, with the collectives that ran beside it and for how long (s)."""
    collectives = trace.collectives
    starts = np.array([s.start_s for s in collectives])
    ends = np.maximum.accumulate([s.end_s for s in collectives] or [0.0])
    for kernels in _kernels_by_step(trace):
        seen: Counter[tuple[str, float]] = Counter()
        for span in kernels:
            shape = (span.name, span.warps_per_sm)
            key = (*shape, seen[shape])
            seen[shape] += 1
            if span.duration_s > 0:
                first = int(np.searchsorted(ends, span.start_s, side="right"))
                last = int(np.searchsorted(starts, span.end_s, side="left"))
                others = collectives[first:last]
                met = [(min(o.end_s, span.end_s) - max(o.start_s, span.start_s), o) for o in others]
                yield key, span, [(length_s, other) for length_s, other in met if length_s > 0]


def _kernels_by_step(trace: KinetoTrace) -> list[list[DeviceSpan]]:
    """Compute kernels of each step, by when the host launched them."""
    launched = trace.launched
    steps: list[list[DeviceSpan]] = [[] for _ in trace.steps]
    for call in trace.calls:
        span = launched.get(call.correlation)
        if span is None or span.kind != "kernel" or span.is_collective:
            continue
        for number, step in enumerate(trace.steps):
            if step.start_s <= call.start_s < step.end_s:
                steps[number].append(span)
    return steps
