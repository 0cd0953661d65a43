"""Iteration times of programs that differ only in how long their tasks take: wired once, refilled and run many times.

`Wires.iteration_ps` equals what `simulate_slowed` finds of the same programs and durations, picosecond for picosecond, and
keeps no timeline.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

from perfmodel.pipeline.programs import compile_classes
from perfmodel.pipeline.tasks import CATEGORIES, LoweredClass
from perfmodel.sim.compile import Compiled
from perfmodel.sim.program import HOST, NO_GROUP, IntArray
from perfmodel.sim.rivals import OverlapModel
from perfmodel.sim.steady_slowed import SlowedPrograms
from perfmodel.units import PS_PER_S

FloatArray = NDArray[np.float64]
Shares = Callable[[Sequence[LoweredClass], Compiled], OverlapModel | None]


class Wires:
    """The programs of ranks, one class a rank, that new durations are put into.

    Args:
        classes: lowered classes on CUDA devices.
        ranks: for each program, the number of its class in `classes`.
        shares: how compute and communication slow each other, from the lowered classes of the programs and these compiled;
            None for no slowdown.
    """

    def __init__(self, classes: Sequence[LoweredClass], ranks: Sequence[int], shares: Shares) -> None:
        chosen = [
            replace(classes[number], carry=tuple(replace(dep, cls=place) for dep in classes[number].carry))
            for place, number in enumerate(ranks)
        ]
        self.compiled: Compiled
        self.compiled, carry = compile_classes(chosen)
        self._programs = SlowedPrograms(self.compiled, carry, shares(chosen, self.compiled))

    @property
    def duration_ps(self) -> IntArray:
        """Durations of all tasks as they were compiled, program by program."""
        return self.compiled.duration_ps

    def iteration_ps(self, durations_ps: IntArray) -> list[Fraction]:
        """Time of one iteration (ps) for each row of durations [runs, tasks]."""
        return self._programs.iterations_ps(durations_ps)


def with_empty_kernels(lowered: LoweredClass, after: Mapping[int, int]) -> LoweredClass:
    """The class with so many kernels that take no time behind some of its eager kernels; no other task ends otherwise.

    Each has a host task of its own, as every kernel has: host and device go on where the kernel before left them.
    """
    n = len(lowered.tasks)
    extra = np.zeros(n, dtype=np.int64)
    extra[list(after)] = 2 * np.array(list(after.values()), dtype=np.int64)
    old = np.repeat(np.arange(n), 1 + extra)
    moved = np.arange(n) + np.cumsum(extra) - extra
    place = np.arange(len(old)) - moved[old]
    host, empty = place % 2 == 1, (place > 0) & (place % 2 == 0)
    program, tasks = lowered.program, lowered.tasks
    owner = np.repeat(np.arange(n), program.dep_count)
    launch_ps = round(lowered.device.host.launch_latency_s * PS_PER_S)
    rows = np.concatenate([moved[owner], np.flatnonzero(empty)])
    index = np.concatenate([moved[program.dep_index], np.flatnonzero(empty) - 1])
    lags = np.concatenate([program.dep_lag_ps, np.full(int(empty.sum()), launch_ps, dtype=np.int64)])
    by_owner = np.argsort(rows, kind="stable")

    def spent(time_s: FloatArray) -> FloatArray:
        return np.where(place > 0, 0.0, time_s[old])

    return replace(
        lowered,
        program=replace(
            program,
            stream=np.where(host, HOST, program.stream[old]),
            duration_ps=np.where(place > 0, 0, program.duration_ps[old]),
            group=np.where(place > 0, NO_GROUP, program.group[old]),
            dep_count=np.bincount(rows, minlength=len(old)).astype(np.int64),
            dep_index=index[by_owner],
            dep_lag_ps=lags[by_owner],
        ),
        tasks=replace(
            tasks,
            event=tasks.event[old],
            category=np.where(host, CATEGORIES.index("host"), tasks.category[old]),
            family=tasks.family[old],
            source=tasks.source[old],
            time_s=spent(tasks.time_s),
            low_s=spent(tasks.low_s),
            high_s=spent(tasks.high_s),
            ideal_s=spent(tasks.ideal_s),
            memory_frac=spent(tasks.memory_frac),
        ),
        carry=tuple(replace(dep, task=int(moved[dep.task]), on=int(moved[dep.on])) for dep in lowered.carry),
    )
