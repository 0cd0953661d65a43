"""Sets of half-open intervals on the integer clock, and how a window of time divides among them by priority."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from perfmodel.sim.program import IntArray

Spans = tuple[IntArray, IntArray]  # starts and ends, any order, overlaps allowed

NO_SPANS: Spans = (np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64))


def clip(spans: Spans, begin: int, end: int) -> Spans:
    """The parts of spans that lie in [begin, end)."""
    low, high = np.clip(spans[0], begin, end), np.clip(spans[1], begin, end)
    kept = high > low
    return low[kept], high[kept]


def fold(spans: Spans, begin: int, period: int) -> Spans:
    """Spans of something that repeats every `period`, as they fall into the one window [begin, begin + period).

    A span that crosses the window's end continues at its beginning; one of a period or longer fills the window.
    """
    if period <= 0:
        return NO_SPANS
    length = np.minimum(spans[1] - spans[0], period)
    low = (spans[0] - begin) % period + begin
    high = low + length
    over = np.maximum(high - (begin + period), 0)
    wrapped = over > 0
    starts = np.concatenate([low, np.full(int(wrapped.sum()), begin, dtype=np.int64)])
    ends = np.concatenate([high - over, begin + over[wrapped]])
    kept = ends > starts
    return starts[kept], ends[kept]


def union(spans: Spans) -> Spans:
    """The same set as disjoint spans in ascending order; spans that touch are joined."""
    kept = spans[1] > spans[0]
    starts, ends = spans[0][kept], spans[1][kept]
    if not len(starts):
        return NO_SPANS
    by_start = np.argsort(starts, kind="stable")
    starts, reach = starts[by_start], np.maximum.accumulate(ends[by_start])
    opens = np.concatenate([[True], starts[1:] > reach[:-1]])
    closes = np.concatenate([opens[1:], [True]])
    return starts[opens], reach[closes]


def total(spans: Spans) -> int:
    """Length of a set of spans, overlaps counted once."""
    starts, ends = union(spans)
    return int((ends - starts).sum())


def divide(layers: Sequence[Spans], begin: int, end: int) -> list[Spans]:
    """Gives each instant of [begin, end) to the first layer that covers it; one more, last, gets what none covers."""
    window = [clip(layer, begin, end) for layer in layers]
    edges = np.sort(np.concatenate([[begin, end], *(part for layer in window for part in layer)]).astype(np.int64))
    edges = edges[np.concatenate([[True], edges[1:] > edges[:-1]])]
    free = np.ones(max(len(edges) - 1, 0), dtype=bool)
    shares: list[Spans] = []
    for starts, ends in window:
        opened, closed = np.searchsorted(edges, starts), np.searchsorted(edges, ends)
        depth = np.bincount(opened, minlength=len(edges)) - np.bincount(closed, minlength=len(edges))
        mine = free & (np.cumsum(depth)[:-1] > 0)
        free &= ~mine
        shares.append(_stretches(edges, mine))
    return [*shares, _stretches(edges, free)]


def _stretches(edges: IntArray, mine: NDArray[np.bool_]) -> Spans:
    """Spans between ascending edges that are marked, those that touch joined."""
    change = np.diff(mine.astype(np.int8), prepend=0, append=0)
    return edges[change > 0], edges[change < 0]
