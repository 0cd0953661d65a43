"""An order of all tasks in which whatever a task, or any member of its group, waits for stands before it.

Rank programs usually meet their collectives in one common order. Then running every program up to its next collective,
and the collective once all members have come to it, yields the order in as many steps as there are collectives.
Programs that cross (two collectives on two streams, issued in different orders) are legal too: they take the general
way, which also finds true deadlocks.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np

from perfmodel.errors import GraphError
from perfmodel.sim.program import IntArray


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Wiring:
    """Who waits for whom, in global task indices; fields as in `Compiled`."""

    offsets: IntArray
    group: IntArray
    group_ids: IntArray
    group_ptr: IntArray
    group_member: IntArray
    prev: IntArray
    dep_ptr: IntArray
    dep_index: IntArray

    @property
    def n_tasks(self) -> int:
        """Tasks of all classes."""
        return int(self.offsets[-1])

    def members(self, task: int) -> list[int]:
        """The task itself, or every member of its group."""
        group = int(self.group[task])
        if group < 0:
            return [task]
        return [int(m) for m in self.group_member[self.group_ptr[group] : self.group_ptr[group + 1]]]

    def waits_for(self, task: int) -> list[int]:
        """Tasks that must end before the task, or its group, can start."""
        found = []
        for member in self.members(task):
            if self.prev[member] >= 0:
                found.append(int(self.prev[member]))
            found += [int(d) for d in self.dep_index[self.dep_ptr[member] : self.dep_ptr[member + 1]]]
        return found

    def name(self, task: int) -> str:
        """`class 0 task 3 (group 7)`, as errors say it."""
        cls = int(np.searchsorted(self.offsets, task, side="right")) - 1
        group = int(self.group[task])
        suffix = f" (group {int(self.group_ids[group])})" if group >= 0 else ""
        return f"class {cls} task {task - int(self.offsets[cls])}{suffix}"


def sweep_order(wiring: Wiring) -> IntArray:
    """All tasks in a valid order. Raises GraphError naming the tasks and groups of a circular wait."""
    order = _common_order(wiring)
    if len(order) < wiring.n_tasks:
        order = _general_order(wiring)
    if len(order) < wiring.n_tasks:
        raise GraphError(_deadlock_text(wiring, order))
    return order


def _common_order(wiring: Wiring) -> IntArray:
    """Runs each program up to its next collective; stops short if two programs meet collectives in different orders."""
    offsets = wiring.offsets.tolist()
    meets = np.flatnonzero(wiring.group >= 0)
    bounds = np.searchsorted(meets, wiring.offsets).tolist()
    meet_at = meets.tolist()
    group_at = wiring.group[meets].tolist()
    missing = np.diff(wiring.group_ptr).tolist()
    parked: dict[int, list[int]] = {}
    position, cursor = offsets[:-1], bounds[:-1]
    pieces: list[IntArray] = []
    runnable = list(range(len(position) - 1, -1, -1))
    while runnable:
        cls = runnable.pop()
        if cursor[cls] == bounds[cls + 1]:
            pieces.append(np.arange(position[cls], offsets[cls + 1], dtype=np.int64))
            continue
        task, group = meet_at[cursor[cls]], group_at[cursor[cls]]
        pieces.append(np.arange(position[cls], task, dtype=np.int64))
        position[cls], cursor[cls] = task + 1, cursor[cls] + 1
        parked.setdefault(group, []).append(cls)
        missing[group] -= 1
        if missing[group] == 0:
            pieces.append(wiring.group_member[wiring.group_ptr[group] : wiring.group_ptr[group + 1]])
            runnable += reversed(parked.pop(group))
    return np.concatenate(pieces) if pieces else np.empty(0, dtype=np.int64)


def _general_order(wiring: Wiring) -> IntArray:
    """Kahn's algorithm over units (a lone task, or a whole group); leaves out what waits in a circle."""
    unit_of: dict[int, int] = {}
    waiting: dict[int, int] = {}
    followers: dict[int, list[int]] = {}
    for task in range(wiring.n_tasks):
        unit_of[task] = wiring.members(task)[0]
    for unit in sorted(set(unit_of.values())):
        needs = {unit_of[t] for t in wiring.waits_for(unit)}
        waiting[unit] = len(needs)
        for need in needs:
            followers.setdefault(need, []).append(unit)
    free = deque(unit for unit, count in waiting.items() if count == 0)
    order: list[int] = []
    while free:
        unit = free.popleft()
        order += wiring.members(unit)
        for follower in followers.get(unit, ()):
            waiting[follower] -= 1
            if waiting[follower] == 0:
                free.append(follower)
    return np.array(order, dtype=np.int64)


def _deadlock_text(wiring: Wiring, done: IntArray) -> str:
    """Names one circular wait among the tasks that never start."""
    finished = set(done.tolist())
    task = next(t for t in range(wiring.n_tasks) if t not in finished)
    seen: dict[int, int] = {}
    path: list[int] = []
    while (unit := wiring.members(task)[0]) not in seen:
        seen[unit] = len(path)
        path.append(task)
        task = next(t for t in wiring.waits_for(task) if t not in finished)
    circle = path[seen[unit] :]
    names = " waits for ".join(wiring.name(t) for t in [*circle, circle[0]])
    return f"deadlock: {len(finished)} of {wiring.n_tasks} tasks can run; {names}"
