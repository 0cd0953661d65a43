"""From placed events and prices to the simulator's programs, as arrays.

On a CUDA device the host thread issues kernels and runs ahead: every kernel becomes a host task (dispatch and launch) and a
device task that depends on it. Host work of ops without kernels is part of the next host task. On a CPU device the thread
that dispatches an op also runs it, so host and device time of an op are one task on the compute stream.

A captured stretch (CUDA graphs) has one host task, its replay; each stream's first kernel in it depends on that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from perfmodel.db.device import Device
from perfmodel.estimate import Source
from perfmodel.pipeline.layout import Layout, cpu_layout, cuda_layout, input_copies, ints, is_communication
from perfmodel.pipeline.pricebook import FloatArray, IntArray, Prices
from perfmodel.pipeline.settings import DEFAULT_SETTINGS, RunSettings
from perfmodel.pipeline.tasks import HOST_FAMILY, LoweredClass, Tasks
from perfmodel.plan.events import Event, RankClass
from perfmodel.plan.sharded import STORAGE as TABLE_STORAGE
from perfmodel.sim.program import COMPUTE, COPY, HOST, NO_GROUP, ArrayProgram
from perfmodel.sim.steady import CarryDep
from perfmodel.units import PS_PER_S

_HOST, _SYNC, _KERNEL, _COPY, _COLLECTIVE = range(5)  # places in CATEGORIES
NO_TASK = -1

Deps = list[tuple[int, int, int]]  # task, the task it waits for, lag (ps)


def lower_class(
    rank_class: RankClass, device: Device, prices: Prices, settings: RunSettings, cls: int = 0
) -> LoweredClass:
    """The program of one rank class on its device; `cls` is its number in the simulator.

    Raises:
        ConfigError: a mode that the device or the model does not allow.
    """
    lowering = _Lowering(rank_class.events, device, prices, settings)
    tasks = lowering.describe(lowering.host_times())
    # What waits for what does not depend on prices: a sequence of events that is priced again keeps it.
    key = "waits", settings.mode, settings.input_copies
    if key not in prices.derived:
        deps, carry = lowering.waits(0, prefetch=settings.input_copies == "prefetch")
        prices.derived[key] = _rows_of(deps), tuple(carry)
    rows, carry_deps = prices.derived[key]
    carry_deps = tuple(replace(dep, cls=cls) for dep in carry_deps)
    program = lowering.program(tasks, rows, len(rank_class.ranks))
    return LoweredClass(
        rank_class=rank_class, device=device, prices=prices, program=program, tasks=tasks, carry=carry_deps
    )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LoweredSegment:
    """The program of events that others come before and after.

    Attributes:
        program: its tasks, with what they wait for among themselves.
        tail_ps: host time that its first host task after it takes over.
        open_waits: (task, stream): it waits for what ran last on the stream before the segment.
        held: (stream, task or NO_TASK, source stream): the next kernel on the stream waits for the task, or for what
            ran last on the source stream before the segment.
    """

    program: ArrayProgram
    tail_ps: int
    open_waits: tuple[tuple[int, int], ...]
    held: tuple[tuple[int, int, int], ...]


def lower_segment(events: Sequence[Event], device: Device, prices: Prices) -> LoweredSegment:
    """The program of a stretch of a rank's events, executed as `DEFAULT_SETTINGS` say."""
    lowering = _Lowering(events, device, prices, DEFAULT_SETTINGS)
    time_ps = lowering.host_times()
    tail_ps = lowering.pending_ps
    if lowering.first_host >= 0:
        time_ps[lowering.first_host] -= tail_ps
    deps: Deps = []
    open_waits: list[tuple[int, int]] = []
    held: dict[int, list[int]] = {}
    for task, source in lowering.sources(held):
        end = lowering.last_before(source)
        if end < 0:
            open_waits.append((task, int(lowering.stream_of[source])))
        else:
            deps.append((task, end, 0))
    left = [
        (stream, lowering.last_before(source), int(lowering.stream_of[source]))
        for stream, sources in held.items()
        for source in sources
    ]
    program = lowering.program(lowering.describe(time_ps), _rows_of(deps), 1)
    return LoweredSegment(program=program, tail_ps=tail_ps, open_waits=tuple(open_waits), held=tuple(left))


def _rows_of(deps: Deps) -> IntArray:
    return np.array(deps, dtype=np.int64).reshape(-1, 3)


class _Lowering:
    """Builds the arrays of one run of events."""

    def __init__(self, events: Sequence[Event], device: Device, prices: Prices, settings: RunSettings) -> None:
        self.events, self.device, self.prices = events, device, prices
        cuda = device.kind == "cuda"
        layout: Layout = cuda_layout(events, device, prices, settings) if cuda else cpu_layout(prices)
        self.layout = layout
        counts = layout.counts
        self.first = np.cumsum(counts) - counts
        self.n_tasks = int(counts.sum())
        self.stream_of = ints(prices.of_events("stream"))
        # Kernels, flat: event, number within it, its device task and its host task (if it has one of its own).
        n = layout.n_kernels
        self.kernel_event = np.repeat(np.arange(len(n)), n)
        self.kernel_number = np.arange(int(n.sum())) - np.repeat(np.cumsum(n) - n, n)
        each = 1 + layout.eager[self.kernel_event]
        self.device_task = self.first[self.kernel_event] + layout.head[self.kernel_event] + each * self.kernel_number
        self.device_task = self.device_task + layout.eager[self.kernel_event]
        last = self.first + layout.head + n * (1 + layout.eager) - 1
        self.last_task = np.where(n > 0, last, -1)
        self.last_before = _last_before(self.last_task, self.stream_of)
        self.pending_ps = 0  # host time after the last host task, set by `host_times`
        self.first_host = NO_TASK

    def program(self, tasks: Tasks, rows: IntArray, n_ranks: int) -> ArrayProgram:
        """The simulator's program of described tasks that wait for each other as `rows` of `Deps` say."""
        launches = self._launches(round(self.device.host.launch_latency_s * PS_PER_S))
        owner, index, lags = (np.concatenate([launches[i], rows[:, i]]) for i in range(3))
        by_owner = np.argsort(owner, kind="stable")
        return ArrayProgram(
            stream=self.stream,
            duration_ps=np.rint(tasks.time_s * PS_PER_S).astype(np.int64),
            group=self._groups(),
            dep_count=np.bincount(owner, minlength=self.n_tasks).astype(np.int64),
            dep_index=index[by_owner],
            dep_lag_ps=lags[by_owner],
            n_ranks=n_ranks,
        )

    def describe(self, host_ps: IntArray) -> Tasks:
        """Columns of all tasks: host tasks by default, kernels and syncs written over them."""
        n, layout = self.n_tasks, self.layout
        names = (*self.prices.names, HOST_FAMILY)
        event = np.repeat(np.arange(len(layout.counts)), layout.counts)
        category = np.full(n, _HOST, dtype=np.int64)
        family = np.full(n, len(names) - 1, dtype=np.int64)
        source = np.full(n, int(Source.FITTED), dtype=np.int64)
        host = self.device.host
        time_s = host_ps / PS_PER_S
        low_s, high_s = host.low_frac * time_s, host.high_frac * time_s
        self.stream = np.full(n, HOST if self.device.kind == "cuda" else COMPUTE, dtype=np.int64)
        ideal_s = np.zeros(n)
        syncs = np.flatnonzero(layout.sync)
        category[self.first[syncs] + layout.counts[syncs] - 1] = _SYNC
        kernels, at = self.prices.kernels, self.device_task
        if self.device.kind == "cpu":
            at = self._cpu_kernels(category, family, source, (time_s, low_s, high_s, ideal_s))
        else:
            rows = ints(self.prices.of_events("first_kernel"))[self.kernel_event] + self.kernel_number
            for column, name in ((time_s, "time_s"), (low_s, "low_s"), (high_s, "high_s"), (ideal_s, "ideal_s")):
                column[at] = kernels[name][rows]
            family[at], source[at] = kernels["family"][rows], kernels["source"][rows]
            category[at] = _category(self.stream_of[self.kernel_event])
        self.stream[at] = self.stream_of[self.kernel_event]
        return Tasks(
            event=event,
            category=category,
            family=family,
            source=source,
            time_s=time_s,
            low_s=low_s,
            high_s=high_s,
            ideal_s=ideal_s,
            names=names,
        )

    def _cpu_kernels(
        self, category: IntArray, family: IntArray, source: IntArray, times: tuple[FloatArray, ...]
    ) -> IntArray:
        """An op of a CPU: the sum of its kernels and its host time in one task; a collective: its kernel alone."""
        kernels = self.prices.kernels
        n, start = ints(self.prices.of_events("n_kernels")), ints(self.prices.of_events("first_kernel"))
        at, has = self.device_task, n > 0
        rows = np.repeat(start - (np.cumsum(n) - n), n) + np.arange(int(n.sum()))
        owner = np.repeat(np.arange(len(n)), n)
        for column, name in zip(times, ("time_s", "low_s", "high_s", "ideal_s"), strict=True):
            column[at] += np.bincount(owner, weights=kernels[name][rows], minlength=len(n))
        worst = np.zeros(len(n), dtype=np.int64)
        np.maximum.at(worst, owner, ints(kernels["source"][rows]))
        source[at] = np.where(has, np.maximum(worst, int(Source.FITTED)), source[at])
        family[at[has]] = kernels["family"][start[has]]
        category[at] = np.where(has, _category(self.stream_of), _HOST)
        return at

    def host_times(self) -> IntArray:
        """Time (ps) of every task as host work: pending ops, dispatch, launches, syncs. Device tasks of a GPU get 0.

        What follows the last host task opens the next iteration: it is part of the first one.
        """
        layout, host_ps = self.layout, self.layout.host_ps
        time_ps = np.zeros(self.n_tasks, dtype=np.int64)
        if self.device.kind == "cpu":
            time_ps[self.first] = host_ps
            return time_ps
        own = layout.eager[self.kernel_event]
        time_ps[self.device_task[own] - 1] = layout.launch_ps[self.kernel_event[own]]
        issues = (layout.head > 0) | ((layout.n_kernels > 0) & layout.eager) | (layout.sync > 0)
        before = np.concatenate([[0], np.cumsum(host_ps)])
        at = np.flatnonzero(issues)
        total = np.diff(before[np.concatenate([[0], at + 1])])
        syncs = np.flatnonzero(layout.sync)
        time_ps[self.first[syncs] + layout.counts[syncs] - 1] += layout.sync_ps[syncs]
        # The first host task of an issuing event carries what is pending; a sync alone, its own call too.
        first = self.first[at]
        alone = (layout.head[at] == 0) & ~((layout.n_kernels[at] > 0) & layout.eager[at])
        time_ps[first] = np.where(alone, time_ps[first] + total, total)
        self.pending_ps = int(before[-1] - before[at[-1] + 1] if len(at) else before[-1])
        if len(at):
            self.first_host = int(first[0])
            time_ps[self.first_host] += self.pending_ps
        return time_ps

    def _launches(self, lag_ps: int) -> tuple[IntArray, IntArray, IntArray]:
        """(task, host task, lag) of every launch."""
        layout = self.layout
        own = layout.eager[self.kernel_event]
        task, launcher = self.device_task[own], self.device_task[own] - 1
        lag = 0 if self.device.kind == "cpu" else lag_ps
        heads = np.flatnonzero(layout.head)
        if len(heads):
            member = np.flatnonzero(~own)
            stretch = np.searchsorted(heads, self.kernel_event[member], side="right") - 1
            key = stretch * (int(self.stream_of.max()) + 1) + self.stream_of[self.kernel_event[member]]
            firsts = np.unique(key, return_index=True)[1]
            task = np.concatenate([task, self.device_task[member[firsts]]])
            launcher = np.concatenate([launcher, self.first[heads[stretch[firsts]]]])
        return task, launcher, np.full(len(task), lag, dtype=np.int64)

    def sources(self, held: dict[int, list[int]]) -> Iterator[tuple[int, int]]:
        """(task, event whose end it waits for): waits for other streams, then those of the host for the device.

        An event without kernels hands its waits to the next kernel on its stream; `held` keeps by stream what none took.
        """
        for number, event in enumerate(self.events):
            stream = int(self.stream_of[number]) if event.after or held else 0
            if self.last_task[number] < 0:
                if event.after:
                    held.setdefault(stream, []).extend(event.after)
                continue
            sources = (*held.pop(stream, ()), *event.after) if held else event.after
            if sources:
                task = int(self.device_task[np.searchsorted(self.kernel_event, number)])
                yield from ((task, source) for source in sources)
        for number in np.flatnonzero(self.layout.sync).tolist():
            yield int(self.first[number] + self.layout.counts[number] - 1), number

    def waits(self, cls: int, *, prefetch: bool) -> tuple[Deps, list[CarryDep]]:
        """Waits within an iteration; what is held over, and waits for prefetched inputs, reach one iteration back."""
        prefetched = input_copies(self.prices) if prefetch else np.zeros(len(self.events), dtype=bool)
        deps: Deps = []
        carry: list[CarryDep] = []
        held: dict[int, list[int]] = {}
        for task, source in self.sources(held):
            end = self.last_before(source)
            if end >= 0 and prefetched[source] and self.stream[task] != HOST:
                carry.append(CarryDep(cls=cls, task=task, on=end))
            elif end >= 0:
                deps.append((task, end, 0))
        return deps, [*carry, *self._held_over(cls, held), *self._ahead(cls)]

    def _ahead(self, cls: int) -> Iterator[CarryDep]:
        """Ops on indices that travelled a batch ahead wait for their exchange, which was issued an iteration before."""
        early: dict[
            int, int
        ] = {}  # storage of indices: the first event that reads it before any exchange has written it
        writer: dict[int, int] = {}
        for number, event in enumerate(self.events):
            if event.op is not None and event.stream == "compute":
                for storage in event.reads:
                    if storage >= TABLE_STORAGE and storage not in writer and self.last_task[number] >= 0:
                        early.setdefault(storage, number)
            elif event.collective is not None:
                writer |= dict.fromkeys(event.writes, number)
        for storage, number in early.items():
            if storage in writer:
                task = int(self.device_task[np.searchsorted(self.kernel_event, number)])
                yield CarryDep(cls=cls, task=task, on=self.last_before(writer[storage]))

    def _held_over(self, cls: int, held: Mapping[int, Sequence[int]]) -> list[CarryDep]:
        """What events after a stream's last kernel wait for keeps its first kernel of the next iteration waiting."""
        found = []
        for stream, sources in held.items():
            first = np.flatnonzero(self.stream[self.device_task] == stream)[:1]
            for source in sources if len(first) else ():
                end = self.last_before(source)
                if end >= 0:
                    found.append(CarryDep(cls=cls, task=int(self.device_task[first[0]]), on=end))
        return found

    def _groups(self) -> IntArray:
        group = np.full(self.n_tasks, NO_GROUP, dtype=np.int64)
        for number in np.flatnonzero(is_communication(self.stream_of)).tolist():
            collective = self.events[number].collective
            if collective is not None:
                group[self.last_task[number]] = collective.instance
        return group


def _last_before(last_task: IntArray, stream_of: IntArray) -> Callable[[int], int]:
    """Maps an event to the last task on its stream at or before it (-1: none)."""
    reached: dict[int, IntArray] = {}

    def find(event: int) -> int:
        own = int(last_task[event])
        if own >= 0:
            return own
        stream = int(stream_of[event])
        if stream not in reached:
            reached[stream] = np.maximum.accumulate(np.where(stream_of == stream, last_task, -1))
        return int(reached[stream][event])

    return find


def _category(streams: IntArray) -> IntArray:
    return np.where(is_communication(streams), _COLLECTIVE, np.where(streams == COPY, _COPY, _KERNEL))
