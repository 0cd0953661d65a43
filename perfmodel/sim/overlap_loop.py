"""The event loop behind `overlap`: plain Python on lists, or compiled by numba on arrays.

A unit is a lone task or a collective. Events are (time, number, unit) on a heap, numbered in the order they were made: at
one time ends come first, then starts, each in that order. An end that is not the unit's `ending` was overtaken by a change
of pace and is dropped.
"""

from __future__ import annotations

import heapq
from typing import Any, NamedTuple

FULL_PACE = 1000  # permille
MOST_LOST = 900  # permille of a pace that others can take; beyond it shares that were counted apart do not add up
OTHER = 0  # kinds that nothing slows; the rest are the stream numbers COMPUTE (1) and COMM (2)
_START = 1 << 60  # added to the numbers of starts, which puts them behind all ends of their time


class Fixed(NamedTuple):
    """What does not change in a run.

    Per unit: its tasks unit_task[unit_ptr[u]:unit_ptr[u + 1]], `work` (ps), the shares `held`, `traffic` and `memory`
    (permille, see `OverlapModel`; 0 for the kind that has none), and `plain`: 1 if nothing can slow it (host work, copies).
    Per task: its `slot` (a compute or communication stream of a class; -1: neither), and who waits for it, in which unit, and
    how long beyond its end: follower, follower_unit, follower_lag[follower_ptr[t]:follower_ptr[t + 1]]. Per slot: the slots of
    the other kind of its class, rival_first[s] to rival_end[s] - 1.
    """

    unit_ptr: Any
    unit_task: Any
    work: Any
    held: Any
    traffic: Any
    memory: Any
    plain: Any
    slot: Any
    rival_first: Any
    rival_end: Any
    follower_ptr: Any
    follower: Any
    follower_unit: Any
    follower_lag: Any


class State(NamedTuple):
    """What changes in a run.

    Per unit: `missing` things to wait for, `left` work in 1/1000 ps at time `since`, `pace` (0: not running), and the
    number of the event of its end, `ending`. Per slot: the unit `running` there (-1: none). Per task the answer.
    """

    missing: Any
    left: Any
    since: Any
    pace: Any
    ending: Any
    running: Any
    ready: Any
    start: Any
    end: Any


# One flat function on local names: under numba, each call that passes these tuples on costs more than its work (counting
# references to two dozen arrays made the loop eight times slower), and closures do not survive its disk cache.
def overlap_loop(f: Fixed, s: State) -> None:  # noqa: C901, PLR0912, PLR0915 -- as just said
    """Fills `s.ready`, `s.start` and `s.end` (ps), in the order of the events.

    Units that nothing can slow need no events: their end is known when they become free.
    """
    unit_ptr, unit_task, work, plain = f.unit_ptr, f.unit_task, f.work, f.plain
    held, traffic, memory = f.held, f.traffic, f.memory
    slot_of, rival_first, rival_end = f.slot, f.rival_first, f.rival_end
    follower_ptr, followers = f.follower_ptr, f.follower
    follower_unit, follower_lag = f.follower_unit, f.follower_lag
    missing, left, since, pace, ending, running = s.missing, s.left, s.since, s.pace, s.ending, s.running
    ready, start, end = s.ready, s.start, s.end
    number, now = 0, 0
    heap = [(0, 0, 0)]
    heap.pop()
    at_once, head = [0], 0  # units that start now: behind every event on the heap for now, in order
    at_once.pop()
    touched = [0]
    free = [unit for unit in range(len(missing)) if missing[unit] == 0]
    done = [0]
    done.pop()
    while True:
        while len(done) > 0 or len(free) > 0:
            if len(done) > 0:
                unit = done.pop()
                for t in range(unit_ptr[unit], unit_ptr[unit + 1]):
                    task = unit_task[t]
                    ended = end[task]
                    for e in range(follower_ptr[task], follower_ptr[task + 1]):
                        follower = followers[e]
                        freed = ended + follower_lag[e]
                        if freed > ready[follower]:  # noqa: PLR1730 -- as `sim.sweep` explains
                            ready[follower] = freed
                        waiting = follower_unit[e]
                        still = missing[waiting] - 1
                        missing[waiting] = still
                        if still == 0:
                            free.append(waiting)
                continue
            unit = free.pop()
            together, first, last = 0, unit_ptr[unit], unit_ptr[unit + 1]
            for t in range(first, last):
                together = max(together, ready[unit_task[t]])
            finish = together + work[unit]
            for t in range(first, last):
                start[unit_task[t]] = together
                end[unit_task[t]] = finish
            if plain[unit] == 1 or work[unit] == 0:
                done.append(unit)
            elif together == now:
                at_once.append(unit)
            else:
                number += 1
                heapq.heappush(heap, (together, _START + number, unit))
        if head < len(at_once) and (len(heap) == 0 or heap[0][0] > now):
            ends, unit = False, at_once[head]
            head += 1
            if head == len(at_once):
                at_once.clear()
                head = 0
        elif len(heap) > 0:
            now, event, unit = heapq.heappop(heap)
            ends = event < _START
            if ends and event != ending[unit]:
                continue
        else:
            break
        touched.clear()
        if ends:
            done.append(unit)
        else:
            touched.append(unit)
            left[unit] = work[unit] * FULL_PACE
            since[unit] = now
        for t in range(unit_ptr[unit], unit_ptr[unit + 1]):
            task = unit_task[t]
            if ends:
                end[task] = now
            own = slot_of[task]
            if own >= 0:
                running[own] = -1 if ends else unit
                for slot in range(rival_first[own], rival_end[own]):
                    if running[slot] >= 0:
                        touched.append(running[slot])
        for other in touched:
            most = 0
            for t in range(unit_ptr[other], unit_ptr[other + 1]):
                own, lost = slot_of[unit_task[t]], 0
                if own >= 0:
                    for slot in range(rival_first[own], rival_end[own]):
                        rival = running[slot]
                        if rival >= 0:
                            both = traffic[other] * memory[rival] + memory[other] * traffic[rival]
                            lost += held[rival] + both // FULL_PACE
                most = max(most, lost)
            new_pace = FULL_PACE - min(most, MOST_LOST)
            if new_pace != pace[other]:
                left[other] -= pace[other] * (now - since[other])
                since[other] = now
                pace[other] = new_pace
                number += 1
                ending[other] = number
                finish = now + max((left[other] + new_pace - 1) // new_pace, 0)
                heapq.heappush(heap, (finish, number, other))
