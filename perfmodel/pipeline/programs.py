"""From lowered classes to what the simulator runs: launch queue, and waits across iterations."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from operator import is_not
from typing import Any

import numpy as np

from perfmodel.pipeline.settings import RunSettings
from perfmodel.pipeline.tasks import LoweredClass
from perfmodel.sim.compile import Compiled, compile_programs
from perfmodel.sim.launch import LAUNCH_QUEUE_DEPTH, with_launch_queue
from perfmodel.sim.program import HOST, ArrayProgram
from perfmodel.sim.steady import CarryRows


def compile_classes(classes: Sequence[LoweredClass]) -> tuple[Compiled, CarryRows]:
    """The programs behind a bounded launch queue, and what waits across iterations."""
    carry = CarryRows.of([dep for lowered in classes for dep in lowered.carry])
    programs: list[ArrayProgram] = [lowered.program for lowered in classes]
    if any(_fills_queue(program) for program in programs):
        programs, queued = with_launch_queue(programs, LAUNCH_QUEUE_DEPTH)
        is_next = queued.rows[:, 4] == 1
        carry = CarryRows(np.concatenate([carry.rows, queued.rows[is_next]]))
    return compile_programs(programs), carry


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Known:
    """Programs compiled before; `others` are `Prices.derived` of the classes after the first, which holds this."""

    others: tuple[dict[Hashable, Any], ...]
    compiled: Compiled
    carry: CarryRows


def recompile_classes(classes: Sequence[LoweredClass], settings: RunSettings) -> tuple[Compiled, CarryRows]:
    """`compile_classes` of what `lower_class` made under `settings`, unchanged.

    Such programs of the same events differ in their times alone, so the rest is kept with what else follows from the events.
    """
    derived = tuple(lowered.prices.derived for lowered in classes)
    key = "compiled", settings.mode, LAUNCH_QUEUE_DEPTH
    known: _Known | None = derived[0].get(key)
    if known is None or len(known.others) != len(derived) - 1 or any(map(is_not, known.others, derived[1:])):
        compiled, carry = compile_classes(classes)
        derived[0][key] = _Known(others=derived[1:], compiled=compiled, carry=carry)
        return compiled, carry
    durations = [lowered.program.duration_ps for lowered in classes]
    programs = tuple(
        replace(program.arrays(), duration_ps=duration_ps)
        for program, duration_ps in zip(known.compiled.programs, durations, strict=True)
    )
    return replace(known.compiled, programs=programs, duration_ps=np.concatenate(durations)), known.carry


def _fills_queue(program: ArrayProgram) -> bool:
    """Whether some stream launches more kernels in an iteration than the queue holds.

    If none does, the queue reaches over whole iterations and cannot set the pace: the wait of a launch for the kernel
    `depth` before it closes a cycle over d iterations that runs through less than one iteration's work.
    """
    streams = program.stream[program.stream != HOST]
    return bool(len(streams)) and int(np.bincount(streams).max()) > LAUNCH_QUEUE_DEPTH
