"""From lowered classes to what the simulator runs: launch queue, and waits across iterations."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from perfmodel.pipeline.tasks import LoweredClass
from perfmodel.sim.compile import Compiled, compile_programs
from perfmodel.sim.launch import LAUNCH_QUEUE_DEPTH, with_launch_queue
from perfmodel.sim.program import HOST, ArrayProgram
from perfmodel.sim.steady import CarryDep


def compile_classes(classes: Sequence[LoweredClass]) -> tuple[Compiled, list[CarryDep]]:
    """The programs behind a bounded launch queue, and what waits across iterations."""
    carry = [dep for lowered in classes for dep in lowered.carry]
    programs: list[ArrayProgram] = [lowered.program for lowered in classes]
    if any(_fills_queue(program) for program in programs):
        programs, queued = with_launch_queue(programs, LAUNCH_QUEUE_DEPTH)
        carry += [dep for dep in queued if dep.distance == 1]
    return compile_programs(programs), carry


def _fills_queue(program: ArrayProgram) -> bool:
    """Whether some stream launches more kernels in an iteration than the queue holds.

    If none does, the queue reaches over whole iterations and cannot set the pace: the wait of a launch for the kernel
    `depth` before it closes a cycle over d iterations that runs through less than one iteration's work.
    """
    streams = program.stream[program.stream != HOST]
    return bool(len(streams)) and int(np.bincount(streams).max()) > LAUNCH_QUEUE_DEPTH
