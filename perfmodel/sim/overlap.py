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
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from perfmodel.errors import GraphError
from perfmodel.sim.compile import Compiled, compile_programs
from perfmodel.sim.loops import compiled_loop, has_numba, use_numba
from perfmodel.sim.overlap_loop import FULL_PACE, OTHER, Fixed, State, overlap_loop
from perfmodel.sim.program import COMM, COMPUTE, COPY, HOST, ArrayProgram, IntArray, Program
from perfmodel.sim.timeline import Timeline


@dataclass(frozen=True, slots=True, kw_only=True)
class OverlapModel:
    """What tasks want of a rank's device while they run, in permille: one value for all tasks, or one per global task index.

    Attributes:
        held: of a collective: the share of a compute kernel's pace that its multiprocessors cost.
        traffic: of a collective: the share of a memory-bound kernel's pace that its traffic costs, and it in turn loses
            beside one.
        memory: of a compute kernel: how much of its time it is bound by memory (1000: all of it).

    Of a collective's members the largest shares count. Values of other kinds of tasks are not read.
    """

    held: int | IntArray = 0
    traffic: int | IntArray = 0
    memory: int | IntArray = 0


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
    n, wiring = compiled.n_tasks, compiled.wiring
    unit, unit_ptr, unit_task = _units(compiled)
    cls = np.repeat(np.arange(compiled.n_classes), np.diff(wiring.offsets))
    kind, slot, slots_ptr = _slots(compiled, cls)
    # The buckets of a class, compute and communication, are neighbours.
    rival = np.repeat(np.arange(2 * compiled.n_classes) ^ 1, np.diff(slots_ptr))
    owner = np.repeat(np.arange(n), np.diff(wiring.dep_ptr))
    has_prev = np.flatnonzero(wiring.prev >= 0)
    source = np.concatenate([wiring.dep_index, wiring.prev[has_prev]])
    target = np.concatenate([owner, has_prev])
    lag = np.concatenate([compiled.dep_lag_ps, np.zeros(len(has_prev), dtype=np.int64)])
    by_source = np.argsort(source, kind="stable")
    n_units = len(unit_ptr) - 1
    fixed = Fixed(
        unit_ptr=unit_ptr,
        unit_task=unit_task,
        work=_largest(durations, unit, n_units),
        held=_shares(model.held, kind == COMM, unit, n_units),
        traffic=_shares(model.traffic, kind == COMM, unit, n_units),
        memory=_shares(model.memory, kind == COMPUTE, unit, n_units),
        plain=1 - _largest((kind != OTHER).astype(np.int64), unit, n_units),
        unit=unit,
        slot=slot,
        rival_first=slots_ptr[rival],
        rival_end=slots_ptr[rival + 1],
        follower_ptr=np.concatenate([[0], np.cumsum(np.bincount(source, minlength=n))]),
        follower=target[by_source],
        follower_lag=lag[by_source],
    )
    per_unit, per_task = np.zeros((4, n_units), dtype=np.int64), np.zeros((3, n), dtype=np.int64)
    state = State(
        missing=np.bincount(unit[target], minlength=n_units),
        left=per_unit[0],
        since=per_unit[1],
        pace=per_unit[2],
        ending=per_unit[3],
        running=np.full(int(slots_ptr[-1]), -1, dtype=np.int64),
        ready=per_task[0],
        start=per_task[1],
        end=per_task[2],
    )
    return fixed, state


def _units(compiled: Compiled) -> tuple[IntArray, IntArray, IntArray]:
    """Unit of each task, and the tasks of each unit; units are numbered by their first task."""
    wiring = compiled.wiring
    first = np.arange(compiled.n_tasks)
    in_group = wiring.group >= 0
    first[in_group] = wiring.group_member[wiring.group_ptr[wiring.group[in_group]]]
    is_first = first == np.arange(compiled.n_tasks)
    unit = (np.cumsum(is_first) - 1)[first]
    counts = np.bincount(unit, minlength=int(is_first.sum()))
    return unit, np.concatenate([[0], np.cumsum(counts)]), np.argsort(unit, kind="stable")


def _largest(values: IntArray, unit: IntArray, n_units: int) -> IntArray:
    largest = np.zeros(n_units, dtype=np.int64)
    largest[unit] = values
    if n_units < len(unit):  # of a collective's members the largest, not the last
        members = np.flatnonzero(np.bincount(unit, minlength=n_units)[unit] > 1)
        np.maximum.at(largest, unit[members], values[members])
    return largest


def _slots(compiled: Compiled, cls: IntArray) -> tuple[IntArray, IntArray, IntArray]:
    """Kind code and slot of each task, and where the slots of each class and kind begin.

    Slots are numbered by class, then kind (compute, communication), then stream; other streams have slot -1.
    """
    kind = compiled.kind.copy()
    kind[(kind == HOST) | (kind == COPY)] = OTHER
    busy = np.flatnonzero(kind != OTHER)
    bucket = 2 * cls[busy] + kind[busy] - 1
    low = int(compiled.stream.min(initial=0))
    span = int(compiled.stream.max(initial=0)) - low + 1
    key = bucket * span + compiled.stream[busy] - low
    rows = np.unique(key)
    slot = np.full(compiled.n_tasks, -1, dtype=np.int64)
    slot[busy] = np.searchsorted(rows, key)  # few rows: sooner found than by the sort of an inverse
    per_bucket = np.bincount(rows // span, minlength=2 * compiled.n_classes)
    return kind, slot, np.concatenate([[0], np.cumsum(per_bucket)])


def _shares(share: int | IntArray, mine: NDArray[np.bool_], unit: IntArray, n_units: int) -> IntArray:
    """The largest share of each unit's tasks, 0 for kinds that have none. Raises GraphError for what is no share."""
    values = np.asarray(share, dtype=np.int64)
    if values.size and not 0 <= int(values.min()) <= int(values.max()) <= FULL_PACE:
        raise GraphError(
            f"overlap share {int(values.min())} to {int(values.max())}; shares are 0 to {FULL_PACE} permille"
        )
    return _largest(np.where(mine, values, 0), unit, n_units)
