"""How much compute kernels slow down while communication runs beside them, measured on a trace of several steps."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
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


def measure_overlap(trace: KinetoTrace) -> OverlapSlowdown:
    """Compares each compute kernel of a step with the same kernel (name, grid, occurrence) of steps where it ran alone.

    Raises:
        ConfigError: no kernel was seen both with and without communication beside it.
    """
    alone: dict[_Key, list[float]] = {}
    beside: dict[_Key, list[float]] = {}
    spans = (
        np.array([s.start_s for s in trace.collectives]),
        np.maximum.accumulate([s.end_s for s in trace.collectives] or [0.0]),
    )
    for kernels in _kernels_by_step(trace):
        seen: Counter[tuple[str, float]] = Counter()
        for span in kernels:
            shape = (span.name, span.warps_per_sm)
            key = (*shape, seen[shape])
            seen[shape] += 1
            share = _share_beside(span, spans)
            if share > _FULLY:
                beside.setdefault(key, []).append(span.duration_s)
            elif share == 0.0:
                alone.setdefault(key, []).append(span.duration_s)
    pairs = [(median(alone[key]), median(beside[key])) for key in beside if key in alone]
    pairs = [pair for pair in pairs if pair[0] > 0]
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


def _share_beside(span: DeviceSpan, spans: tuple[np.ndarray[tuple[int], np.dtype[np.float64]], ...]) -> float:
    """Share of a kernel's time in which a collective ran; collectives of a rank follow one another."""
    if span.duration_s <= 0 or not len(spans[0]):
        return 0.0
    first = int(np.searchsorted(spans[1], span.start_s, side="right"))
    last = int(np.searchsorted(spans[0], span.end_s, side="left"))
    covered = np.minimum(spans[1][first:last], span.end_s) - np.maximum(spans[0][first:last], span.start_s)
    return float(np.maximum(covered, 0.0).sum()) / span.duration_s
