"""Loads the simulator's compiled loops before they are first needed."""

from __future__ import annotations

from perfmodel.sim.compile import compile_programs
from perfmodel.sim.engine import simulate_compiled
from perfmodel.sim.loops import LOADED_FROM_TASKS, compiled_loop, has_numba
from perfmodel.sim.order import append_unit, general_order, kahn_loop
from perfmodel.sim.path import critical_stretches, walk_loop
from perfmodel.sim.program import Program, Task
from perfmodel.sim.sweep import sweep_loop


def warm_up_all() -> bool:
    """Loads them, so that later runs of any size use them; False if numba is not installed.

    Worth it for a process that predicts many times (0.5 s once, from the cache on disk).
    """
    if not has_numba():
        return False
    compiled_loop(sweep_loop)
    compiled_loop(walk_loop)
    compiled_loop(kahn_loop, append_unit)
    # Compiled loops are loaded for the types that they are first called with: those of any program.
    tasks = [
        Task(stream=1, duration_ps=1),
        *(Task(stream=1, duration_ps=1, deps=((0, 0),)) for _ in range(LOADED_FROM_TASKS)),
    ]
    compiled = compile_programs([Program(tasks=tasks)])
    general_order(compiled.wiring)
    critical_stretches(simulate_compiled(compiled))
    return True
