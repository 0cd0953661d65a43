"""Tasks of priced events: where each event's tasks stand, what they are, how long they take and what they wait for, as arrays.

On a CUDA device the host thread issues kernels and runs ahead: every kernel becomes a host task (dispatch and launch) and a
device task that depends on it. Host work of ops without kernels is part of the next host task. On a CPU device the thread
that dispatches an op also runs it, so host and device time of an op are one task on the compute stream.

A captured stretch (CUDA graphs) has one host task, its replay; each stream's first kernel in it depends on that.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from perfmodel.db.device import Device
from perfmodel.estimate import Source
from perfmodel.pipeline.layout import Layout, cpu_layout, cuda_layout, input_copies, ints, is_communication
from perfmodel.pipeline.pricebook import FloatArray, IntArray, PricedClasses, Prices
from perfmodel.pipeline.settings import RunSettings
from perfmodel.pipeline.tasks import HOST_FAMILY, Tasks
from perfmodel.sim.program import COMPUTE, COPY, COPY_BACK, HOST, NO_GROUP
from perfmodel.units import PS_PER_S

_HOST, _SYNC, _KERNEL, _COPY, _COLLECTIVE = range(5)  # places in CATEGORIES
NO_TASK = -1
NO_EVENT = -1


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Waits:
    """What waits for what: rows (task, event whose end it waits for), and what no kernel of the classes takes.

    `held` are (event that waits, event it waits for) of events without kernels after the last kernel on their stream.
    """

    task: IntArray
    source: IntArray
    held: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class HostTimes:
    """Time (ps) of every task as host work, and by class what its first host task (-1: none) takes over from its end."""

    time_ps: IntArray
    first_host: IntArray
    pending_ps: IntArray


class Lowering:
    """The tasks of rank classes on one device: of all, one behind the other.

    What is said here follows from the events, their device and the settings; `host_times` and `tasks` say what prices add.
    """

    def __init__(self, priced: PricedClasses, device: Device, settings: RunSettings) -> None:
        prices = priced.whole
        self.device, self.settings, self.columns = device, settings, prices.columns
        self.first_event = priced.first_event
        self.class_of = np.repeat(np.arange(len(priced.parts)), np.diff(priced.first_event))
        layout = self.layout(prices)
        self._shape = layout
        counts = layout.counts
        self.first = np.cumsum(counts) - counts
        self.n_tasks = int(counts.sum())
        self.first_task = np.append(self.first, self.n_tasks)[priced.first_event]
        self.stream_of = ints(prices.of_events("stream"))
        # Kernels, flat: event, number within it, its device task and its host task (if it has one of its own).
        n = layout.n_kernels
        self.kernel_event = np.repeat(np.arange(len(n)), n)
        first_kernel = np.cumsum(n) - n
        self.kernel_number = np.arange(int(n.sum())) - np.repeat(first_kernel, n)
        own = layout.eager[self.kernel_event]
        each = 1 + own
        self.device_task = (
            self.first[self.kernel_event] + layout.head[self.kernel_event] + each * self.kernel_number + own
        )
        self.first_kernel = np.where(n > 0, first_kernel, -1)
        self.last_task = np.where(n > 0, self.first + layout.head + n * (1 + layout.eager) - 1, -1)
        self.event = np.repeat(np.arange(len(counts)), counts)
        self.stream = np.full(self.n_tasks, HOST if device.kind == "cuda" else COMPUTE, dtype=np.int64)
        self.stream[self.device_task] = self.stream_of[self.kernel_event]
        self._lane = self.class_of * (int(self.stream_of.max(initial=0)) + 1) + self.stream_of
        self._issuing: IntArray | None = None  # events with kernels by stream, found when first asked for
        self._first_on: dict[int, int] | None = None  # the first device task of each lane, likewise
        self.category = self._categories()
        self.family = np.full(self.n_tasks, len(prices.names), dtype=np.int64)

    def layout(self, prices: Prices) -> Layout:
        """Tasks and host times of the events at these prices."""
        if self.device.kind == "cpu":
            return cpu_layout(prices)
        return cuda_layout(prices, self.device, self.settings, self.first_event)

    def _categories(self) -> IntArray:
        layout = self._shape
        category = np.full(self.n_tasks, _HOST, dtype=np.int64)
        if self.device.kind == "cpu":
            category[self.device_task] = _category(self.stream_of)
            return category
        syncs = np.flatnonzero(layout.sync)
        category[self.first[syncs] + layout.counts[syncs] - 1] = _SYNC
        category[self.device_task] = _category(self.stream_of[self.kernel_event])
        return category

    def tasks(self, prices: Prices, host_ps: IntArray) -> Tasks:
        """Columns of all tasks, whose time as host work is given."""
        names = (*prices.names, HOST_FAMILY)
        host = self.device.host
        time_s = host_ps / PS_PER_S
        low_s, high_s = host.low_frac * time_s, host.high_frac * time_s
        ideal_s, memory_frac = np.zeros(self.n_tasks), np.zeros(self.n_tasks)
        source = np.full(self.n_tasks, int(Source.FITTED), dtype=np.int64)
        family = np.full(self.n_tasks, len(names) - 1, dtype=np.int64)
        category, kernels, at = self.category, prices.kernels, self.device_task
        times = (time_s, low_s, high_s, ideal_s)
        if self.device.kind == "cpu":
            category = self._cpu_kernels(prices, (family, source), times)
        else:
            for column, name in zip(times, ("time_s", "low_s", "high_s", "ideal_s"), strict=True):
                column[at] = kernels[name]
            family[at], source[at] = kernels["family"], kernels["source"]
            memory_frac[at] = kernels["memory_frac"]
        return Tasks(
            event=self.event,
            category=category,
            family=family,
            source=source,
            time_s=time_s,
            low_s=low_s,
            high_s=high_s,
            ideal_s=ideal_s,
            memory_frac=memory_frac,
            names=names,
        )

    def _cpu_kernels(self, prices: Prices, marks: tuple[IntArray, IntArray], times: tuple[FloatArray, ...]) -> IntArray:
        """An op of a CPU: the sum of its kernels and its host time in one task; a collective: its kernel alone.

        Fills `marks` (family and source) and `times`; returns the categories.
        """
        family, source = marks
        kernels, at = prices.kernels, self.device_task
        n, start = ints(prices.of_events("n_kernels")), ints(prices.of_events("first_kernel"))
        has = n > 0
        owner = np.repeat(np.arange(len(n)), n)
        for column, name in zip(times, ("time_s", "low_s", "high_s", "ideal_s"), strict=True):
            column[at] += np.bincount(owner, weights=kernels[name], minlength=len(n))
        worst = np.zeros(len(n), dtype=np.int64)
        np.maximum.at(worst, owner, ints(kernels["source"]))
        source[at] = np.where(has, np.maximum(worst, int(Source.FITTED)), source[at])
        family[at[has]] = kernels["family"][start[has]]
        category = self.category.copy()
        category[at[~has]] = _HOST
        return category

    def host_times(self, prices: Prices) -> HostTimes:
        """Host work: pending ops, dispatch, launches, syncs. Device tasks of a GPU get 0.

        What follows the last host task opens the next iteration: it is part of the first one.
        """
        layout = self.layout(prices)
        host_ps, n_classes = layout.host_ps, len(self.first_event) - 1
        time_ps = np.zeros(self.n_tasks, dtype=np.int64)
        first_host = np.full(n_classes, NO_TASK, dtype=np.int64)
        if self.device.kind == "cpu":
            time_ps[self.first] = host_ps
            return HostTimes(time_ps=time_ps, first_host=first_host, pending_ps=np.zeros(n_classes, dtype=np.int64))
        own = layout.eager[self.kernel_event]
        time_ps[self.device_task[own] - 1] = layout.launch_ps[self.kernel_event[own]]
        issues_itself = (layout.head > 0) | ((layout.n_kernels > 0) & layout.eager)
        at = np.flatnonzero(issues_itself | (layout.sync > 0))
        before = np.concatenate([[0], np.cumsum(host_ps)])
        # From behind the issuing event before it in its class, or from the beginning of the class.
        opens, begins = self._bounds(at)
        since = np.concatenate([[0], at[:-1] + 1])[: len(at)]
        since[opens] = self.first_event[self.class_of[at[opens]]]
        total = before[at + 1] - before[since]
        syncs = np.flatnonzero(layout.sync)
        time_ps[self.first[syncs] + layout.counts[syncs] - 1] += layout.sync_ps[syncs]
        # The first host task of an issuing event carries what is pending; a sync alone, its own call too.
        first = self.first[at]
        time_ps[first] = np.where(issues_itself[at], total, time_ps[first] + total)
        behind = self.first_event[:-1].copy()  # of each class, where what is pending begins
        closes = np.append(opens[1:], len(at))[: len(opens)]
        behind[begins] = at[closes - 1] + 1
        pending_ps = before[self.first_event[1:]] - before[behind]
        first_host[begins] = first[opens]
        time_ps[first[opens]] += pending_ps[begins]
        return HostTimes(time_ps=time_ps, first_host=first_host, pending_ps=pending_ps)

    def _bounds(self, at: IntArray) -> tuple[IntArray, IntArray]:
        """Of ascending events, the places at which a class begins, and those classes."""
        cls = self.class_of[at]
        opens = np.flatnonzero(np.diff(cls, prepend=-1))
        return opens, cls[opens]

    def launches(self) -> tuple[IntArray, IntArray]:
        """(task, host task) of every launch."""
        layout = self._shape
        own = layout.eager[self.kernel_event]
        task, launcher = self.device_task[own], self.device_task[own] - 1
        heads = np.flatnonzero(layout.head)
        if len(heads):
            member = np.flatnonzero(~own)
            stretch = np.searchsorted(heads, self.kernel_event[member], side="right") - 1
            key = stretch * (int(self.stream_of.max()) + 1) + self.stream_of[self.kernel_event[member]]
            firsts = np.unique(key, return_index=True)[1]
            task = np.concatenate([task, self.device_task[member[firsts]]])
            launcher = np.concatenate([launcher, self.first[heads[stretch[firsts]]]])
        return task, launcher

    def waits(self) -> Waits:
        """Waits for other streams, then those of the host for the device.

        An event without kernels hands its waits to the next kernel on its stream.
        """
        waiter, source = self.columns.waiter, self.columns.source
        takes = waiter.copy()
        idle = np.flatnonzero(self.last_task[waiter] < 0)
        if len(idle):
            takes[idle] = self._neighbours(waiter[idle], side="left")
        kept = takes >= 0
        held = tuple(zip(waiter[~kept].tolist(), source[~kept].tolist(), strict=True))
        task = self.device_task[self.first_kernel[takes[kept]]]
        syncs = np.flatnonzero(self._shape.sync)
        ends = self.first[syncs] + self._shape.counts[syncs] - 1
        return Waits(task=np.concatenate([task, ends]), source=np.concatenate([source[kept], syncs]), held=held)

    def ends(self, events: IntArray) -> IntArray:
        """The last task on the stream of each event, at or before it (-1: none)."""
        found = self.last_task[events]
        without = np.flatnonzero(found < 0)
        if len(without):
            before = self._neighbours(events[without], side="right")
            found[without] = np.where(before < 0, NO_TASK, self.last_task[before])
        return found

    def _neighbours(self, events: IntArray, *, side: Literal["left", "right"]) -> IntArray:
        """The next event with kernels on the stream of each, or (`right`) the last before it (-1: none)."""
        size = self.columns.size
        if self._issuing is None:
            with_kernels = np.flatnonzero(self.last_task >= 0)
            self._issuing = np.sort(self._lane[with_kernels] * size + with_kernels)
        keys = self._lane[events] * size + events
        at = np.searchsorted(self._issuing, keys, side=side) - (side == "right")
        found = self._issuing[np.clip(at, 0, len(self._issuing) - 1)] if len(self._issuing) else keys - size
        is_there = (at >= 0) & (at < len(self._issuing)) & (found // size == self._lane[events])
        return np.where(is_there, found % size, NO_EVENT)

    def first_on(self, event: int) -> int:
        """The first device task on the stream of an event in its class (-1: none)."""
        if self._first_on is None:
            lanes, firsts = np.unique(self._lane[self.kernel_event], return_index=True)
            self._first_on = dict(zip(lanes.tolist(), self.device_task[firsts].tolist(), strict=True))
        return self._first_on.get(int(self._lane[event]), NO_TASK)

    def ahead(self) -> Iterator[tuple[int, int]]:
        """(task, event whose end of the iteration before it waits for) of ops on indices that travelled a batch ahead."""
        early: dict[
            tuple[int, int], int
        ] = {}  # storage of a class: the first event that reads it before an exchange fills it
        writer: dict[tuple[int, int], int] = {}
        for number, storage, written in self.columns.exchanged:
            key = (int(self.class_of[number]), storage)
            if written:
                writer[key] = number
            elif key not in writer and self.last_task[number] >= 0:
                early.setdefault(key, number)
        for key, number in early.items():
            if key in writer:
                yield int(self.device_task[self.first_kernel[number]]), writer[key]

    def groups(self) -> IntArray:
        """The instance of the collective that each task is part of, or NO_GROUP."""
        group = np.full(self.n_tasks, NO_GROUP, dtype=np.int64)
        at = self.columns.collective_at
        communicates = is_communication(self.stream_of[at])
        group[self.last_task[at[communicates]]] = self.columns.instance[communicates]
        return group

    def prefetched(self, prices: Prices) -> NDArray[np.bool_]:
        """Which events copy inputs for the next iteration."""
        return input_copies(prices, ahead=True)


def _category(streams: IntArray) -> IntArray:
    copies = (streams == COPY) | (streams == COPY_BACK)
    return np.where(is_communication(streams), _COLLECTIVE, np.where(copies, _COPY, _KERNEL))
