"""Iterations in sequence in which compute and communication slow each other, sweep after sweep until they repeat.

The law is that of the event engine (`sim.overlap`), the order that of the plain sweep (`sim.sweep`). When a task that can be
slowed gets its start, its end follows from what runs beside it: where its work ends at a pace that changes at the starts and
ends of its rivals. Rivals that this sweep has not come to yet are taken to stand to the task as they stood to it an iteration
ago. Once every task has moved by the same time as its class, that held, so the iteration is what the event engine would make
of one between two equal ones, picosecond for picosecond. Relaxation of waveforms, in other words (Lelarasmee, Ruehli and
Sangiovanni-Vincentelli, IEEE Trans. CAD 1(3), 1982), in the direction of time; plans take 5 to 10 sweeps.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from perfmodel.sim.overlap_loop import FULL_PACE, MOST_LOST

MAX_SWEEPS = 128  # by then iterations either repeat or alternate between several
EXACT_SWEEPS = 64  # from here on they may differ by the part below: rounding can keep single picoseconds alive
SETTLED_PARTS = 10_000_000  # of the iteration time: one is that part
NEVER = 1 << 62  # ps, behind every time
ALTERNATING = -1  # in place of a growth: iterations that do not repeat one by one
# Ways of tasks beside the slots from 0 on.
PLAIN = -1  # a lone task that nothing slows
MEMBER = -2  # of a collective, but not its last in order
NO_LAP = 1 << 40  # iterations, behind all
NOBODY, SEVERAL = -1, -2  # in place of the one unit that runs on the rival slots


class Links(NamedTuple):
    """What sweeps read: lists in plain Python, int64 arrays under numba.

    Per task, as in `sim.sweep.Arrays`: order, prev, deps. Per seam, as in `sim.steady.Seam`: target, source, lag, distance;
    `kept` are sources that nothing slows and the last tasks of all streams, each once, `kept_class` their classes.
    Per task: its `way`, PLAIN, MEMBER or 0, its `unit` (a lone task, or a collective) and its `slot` (a compute or
    communication stream of a class; -1: nothing slows it). Per unit: its tasks unit_task[unit_ptr[u]:unit_ptr[u + 1]] and the
    shares of `sim.rivals.OverlapModel`. Per slot: the class, the slots of the other kind, rival_first[s] to rival_end[s] - 1,
    from which on `place_ptr` has a place for each, and those of its tasks that slow others, item[item_ptr[s]:item_ptr[s + 1]].
    """

    order: Any
    prev: Any
    dep_ptr: Any
    dep_index: Any
    dep_lag: Any
    target: Any
    source: Any
    lag: Any
    distance: Any
    kept: Any
    kept_class: Any
    way: Any
    unit: Any
    unit_ptr: Any
    unit_task: Any
    held: Any
    traffic: Any
    memory: Any
    slot: Any
    slot_class: Any
    rival_first: Any
    rival_end: Any
    place_ptr: Any
    item: Any
    item_ptr: Any


class State(NamedTuple):
    """What changes from sweep to sweep.

    Per task: its `release` time (ps), and `ready`, `start`, `end` (ps) of the iteration that came to it last, `seen` (its
    number, -1: none). Per class: its end, `finish`, that of the iteration before, `grown`, and how far it moved, `growth`. Per
    slot: until when its rivals are known to stay as they are, `until`, and which unit runs there, `beside`. Per pair of a slot
    and a rival slot: the first item of the rival that may still run, `place` in `item`, and its iteration, `lap`.
    Per kept source: its end, `last`, and how far it moved, `step`. `past` has the ends of the sources of the seam in the last
    iterations, one more than it reaches over.
    """

    release: Any
    ready: Any
    start: Any
    end: Any
    seen: Any
    growth: Any
    grown: Any
    finish: Any
    until: Any
    beside: Any
    place: Any
    lap: Any
    last: Any
    step: Any
    past: Any


# One flat function on local names, as `sim.overlap_loop` explains.
def sweep_slowed(a: Links, work: Any, s: State, number: int) -> int:  # noqa: C901, PLR0912, PLR0915 -- as just said
    """One iteration, `number` from 0, from the release times on.

    Returns by how much (ps) starts and ends moved otherwise than the end of their class did before, at most.
    """
    prev, dep_ptr, dep_index, dep_lag, way = a.prev, a.dep_ptr, a.dep_index, a.dep_lag, a.way
    unit_of, unit_ptr, unit_task, slot_of = a.unit, a.unit_ptr, a.unit_task, a.slot
    held, traffic, memory = a.held, a.traffic, a.memory
    rival_first, rival_end, place_ptr, items, item_ptr = a.rival_first, a.rival_end, a.place_ptr, a.item, a.item_ptr
    release, ready, start, end, seen, until, beside, places, laps = (
        s.release, s.ready, s.start, s.end, s.seen, s.until, s.beside, s.place, s.lap,
    )  # fmt: skip
    usual = [s.growth[cls] for cls in a.slot_class]
    last_lap = NO_LAP if number > 0 else 0  # in the first iteration nothing is known of the next
    uneven = 0
    for slot in range(len(until)):
        until[slot] = 0
    for task in a.order:
        at = release[task]
        before = prev[task]
        if before >= 0:
            free = end[before]
            if free > at:  # noqa: PLR1730 -- as `sim.sweep` explains
                at = free
        d, last = dep_ptr[task], dep_ptr[task + 1]
        while d < last:
            free = end[dep_index[d]] + dep_lag[d]
            if free > at:  # noqa: PLR1730
                at = free
            d += 1
        ready[task] = at
        if way[task] < 0:
            if way[task] == PLAIN:
                start[task] = at
                end[task] = at + work[task]
            continue
        unit = unit_of[task]
        first, stop = unit_ptr[unit], unit_ptr[unit + 1]
        longest = work[task]
        now, slot = at, slot_of[task]
        if stop - first > 1:
            for m in range(first, stop):
                at = max(at, ready[unit_task[m]])
                longest = max(longest, work[unit_task[m]])
            now = at
        elif at < until[slot]:
            by, lost = beside[slot], 0
            if by >= 0:
                lost = held[by] + (traffic[unit] * memory[by] + memory[unit] * traffic[by]) // FULL_PACE
            pace = FULL_PACE - min(lost, MOST_LOST)
            now = at + (longest * FULL_PACE + pace - 1) // pace
            if now > until[slot]:
                now = at
        left = longest * FULL_PACE if now == at else 0
        taking = (
            held[unit] + traffic[unit] > 0
        )  # communication: now that it is placed, what is known beside it is out of date
        while left > 0:
            change, most, by = NEVER, 0, NOBODY
            for m in range(first, stop):
                own, lost = slot_of[unit_task[m]], 0
                if own < 0:
                    continue
                shift = at - start[unit_task[m]]  # since the iteration before
                for rival in range(rival_first[own], rival_end[own]):
                    p = place_ptr[own] + rival - rival_first[own]
                    place, lap = places[p], laps[p]
                    while 0 <= lap <= last_lap:  # back, if an estimate of a sweep before went too far
                        sooner, its_lap = place - 1, lap
                        if place == item_ptr[rival]:
                            sooner, its_lap = item_ptr[rival + 1] - 1, lap - 1
                        other = items[sooner]
                        if its_lap < 0 or seen[other] < 0 or end[other] + (its_lap - seen[other]) * shift <= now:
                            break
                        place, lap = sooner, its_lap
                    while lap <= last_lap:
                        other = items[place]
                        if seen[other] < 0:
                            break
                        moved = (lap - seen[other]) * shift
                        ends = end[other] + moved
                        if ends > now:
                            begins = start[other] + moved
                            if begins <= now:
                                by = unit_of[other] if by == NOBODY else SEVERAL
                                its = unit_of[other]
                                lost += (
                                    held[its] + (traffic[unit] * memory[its] + memory[unit] * traffic[its]) // FULL_PACE
                                )
                                change = min(change, ends)
                            else:
                                change = min(change, begins)
                            break
                        place += 1
                        if place == item_ptr[rival + 1]:
                            place, lap = item_ptr[rival], lap + 1
                    places[p], laps[p] = place, lap
                most = max(most, lost)
            pace = FULL_PACE - min(most, MOST_LOST)
            done = now + (left + pace - 1) // pace
            if done <= change:
                now = done
                if by != SEVERAL and not taking:
                    until[slot], beside[slot] = change, by
                break
            left -= pace * (change - now)
            now = change
        for m in range(first, stop):
            member = unit_task[m]
            slot = slot_of[member]
            if slot >= 0 and (at - start[member] != usual[slot] or now - end[member] != usual[slot]):
                uneven = max(uneven, abs(at - start[member] - usual[slot]), abs(now - end[member] - usual[slot]))
            start[member] = at
            end[member] = now
            seen[member] = number
            if taking and slot >= 0:
                for rival in range(rival_first[slot], rival_end[slot]):
                    until[rival] = 0
    return uneven


def set_release(a: Links, s: State, number: int) -> int:
    """Release times of an iteration from those before, whose ends are kept; how many iterations they reach back."""
    target, source, distance, lag, past = a.target, a.source, a.distance, a.lag, s.past
    n_edges = len(target)
    kept = len(past) // n_edges if n_edges > 0 else 2
    for edge in range(n_edges):
        s.release[target[edge]] = 0
        if number > 0:
            past[(number - 1) % kept * n_edges + edge] = s.end[source[edge]]
    for edge in range(n_edges):
        if distance[edge] <= number:
            free = past[(number - distance[edge]) % kept * n_edges + edge] + lag[edge]
            s.release[target[edge]] = max(s.release[target[edge]], free)
    return kept - 1


def settle_one(a: Links, work: Any, s: State, found: Any) -> None:
    """Sweeps iterations of tasks of `work` (ps) until they repeat.

    `found` is left with their number, the growth per iteration (ps; `ALTERNATING` if they do not repeat by `MAX_SWEEPS`) and
    where the last began (ps).
    """
    kept, kept_class = a.kept, a.kept_class
    end, growth, ends, last, step = s.end, s.growth, s.finish, s.last, s.step
    same, finish = 0, 0
    for number in range(MAX_SWEEPS):
        depth = set_release(a, s, number)
        uneven = sweep_slowed(a, work, s, number)
        begin, finish = finish, 0
        for cls in range(len(ends)):
            s.grown[cls], ends[cls] = ends[cls], 0
        for k in range(len(kept)):
            ends[kept_class[k]] = max(ends[kept_class[k]], end[kept[k]])
        for cls in range(len(ends)):
            grown = ends[cls] - s.grown[cls]
            uneven = max(uneven, abs(grown - growth[cls]))
            growth[cls] = grown
            finish = max(finish, ends[cls])
        widest = 0
        for k in range(len(kept)):
            moved = end[kept[k]] - last[k]
            uneven = max(uneven, abs(moved - step[k]))
            widest = max(widest, moved)
            last[k], step[k] = end[kept[k]], moved
        slack = 0 if number < EXACT_SWEEPS else (finish - begin) // SETTLED_PARTS
        same = same + 1 if number > 1 and uneven <= slack and widest - (finish - begin) <= slack else 0
        found[0], found[1], found[2] = number + 1, finish - begin, begin
        if same >= depth:
            return
    found[1] = ALTERNATING


def settle_rows(a: Links, rows: Any, s: State, found: Any) -> None:
    """Fills each row of `found` with what `settle_one` finds of the row of durations; the state is left as of the last."""
    for row in range(len(rows)):
        reset(a, s)
        settle_one(a, rows[row], s, found[row])


def reset(a: Links, s: State) -> None:
    """Puts the state before the first iteration."""
    for task in range(len(s.seen)):
        s.start[task], s.end[task], s.seen[task] = 0, 0, -1
    for cls in range(len(s.growth)):
        s.growth[cls], s.finish[cls] = 0, 0
    for k in range(len(s.last)):
        s.last[k], s.step[k] = 0, 0
    for slot in range(len(s.until)):
        for rival in range(a.rival_first[slot], a.rival_end[slot]):
            p = a.place_ptr[slot] + rival - a.rival_first[slot]
            s.place[p], s.lap[p] = a.item_ptr[rival], 0
            if a.item_ptr[rival] == a.item_ptr[rival + 1]:
                s.lap[p] = NO_LAP + 1  # nothing in it slows anything


HELPERS = (set_release, sweep_slowed, settle_one, reset)
