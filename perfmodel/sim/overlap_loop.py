"""The event loop behind `overlap`: plain Python on lists, or compiled by numba on arrays.

A unit is a lone task or a collective. Events are (time, kind, sequence, unit, version) on a heap; an end whose version is
not the unit's current one was overtaken by a change of pace and is dropped.
"""

from __future__ import annotations

import heapq
from typing import Any, NamedTuple

from perfmodel.sim.program import COMPUTE

FULL_PACE = 1000  # permille
OTHER = 0  # kinds that nothing slows; the rest are the stream numbers COMPUTE (1) and COMM (2)
_END, _START = 0, 1  # events at one time: ends first, then starts, then by sequence number


class Fixed(NamedTuple):
    """What does not change in a run.

    Per unit: its tasks unit_task[unit_ptr[u]:unit_ptr[u + 1]], `work` (ps), `permille`, and `plain`: 1 if nothing can
    slow it (host work, copies). Per task: its `unit`, `kind`, `cls`, `slot` (a compute or communication stream of a
    class), and who waits for it and how long beyond its end: follower, follower_lag[follower_ptr[t]:follower_ptr[t + 1]].
    slots_ptr[2 * cls + kind - 1] is the first slot of a class's streams of a kind.
    """

    unit_ptr: Any
    unit_task: Any
    work: Any
    permille: Any
    plain: Any
    unit: Any
    kind: Any
    cls: Any
    slot: Any
    slots_ptr: Any
    follower_ptr: Any
    follower: Any
    follower_lag: Any


class State(NamedTuple):
    """What changes in a run.

    Per unit: `missing` things to wait for, `left` work in 1/permille ps at time `since`, `pace` (0: not running),
    `version`. Per slot: the unit `running` there (-1: none). Per task the answer.
    """

    missing: Any
    left: Any
    since: Any
    pace: Any
    version: Any
    running: Any
    ready: Any
    start: Any
    end: Any


# One flat function on local names: under numba, each call that passes these tuples on costs more than its work (counting
# references to two dozen arrays made the loop eight times slower), and closures do not survive its disk cache.
def overlap_loop(f: Fixed, s: State) -> None:  # noqa: C901, PLR0912, PLR0915 -- as just said
    """Fills `s.ready`, `s.start` and `s.end` (ps), in the order of (time, kind, sequence).

    Units that nothing can slow need no events: their end is known when they become free.
    """
    unit_ptr, unit_task, work, permille, plain = f.unit_ptr, f.unit_task, f.work, f.permille, f.plain
    unit_of, kind_of, cls, slot_of, slots_ptr = f.unit, f.kind, f.cls, f.slot, f.slots_ptr
    follower_ptr, followers, follower_lag = f.follower_ptr, f.follower, f.follower_lag
    missing, left, since, pace, version, running = s.missing, s.left, s.since, s.pace, s.version, s.running
    ready, start, end = s.ready, s.start, s.end
    sequence = 0
    heap = [(0, _START, 0, 0, 0)]
    heap.pop()
    free = [unit for unit in range(len(missing)) if missing[unit] == 0]
    done = [0]
    done.pop()
    while True:
        while len(done) > 0 or len(free) > 0:
            if len(done) > 0:
                unit = done.pop()
                for t in range(unit_ptr[unit], unit_ptr[unit + 1]):
                    task = unit_task[t]
                    for e in range(follower_ptr[task], follower_ptr[task + 1]):
                        follower = followers[e]
                        ready[follower] = max(ready[follower], end[task] + follower_lag[e])
                        missing[unit_of[follower]] -= 1
                        if missing[unit_of[follower]] == 0:
                            free.append(unit_of[follower])
                continue
            unit = free.pop()
            together = 0
            for t in range(unit_ptr[unit], unit_ptr[unit + 1]):
                together = max(together, ready[unit_task[t]])
            for t in range(unit_ptr[unit], unit_ptr[unit + 1]):
                start[unit_task[t]] = together
                end[unit_task[t]] = together + work[unit]
            if plain[unit] == 1 or work[unit] == 0:
                done.append(unit)
            else:
                sequence += 1
                heapq.heappush(heap, (together, _START, sequence, unit, 0))
        if len(heap) == 0:
            break
        now, event, _, unit, stamp = heapq.heappop(heap)
        if event == _END and stamp != version[unit]:
            continue
        touched = [unit]
        if event == _END:
            touched.pop()
            done.append(unit)
        else:
            left[unit] = work[unit] * permille[unit]
            since[unit] = now
        for t in range(unit_ptr[unit], unit_ptr[unit + 1]):
            task = unit_task[t]
            if event == _END:
                end[task] = now
            if kind_of[task] != OTHER:
                running[slot_of[task]] = -1 if event == _END else unit
                place = 2 * cls[task] + (1 if kind_of[task] == COMPUTE else 0)  # the slots of the other kind
                for slot in range(slots_ptr[place], slots_ptr[place + 1]):
                    if running[slot] >= 0:
                        touched.append(running[slot])
        for other in touched:
            slowed = False
            for t in range(unit_ptr[other], unit_ptr[other + 1]):
                task = unit_task[t]
                if kind_of[task] != OTHER:
                    place = 2 * cls[task] + (1 if kind_of[task] == COMPUTE else 0)
                    for slot in range(slots_ptr[place], slots_ptr[place + 1]):
                        slowed = slowed or running[slot] >= 0
            new_pace = FULL_PACE if slowed else permille[other]
            if new_pace != pace[other]:
                left[other] -= pace[other] * (now - since[other])
                since[other] = now
                pace[other] = new_pace
                version[other] += 1
                sequence += 1
                finish = now + max((left[other] + new_pace - 1) // new_pace, 0)
                heapq.heappush(heap, (finish, _END, sequence, other, version[other]))
