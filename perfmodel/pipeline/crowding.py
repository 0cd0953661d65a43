"""Processes that share the cores of a CPU: compute of all ranks and the threads of their collectives take turns.

Prices say how long a process takes that has its equal part of the cores all the time. Where others wait it gets more, up to
a core for each of its threads, and where gloo's threads move bytes it gets less: `sim.cores` finds the lengths that follow,
over a few iterations, of which one in the middle counts. What a collective's threads ask for was measured with it
(`CollectiveEstimate.busy_frac`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
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

N_ITERATIONS, COUNTED = 4, 2  # iterations in a row, and the number of the one whose lengths count
GLOO_THREADS = (
    2  # of a rank that move a collective's bytes: one sends and reduces, one receives (gloo's tcp device loop)
)


def share_cores(
    classes: Sequence[LoweredClass],
    compiled: Compiled,
    carry: Sequence[CarryDep],
    collectives: Mapping[int, CollectiveEstimate],
) -> Compiled:
    """The programs with the times that tasks take beside all others; themselves on GPUs and of a lone process."""
    devices = [lowered.device for lowered in classes]
    if any(device.kind != "cpu" for device in devices) or max(device.n_on_host for device in devices) <= 1:
        return compiled
    n_cores = sum(cores_of(lowered.device) * len(lowered.rank_class.ranks) for lowered in classes)
    alone = compiled.duration_ps / np.where(compiled.kind == COMPUTE, _each(compiled, map(crowding, devices)), 1.0)
    demand = Demand(
        threads=_each(compiled, (len(lowered.rank_class.ranks) for lowered in classes)).astype(np.int64)
        * np.where(compiled.kind == COMM, GLOO_THREADS, _each(compiled, map(threads_of, devices)).astype(np.int64)),
        share=_shares(classes, compiled, collectives),
    )
    long = compile_programs(unrolled(compiled.programs, N_ITERATIONS, carry))
    every = Demand(threads=_tiled(demand.threads, compiled), share=_tiled(demand.share, compiled))
    lengths = lengths_on_cores(long, _tiled(alone, compiled), every, n_cores)
    return replace(compiled, duration_ps=np.rint(_counted(lengths, compiled)).astype(np.int64))


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
