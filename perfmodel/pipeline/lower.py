"""From placed events and prices to the simulator's programs.

On a CUDA device the host thread issues kernels and runs ahead: every kernel becomes a host task (dispatch and launch) and a
device task that depends on it. On a CPU device the thread that dispatches an op also runs it, so host and device time of an
op are one task on the compute stream.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from perfmodel.db.device import Device
from perfmodel.estimate import ZERO, Estimate, Source
from perfmodel.kernels import calls_of, host_cost_s, price
from perfmodel.plan.events import Event, RankClass, Stream
from perfmodel.sim.program import COMM, COMPUTE, COPY, HOST, NO_GROUP, Program, Task
from perfmodel.units import seconds_to_ps

Category = Literal["host", "sync", "kernel", "copy", "collective"]
STREAM_NUMBERS: Mapping[Stream, int] = {"compute": COMPUTE, "comm": COMM, "copy": COPY}


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskInfo:
    """What a task of a program stands for: the index of its event, what it is, and its price."""

    event: int
    category: Category
    family: str
    estimate: Estimate


@dataclass(frozen=True, slots=True, kw_only=True)
class LoweredClass:
    """The program of one rank class, with `infos[i]` describing `program.tasks[i]`."""

    rank_class: RankClass
    device: Device
    program: Program
    infos: tuple[TaskInfo, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class EventPrice:
    """Price of one event: one estimate per kernel (or one for a collective), their families, and the host's time (s)."""

    kernels: tuple[Estimate, ...]
    families: tuple[str, ...]
    host_s: float


def price_events(
    events: Sequence[Event], device: Device, collective_prices: Mapping[int, Estimate]
) -> tuple[EventPrice, ...]:
    """Prices every event of one rank class. `collective_prices` maps collective instances to estimates."""
    ops = [event.op for event in events if event.op is not None]
    by_op = iter(price(ops, device))
    prices = []
    for event in events:
        if event.op is not None:
            kernels = next(by_op)
            families = tuple(call.family for call in calls_of(event.op))
            prices.append(
                EventPrice(kernels=kernels, families=families, host_s=host_cost_s(event.op, len(kernels), device))
            )
        elif event.collective is not None:
            estimate = collective_prices[event.collective.instance]
            host_s = device.host.op_dispatch_s + device.host.launch_s
            prices.append(EventPrice(kernels=(estimate,), families=(event.collective.op,), host_s=host_s))
    return tuple(prices)


class _Lowering:
    """Accumulates the tasks of one rank class; `lower_class` is the only user."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self.tasks: list[Task] = []
        self.infos: list[TaskInfo] = []
        self.last_on: dict[int, int] = {}
        self.event_end: list[int | None] = []
        self.pending_host_s = 0.0
        self.latency_ps = seconds_to_ps(device.host.launch_latency_s)

    def add(
        self,
        stream: int,
        estimate: Estimate,
        info: tuple[int, Category, str],
        deps: Sequence[tuple[int, int]],
        group: int,
    ) -> int:
        index = len(self.tasks)
        event, category, family = info
        self.tasks.append(
            Task(stream=stream, duration_ps=seconds_to_ps(estimate.time_s), deps=tuple(deps), group=group)
        )
        self.infos.append(TaskInfo(event=event, category=category, family=family, estimate=estimate))
        self.last_on[stream] = index
        return index

    def host(self, event: int, time_s: float, deps: Sequence[tuple[int, int]] = (), category: Category = "host") -> int:
        total_s = self.pending_host_s + time_s
        self.pending_host_s = 0.0
        estimate = Estimate(time_s=total_s, low_s=0.7 * total_s, high_s=1.5 * total_s, source=Source.FITTED)
        return self.add(HOST, estimate, (event, category, "host"), deps, NO_GROUP)

    def waits(self, event: Event) -> list[tuple[int, int]]:
        return [(end, 0) for i in event.after if (end := self.event_end[i]) is not None]


def lower_class(rank_class: RankClass, device: Device, prices: Sequence[EventPrice]) -> LoweredClass:
    """The program of one rank class on its device."""
    lowering = _Lowering(device)
    step = _cuda_event if device.kind == "cuda" else _cpu_event
    for index, (event, event_price) in enumerate(zip(rank_class.events, prices, strict=True)):
        step(lowering, index, event, event_price)
        lowering.event_end.append(lowering.last_on.get(STREAM_NUMBERS[event.stream]))
    if lowering.pending_host_s > 0:
        lowering.host(len(rank_class.events) - 1, 0.0)
    program = Program(tasks=tuple(lowering.tasks), n_ranks=len(rank_class.ranks))
    return LoweredClass(rank_class=rank_class, device=device, program=program, infos=tuple(lowering.infos))


def _cuda_event(low: _Lowering, index: int, event: Event, event_price: EventPrice) -> None:
    waits = low.waits(event)
    host_waits = waits if event.host_waits else []
    if not event_price.kernels:
        low.pending_host_s += event_price.host_s
        if host_waits:
            low.host(index, low.device.host.sync_s, host_waits, "sync")
        return
    n_kernels = len(event_price.kernels)
    launch_s = min(low.device.host.launch_s, event_price.host_s / n_kernels)
    first_s = event_price.host_s - (n_kernels - 1) * launch_s
    group = event.collective.instance if event.collective is not None else NO_GROUP
    category = _category(event)
    for number, (estimate, family) in enumerate(zip(event_price.kernels, event_price.families, strict=True)):
        issued = low.host(index, first_s if number == 0 else launch_s, host_waits if number == 0 else ())
        deps = [(issued, low.latency_ps), *(waits if number == 0 else ())]
        low.add(STREAM_NUMBERS[event.stream], estimate, (index, category, family), deps, group)
    if event.op is not None and event.op.host_sync:
        low.host(index, low.device.host.sync_s, [(len(low.tasks) - 1, 0)], "sync")


def _cpu_event(low: _Lowering, index: int, event: Event, event_price: EventPrice) -> None:
    waits = low.waits(event)
    if event.collective is not None:
        issued = low.add(COMPUTE, _host_estimate(event_price.host_s), (index, "host", "host"), (), NO_GROUP)
        estimate = event_price.kernels[0]
        deps = [(issued, 0), *waits]
        low.add(COMM, estimate, (index, "collective", event_price.families[0]), deps, event.collective.instance)
        return
    body = sum(event_price.kernels, ZERO)
    estimate = body + _host_estimate(event_price.host_s)
    family = event_price.families[0] if event_price.families else "host"
    category: Category = "kernel" if event_price.kernels else "host"
    low.add(STREAM_NUMBERS[event.stream], estimate, (index, category, family), waits, NO_GROUP)


def _host_estimate(time_s: float) -> Estimate:
    return Estimate(time_s=time_s, low_s=0.7 * time_s, high_s=1.5 * time_s, source=Source.FITTED)


def _category(event: Event) -> Category:
    if event.collective is not None:
        return "collective"
    return "copy" if event.stream == "copy" else "kernel"
