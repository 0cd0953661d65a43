"""The range of an iteration time, from the ranges of the prices along its critical path.

Errors with one cause are fully correlated and add up; errors with different causes are independent and add in quadrature.
One cause are: all prices of one family (a law that is 5 % slow is 5 % slow everywhere); all products, convolutions and
attention whose law was borrowed (from another kernel, another device or the datasheet); the host's operators. Memory-bound
kernels with a borrowed price share the error of the borrowed bandwidth, whatever their family, as much as laws err on
another chip; the rest of their range, how their pattern of access uses it, is their family's own. On top lies what no price
knows: how far the machine at hand is from the one that was measured, in the state it was measured in, and, above, whether a
batch that is predicted to be on the device is first copied there.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from perfmodel.estimate import Source
from perfmodel.graph import Graph
from perfmodel.kernels.correction import OTHER_CHIP_WIDENING
from perfmodel.kernels.transfer import PAGEABLE_FRAC
from perfmodel.pipeline.joined import by_name, joined
from perfmodel.pipeline.pricebook import FloatArray, IntArray
from perfmodel.pipeline.tasks import CATEGORIES, LoweredClass
from perfmodel.plan.facts import KINDS, facts_of
from perfmodel.units import PS_PER_S

# Campaigns on machines with one GPU model differ by 9.8 % at the 80th percentile of shapes (gemm, median of 12 pairs of
# campaigns in ai-dynamo/aiconfigurator @095f58a, A100, H100, H200, L40S): each is 1 / sqrt(2) of that from the truth.
OTHER_MACHINE_FRAC = 0.07
# A CPU is calibrated where it is used, but its tables hold the best of three rounds, and a step's usual time is that of the
# middle one. The second best round lies above the best by 0 to 9.4 % (10th and 90th percentile of next_s over time_s, the
# 1,799 cases of kernels_db/cpu whose rounds are told apart; with one thread 7.1 %). The rounds of a case are seconds apart
# and a step's operators milliseconds, so whatever slows a round slows all of a step.
CPU_ROUND_BELOW_FRAC, CPU_ROUND_ABOVE_FRAC = 0.0, 0.094

BORROWED = (Source.DERIVED, Source.ROOFLINE)
BOUND_BY_ARITHMETIC = frozenset({"attention", "conv", "gemm"})
LINKS = frozenset({"transfer"})  # the host link has a rate of its own
_BANDWIDTH, _ARITHMETIC, _OWN = range(3)  # shared causes, then the families' own
_IS_BORROWED = np.array([source in BORROWED for source in Source])
_IS_ON_DEVICE = np.array([category in ("kernel", "copy") for category in CATEGORIES])


def away_s(classes: Sequence[LoweredClass], task: IntArray, length_ps: IntArray, column: str) -> FloatArray:
    """Of each stretch of the path, how far (s) its time may be from what its price says, at the `column` of limits."""
    time_s, other_s = joined(classes, "time_s")[task], joined(classes, column)[task]
    share = np.divide(length_ps / PS_PER_S, time_s, out=np.zeros_like(time_s), where=time_s > 0)
    found: FloatArray = share * np.abs(other_s - time_s)
    return found


def shared_causes(classes: Sequence[LoweredClass], task: IntArray, cause: IntArray) -> IntArray:
    """What the error of each stretch comes from: its own `cause`, or one that several families share."""
    source, category = joined(classes, "source")[task], joined(classes, "category")[task]
    kind = by_name(classes, "family", _kind)[task]
    shared = np.where(_IS_BORROWED[source] & _IS_ON_DEVICE[category], kind, _OWN)
    return np.where(shared == _OWN, cause + _OWN, shared).astype(np.int64)


def _kind(family: str) -> int:
    """The shared cause of borrowed prices of a family."""
    return _ARITHMETIC if family in BOUND_BY_ARITHMETIC else _OWN if family in LINKS else _BANDWIDTH


def together_s(cause: IntArray, family: IntArray, distances: tuple[FloatArray, FloatArray], other_s: float) -> float:
    """Errors of all stretches of a path and `other_s`, in seconds.

    Args:
        cause: what the error of each stretch comes from, by `shared_causes`.
        family: what the stretch itself is, as the path's shares are named.
        distances: how far (s) each may be off, and how much (s) of that a borrowed bandwidth explains at most.
        other_s: an independent error (s) on top.
    """
    away, most = distances
    common = np.where(cause == _BANDWIDTH, np.minimum(away, most), away)
    own = np.sqrt(np.maximum(away**2 - common**2, 0.0))
    # The part of a range that a family has beside the bandwidth is an error of its own, also beside its measured prices.
    parts = [*np.bincount(cause, weights=common).tolist(), *np.bincount(family, weights=own).tolist()]
    # In an order that does not depend on how causes are numbered.
    return math.hypot(*sorted(parts), other_s)


def chip_s(length_ps: IntArray, column: str) -> FloatArray:
    """How far (s) below or above (by the `column` of limits) a law may put a stretch on a chip that is not its own."""
    fraction = 1.0 - 1.0 / OTHER_CHIP_WIDENING if column == "low_s" else OTHER_CHIP_WIDENING - 1.0
    found: FloatArray = length_ps / PS_PER_S * fraction
    return found


def machine_frac(classes: Sequence[LoweredClass]) -> tuple[float, float]:
    """How far below and above the time (fractions) the state of the machine at hand may put it."""
    fractions = [
        (OTHER_MACHINE_FRAC, OTHER_MACHINE_FRAC)
        if lowered.device.kind == "cuda"
        else (CPU_ROUND_BELOW_FRAC, CPU_ROUND_ABOVE_FRAC)
        for lowered in classes
    ]
    return max(below for below, _ in fractions), max(above for _, above in fractions)


def feeding_s(graph: Graph, classes: Sequence[LoweredClass]) -> float:
    """Time (s) to bring a batch from pageable memory to a GPU, where it is predicted to be there already; else 0.

    Training copies its batch in the step. Forward alone, or with backward, is predicted with the batch on the device, but
    whoever times it may copy it within, and from memory that nobody pinned: that is how long the step may take more.
    """
    storages = facts_of(graph).storages
    n_bytes = int(storages["bytes"][(storages["kind"] == KINDS.index("input")) & (storages["born"] < 0)].sum())
    rates = [
        lowered.device.host_link_bytes_per_s * PAGEABLE_FRAC for lowered in classes if lowered.device.kind == "cuda"
    ]
    return n_bytes / min(rates) if rates else 0.0


def slow_host_s(classes: Sequence[LoweredClass], host_busy_s: Sequence[float]) -> float:
    """Host time (s) of the busiest rank class at the high end of its range: no iteration is shorter than that."""
    return max(busy_s * lowered.device.host.high_frac for lowered, busy_s in zip(classes, host_busy_s, strict=True))
