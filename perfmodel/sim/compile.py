"""Programs -> flat arrays in an order in which one sweep computes every start: done once, re-simulated many times."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from perfmodel.errors import GraphError
from perfmodel.sim.order import Wiring, sweep_order
from perfmodel.sim.program import COMM, KIND_CODES, NO_GROUP, ArrayProgram, IntArray, Program


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Compiled:
    """Programs as flat int64 arrays. A task's global index is `offsets[class] + index in its program`.

    Attributes:
        programs: what was compiled.
        wiring: who waits for whom (`prev`, deps and groups; a dep's lag stands at the same place in `dep_lag_ps`).
        stream, duration_ps, dep_lag_ps: as in `Task`.
        kind: what each task is: HOST, COMPUTE, COMM or COPY, by what its stream carries. A member of a group is communication
            whatever its stream (a collective issued on the compute stream).
        order: all tasks such that whatever a task (or any member of its group) waits for stands before it.
    """

    programs: tuple[Program | ArrayProgram, ...]
    wiring: Wiring
    stream: IntArray
    duration_ps: IntArray
    dep_lag_ps: IntArray
    kind: IntArray
    order: IntArray

    @property
    def n_tasks(self) -> int:
        """Tasks of all classes."""
        return self.wiring.n_tasks

    @property
    def n_classes(self) -> int:
        """Rank classes."""
        return len(self.programs)

    def tasks_of(self, cls: int) -> slice:
        """Global indices of a class's tasks."""
        return slice(int(self.wiring.offsets[cls]), int(self.wiring.offsets[cls + 1]))

    def class_of(self, task: int) -> int:
        """Class of a global task index."""
        return int(np.searchsorted(self.wiring.offsets, task, side="right")) - 1

    def kinds_of(self, cls: int) -> IntArray:
        """`kind` of each task of a class."""
        return self.kind[self.tasks_of(cls)]


def compile_programs(programs: Sequence[Program | ArrayProgram]) -> Compiled:
    """Checks programs and lays them out for `simulate_compiled`.

    Raises:
        GraphError: no program, a dep that does not point backwards, a negative duration or lag, a group twice in one
            class, or a circular wait (deadlock), naming the tasks and groups.
    """
    if not programs:
        raise GraphError("no programs to simulate: at least one rank class is needed")
    parts = [program.arrays() for program in programs]
    offsets = np.cumsum([0] + [len(part.stream) for part in parts], dtype=np.int64)
    cls = np.repeat(np.arange(len(parts)), np.diff(offsets))
    ids, stream, duration_ps, dep_count, dep_index, dep_lag_ps = (
        np.concatenate([getattr(part, name) for part in parts])
        for name in ("group", "stream", "duration_ps", "dep_count", "dep_index", "dep_lag_ps")
    )
    group, group_ids = _dense_groups(ids)
    group_ptr, group_member = _members(group, len(group_ids))
    lane = cls * (int(stream.max(initial=0)) - int(stream.min(initial=0)) + 1) + stream - int(stream.min(initial=0))
    wiring = Wiring(
        offsets=offsets,
        group=group,
        group_ids=group_ids,
        group_ptr=group_ptr,
        group_member=group_member,
        prev=_previous(lane),
        dep_ptr=np.concatenate([[0], np.cumsum(dep_count, dtype=np.int64)]),
        dep_index=dep_index + np.repeat(offsets[cls], dep_count),
    )
    if not _is_sound(wiring, cls, (duration_ps, dep_lag_ps)):
        for number, part in enumerate(parts):
            _check(number, part)
    kinds = _kinds(parts, (stream, lane))
    return Compiled(
        programs=tuple(programs),
        wiring=wiring,
        stream=stream,
        duration_ps=duration_ps,
        dep_lag_ps=dep_lag_ps,
        kind=np.where(group >= 0, COMM, kinds),
        order=sweep_order(wiring),
    )


def _kinds(parts: Sequence[ArrayProgram], of_task: tuple[IntArray, IntArray]) -> IntArray:
    """What the stream of each task carries; `of_task` are its stream, and that stream's number among those of all classes."""
    stream, lane = of_task
    present = np.flatnonzero(np.bincount(lane))
    table = np.zeros(int(present[-1]) + 1 if len(present) else 0, dtype=np.int64)
    low, width = int(stream.min(initial=0)), int(stream.max(initial=0)) - int(stream.min(initial=0)) + 1
    table[present] = [KIND_CODES[parts[at // width].kind(at % width + low)] for at in present.tolist()]
    return table[lane]


def _is_sound(wiring: Wiring, cls: IntArray, times_ps: tuple[IntArray, IntArray]) -> bool:
    """Whether deps point backwards inside their programs, times are not negative, and no class has a group twice."""
    first = np.repeat(wiring.offsets[cls], np.diff(wiring.dep_ptr))
    owner = np.repeat(np.arange(wiring.n_tasks), np.diff(wiring.dep_ptr))
    if (wiring.dep_index >= owner).any() or (wiring.dep_index < first).any():
        return False
    if any(times.min(initial=0) < 0 for times in times_ps):
        return False
    of_member = cls[wiring.group_member]  # ascending within a group
    twice = (of_member[1:] == of_member[:-1]) & (
        wiring.group[wiring.group_member[1:]] == wiring.group[wiring.group_member[:-1]]
    )
    return not twice.any()


def _check(cls: int, part: ArrayProgram) -> None:
    """Raises GraphError for what is wrong with a program."""
    owner = np.repeat(np.arange(len(part.stream)), part.dep_count)
    wrong = np.flatnonzero((part.dep_index >= owner) | (part.dep_index < 0))
    if len(wrong):
        task, dep = owner[wrong[0]], part.dep_index[wrong[0]]
        raise GraphError(
            f"class {cls} task {task}: dep on task {dep}; a dep must point to an earlier task of its program"
        )
    if len(part.dep_lag_ps) and part.dep_lag_ps.min() < 0:
        task = owner[int(part.dep_lag_ps.argmin())]
        raise GraphError(f"class {cls} task {task}: lag {part.dep_lag_ps.min()} ps; a lag must be 0 or more")
    if len(part.duration_ps) and part.duration_ps.min() < 0:
        task = int(part.duration_ps.argmin())
        raise GraphError(f"class {cls} task {task}: duration {part.duration_ps[task]} ps; a duration must be 0 or more")
    groups, counts = np.unique(part.group[part.group != NO_GROUP], return_counts=True)
    if len(groups) and counts.max() > 1:
        raise GraphError(f"class {cls}: group {groups[counts.argmax()]} occurs {counts.max()} times; once is allowed")


def _dense_groups(group: IntArray) -> tuple[IntArray, IntArray]:
    """Groups renumbered from 0 in ascending order of id, -1 where there is none; and the ids."""
    at = np.flatnonzero(group != NO_GROUP)
    ids, dense = np.unique(group[at], return_inverse=True)
    found = np.full(len(group), -1, dtype=np.int64)
    found[at] = dense
    return found, ids


def _members(group: IntArray, n_groups: int) -> tuple[IntArray, IntArray]:
    in_group = np.flatnonzero(group >= 0)
    member = in_group[np.argsort(group[in_group], kind="stable")]
    counts = np.bincount(group[in_group], minlength=n_groups)
    return np.concatenate([[0], np.cumsum(counts, dtype=np.int64)]), member.astype(np.int64)


def _previous(lane: IntArray) -> IntArray:
    """Index of the task before each task on its lane, a stream of a class, or -1."""
    # Few lanes fit 16 bits, whose stable sort is by radix.
    by_lane = np.argsort(lane.astype(np.int16) if lane.max(initial=0) < 2**15 else lane, kind="stable")
    previous = np.full(len(lane), -1, dtype=np.int64)
    same = lane[by_lane[1:]] == lane[by_lane[:-1]]
    previous[by_lane[1:][same]] = by_lane[:-1][same]
    return previous
