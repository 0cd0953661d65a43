"""The iteration time of a segmented plan without a program of its tasks: segments replayed until the pattern repeats.

What comes out is the steady state of the simulator's rules to the picosecond where nothing slows anything. Where compute and
collectives slow each other it follows the same law step by step (`pipeline.replay`), and agrees with the simulation of all
tasks but for the last parts in 100,000, within which both end their search (`tests/property/test_pace.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

import numpy as np

from perfmodel.db.device import Device
from perfmodel.estimate import Estimate
from perfmodel.kernels.host import collective_dispatch_s
from perfmodel.pipeline.collective_prices import CollectivePrices
from perfmodel.pipeline.contention import shares
from perfmodel.pipeline.lower import lower_segment
from perfmodel.pipeline.pricebook import PriceBook, known_kinds
from perfmodel.pipeline.replay import replay
from perfmodel.pipeline.replay_loop import COMPUTED, HOSTED, WAITED, WORKED
from perfmodel.pipeline.rows import RowTable, SegmentRows
from perfmodel.pipeline.script import CollectiveTime, Sources, script_of
from perfmodel.plan import Collective, Placement
from perfmodel.plan.columns import EventColumns, collective_of
from perfmodel.plan.runs import Segment
from perfmodel.sim.launch import LAUNCH_QUEUE_DEPTH
from perfmodel.topology import Topology
from perfmodel.units import PS_PER_S

MAX_ROWS = 2_500_000  # of the segments remembered, about 200 MB
MAX_PRICES = 100_000  # of collectives, remembered


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassPace:
    """What the rank of a class does with an iteration (ps): its kernels run, wait for the host, or for anything else.

    `slowed_ps` is what of the kernels' time they would not need without collectives beside them.
    """

    compute_ps: int
    slowed_ps: int
    host_ps: int
    wait_ps: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """Iteration time (ps) of a plan, by class where it goes, and whether the simulation gives the same time to the ps."""

    iteration_ps: Fraction
    classes: tuple[ClassPace, ...]
    is_exact: bool


class Paces:
    """Finds paces; keeps the rows of segments it has met. Threads may share it."""

    def __init__(self, collectives: CollectivePrices) -> None:
        self._collectives = collectives
        self._kept = _Kept()

    def of(
        self, placement: Placement, topology: Topology, books: Mapping[str, PriceBook], *, overlap: bool
    ) -> Pace | None:
        """The pace of a placement on CUDA devices, executed as `DEFAULT_SETTINGS` say; None if it does not settle.

        Raises NotSegmentedError.
        """
        of_class = [books[rank_class.device] for rank_class in placement.classes]
        kept = self._kept = self._kept if len(self._kept.table) <= MAX_ROWS else _Kept()
        finder = _Finder(self._collectives, kept, topology, overlap=overlap)
        script = script_of(
            placement,
            Sources(
                segment=lambda cls, run: finder.segment(run, of_class[cls]),
                time=lambda cls, collective: finder.time(collective, of_class[cls].device),
                issue_ps=lambda cls: _issue_ps(of_class[cls].device),
            ),
        )
        found = replay(script, kept.table.arrays, [_lag_ps(book.device) for book in of_class], LAUNCH_QUEUE_DEPTH)
        if found is None:
            return None
        rows = found.spent_ps
        classes = [
            ClassPace(
                compute_ps=row[COMPUTED],
                slowed_ps=row[COMPUTED] - row[WORKED],
                host_ps=row[HOSTED],
                wait_ps=row[WAITED],
            )
            for row in rows.tolist()
        ]
        return Pace(iteration_ps=found.iteration_ps, classes=tuple(classes), is_exact=not script.slows)


class _Kept:
    """Rows of segments, found by identity and by what they follow from, and times of collectives; all hold their keys."""

    def __init__(self) -> None:
        self.table = RowTable()
        self.segments: dict[tuple[object, ...], tuple[object, SegmentRows]] = {}
        self.alike: dict[tuple[object, ...], SegmentRows] = {}
        self.times: dict[tuple[object, ...], tuple[Collective, CollectiveTime, Estimate]] = {}


class _Finder:
    """What segments and collectives take on one machine, found once."""

    def __init__(self, prices: CollectivePrices, kept: _Kept, topology: Topology, *, overlap: bool) -> None:
        self._prices, self._kept, self._topology, self._overlap = prices, kept, topology, overlap

    def segment(self, run: Segment, book: PriceBook) -> SegmentRows:
        """Its rows on a device."""
        # A lone op is wrapped anew for every placement; what it does is the op's.
        held: object = run[0].op if len(run) == 1 else run
        key = (id(held), book.device.name, self._topology.fingerprint, self._overlap)
        known = self._kept.segments.get(key)
        if known is None:
            known = self._kept.segments[key] = (held, self._rows(run, book))
        return known[1]

    def time(self, collective: Collective, device: Device) -> CollectiveTime:
        """How long a collective takes alone, and what it takes from kernels beside it."""
        return self._timed(collective, device)[1]

    def _rows(self, run: Segment, book: PriceBook) -> SegmentRows:
        """Segments of other plans and stages that differ in names alone have the same rows."""
        found = [self._timed(collective_of(event), book.device) for event in run.columns.collectives]
        key = (book.device.name, self._topology.fingerprint, self._overlap, *_likeness(run.columns, found))
        known = self._kept.alike.get(key)
        if known is None:
            columns = replace(run.columns, instance=np.arange(len(found)))
            prices = book.prices_in(columns, {number: price for number, (_, _, price) in enumerate(found)})
            loads = {number: (time.held, time.traffic) for number, (_, time, _) in enumerate(found)}
            known = self._kept.alike[key] = self._kept.table.add(lower_segment(book.device, prices), loads)
        return known

    def _timed(self, collective: Collective, device: Device) -> tuple[Collective, CollectiveTime, Estimate]:
        # Ranks and siblings by identity: to hash thousands costs more than a price. What is remembered holds them.
        call = collective.op, collective.bytes, collective.dtype, id(collective.ranks), id(collective.siblings)
        key = (*call, collective.send_bytes, device.name, self._topology.fingerprint, self._overlap)
        known = self._kept.times.get(key)
        if known is None:
            if len(self._kept.times) >= MAX_PRICES:
                self._kept.times = {}
            found = self._prices.of(collective, self._topology)
            held, traffic = shares(collective, found, self._topology, device) if self._overlap else (0, 0)
            time = CollectiveTime(round(found.estimate.time_s * PS_PER_S), held, traffic)
            known = self._kept.times[key] = (collective, time, found.estimate)
        return known


def _likeness(
    columns: EventColumns, found: Sequence[tuple[Collective, CollectiveTime, Estimate]]
) -> tuple[object, ...]:
    """What the rows of a segment on a device follow from: kinds of ops, what waits for what, times of collectives."""
    kinds = np.zeros(columns.size, dtype=np.int64)
    kinds[columns.op_at] = 1 + known_kinds(columns.ops)
    calls = tuple(
        (place, event.stream, event.host_waits, time)
        for place, event, (_, time, _) in zip(columns.collective_at.tolist(), columns.collectives, found, strict=True)
    )
    return kinds.tobytes(), columns.waiter.tobytes(), columns.source.tobytes(), calls


def _issue_ps(device: Device) -> int:
    """Host time of a collective as lowering counts it: dispatch and launch, each in whole picoseconds."""
    return round(collective_dispatch_s(device) * PS_PER_S) + round(device.host.launch_s * PS_PER_S)


def _lag_ps(device: Device) -> int:
    return round(device.host.launch_latency_s * PS_PER_S)
