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
    for cls, part in enumerate(parts):
        _check(cls, part)
    offsets = np.cumsum([0] + [len(part.stream) for part in parts], dtype=np.int64)
    shift = np.repeat(offsets[:-1], [len(part.dep_index) for part in parts])
    group, group_ids = _dense_groups(np.concatenate([part.group for part in parts]))
    group_ptr, group_member = _members(group, len(group_ids))
    wiring = Wiring(
        offsets=offsets,
        group=group,
        group_ids=group_ids,
        group_ptr=group_ptr,
        group_member=group_member,
        prev=np.concatenate([_previous(part.stream, int(o)) for part, o in zip(parts, offsets[:-1], strict=True)]),
        dep_ptr=np.concatenate([[0], np.cumsum(np.concatenate([part.dep_count for part in parts]), dtype=np.int64)]),
        dep_index=np.concatenate([part.dep_index for part in parts]) + shift,
    )
    return Compiled(
        programs=tuple(programs),
        wiring=wiring,
        stream=np.concatenate([part.stream for part in parts]),
        duration_ps=np.concatenate([part.duration_ps for part in parts]),
        dep_lag_ps=np.concatenate([part.dep_lag_ps for part in parts]),
        kind=np.where(group >= 0, COMM, np.concatenate([_kinds(part) for part in parts])),
        order=sweep_order(wiring),
    )


def _kinds(part: ArrayProgram) -> IntArray:
    """What the stream of each task carries."""
    if not len(part.stream):
        return part.stream
    low = int(part.stream.min())
    present = np.flatnonzero(np.bincount(part.stream - low)) + low
    table = np.zeros(int(present[-1]) - low + 1, dtype=np.int64)
    table[present - low] = [KIND_CODES[part.kind(stream)] for stream in present.tolist()]
    return table[part.stream - low]


def _check(cls: int, part: ArrayProgram) -> None:
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
    ids, dense = np.unique(group, return_inverse=True)
    has_none = bool(len(ids)) and bool((ids == NO_GROUP).any())
    if not has_none:
        return dense.astype(np.int64), ids
    none = int(np.flatnonzero(ids == NO_GROUP)[0])
    renumbered = np.where(dense == none, -1, dense - (dense > none))
    return renumbered.astype(np.int64), np.delete(ids, none)


def _members(group: IntArray, n_groups: int) -> tuple[IntArray, IntArray]:
    in_group = np.flatnonzero(group >= 0)
    member = in_group[np.argsort(group[in_group], kind="stable")]
    counts = np.bincount(group[in_group], minlength=n_groups)
    return np.concatenate([[0], np.cumsum(counts, dtype=np.int64)]), member.astype(np.int64)


def _previous(stream: IntArray, offset: int) -> IntArray:
    """Global index of the task before each task on its stream, or -1."""
    by_stream = np.argsort(stream, kind="stable")
    previous = np.full(len(stream), -1, dtype=np.int64)
    same = stream[by_stream[1:]] == stream[by_stream[:-1]]
    previous[by_stream[1:][same]] = by_stream[:-1][same] + offset
    return previous
