"""Compute and communication that run on one rank at the same time slow each other: an event engine with rates.

A collective holds multiprocessors, and moves bytes through device memory, which compute kernels want too. While it runs on
a rank, a compute kernel there loses the share of its pace that the collective `held`, and the product of the collective's
`traffic` and of how much the kernel lives off memory. The collective loses that product too, on the rank where it is
largest (the slowest member holds back the rest, as in a ring). Shares of several that run at once add up, to 90 % at most.
A member that waits for the others slows nothing. Rates change only at starts and ends, and work is counted in 1/1000 ps,
so everything is whole numbers: a task ends at the first picosecond by which its work is done.

With slowdown, the simulator may answer a shorter task with a longer run: a collective that comes earlier can overlap,
and so slow, work that it did not touch before.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from perfmodel.errors import GraphError
from perfmodel.sim.compile import Compiled, compile_programs
from perfmodel.sim.loops import compiled_loop, has_numba, use_numba
from perfmodel.sim.overlap_loop import OTHER, Fixed, State, overlap_loop
from perfmodel.sim.program import ArrayProgram, IntArray, Program
from perfmodel.sim.rivals import OverlapModel, rivals_of
from perfmodel.sim.timeline import Timeline


def simulate_overlapped(programs: Sequence[Program | ArrayProgram], model: OverlapModel) -> Timeline:
    """`simulate`, with compute and communication slowing each other. Raises GraphError as `simulate`."""
    return simulate_overlapped_compiled(compile_programs(programs), model)


def simulate_overlapped_compiled(
    compiled: Compiled, model: OverlapModel, duration_ps: IntArray | None = None
) -> Timeline:
    """`simulate_overlapped` without the conversion; `duration_ps` replaces the programs' own durations."""
    numba = use_numba(overlap_loop, compiled.n_tasks)
    return overlapped_with(compiled, model, duration_ps, numba=numba)


def overlapped_with(compiled: Compiled, model: OverlapModel, duration_ps: IntArray | None, *, numba: bool) -> Timeline:
    """`simulate_overlapped_compiled` with the way to run it given: compiled by numba, or plain Python."""
    durations = compiled.duration_ps if duration_ps is None else np.asarray(duration_ps, dtype=np.int64)
    if durations.shape != (compiled.n_tasks,):
        raise GraphError(f"{durations.size} durations for {compiled.n_tasks} tasks")
    fixed, state = _prepare(compiled, model, durations)
    if numba:
        compiled_loop(overlap_loop)(fixed, state)
    else:
        state = State(*(array.tolist() for array in state))
        overlap_loop(Fixed(*(array.tolist() for array in fixed)), state)
    return Timeline(
        compiled=compiled,
        duration_ps=durations,
        release_ps=np.zeros(compiled.n_tasks, dtype=np.int64),
        ready_ps=np.asarray(state.ready, dtype=np.int64),
        start_ps=np.asarray(state.start, dtype=np.int64),
        end_ps=np.asarray(state.end, dtype=np.int64),
        stretched=True,
    )


def warm_up() -> bool:
    """Loads the compiled loop now, so that later runs of any size use it; False if numba is not installed."""
    if not has_numba():
        return False
    overlapped_with(compile_programs([Program(tasks=())]), OverlapModel(), None, numba=True)
    return True


def _prepare(compiled: Compiled, model: OverlapModel, durations: IntArray) -> tuple[Fixed, State]:
    """Arrays of the loop; every one int64."""
    n, wiring, rivals = compiled.n_tasks, compiled.wiring, rivals_of(compiled, model)
    owner = np.repeat(np.arange(n), np.diff(wiring.dep_ptr))
    has_prev = np.flatnonzero(wiring.prev >= 0)
    source = np.concatenate([wiring.dep_index, wiring.prev[has_prev]])
    target = np.concatenate([owner, has_prev])
    lag = np.concatenate([compiled.dep_lag_ps, np.zeros(len(has_prev), dtype=np.int64)])
    by_source = np.argsort(source, kind="stable")
    follower, n_units = target[by_source], rivals.n_units
    fixed = Fixed(
        unit_ptr=rivals.unit_ptr,
        unit_task=rivals.unit_task,
        work=rivals.largest(durations),
        held=rivals.held,
        traffic=rivals.traffic,
        memory=rivals.memory,
        plain=1 - rivals.largest((rivals.kind != OTHER).astype(np.int64)),
        slot=rivals.slot,
        rival_first=rivals.rival_first,
        rival_end=rivals.rival_end,
        follower_ptr=np.concatenate([[0], np.cumsum(np.bincount(source, minlength=n))]),
        follower=follower,
        follower_unit=rivals.unit[follower],
        follower_lag=lag[by_source],
    )
    per_unit, per_task = np.zeros((4, n_units), dtype=np.int64), np.zeros((3, n), dtype=np.int64)
    state = State(
        missing=np.bincount(rivals.unit[target], minlength=n_units),
        left=per_unit[0],
        since=per_unit[1],
        pace=per_unit[2],
        ending=per_unit[3],
        running=np.full(int(rivals.slots_ptr[-1]), -1, dtype=np.int64),
        ready=per_task[0],
        start=per_task[1],
        end=per_task[2],
    )
    return fixed, state
