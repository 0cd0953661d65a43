"""Who can slow whom: units that start and end together, slots on which one thing runs at a time, and the shares of units."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from perfmodel.errors import GraphError
from perfmodel.sim.compile import Compiled
from perfmodel.sim.overlap_loop import FULL_PACE, OTHER
from perfmodel.sim.program import COMM, COMPUTE, IntArray


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


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Rivals:
    """Units, slots and shares of programs.

    Attributes:
        unit: of each task: a lone task, or a collective; numbered by their first tasks.
        unit_ptr, unit_task: the tasks of unit u are unit_task[unit_ptr[u]:unit_ptr[u + 1]].
        held, traffic, memory: permille of each unit, 0 for kinds that have none.
        kind: of each task, HOST and COPY joined to OTHER.
        slot: of each task: a compute or communication stream of a class, by class, then kind, then stream; -1 of others.
        members: tasks of collectives.
        slots_ptr: where the slots of each class and kind begin.
        rival_first, rival_end: of each slot: those of the other kind of its class.
    """

    unit: IntArray
    unit_ptr: IntArray
    unit_task: IntArray
    held: IntArray
    traffic: IntArray
    memory: IntArray
    kind: IntArray
    slot: IntArray
    members: IntArray
    slots_ptr: IntArray
    rival_first: IntArray
    rival_end: IntArray

    @property
    def n_units(self) -> int:
        """Lone tasks and collectives."""
        return len(self.unit_ptr) - 1

    def largest(self, values: IntArray) -> IntArray:
        """Of each unit the largest of its tasks' values, which are 0 or more."""
        return _largest(values, self.unit, self.members, self.n_units)


def rivals_of(compiled: Compiled, model: OverlapModel) -> Rivals:
    """Who can slow whom in programs. Raises GraphError for what is no share."""
    unit, unit_ptr, unit_task = _units(compiled)
    cls = np.repeat(np.arange(compiled.n_classes), np.diff(compiled.wiring.offsets))
    kind, slot, slots_ptr = _slots(compiled, cls)
    # The buckets of a class, compute and communication, are neighbours.
    rival = np.repeat(np.arange(2 * compiled.n_classes) ^ 1, np.diff(slots_ptr))
    n_units, members = len(unit_ptr) - 1, np.flatnonzero(compiled.wiring.group >= 0)

    def shares(share: int | IntArray, of: int) -> IntArray:
        return _largest(_shares(share, kind == of), unit, members, n_units)

    return Rivals(
        unit=unit,
        unit_ptr=unit_ptr,
        unit_task=unit_task,
        held=shares(model.held, COMM),
        traffic=shares(model.traffic, COMM),
        memory=shares(model.memory, COMPUTE),
        kind=kind,
        slot=slot,
        members=members,
        slots_ptr=slots_ptr,
        rival_first=slots_ptr[rival],
        rival_end=slots_ptr[rival + 1],
    )


def _units(compiled: Compiled) -> tuple[IntArray, IntArray, IntArray]:
    """Unit of each task, and the tasks of each unit; units are numbered by their first task."""
    wiring = compiled.wiring
    if not len(wiring.group_member):
        alone = np.arange(compiled.n_tasks + 1)
        return alone[:-1], alone, alone[:-1]
    first = np.arange(compiled.n_tasks)
    in_group = wiring.group >= 0
    first[in_group] = wiring.group_member[wiring.group_ptr[wiring.group[in_group]]]
    is_first = first == np.arange(compiled.n_tasks)
    unit = (np.cumsum(is_first) - 1)[first]
    counts = np.bincount(unit, minlength=int(is_first.sum()))
    return unit, np.concatenate([[0], np.cumsum(counts)]), np.argsort(unit, kind="stable")


def _largest(values: IntArray, unit: IntArray, members: IntArray, n_units: int) -> IntArray:
    largest = np.zeros(n_units, dtype=np.int64)
    largest[unit] = values
    np.maximum.at(largest, unit[members], values[members])  # of a collective's members the largest, not the last
    return largest


def _slots(compiled: Compiled, cls: IntArray) -> tuple[IntArray, IntArray, IntArray]:
    """Kind code and slot of each task, and where the slots of each class and kind begin."""
    kind = compiled.kind.copy()
    kind[(kind != COMM) & (kind != COMPUTE)] = OTHER
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


def _shares(share: int | IntArray, mine: NDArray[np.bool_]) -> IntArray:
    """The shares of tasks, 0 for kinds that have none. Raises GraphError for what is no share."""
    values = np.asarray(share, dtype=np.int64)
    if values.size and not 0 <= int(values.min()) <= int(values.max()) <= FULL_PACE:
        raise GraphError(
            f"overlap share {int(values.min())} to {int(values.max())}; shares are 0 to {FULL_PACE} permille"
        )
    return np.where(mine, values, 0)
