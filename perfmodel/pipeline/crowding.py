"""Processes that share the cores of a CPU: compute of all ranks and the threads of their collectives take turns.

Prices say how long a process takes that has its equal part of the cores, beside others that compute, all the time. Where
others wait it gets more, up to a core for each of its threads and all of the memory's bandwidth, and where gloo's threads move
bytes it gets less: `sim.cores` finds the lengths that follow,
over a few iterations, of which one in the middle counts. What a collective's threads ask for was measured with it
(`CollectiveEstimate.busy_frac`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from perfmodel.collectives import CollectiveEstimate
from perfmodel.db.device import Device
from perfmodel.pipeline.pricebook import FloatArray
from perfmodel.pipeline.tasks import LoweredClass
from perfmodel.sim.compile import Compiled, compile_programs
from perfmodel.sim.cores import Demand, lengths_on_cores
from perfmodel.sim.program import COMM, COMPUTE
from perfmodel.sim.steady import CarryDep, unrolled

PriceAlone = Callable[[Mapping[str, Device]], Sequence[LoweredClass]]
N_ITERATIONS, COUNTED = 4, 2  # iterations in a row, and the number of the one whose lengths count
GLOO_THREADS = (
    2  # of a rank that move a collective's bytes: one sends and reduces, one receives (gloo's tcp device loop)
)


def share_cores(
    classes: Sequence[LoweredClass],
    compiled: Compiled,
    carry: Sequence[CarryDep],
    collectives: Mapping[int, CollectiveEstimate],
    price_alone: PriceAlone,
) -> Compiled:
    """The programs with the times that tasks take beside all others; themselves on GPUs and of a lone process.

    `price_alone` gives the classes as they would be on devices that no other process uses.
    """
    devices = [lowered.device for lowered in classes]
    if any(device.kind != "cpu" for device in devices) or max(device.n_on_host for device in devices) <= 1:
        return compiled
    n_cores = sum(cores_of(lowered.device) * len(lowered.rank_class.ranks) for lowered in classes)
    computes = compiled.kind == COMPUTE
    crowded = compiled.duration_ps / np.where(computes, _each(compiled, map(crowding, devices)), 1.0)
    beside = np.where(computes, _beside(classes, compiled, crowded, price_alone), 1.0)
    alone = crowded / beside
    of_rank = _each(compiled, map(threads_of, devices)).astype(np.int64)
    n_ranks = _each(compiled, (len(lowered.rank_class.ranks) for lowered in classes)).astype(np.int64)
    every = Demand(
        threads=_tiled(n_ranks * np.where(compiled.kind == COMM, GLOO_THREADS, of_rank), compiled),
        share=_tiled(_shares(classes, compiled, collectives), compiled),
        beside=_tiled(beside, compiled),
        of_rank=_tiled(of_rank, compiled),
    )
    long = compile_programs(unrolled(compiled.programs, N_ITERATIONS, carry))
    lengths = lengths_on_cores(long, _tiled(alone, compiled), every, n_cores)
    return replace(compiled, duration_ps=np.rint(_counted(lengths, compiled)).astype(np.int64))


def alone(device: Device) -> Device:
    """The device of one process whose neighbours wait: its threads have a core each, the memory's bandwidth is its own.

    Faults on new pages stay as slow as beside others: what one process pays for large mappings alone varies from run to run
    between its own price and that (2.7 to 6.7 us a page).
    """
    crowd = crowding(device)
    host = replace(
        device.host,
        op_dispatch_s=device.host.op_dispatch_s / crowd,
        backward_op_s=device.host.backward_op_s / crowd,
    )
    at_once = min(device.n_on_host, device.host_cores)
    return replace(device, n_processes=1, n_on_host=at_once, host_cores=1, host=host)


def _beside(
    classes: Sequence[LoweredClass], compiled: Compiled, crowded_ps: FloatArray, price_alone: PriceAlone
) -> FloatArray:
    """How many times as long tasks take while other ranks compute, on cores of their own.

    1 where the device's fits are of other threads than a process has, so that they cannot tell.
    """
    if any(lowered.device.n_sms != threads_of(lowered.device) for lowered in classes):
        return np.ones(compiled.n_tasks)
    lone = price_alone({lowered.device.name: alone(lowered.device) for lowered in classes})
    lone_ps = np.concatenate([lowered.program.duration_ps for lowered in lone])
    if len(lone_ps) != compiled.n_tasks:  # classes were split since they were placed
        return np.ones(compiled.n_tasks)
    found: FloatArray = np.maximum(crowded_ps / np.maximum(lone_ps, 1), 1.0)
    return found


def cores_of(device: Device) -> float:
    """Cores of the host over its processes."""
    return device.host_cores / device.n_on_host


def crowding(device: Device) -> float:
    """How much longer prices are than those of a process that has a core for each thread."""
    return max(1.0, device.n_processes / device.n_sms)


def threads_of(device: Device) -> int:
    """Threads of one process."""
    return max(1, device.host_cores // device.n_on_host)


def _shares(
    classes: Sequence[LoweredClass], compiled: Compiled, collectives: Mapping[int, CollectiveEstimate]
) -> FloatArray:
    """Share of a core that each thread of a task asks for."""
    found = np.ones(compiled.n_tasks)
    for cls, lowered in enumerate(classes):
        begin = compiled.tasks_of(cls).start
        for task in np.flatnonzero(compiled.kinds_of(cls) == COMM).tolist():
            collective = lowered.rank_class.events[int(lowered.tasks.event[task])].collective
            busy = collectives[collective.instance].busy_frac if collective is not None else 0.0
            found[begin + task] = min(busy / GLOO_THREADS, 1.0)
    return found


def _each(compiled: Compiled, of_class: Iterable[float]) -> FloatArray:
    """A value of each class, for each of its tasks."""
    return np.repeat(np.array(list(of_class), dtype=np.float64), np.diff(compiled.wiring.offsets))


def _tiled(values: np.ndarray, compiled: Compiled) -> np.ndarray:
    """Values of tasks for all iterations, class by class."""
    return np.concatenate([np.tile(values[compiled.tasks_of(cls)], N_ITERATIONS) for cls in range(compiled.n_classes)])


def _counted(values: FloatArray, compiled: Compiled) -> FloatArray:
    """The values of the counted iteration."""
    parts = []
    for cls in range(compiled.n_classes):
        tasks = compiled.tasks_of(cls)
        size = tasks.stop - tasks.start
        begin = N_ITERATIONS * tasks.start + COUNTED * size
        parts.append(values[begin : begin + size])
    return np.concatenate(parts)
