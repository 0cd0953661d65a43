"""From placed events and prices to the simulator's programs, as arrays.

On a CUDA device the host thread issues kernels and runs ahead: every kernel becomes a host task (dispatch and launch) and a
device task that depends on it. Host work of ops without kernels is part of the next host task. On a CPU device the thread
that dispatches an op also runs it, so host and device time of an op are one task on the compute stream.

A captured stretch (CUDA graphs) has one host task, its replay; each stream's first kernel in it depends on that.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from perfmodel.db.device import Device
from perfmodel.estimate import Estimate, Source
from perfmodel.graph import PHASES
from perfmodel.pipeline.capture import Capture, captured
from perfmodel.pipeline.pricebook import FloatArray, IntArray, Prices
from perfmodel.pipeline.settings import RunSettings
from perfmodel.plan.events import RankClass
from perfmodel.sim.program import COMM, COMPUTE, COPY, HOST, NO_GROUP, ArrayProgram
from perfmodel.sim.steady import CarryDep
from perfmodel.units import PS_PER_S, US_PER_S

Category = Literal["host", "sync", "kernel", "copy", "collective"]
CATEGORIES: tuple[Category, ...] = ("host", "sync", "kernel", "copy", "collective")
_HOST, _SYNC, _KERNEL, _COPY, _COLLECTIVE = range(5)
HOST_FAMILY = "host"
_INPUT = PHASES.index("input")
# Host time of a kernel launched by inductor's generated code beyond the driver's launch call (6.8 less 3.0 us), and of
# entering a compiled graph: guards, arguments, checks (44.3 less 6.8 us). meta-pytorch/tritonbench pull request 1017, GB200.
COMPILED_KERNEL_S = 3.8 / US_PER_S
COMPILED_GRAPH_S = 37.5 / US_PER_S

BoolArray = NDArray[np.bool_]
Deps = list[tuple[int, int, int]]  # task, the task it waits for, lag (ps)


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskInfo:
    """What a task of a program stands for: the index of its event, what it is, and its price."""

    event: int
    category: Category
    family: str
    estimate: Estimate


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Tasks:
    """What the tasks of a program stand for, by column: see `TaskInfo`.

    `category` indexes CATEGORIES, `family` indexes `names`; `ideal_s` is the time at datasheet peak rates.
    """

    event: IntArray
    category: IntArray
    family: IntArray
    source: IntArray
    time_s: FloatArray
    low_s: FloatArray
    high_s: FloatArray
    ideal_s: FloatArray
    names: Sequence[str]

    def __len__(self) -> int:
        return len(self.event)

    def __getitem__(self, task: int) -> TaskInfo:
        return TaskInfo(
            event=int(self.event[task]),
            category=CATEGORIES[self.category[task]],
            family=self.names[self.family[task]],
            estimate=Estimate(
                time_s=float(self.time_s[task]),
                low_s=float(self.low_s[task]),
                high_s=float(self.high_s[task]),
                source=Source(int(self.source[task])),
            ),
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LoweredClass:
    """The program of one rank class, with `tasks[i]` describing its task i and what waits across iterations."""

    rank_class: RankClass
    device: Device
    prices: Prices
    program: ArrayProgram
    tasks: Tasks
    carry: tuple[CarryDep, ...] = ()


def lower_class(
    rank_class: RankClass, device: Device, prices: Prices, settings: RunSettings, cls: int = 0
) -> LoweredClass:
    """The program of one rank class on its device; `cls` is its number in the simulator.

    Raises:
        ConfigError: a mode that the device or the model does not allow.
    """
    layout = _cuda_layout(rank_class, device, prices, settings) if device.kind == "cuda" else _cpu_layout(prices)
    return _Lowering(rank_class, device, prices, settings, layout).lowered(cls)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Layout:
    """Tasks of each event, in this order: `head` host tasks, kernels (each after its own host task if `eager`), `sync`."""

    head: IntArray
    n_kernels: IntArray
    eager: BoolArray
    sync: IntArray
    host_s: FloatArray  # host time of the event without its kernels after the first, and without syncs
    launch_s: FloatArray
    sync_s: FloatArray

    @property
    def counts(self) -> IntArray:
        """Tasks of each event."""
        return self.head + self.n_kernels * (1 + self.eager) + self.sync


def _cuda_layout(rank_class: RankClass, device: Device, prices: Prices, settings: RunSettings) -> _Layout:
    n_kernels = _ints(prices.of_events("n_kernels"))
    dispatch_s = _floats(prices.of_events("dispatch_s"))
    sync = _ints(prices.of_events("host_sync"))
    sync_s = np.where(sync > 0, device.host.sync_s, 0.0)
    if settings.input_copies == "pageable":
        copies = _input_copies(prices) & (n_kernels > 0) & (sync == 0)
        sync = sync | copies  # the copy itself is the wait; no call of its own
    capture: Capture | None = None
    if settings.mode == "cuda_graph":
        capture = captured(rank_class.events, n_kernels, sync > 0, _input_copies(prices))
        dispatch_s = np.where(capture.member, 0.0, dispatch_s) + capture.replay_s
    elif settings.mode == "compile":
        dispatch_s = _compiled_dispatch(prices, n_kernels, dispatch_s)
    member = np.zeros(len(n_kernels), dtype=bool) if capture is None else capture.member
    launch_s = np.where(member, 0.0, device.host.launch_s)
    return _Layout(
        head=np.zeros_like(n_kernels) if capture is None else (capture.replay_s > 0).astype(np.int64),
        n_kernels=n_kernels,
        eager=~member,
        sync=sync,
        host_s=dispatch_s + np.where(n_kernels > 0, launch_s, 0.0),
        launch_s=launch_s,
        sync_s=sync_s,
    )


def _compiled_dispatch(prices: Prices, n_kernels: IntArray, dispatch_s: FloatArray) -> FloatArray:
    """Host time beyond launches where compiled code issues the ops: all but inputs, the optimizer and collectives.

    Each kernel costs its launcher; the compiled forward and the compiled backward each cost their entry once.
    """
    phase, is_op = prices.of_events("phase"), prices.of_events("stream") == COMPUTE
    backward = (phase == PHASES.index("backward")) & is_op
    forward = np.isin(phase, [PHASES.index("forward"), PHASES.index("loss")]) & is_op
    found = np.where(forward | backward, n_kernels * COMPILED_KERNEL_S, dispatch_s)
    for part in (forward, backward):
        found[np.flatnonzero(part)[:1]] += COMPILED_GRAPH_S
    return found


def _input_copies(prices: Prices) -> BoolArray:
    copies: BoolArray = (prices.of_events("phase") == _INPUT) & (prices.of_events("stream") == COPY)
    return copies


def _cpu_layout(prices: Prices) -> _Layout:
    n_kernels = _ints(prices.of_events("n_kernels"))
    is_collective = _is_communication(_ints(prices.of_events("stream")))
    zeros = np.zeros(len(n_kernels))
    return _Layout(
        head=np.zeros_like(n_kernels),
        n_kernels=np.ones_like(n_kernels),
        eager=is_collective,
        sync=np.zeros_like(n_kernels),
        host_s=_floats(prices.of_events("dispatch_s")),
        launch_s=zeros,
        sync_s=zeros,
    )


class _Lowering:
    """Builds the arrays of one rank class; `lower_class` is the only user."""

    def __init__(
        self, rank_class: RankClass, device: Device, prices: Prices, settings: RunSettings, layout: _Layout
    ) -> None:
        self.rank_class, self.device, self.prices, self.settings, self.layout = (
            rank_class, device, prices, settings, layout
        )  # fmt: skip
        counts = layout.counts
        self.first = np.cumsum(counts) - counts
        self.n_tasks = int(counts.sum())
        self.stream_of = _ints(prices.of_events("stream"))
        # Kernels, flat: event, number within it, its device task and its host task (if it has one of its own).
        n = layout.n_kernels
        self.kernel_event = np.repeat(np.arange(len(n)), n)
        self.kernel_number = np.arange(int(n.sum())) - np.repeat(np.cumsum(n) - n, n)
        each = 1 + layout.eager[self.kernel_event]
        self.device_task = self.first[self.kernel_event] + layout.head[self.kernel_event] + each * self.kernel_number
        self.device_task = self.device_task + layout.eager[self.kernel_event]
        last = self.first + layout.head + n * (1 + layout.eager) - 1
        self.last_task = np.where(n > 0, last, -1)

    def lowered(self, cls: int) -> LoweredClass:
        """The program and its description."""
        self._describe()
        deps, carry = self._waits(cls)
        lag_ps = _ps(self.device.host.launch_latency_s)
        launches = self._launches(lag_ps)
        owner = np.concatenate([launches[0], np.array([d[0] for d in deps], dtype=np.int64)])
        index = np.concatenate([launches[1], np.array([d[1] for d in deps], dtype=np.int64)])
        lags = np.concatenate([launches[2], np.array([d[2] for d in deps], dtype=np.int64)])
        by_owner = np.argsort(owner, kind="stable")
        program = ArrayProgram(
            stream=self.stream,
            duration_ps=np.rint(self.tasks.time_s * PS_PER_S).astype(np.int64),
            group=self._groups(),
            dep_count=np.bincount(owner, minlength=self.n_tasks).astype(np.int64),
            dep_index=index[by_owner],
            dep_lag_ps=lags[by_owner],
            n_ranks=len(self.rank_class.ranks),
        )
        return LoweredClass(
            rank_class=self.rank_class,
            device=self.device,
            prices=self.prices,
            program=program,
            tasks=self.tasks,
            carry=tuple(carry),
        )

    def _describe(self) -> None:
        """Columns of all tasks: host tasks by default, kernels and syncs written over them."""
        n, layout = self.n_tasks, self.layout
        names = (*self.prices.names, HOST_FAMILY)
        event = np.repeat(np.arange(len(layout.counts)), layout.counts)
        category = np.full(n, _HOST, dtype=np.int64)
        family = np.full(n, len(names) - 1, dtype=np.int64)
        source = np.full(n, int(Source.FITTED), dtype=np.int64)
        host = self.device.host
        time_s = self._host_times()
        low_s, high_s = host.low_frac * time_s, host.high_frac * time_s
        self.stream = np.full(n, HOST if self.device.kind == "cuda" else COMPUTE, dtype=np.int64)
        ideal_s = np.zeros(n)
        syncs = np.flatnonzero(layout.sync)
        category[self.first[syncs] + layout.counts[syncs] - 1] = _SYNC
        kernels, at = self.prices.kernels, self.device_task
        if self.device.kind == "cpu":
            at = self._cpu_kernels(category, family, source, (time_s, low_s, high_s, ideal_s))
        else:
            rows = _ints(self.prices.of_events("first_kernel"))[self.kernel_event] + self.kernel_number
            for column, name in ((time_s, "time_s"), (low_s, "low_s"), (high_s, "high_s"), (ideal_s, "ideal_s")):
                column[at] = kernels[name][rows]
            family[at], source[at] = kernels["family"][rows], kernels["source"][rows]
            category[at] = _category(self.stream_of[self.kernel_event])
        self.stream[at] = self.stream_of[self.kernel_event]
        self.tasks = Tasks(
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
        n, start = _ints(self.prices.of_events("n_kernels")), _ints(self.prices.of_events("first_kernel"))
        at, has = self.device_task, n > 0
        rows = np.repeat(start - (np.cumsum(n) - n), n) + np.arange(int(n.sum()))
        owner = np.repeat(np.arange(len(n)), n)
        for column, name in zip(times, ("time_s", "low_s", "high_s", "ideal_s"), strict=True):
            column[at] += np.bincount(owner, weights=kernels[name][rows], minlength=len(n))
        worst = np.zeros(len(n), dtype=np.int64)
        np.maximum.at(worst, owner, _ints(kernels["source"][rows]))
        source[at] = np.where(has, np.maximum(worst, int(Source.FITTED)), source[at])
        family[at[has]] = kernels["family"][start[has]]
        category[at] = np.where(has, _category(self.stream_of), _HOST)
        return at

    def _host_times(self) -> FloatArray:
        """Seconds of every task as host work: pending ops, dispatch, launches, syncs. Device tasks of a GPU get 0."""
        layout, host_s = self.layout, self.layout.host_s
        time_s = np.zeros(self.n_tasks)
        if self.device.kind == "cpu":
            time_s[self.first] = host_s
            return time_s
        own = layout.eager[self.kernel_event]
        time_s[self.device_task[own] - 1] = layout.launch_s[self.kernel_event[own]]
        issues = (layout.head > 0) | ((layout.n_kernels > 0) & layout.eager) | (layout.sync > 0)
        before = np.concatenate([[0.0], np.cumsum(host_s)])
        at = np.flatnonzero(issues)
        total = np.diff(before[np.concatenate([[0], at + 1])])
        syncs = np.flatnonzero(layout.sync)
        time_s[self.first[syncs] + layout.counts[syncs] - 1] += layout.sync_s[syncs]
        # The first host task of an issuing event carries what is pending; a sync alone, its own call too.
        first = self.first[at]
        alone = (layout.head[at] == 0) & ~((layout.n_kernels[at] > 0) & layout.eager[at])
        time_s[first] = np.where(alone, time_s[first] + total, total)
        if len(at):
            time_s[first[0]] += before[-1] - before[at[-1] + 1]  # what follows the last one opens the next iteration
        return time_s

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

    def _waits(self, cls: int) -> tuple[Deps, list[CarryDep]]:
        """Waits for other streams and of the host for the device; those on prefetched inputs reach one iteration back."""
        prefetched = _input_copies(self.prices) if self.settings.input_copies == "prefetch" else None
        deps: Deps = []
        carry: list[CarryDep] = []
        last_before = _last_before(self.last_task, self.stream_of)
        held: dict[int, list[int]] = {}  # stream -> what an event without kernels on it waits for; the next kernel does
        for number, event in enumerate(self.rank_class.events):
            stream = int(self.stream_of[number]) if event.after or held else 0
            if self.last_task[number] < 0:
                if event.after:
                    held.setdefault(stream, []).extend(event.after)
                continue
            sources = (*held.pop(stream, ()), *event.after) if held else event.after
            if not sources:
                continue
            task = int(self.device_task[np.searchsorted(self.kernel_event, number)])
            for source in sources:
                end = last_before(source)
                if end < 0:
                    continue
                if prefetched is not None and prefetched[source]:
                    carry.append(CarryDep(cls=cls, task=task, on=end))
                else:
                    deps.append((task, end, 0))
        carry += self._held_over(cls, held, last_before)
        for number in np.flatnonzero(self.layout.sync).tolist():
            end = last_before(number)
            if end >= 0:
                deps.append((int(self.first[number] + self.layout.counts[number] - 1), end, 0))
        return deps, carry

    def _held_over(
        self, cls: int, held: Mapping[int, Sequence[int]], last_before: Callable[[int], int]
    ) -> list[CarryDep]:
        """What events after a stream's last kernel wait for keeps its first kernel of the next iteration waiting."""
        found = []
        for stream, sources in held.items():
            first = np.flatnonzero(self.stream[self.device_task] == stream)[:1]
            for source in sources if len(first) else ():
                end = last_before(source)
                if end >= 0:
                    found.append(CarryDep(cls=cls, task=int(self.device_task[first[0]]), on=end))
        return found

    def _groups(self) -> IntArray:
        group = np.full(self.n_tasks, NO_GROUP, dtype=np.int64)
        for number in np.flatnonzero(_is_communication(self.stream_of)).tolist():
            collective = self.rank_class.events[number].collective
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


def _is_communication(streams: IntArray) -> BoolArray:
    found: BoolArray = (streams == COMM) | (streams > COPY)
    return found


def _category(streams: IntArray) -> IntArray:
    return np.where(_is_communication(streams), _COLLECTIVE, np.where(streams == COPY, _COPY, _KERNEL))


def _ps(time_s: float) -> int:
    return round(time_s * PS_PER_S)


def _ints(values: NDArray[np.generic]) -> IntArray:
    return values.astype(np.int64, copy=False)


def _floats(values: NDArray[np.generic]) -> FloatArray:
    return values.astype(np.float64, copy=False)
