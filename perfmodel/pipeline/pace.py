"""The iteration time of a segmented plan without its tasks: clocks moved segment by segment until the pattern repeats.

What comes out is the steady state of the simulator's rules to the picosecond, but for one thing that only lengthens an
iteration and is left out: the slowdown of compute beside communication. Durations that slowdown makes longer never shorten a
max-plus system, so the pace is a lower bound of the prediction in every case, and the prediction itself where it does not
apply (`Pace.is_exact`). Where a launch queue may fill, clocks move task by task instead (`queued_pace`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any, NamedTuple

import numpy as np

from perfmodel.collectives import CollectiveEstimate
from perfmodel.db.device import Device
from perfmodel.estimate import Estimate
from perfmodel.kernels.host import collective_dispatch_s
from perfmodel.pipeline.collective_prices import CollectivePrices
from perfmodel.pipeline.lower import lower_segment
from perfmodel.pipeline.moves import HOST_FREE, N_CLOCKS, NEVER, Move, joined, move_of
from perfmodel.pipeline.pricebook import IntArray, PriceBook, known_kinds
from perfmodel.pipeline.queued_pace import queued_ps
from perfmodel.pipeline.script import END, ISSUE, MEET, RUN, WAIT, Script, Sources, live_clocks, script_of
from perfmodel.plan import Collective, Placement
from perfmodel.plan.runs import Segment
from perfmodel.sim.launch import LAUNCH_QUEUE_DEPTH
from perfmodel.sim.loops import compiled_loop, has_numba
from perfmodel.sim.steady import cycle_of
from perfmodel.topology import Topology
from perfmodel.units import PS_PER_S

MAX_ITERATIONS = 64
MAX_TASKS = 5_000_000  # of the moves remembered, about 300 MB
MAX_PRICES = 100_000  # of collectives in segments, remembered


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """Iteration time (ps) of a plan: `is_exact` if the simulation of its tasks gives the same, else no more than that."""

    iteration_ps: Fraction
    is_exact: bool


class Paces:
    """Finds paces; keeps the moves of segments it has met. Threads may share it."""

    def __init__(self, collectives: CollectivePrices) -> None:
        self._collectives = collectives
        self._moves: dict[tuple[int, str, str], tuple[object, Move]] = {}
        self._alike: dict[tuple[object, ...], Move] = {}
        self._n_tasks = 0  # of those
        self._prices: dict[tuple[object, ...], tuple[object, Estimate]] = {}  # siblings, held, by identity

    def of(
        self, placement: Placement, topology: Topology, books: Mapping[str, PriceBook], *, overlap: bool
    ) -> Pace | None:
        """The pace of a placement on CUDA devices, executed as `DEFAULT_SETTINGS` say; None if it does not settle.

        Raises NotSegmentedError.
        """
        devices = [books[rank_class.device].device for rank_class in placement.classes]

        known: dict[object, CollectiveEstimate] = {}  # siblings by identity: to hash thousands costs more than a price

        def price(collective: Collective) -> CollectiveEstimate:
            key = collective.op, collective.bytes, collective.dtype, collective.ranks, id(collective.siblings)
            if key not in known:
                known[key] = self._collectives.of(collective, topology)
            return known[key]

        script = script_of(
            placement,
            Sources(
                move=lambda cls, run: self._move(run, books[placement.classes[cls].device], topology),
                price=price,
                issue_ps=lambda cls: _issue_ps(devices[cls]),
            ),
        )
        lag_ps = [_lag_ps(device) for device in devices]
        if max(script.n_kernels.values(), default=0) > LAUNCH_QUEUE_DEPTH:
            iteration_ps = queued_ps(script, lag_ps, LAUNCH_QUEUE_DEPTH)
        else:
            iteration_ps = _steady_ps(script, lag_ps)
        if iteration_ps is None:
            return None
        slowed = overlap and placement.n_ranks > 1 and any(device.overlap.scale > 0 for device in devices)
        return Pace(iteration_ps=iteration_ps, is_exact=not slowed)

    def _move(self, run: Segment, book: PriceBook, topology: Topology) -> Move:
        # A lone op is wrapped anew for every placement; what it does is the op's.
        kept: object = run[0].op if len(run) == 1 else run
        key = (id(kept), book.device.name, topology.fingerprint)
        known = self._moves.get(key)
        if known is None:
            known = self._moves[key] = (kept, self._make(run, book, topology))
        return known[1]

    def _make(self, run: Segment, book: PriceBook, topology: Topology) -> Move:
        """Segments of other plans and stages that differ in names alone have the same move."""
        prices = [self._price(run[place].collective, topology) for place in run.collectives]
        key = (book.device.name, topology.fingerprint, *_likeness(run, prices))
        known = self._alike.get(key)
        if known is None:
            if self._n_tasks > MAX_TASKS:
                self._moves, self._alike, self._n_tasks = {}, {}, 0
            columns = replace(run.columns, instance=np.arange(len(prices)))
            known = move_of(lower_segment(book.device, book.prices_in(columns, dict(enumerate(prices)))))
            self._alike[key] = known
            self._n_tasks += len(known.tasks.stream)
        return known

    def _price(self, collective: Collective | None, topology: Topology) -> Estimate:
        if collective is None:
            raise RuntimeError("a collective's event carries one")
        call = collective.op, collective.bytes, collective.dtype, collective.ranks, collective.send_bytes
        key = (topology.fingerprint, *call, id(collective.siblings))
        known = self._prices.get(key)
        if known is None:
            if len(self._prices) >= MAX_PRICES:
                self._prices = {}
            estimate = self._collectives.of(collective, topology).estimate
            known = self._prices[key] = (collective.siblings, estimate)
        return known[1]


def _likeness(run: Segment, prices: Sequence[Estimate]) -> tuple[object, ...]:
    """What the move of a segment on a device follows from: kinds of ops, what waits for what, times of collectives."""
    columns = run.columns
    kinds = np.zeros(columns.size, dtype=np.int64)
    kinds[columns.op_at] = 1 + known_kinds(columns.ops)
    waits = tuple((place, run[place].after) for place in run.waiters)
    calls = tuple(
        (place, run[place].stream, run[place].host_waits, price.time_s)
        for place, price in zip(run.collectives, prices, strict=True)
    )
    return kinds.tobytes(), waits, calls


def _issue_ps(device: Device) -> int:
    """Host time of a collective as lowering counts it: dispatch and launch, each in whole picoseconds."""
    return round(collective_dispatch_s(device) * PS_PER_S) + round(device.host.launch_s * PS_PER_S)


def _lag_ps(device: Device) -> int:
    return round(device.host.launch_latency_s * PS_PER_S)


class Arrays(NamedTuple):
    """What the loop reads, as int64 arrays or lists: steps, moves as `joined` lays them out, launch latency by class."""

    steps: Any
    row_ptr: Any
    out: Any
    ptr: Any
    source: Any
    weight: Any
    lag: Any


def _steady_ps(script: Script, lag_ps: Sequence[int]) -> Fraction | None:
    """Iteration time once the clocks grow evenly (see `sim.steady`); None if they do not within MAX_ITERATIONS."""
    steps = np.array(script.steps, dtype=np.int64).reshape(-1, 5)
    arrays = Arrays(steps, *joined(script.moves), np.array(lag_ps, dtype=np.int64))
    clocks = np.zeros((script.n_classes, N_CLOCKS), dtype=np.int64)
    slots = np.zeros(max(script.n_slots, 1), dtype=np.int64)
    scratch = np.zeros(N_CLOCKS, dtype=np.int64)
    live = live_clocks(script)
    states: list[IntArray] = []
    numba = has_numba()
    for _ in range(MAX_ITERATIONS):
        clocks[:, 1::2] = NEVER
        if numba:
            compiled_loop(pace_loop)(arrays, clocks, slots, scratch)
        else:
            lists = clocks.tolist(), slots.tolist(), scratch.tolist()
            pace_loop(Arrays(*(array.tolist() for array in arrays)), *lists)
            clocks, slots = np.array(lists[0], dtype=np.int64), np.array(lists[1], dtype=np.int64)
        state = clocks.reshape(-1)[live]
        states.append(np.concatenate([state, [state.max()]]))
        cycle = cycle_of(states, 1)
        if cycle:
            return Fraction(int((states[-1] - states[-1 - cycle]).max()), cycle)
    return None


def pace_loop(a: Arrays, clocks: Any, slots: Any, scratch: Any) -> None:
    """One iteration: moves `clocks` (by class) as the steps say; `slots` and `scratch` are its workspace."""
    for i in range(len(a.steps)):
        step = a.steps[i]
        what, first, second, third = step[0], step[2], step[3], step[4]
        clock = clocks[step[1]]
        if what == RUN:
            low, high = a.row_ptr[first], a.row_ptr[first + 1]
            for r in range(low, high):
                at = NEVER
                for t in range(a.ptr[r], a.ptr[r + 1]):
                    at = max(at, clock[a.source[t]] + a.weight[t])
                scratch[r - low] = at
            for r in range(low, high):
                clock[a.out[r]] = scratch[r - low]
        elif what == WAIT:
            clock[2 * first] = max(clock[2 * first], slots[second])
        elif what == ISSUE:
            clock[HOST_FREE] += second
            slots[third] = max(clock[2 * first], clock[HOST_FREE] + a.lag[step[1]])
        elif what == MEET:
            slots[first] = max(slots[first], slots[second])
        elif what == END:
            slots[second] += third
            clock[2 * first] = slots[second]
            clock[2 * first + 1] = slots[second]
        else:  # WAIT_LAST
            clock[2 * first] = max(clock[2 * first], clock[2 * second + 1])
