"""From placed events and prices to the simulator's programs: see `lowering` for what an event becomes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from perfmodel.db.device import Device
from perfmodel.pipeline.copies import in_line
from perfmodel.pipeline.lowering import NO_TASK, Lowering
from perfmodel.pipeline.pricebook import IntArray, PricedClasses, Prices
from perfmodel.pipeline.settings import DEFAULT_SETTINGS, RunSettings
from perfmodel.pipeline.tasks import LoweredClass, Tasks
from perfmodel.plan.events import RankClass
from perfmodel.sim.program import COMPUTE, COPY, HOST, ArrayProgram
from perfmodel.sim.steady import CarryDep
from perfmodel.units import PS_PER_S


def lower_class(
    rank_class: RankClass, device: Device, prices: Prices, settings: RunSettings, cls: int = 0
) -> LoweredClass:
    """The program of one rank class on its device: see `lower_classes`."""
    priced = PricedClasses(whole=prices, parts=(prices,), first_event=np.array([0, prices.columns.size]))
    return lower_classes([rank_class], device, priced, settings, [cls])[0]


def lower_classes(
    rank_classes: Sequence[RankClass],
    device: Device,
    priced: PricedClasses,
    settings: RunSettings,
    numbers: Sequence[int],
) -> list[LoweredClass]:
    """The programs of rank classes on one device; `numbers` are theirs in the simulator.

    Raises:
        ConfigError: a mode that the device or the model does not allow.
    """
    wired = _wired(priced, device, settings)
    lowering = wired.lowering
    host = lowering.host_times(priced.whole)
    tasks = lowering.tasks(priced.whole, host.time_ps)
    duration_ps = np.rint(tasks.time_s * PS_PER_S).astype(np.int64)
    found = []
    for i, (rank_class, prices, number) in enumerate(zip(rank_classes, priced.parts, numbers, strict=True)):
        mine = slice(int(lowering.first_task[i]), int(lowering.first_task[i + 1]))
        program = replace(wired.programs[i], duration_ps=duration_ps[mine], n_ranks=len(rank_class.ranks))
        found.append(
            LoweredClass(
                rank_class=rank_class,
                device=device,
                prices=prices,
                program=program,
                tasks=_tasks_of(tasks, mine, wired.events[i]),
                carry=tuple(replace(dep, cls=number) for dep in wired.carry[i]),
            )
        )
    return found


def _tasks_of(tasks: Tasks, mine: slice, event: IntArray) -> Tasks:
    return Tasks(
        event=event,
        category=tasks.category[mine],
        family=tasks.family[mine],
        source=tasks.source[mine],
        time_s=tasks.time_s[mine],
        low_s=tasks.low_s[mine],
        high_s=tasks.high_s[mine],
        ideal_s=tasks.ideal_s[mine],
        memory_frac=tasks.memory_frac[mine],
        names=tasks.names,
    )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Wired:
    """What does not depend on prices: the tasks of classes, who waits for whom, by class programs without their durations.

    `others` are `Prices.derived` of the classes after the first, which holds this; `events` the event of each task by class.
    """

    others: tuple[object, ...]
    lowering: Lowering
    programs: tuple[ArrayProgram, ...]
    events: tuple[IntArray, ...]
    carry: tuple[tuple[CarryDep, ...], ...]


def _wired(priced: PricedClasses, device: Device, settings: RunSettings) -> _Wired:
    """Found once for sequences of events, however often they are priced again."""
    derived = tuple(prices.derived for prices in priced.parts)
    key = "wired", settings.mode
    known: _Wired | None = derived[0].get(key)
    if (
        known is None
        or len(known.others) != len(derived) - 1
        or any(a is not b for a, b in zip(known.others, derived[1:], strict=True))
    ):
        lowering = Lowering(priced, device, settings)
        rows, carry = _waits(lowering, priced.whole)
        first_event = lowering.first_event.tolist()
        edges = list(zip(lowering.first_task[:-1].tolist(), lowering.first_task[1:].tolist(), strict=True))
        known = _Wired(
            others=derived[1:],
            lowering=lowering,
            programs=tuple(_programs(lowering, rows)),
            events=tuple(lowering.event[a:b] - first for (a, b), first in zip(edges, first_event, strict=False)),
            carry=carry,
        )
        derived[0][key] = known
    return known


def _waits(lowering: Lowering, prices: Prices) -> tuple[IntArray, tuple[tuple[CarryDep, ...], ...]]:
    """Waits within an iteration, as rows (task, the task it waits for, lag); and by class those for the iteration before.

    What is held over, waits for prefetched inputs, and copies of inputs behind the kernels reach one iteration back.
    """
    waits, line = lowering.waits(), in_line(lowering, prices)
    end = lowering.ends(waits.source)
    back = lowering.prefetched(prices)[waits.source] & (lowering.stream[waits.task] != HOST)
    now = (end >= 0) & ~back
    rows = _without_lag([waits.task[now], line.task], [end[now], line.on])
    pairs = list(zip(waits.task[back & (end >= 0)].tolist(), end[back & (end >= 0)].tolist(), strict=True))
    for event, source in _by_stream(lowering, waits.held):
        task, before = lowering.first_on(event), int(lowering.ends(np.array([source]))[0])
        if task >= 0 and before >= 0:
            pairs.append((task, before))
    pairs += [(task, int(lowering.ends(np.array([source]))[0])) for task, source in lowering.ahead()]
    pairs += line.over()
    carry: list[list[CarryDep]] = [[] for _ in range(len(lowering.first_event) - 1)]
    for task, on in pairs:
        cls = int(np.searchsorted(lowering.first_task, task, side="right")) - 1
        first = int(lowering.first_task[cls])
        carry[cls].append(CarryDep(cls=cls, task=task - first, on=on - first))
    return rows, tuple(map(tuple, carry))


def _without_lag(task: Sequence[IntArray], on: Sequence[IntArray]) -> IntArray:
    """Rows (task, the task it waits for, lag)."""
    tasks = np.concatenate(task)
    return np.stack([tasks, np.concatenate(on), np.zeros_like(tasks)], axis=1)


def _by_stream(lowering: Lowering, held: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """What is held, stream by stream in the order in which they come up first."""
    found: dict[int, list[tuple[int, int]]] = {}
    for event, source in held:
        found.setdefault(int(lowering.stream_of[event]), []).append((event, source))
    return [pair for pairs in found.values() for pair in pairs]


def _programs(lowering: Lowering, rows: IntArray) -> list[ArrayProgram]:
    """By class the program of its tasks, which wait for each other as `rows` say; durations are left at 0."""
    task, launcher = lowering.launches()
    latency_s = 0.0 if lowering.device.kind == "cpu" else lowering.device.host.launch_latency_s
    lag = np.full(len(task), round(latency_s * PS_PER_S), dtype=np.int64)
    owner, index, lags = (np.concatenate([first, rows[:, i]]) for i, first in enumerate((task, launcher, lag)))
    by_owner = np.argsort(owner, kind="stable")
    index, lags = index[by_owner], lags[by_owner]
    count = np.bincount(owner, minlength=lowering.n_tasks).astype(np.int64)
    group, duration_ps = lowering.groups(), np.zeros(lowering.n_tasks, dtype=np.int64)
    first_task = lowering.first_task
    edges = np.concatenate([[0], np.cumsum(count)])[first_task].tolist()
    found = []
    for i, (begin, end) in enumerate(zip(first_task[:-1].tolist(), first_task[1:].tolist(), strict=True)):
        found.append(
            ArrayProgram(
                stream=lowering.stream[begin:end],
                duration_ps=duration_ps[begin:end],
                group=group[begin:end],
                dep_count=count[begin:end],
                dep_index=index[edges[i] : edges[i + 1]] - begin,
                dep_lag_ps=lags[edges[i] : edges[i + 1]],
            )
        )
    return found


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LoweredSegment:
    """The program of events that others come before and after.

    Attributes:
        program: its tasks, with what they wait for among themselves.
        tasks: what they stand for.
        tail_ps: host time that its first host task after it takes over.
        open_waits: (task, stream): it waits for what ran last on the stream before the segment.
        held: (stream, task or NO_TASK, source stream): the next kernel on the stream waits for the task, or for what
            ran last on the source stream before the segment.
    """

    program: ArrayProgram
    tasks: Tasks
    tail_ps: int
    open_waits: tuple[tuple[int, int], ...]
    held: tuple[tuple[int, int, int], ...]


def lower_segment(device: Device, prices: Prices) -> LoweredSegment:
    """The program of a stretch of a rank's events, executed as `DEFAULT_SETTINGS` say."""
    priced = PricedClasses(whole=prices, parts=(prices,), first_event=np.array([0, prices.columns.size]))
    lowering = Lowering(priced, device, DEFAULT_SETTINGS)
    host = lowering.host_times(prices)
    time_ps, tail_ps = host.time_ps, int(host.pending_ps[0])
    if host.first_host[0] != NO_TASK:
        time_ps[host.first_host] -= tail_ps
    waits, line = lowering.waits(), in_line(lowering, prices)
    end = lowering.ends(waits.source)
    inside = end >= 0
    rows = _without_lag([waits.task[inside], line.task], [end[inside], line.on])
    opens = list(zip(waits.task[~inside].tolist(), lowering.stream_of[waits.source[~inside]].tolist(), strict=True))
    opens += [(task, COMPUTE) for task, is_copy in line.opens if is_copy]
    left = [
        (int(lowering.stream_of[event]), int(lowering.ends(np.array([source]))[0]), int(lowering.stream_of[source]))
        for event, source in _by_stream(lowering, waits.held)
    ]
    left += [(COMPUTE, task, COPY) for task, is_copy in line.closes if is_copy]
    tasks = lowering.tasks(prices, time_ps)
    program = replace(_programs(lowering, rows)[0], duration_ps=np.rint(tasks.time_s * PS_PER_S).astype(np.int64))
    return LoweredSegment(program=program, tasks=tasks, tail_ps=tail_ps, open_waits=tuple(opens), held=tuple(left))
