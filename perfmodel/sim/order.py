"""An order of all tasks in which whatever a task, or any member of its group, waits for stands before it.

Deps point backwards, so what a program has before a task is enough for it, but for collectives that wait for other programs.
Running every program up to its next collective with members elsewhere, leaving that behind until all of them have come to it,
and going on up to the first task that waits for one left behind yields the order in as many steps as there are such
collectives, also where two programs issue two of them in different orders (a stage of a pipeline sends forwards before it
receives backwards, its neighbour the other way round). What does not come to its end so takes the general way, which also
finds true deadlocks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

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
    """Runs each program as far as the collectives left behind allow; stops short where each waits for another like that."""
    meets = np.flatnonzero(_meets_others(wiring))
    cursors = np.searchsorted(meets, wiring.offsets).tolist()
    group_of, until_of = wiring.group[meets].tolist(), _first_waiting(wiring, meets).tolist()
    missing = np.diff(wiring.group_ptr).tolist()
    run = _Programs(meets.tolist(), wiring.offsets.tolist(), cursors)
    pieces: list[IntArray] = []
    runnable = list(range(len(cursors) - 2, -1, -1))
    behind: dict[int, list[tuple[int, int]]] = {}  # by group: (class, meet) of members that have come to it
    while runnable:
        cls = runnable.pop()
        meet = run.advance(cls, pieces)
        if meet < 0:
            continue
        runnable.append(cls)
        group = group_of[meet]
        missing[group] -= 1
        if missing[group]:
            run.waiting[cls][meet] = until_of[meet]
            behind.setdefault(group, []).append((cls, meet))
            continue
        pieces.append(wiring.group_member[wiring.group_ptr[group] : wiring.group_ptr[group + 1]])
        for other, left in reversed(behind.pop(group)):
            del run.waiting[other][left]
            runnable.append(other)
    return np.concatenate(pieces) if pieces else np.empty(0, dtype=np.int64)


class _Programs:
    """How far each program has run, and the first task that waits for each of the collectives it left behind."""

    def __init__(self, meets: list[int], offsets: list[int], cursors: list[int]) -> None:
        self._meets, self._ends, self._last = meets, offsets[1:], cursors[1:]
        self._position, self._cursor = offsets[:-1], cursors[:-1]
        self.waiting: list[dict[int, int]] = [{} for _ in self._ends]

    def advance(self, cls: int, pieces: list[IntArray]) -> int:
        """Adds the tasks up to the next collective with members elsewhere, and returns its number; -1 if none is reached."""
        stop = min((self._ends[cls], *self.waiting[cls].values()))
        meet = self._cursor[cls]
        reached = meet < self._last[cls] and self._meets[meet] < stop
        until = self._meets[meet] if reached else stop
        if until > self._position[cls]:
            pieces.append(np.arange(self._position[cls], until, dtype=np.int64))
        self._position[cls] = until + reached
        self._cursor[cls] += reached
        return meet if reached else -1


def _meets_others(wiring: Wiring) -> NDArray[np.bool_]:
    """Whether each task is a member of a group that has others: the rest run like lone tasks."""
    alone = np.append(np.diff(wiring.group_ptr) < 2, True)  # the last is that of -1, no group
    return ~alone[wiring.group]


def _first_waiting(wiring: Wiring, tasks: IntArray) -> IntArray:
    """The first task that waits for each of `tasks` itself; the number of all tasks where none does."""
    number = np.full(wiring.n_tasks, -1, dtype=np.int64)
    number[tasks] = np.arange(len(tasks))
    owner = np.repeat(np.arange(wiring.n_tasks), np.diff(wiring.dep_ptr))
    behind = np.flatnonzero(wiring.prev >= 0)
    source = number[np.concatenate([wiring.dep_index, wiring.prev[behind]])]
    target = np.concatenate([owner, behind])[source >= 0]
    first = np.full(len(tasks), wiring.n_tasks, dtype=np.int64)
    np.minimum.at(first, source[source >= 0], target)
    return first


class Links(NamedTuple):
    """What `kahn_loop` reads: who follows each task, and the first member of each task's group (itself if it has none)."""

    follower_ptr: Any
    follower: Any
    first: Any
    group: Any
    group_ptr: Any
    group_member: Any


def general_order(wiring: Wiring, *, numba: bool | None = None) -> IntArray:
    """Kahn's algorithm over units (a lone task, or a whole group); leaves out what waits in a circle.

    `numba` says how to run: compiled or plain Python; None leaves it to the size.
    """
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
    if use_numba(kahn_loop, wiring.n_tasks) if numba is None else numba:
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
