"""Programs -> Timeline. Rules only: first-in first-out streams, deps, collectives that wait for their last member."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from perfmodel.errors import GraphError
from perfmodel.sim.compile import Compiled, compile_programs
from perfmodel.sim.program import ArrayProgram, IntArray, Program
from perfmodel.sim.sweep import sweep
from perfmodel.sim.timeline import Timeline


def simulate(programs: Sequence[Program | ArrayProgram]) -> Timeline:
    """Runs one iteration from an idle machine.

    Each task starts when the previous task on its stream has ended, each dep has ended plus its lag, and, for a
    collective, every member is ready; a collective lasts as long as its slowest member's `duration_ps`.

    Raises:
        GraphError: malformed programs or a deadlock (see `compile_programs`).

    >>> from perfmodel.sim.program import COMPUTE, HOST, Program, Task
    >>> host, kernel = Task(stream=HOST, duration_ps=5), Task(stream=COMPUTE, duration_ps=7, deps=((0, 2),))
    >>> simulate([Program(tasks=[host, kernel])]).makespan_ps
    14
    """
    return simulate_compiled(compile_programs(programs))


def simulate_compiled(compiled: Compiled, duration_ps: IntArray | None = None) -> Timeline:
    """`simulate` without the conversion; `duration_ps` (one per global task index) replaces the programs' own."""
    durations = compiled.duration_ps if duration_ps is None else np.asarray(duration_ps, dtype=np.int64)
    if durations.shape != (compiled.n_tasks,):
        raise GraphError(f"{durations.size} durations for {compiled.n_tasks} tasks")
    release = np.zeros(compiled.n_tasks, dtype=np.int64)
    ready, start, end = sweep(compiled, durations, release)
    return Timeline(
        compiled=compiled, duration_ps=durations, release_ps=release, ready_ps=ready, start_ps=start, end_ps=end
    )
