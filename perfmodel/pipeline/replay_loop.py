"""The loop behind `pipeline.replay`: one iteration of a plan's segments, plain Python on lists or compiled by numba on arrays.

Names in a row, a segment and a step: `pipeline.rows` and `pipeline.script`; what changes: `pipeline.replay_data`.
"""

from __future__ import annotations

from perfmodel.pipeline.replay_data import Plan, State
from perfmodel.pipeline.rows import N_CLOCKS, N_STREAMS
from perfmodel.pipeline.script import END, ISSUE, RUN, WAIT
from perfmodel.sim.overlap_loop import FULL_PACE, MOST_LOST
from perfmodel.sim.program import COMPUTE, COPY, COPY_BACK, HOST

NEVER = -(1 << 60)  # ps; before every time there is, with room to add to it
LATER = 1 << 60  # ps; after every time there is
# From this iteration on what is expected of collectives goes but a part of the way to what was found, lest it swing to and
# fro: at most the first share, and so many parts of the iteration's number, for swings that do not die of that.
DAMPED_FROM, MOST_TRUST, TRUSTED_PARTS = 3, 0.6, 3.0
# Columns of `State.spent`, by class: kernels' work and time, and time before kernels that waited for the host or for others.
WORKED, COMPUTED, HOSTED, WAITED = range(4)


def open_iteration(a: Plan, s: State, number: int) -> None:
    """Clears what is counted anew, and expects collectives where they were, and as slow."""
    for i in range(len(s.count)):
        s.count[i] = 0
    for cls in range(len(s.pending)):
        s.until[cls] = NEVER
        for what in range(4):
            s.spent[cls][what] = 0
        for stream in range(N_STREAMS):
            s.clocks[cls][2 * stream + 1] = NEVER
    trust = 1.0 if number < DAMPED_FROM else min(MOST_TRUST, TRUSTED_PARTS / number)
    if number > 0:
        for i in range(len(s.now)):
            s.then[i] = s.now[i]
        for i in range(len(a.lanes)):
            expect(a, s, a.lanes[i], trust)
    for cls in range(len(s.opened)):
        s.opened[cls] = s.clocks[cls][2 * COMPUTE]


def expect(a: Plan, s: State, lane: int, trust: float) -> None:
    """What is expected of the collectives of a lane in the iteration to come."""
    cls = lane // N_STREAMS
    low, high = a.kernel_ptr[lane], a.kernel_ptr[lane + 1]
    opened, reached = s.opened[cls], s.clocks[cls][2 * COMPUTE]
    if s.running[lane] >= 0:
        s.met[s.running[lane]] += s.area[cls]
        s.running[lane] = -1
    soon = high
    for k in range(high - 1, low - 1, -1):
        if s.early[k]:
            soon = k
        s.soon[k] = soon
        lost = 0.0
        if s.moves[k] > 0 and s.now[k] > s.begin[k]:
            lost = min(s.moves[k] * s.met[k] / (s.now[k] - s.begin[k]) / FULL_PACE, MOST_LOST) / FULL_PACE
        begin, end = s.begin[k] - opened, s.now[k] - opened
        s.lost[k] += trust * (lost - s.lost[k])
        s.soonest[k] += int(trust * (begin - s.soonest[k]))
        s.latest[k] += int(trust * (end - s.latest[k]))
        s.met[k], s.began[k], s.now[k] = 0.0, s.begin[k], NEVER
    place = min(s.place[lane] - (high - low), 0)
    while place > low - high and s.then[high + place - 1] > reached:
        place -= 1
    s.place[lane], s.shift[lane] = place, reached


def look_around(a: Plan, s: State, cls: int, at: int, period: int) -> None:
    """Finds what runs beside the kernels of a class at a time, and until when; what ran till now has met its kernels.

    One function: numba hands on every array of `a` and `s` with each call.
    """
    until, held, traffic, met = LATER, 0, 0, s.area[cls]
    s.area[cls] = 0.0
    for i in range(a.lane_ptr[cls], a.lane_ptr[cls + 1]):
        lane = a.lanes[i]
        if s.running[lane] >= 0:
            s.met[s.running[lane]] += met
            s.running[lane] = -1
        low, n, place = a.kernel_ptr[lane], a.kernel_ptr[lane + 1] - a.kernel_ptr[lane], s.place[lane]
        while place < 2 * n:
            if place < 0:  # of the iteration before
                k = low + n + place
                begin, end = s.began[k], s.then[k]
            else:
                later = n if place >= n else 0  # of the iteration to come
                k = low + place - later
                begin, end = s.begin[k], s.now[k]
                if s.early[k] == 0 and (later > 0 or end == NEVER):  # nobody knows, nor any before the next early one
                    place = max(s.soon[k] - low + later, place + 1)
                    continue
                if end == NEVER:
                    begin, end = s.soonest[k] + s.shift[lane], s.latest[k] + s.shift[lane]
                if later > 0:
                    begin, end = begin + period, end + period
            if end > at:
                if begin > at:
                    until = min(until, begin)
                else:
                    until = min(until, end)
                    held += s.holds[k]
                    traffic += s.moves[k]
                    s.running[lane] = k
                break
            place += 1
        s.place[lane] = place
    s.until[cls], s.held[cls], s.traffic[cls] = until, held, traffic


def run_over(a: Plan, s: State, cls: int, kernel: tuple[int, int, int, int], period: int) -> int:
    """When a kernel ends that outlasts what is beside it: when it begins and would end so, its work, and memory's share."""
    at, end, work, memory = kernel
    left = 1.0 * work
    while end > s.until[cls]:
        lost = min(s.held[cls] + s.traffic[cls] * memory / FULL_PACE, MOST_LOST) / FULL_PACE
        reached = s.until[cls]
        s.area[cls] += memory * (reached - at)
        left -= (reached - at) * (1.0 - lost)
        at = reached
        look_around(a, s, cls, at, period)
        lost = min(s.held[cls] + s.traffic[cls] * memory / FULL_PACE, MOST_LOST) / FULL_PACE
        end = at + int(left / (1.0 - lost) + 0.5)
    s.area[cls] += memory * (end - at)
    return end


def run_collective(s: State, where: tuple[int, int, int], span: tuple[int, int], shares: tuple[int, int]) -> None:
    """A collective (lane, kernel, place) begins and ends: what its class's kernels were to find may have changed."""
    lane, k, place = where
    cls = lane // N_STREAMS
    s.begin[k], s.now[k] = span
    s.holds[k], s.moves[k] = shares
    s.shift[lane] = s.now[k] - s.latest[k]
    s.place[lane] = min(s.place[lane], place)
    s.early[k] = s.begin[k] < s.last[cls]
    s.until[cls] = NEVER


def queue_place(a: Plan, s: State, lane: int, depth: int, number: int) -> int:
    """Where the kernel stands that the next launch of a lane waits for: in `now`, or behind it in `then`; -1: none."""
    k = s.count[lane] - depth
    if k >= 0:
        return a.kernel_ptr[lane] + k  # type: ignore[no-any-return]  # of an array or a list
    n = a.kernel_ptr[lane + 1] - a.kernel_ptr[lane]
    if k + n >= 0 and number > 0:
        return len(s.now) + a.kernel_ptr[lane + 1] + k  # type: ignore[no-any-return]  # as above
    return -1


def replay_loop(a: Plan, s: State, how: tuple[int, int, int, bool]) -> None:  # noqa: C901, PLR0912, PLR0915 -- see below
    """One iteration. One flat function on local names, as `sim.overlap_loop` explains.

    `how`: depth of the launch queue, number of the iteration, the period expected, and whether anything slows anything.
    """
    depth, number, period, slows = how
    before, lag, ends, ended = a.before, a.lag, s.ends, s.ended
    kernel_ptr, count, now, then, slots = a.kernel_ptr, s.count, s.now, s.then, s.slots
    stream_of, host_of, work_of, memory_of = a.stream, a.host, a.work, a.memory
    work_sum, area_sum = a.work_sum, a.area_sum
    first_dep, end_dep, end_run, run_host = a.first_dep, a.end_dep, a.end_run, a.run_host
    until, held, traffic, area, last = s.until, s.held, s.traffic, s.area, s.last
    open_iteration(a, s, number)
    for i in range(len(a.steps)):
        step = a.steps[i]
        what, cls, first, second, third = step[0], step[1], step[2], step[3], step[4]
        clock = s.clocks[cls]
        base = cls * N_STREAMS
        if what == RUN:
            segment = a.segments[first]
            begin_row, r, end_row = segment[0], segment[0], segment[1]
            latency, pending = a.latency[cls], s.pending[cls]
            hosted, waited, worked, computed = 0, 0, 0, 0
            for c in range(N_CLOCKS):
                ended[c] = clock[c]
            host = clock[0]
            while r < end_row:
                stop = end_run[r]
                if r < stop <= r + depth:  # kernels of the compute stream that wait for nothing else
                    lane = base + COMPUTE
                    queued = count[lane] - depth
                    reached = host
                    if queued >= 0:
                        reached = max(host, now[kernel_ptr[lane] + queued + stop - 1 - r])
                    elif number > 0 and queued + stop - 1 - r + kernel_ptr[lane + 1] - kernel_ptr[lane] >= 0:
                        behind = queued + stop - 1 - r
                        gone_by = now[kernel_ptr[lane] + behind] if behind >= 0 else then[kernel_ptr[lane + 1] + behind]
                        reached = host if gone_by <= host else LATER
                    at = clock[2 * COMPUTE]
                    if reached + pending + run_host[r] + latency <= at:  # all launched before the first begins
                        waited += at - last[cls]
                        k = kernel_ptr[lane] + count[lane]
                        j = r
                        while j < stop:  # from one start or end of a collective to the next
                            edge, hold, move = LATER, 0, 0
                            if slows:
                                if at >= until[cls]:
                                    look_around(a, s, cls, at, period)
                                edge, hold, move = until[cls], held[cls], traffic[cls]
                            opened, gone, met = at, work_sum[j], 0.0
                            if hold + move == 0 and at + work_sum[stop - 1] + work_of[stop - 1] - gone <= edge:
                                met = 1.0 * (area_sum[stop - 1] + work_of[stop - 1] * memory_of[stop - 1] - area_sum[j])
                                for i_row in range(j, stop):  # nothing beside them
                                    if queued >= 0:
                                        host = max(host, now[k - depth])
                                    host += pending + host_of[i_row]
                                    pending = 0
                                    at = opened + work_sum[i_row] - gone + work_of[i_row]
                                    now[k] = at
                                    k += 1
                                    ends[2 * (i_row - begin_row)] = host
                                    ends[2 * (i_row - begin_row) + 1] = at
                                j = stop
                            while j < stop and at < edge:
                                if queued >= 0:
                                    host = max(host, now[k - depth])
                                host += pending + host_of[j]
                                pending = 0
                                work, memory = work_of[j], memory_of[j]
                                lost = min(hold + move * memory / FULL_PACE, MOST_LOST)
                                end = at + int(work / (1.0 - lost / FULL_PACE) + 0.5) if lost > 0 else at + work
                                if end > edge:
                                    area[cls] += met
                                    met = 0.0
                                    end = run_over(a, s, cls, (at, end, work, memory), period)
                                    edge, hold, move = until[cls], held[cls], traffic[cls]
                                else:
                                    met += memory * (end - at)
                                at = end
                                now[k] = at
                                k += 1
                                ends[2 * (j - begin_row)] = host
                                ends[2 * (j - begin_row) + 1] = at
                                j += 1
                            area[cls] += met
                            computed += at - opened
                        worked += work_sum[stop - 1] + work_of[stop - 1] - work_sum[r]
                        last[cls] = at
                        clock[2 * COMPUTE] = at
                        clock[2 * COMPUTE + 1] = at
                        count[lane] += stop - r
                        r = stop
                        continue
                stream, host_ps, place = stream_of[r], host_of[r], 2 * (r - begin_row)
                if stream == HOST:  # host work alone
                    for d in range(first_dep[r], end_dep[r]):
                        on = before[d]
                        reached = (ended[on] if on < N_CLOCKS else ends[on - N_CLOCKS]) + lag[d]
                        host = max(host, reached)
                launched = memory_of[r] if stream == HOST else stream
                lane = base + launched
                if host_ps >= 0:
                    if launched >= 0:
                        at = queue_place(a, s, lane, depth, number)
                        if at >= 0:
                            host = max(host, now[at] if at < len(now) else then[at - len(now)])
                    host += pending + host_ps
                    pending = 0
                    ends[place] = host
                r += 1
                if stream == HOST:
                    continue
                free = at = clock[2 * stream]
                if host_ps >= 0:
                    at = max(at, host + latency)
                by_host = at - free
                for d in range(first_dep[r - 1], end_dep[r - 1]):
                    on = before[d]
                    reached = (ended[on] if on < N_CLOCKS else ends[on - N_CLOCKS]) + lag[d]
                    at = max(at, reached)
                k, work, memory = kernel_ptr[lane] + count[lane], work_of[r - 1], memory_of[r - 1]
                end = at + work
                if stream == COMPUTE:
                    if slows:
                        if at >= until[cls]:
                            look_around(a, s, cls, at, period)
                        lost = held[cls] + traffic[cls] * memory / FULL_PACE
                        if lost > 0:
                            end = at + int(work / (1.0 - min(lost, MOST_LOST) / FULL_PACE) + 0.5)
                        if end > until[cls]:
                            end = run_over(a, s, cls, (at, end, work, memory), period)
                        else:
                            area[cls] += memory * (end - at)
                    hosted += by_host
                    waited += at - last[cls] - by_host
                    worked += work
                    computed += end - at
                    last[cls] = end
                    now[k] = end
                elif slows and stream not in (COPY, COPY_BACK):
                    end = at + int(work / (1.0 - s.lost[k]) + 0.5)
                    run_collective(s, (lane, k, count[lane]), (at, end), (a.holds[r - 1], a.moves[r - 1]))
                else:
                    now[k] = end
                count[lane] += 1
                ends[place + 1] = end
                clock[2 * stream] = end
                clock[2 * stream + 1] = end
            spent = s.spent[cls]
            spent[WORKED] += worked
            spent[COMPUTED] += computed
            spent[HOSTED] += hosted
            spent[WAITED] += waited
            clock[0] = host
            s.pending[cls] = pending + segment[2]
            for h in range(segment[3], segment[4]):
                left = a.held[h]
                reached = ends[2 * left[1] + 1] if left[1] >= 0 else ended[2 * left[2] + 1]
                clock[2 * left[0]] = max(clock[2 * left[0]], reached)
        elif what == WAIT:
            clock[2 * first] = max(clock[2 * first], slots[second])
        elif what == ISSUE:
            lane = base + first
            at = queue_place(a, s, lane, depth, number)
            if at >= 0:
                clock[0] = max(clock[0], now[at] if at < len(now) else then[at - len(now)])
            clock[0] += s.pending[cls] + second
            s.pending[cls] = 0
            count[lane] += 1
            slots[third] = max(clock[2 * first], clock[0] + a.latency[cls])
        elif what == END:
            at, most = NEVER, 0.0
            for m in range(first, second):
                member = a.members[m]
                lane = member[0] * N_STREAMS + member[1]
                at = max(at, slots[member[2]])
                most = max(most, s.lost[kernel_ptr[lane] + count[lane] - 1])
            end = at + int(third / (1.0 - most) + 0.5)
            for m in range(first, second):
                member = a.members[m]
                lane = member[0] * N_STREAMS + member[1]
                place = count[lane] - 1
                slots[member[2]] = end
                s.clocks[member[0]][2 * member[1]] = end
                s.clocks[member[0]][2 * member[1] + 1] = end
                now[kernel_ptr[lane] + place] = end
                if slows:
                    run_collective(s, (lane, kernel_ptr[lane] + place, place), (at, end), (member[3], member[4]))
        else:  # WAIT_LAST
            clock[2 * first] = max(clock[2 * first], clock[2 * second + 1])


HELPERS = (expect, open_iteration, look_around, run_over, run_collective, queue_place)
