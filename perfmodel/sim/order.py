"""An order of all tasks in which whatever a task, or any member of its group, waits for stands before it.

Rank programs usually meet their collectives in one common order. Then running every program up to its next collective,
and the collective once all members have come to it, yields the order in as many steps as there are collectives.
Programs that cross (two collectives on two streams, issued in different orders) are legal too: they take the general
way, which also finds true deadlocks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from perfmodel.errors import GraphError
from perfmodel.sim.loops import compiled_loop, use_numba
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
        order = general_order(wiring)
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


class Links(NamedTuple):
    """What `kahn_loop` reads: who follows each task, and the first member of each task's group (itself if it has none)."""

    follower_ptr: Any
    follower: Any
    first: Any
    group: Any
    group_ptr: Any
    group_member: Any


def general_order(wiring: Wiring) -> IntArray:
    """Kahn's algorithm over units (a lone task, or a whole group); leaves out what waits in a circle."""
    owner = np.repeat(np.arange(wiring.n_tasks), np.diff(wiring.dep_ptr))
    has_prev = np.flatnonzero(wiring.prev >= 0)
    sources = np.concatenate([wiring.dep_index, wiring.prev[has_prev]])
    targets = np.concatenate([owner, has_prev])
    first = np.arange(wiring.n_tasks)
    in_group = wiring.group >= 0
    first[in_group] = wiring.group_member[wiring.group_ptr[wiring.group[in_group]]]
    missing = np.bincount(first[targets], minlength=wiring.n_tasks)
    links = Links(
        follower_ptr=np.concatenate([[0], np.cumsum(np.bincount(sources, minlength=wiring.n_tasks))]),
        follower=targets[np.argsort(sources, kind="stable")],
        first=first,
        group=wiring.group,
        group_ptr=wiring.group_ptr,
        group_member=wiring.group_member,
    )
    if use_numba(kahn_loop, wiring.n_tasks):
        order = np.zeros(wiring.n_tasks, dtype=np.int64)
        count = compiled_loop(kahn_loop, append_unit)(links, missing, order)
        return order[:count]
    order_list = [0] * wiring.n_tasks
    count = kahn_loop(Links(*(array.tolist() for array in links)), missing.tolist(), order_list)
    return np.array(order_list[:count], dtype=np.int64)


def kahn_loop(links: Links, missing: Any, order: Any) -> int:
    """Fills `order` with tasks whose unit waits for nothing more, and returns how many there are. Lists or arrays alike.

    `missing[u]` counts what the unit of first member u waits for. `order` is the queue as well: tasks between `done` and
    `count` are free, but what follows them has not been looked at.
    """
    count = 0
    done = 0
    for task in range(len(missing)):
        if links.first[task] == task and missing[task] == 0:
            count = append_unit(links, task, order, count)
    while done < count:
        task = order[done]
        done += 1
        for f in range(links.follower_ptr[task], links.follower_ptr[task + 1]):
            unit = links.first[links.follower[f]]
            missing[unit] -= 1
            if missing[unit] == 0:
                count = append_unit(links, unit, order, count)
    return count


def append_unit(links: Links, unit: int, order: Any, count: int) -> int:
    """Puts a unit's tasks in `order` from `count` on, and returns how many there are then."""
    group = links.group[unit]
    if group < 0:
        order[count] = unit
        return count + 1
    for m in range(links.group_ptr[group], links.group_ptr[group + 1]):
        order[count] = links.group_member[m]
        count += 1
    return count


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
