"""Rounds in which compute and collectives slow each other until the iteration time stands still, in one compiled loop.

The rules of `sim.steady` and `pipeline.overlap` in the same arithmetic, without the values between: the durations that
`settle` leaves are those that `overlap.rounds` finds, picosecond for picosecond.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from perfmodel.sim.compile import Compiled
from perfmodel.sim.loops import compiled_loop, has_numba
from perfmodel.sim.overlap import OverlapModel
from perfmodel.sim.overlap_loop import FULL_PACE, MOST_LOST
from perfmodel.sim.program import COMM, COMPUTE, IntArray
from perfmodel.sim.steady import LONGEST_CYCLE, MAX_ITERATIONS, Seam

MAX_ROUNDS = 30
SETTLED_FRAC = 1e-5  # change of the iteration time between rounds that ends the search
MOST_MOVES = 16  # of each edge, on average, in sorting what is nearly in order

FloatArray = NDArray[np.float64]


class Links(NamedTuple):
    """What the loop reads; the first nine as in `sim.sweep.Arrays`, the seam as in `sim.steady.Seam`.

    `held`, `traffic` and `memory` are the shares of `sim.overlap.OverlapModel`, `comm` the tasks of communication of each
    class from `comm_ptr`, `compute` its kernels from `compute_ptr`.
    """

    order: IntArray
    prev: IntArray
    dep_ptr: IntArray
    dep_index: IntArray
    dep_lag: IntArray
    group: IntArray
    group_ptr: IntArray
    group_member: IntArray
    target: IntArray
    source: IntArray
    lag: IntArray
    kept: IntArray
    held: IntArray
    traffic: IntArray
    memory: IntArray
    comm: IntArray
    comm_ptr: IntArray
    compute: IntArray
    compute_ptr: IntArray


def links_of(compiled: Compiled, seam: Seam, model: OverlapModel | None) -> Links:
    """What the loop reads of programs, whose waits for iterations before reach one back, and of how tasks slow each other."""
    wiring = compiled.wiring
    comm, compute = np.flatnonzero(compiled.kind == COMM), np.flatnonzero(compiled.kind == COMPUTE)
    none = np.zeros(compiled.n_tasks, dtype=np.int64)
    shares = (none, none, none) if model is None else (model.held, model.traffic, model.memory)
    held, traffic, memory = (none + share for share in shares)
    return Links(
        order=compiled.order,
        prev=wiring.prev,
        dep_ptr=wiring.dep_ptr,
        dep_index=wiring.dep_index,
        dep_lag=compiled.dep_lag_ps,
        group=wiring.group,
        group_ptr=wiring.group_ptr,
        group_member=wiring.group_member,
        target=seam.target,
        source=seam.source,
        lag=seam.lag,
        kept=np.unique(seam.source),
        held=held,
        traffic=traffic,
        memory=memory,
        comm=comm,
        comm_ptr=np.searchsorted(comm, wiring.offsets),
        compute=compute,
        compute_ptr=np.searchsorted(compute, wiring.offsets),
    )


def settle(links: Links, durations_ps: IntArray) -> IntArray:
    """What rows of durations [runs, tasks] lead to; they are left with the durations that tasks have in the end.

    For each row: growth of a repeating pattern (ps), its length in iterations, 1 if it settled; the first two without
    slowdown.
    """
    found = np.zeros((len(durations_ps), 5), dtype=np.int64)
    compiled_loop(run_all, *HELPERS)(links, durations_ps, (MAX_ITERATIONS, MAX_ROUNDS, SETTLED_FRAC), found)
    return found


def warm_up_rounds() -> None:
    """Has later runs of any size use the compiled loop, where numba is installed (see `sim.warm`)."""
    if has_numba():
        compiled_loop(run_all, *HELPERS)


def run_all(a: Links, durations: IntArray, limits: tuple[int, int, float], found: IntArray) -> None:
    """Fills `found` as `settle` says."""
    n = durations.shape[1]
    start, end, before = np.zeros(n, np.int64), np.zeros(n, np.int64), np.zeros(n, np.int64)
    longer, now = np.zeros(n, np.int64), np.zeros(n, np.int64)
    # Each communication and each kernel has at most four edges.
    n_comm, n_compute = 4 * len(a.comm) + 1, 4 * len(a.compute) + 1
    edges = (np.zeros((n_comm, 4), np.int64), np.zeros((n_comm, 4), np.int64), np.zeros((n_compute, 4), np.int64))
    states = np.zeros((limits[0], len(a.kept) + 1), np.int64)
    slows = max(a.held.max(), a.traffic.max()) > 0
    for row in range(durations.shape[0]):
        growth, span, begin = steady_state(a, durations[row], (start, end, before), states)
        found[row, 3], found[row, 4] = growth, span
        settled, halves, last = not slows, False, 0.0
        now[:] = durations[row]
        for turn in range(limits[1] if slows else 0):
            slow_down(a, durations[row], (start, end), begin, edges, longer)
            for task in range(n):
                now[task] = (now[task] + longer[task]) // 2 if halves else longer[task]
            again, wide, begin = steady_state(a, now, (start, end, before), states)
            moved = (again * span - growth * wide) / (span * wide)
            growth, span = again, wide
            halves, last = turn == 0 or moved * last < 0, moved
            if abs(moved) <= limits[2] * (growth / span):
                settled = True
                break
        durations[row] = now
        found[row, 2] = settled
        found[row, 0], found[row, 1] = growth, span


def sweep_once(a: Links, duration: IntArray, start: IntArray, end: IntArray) -> None:
    """As `sim.sweep.sweep_loop`; `start` holds the release times."""
    for task in a.order:
        at = start[task]
        before = a.prev[task]
        if before >= 0 and end[before] > at:
            at = end[before]
        for d in range(a.dep_ptr[task], a.dep_ptr[task + 1]):
            at = max(at, end[a.dep_index[d]] + a.dep_lag[d])
        start[task] = at
        end[task] = at + duration[task]
        g = a.group[task]
        if g >= 0 and a.group_member[a.group_ptr[g + 1] - 1] == task:
            together, longest = at, duration[task]
            for m in range(a.group_ptr[g], a.group_ptr[g + 1]):
                together = max(together, start[a.group_member[m]])
                longest = max(longest, duration[a.group_member[m]])
            for m in range(a.group_ptr[g], a.group_ptr[g + 1]):
                start[a.group_member[m]] = together
                end[a.group_member[m]] = together + longest


def cycle_length(states: IntArray, count: int) -> int:
    """As `sim.steady.cycle_of` at a depth of 1, of the first `count` states."""
    width = states.shape[1]
    for cycle in range(1, LONGEST_CYCLE + 1):
        if count < 2 * cycle + 1:
            return 0
        same, top = True, states[count - 1, width - 1] - states[count - 1 - cycle, width - 1]
        for i in range(width):
            step = states[count - 1, i] - states[count - 1 - cycle, i]
            if step > top or step != states[count - 1 - cycle, i] - states[count - 1 - 2 * cycle, i]:
                same = False
                break
        if same:
            return cycle
    return 0


def steady_state(
    a: Links, duration: IntArray, times: tuple[IntArray, IntArray, IntArray], states: IntArray
) -> tuple[int, int, int]:
    """As `sim.steady.simulate_steady_compiled`: growth, its span in iterations, and where the last iteration began."""
    start, end, before = times
    n, n_kept = len(duration), len(a.kept)
    finish, begin = 0, 0
    for count in range(1, states.shape[0] + 1):
        before[:] = end
        start[:] = 0
        if count > 1:
            for s in range(len(a.target)):
                start[a.target[s]] = max(start[a.target[s]], before[a.source[s]] + a.lag[s])
        sweep_once(a, duration, start, end)
        begin, finish = finish, 0
        for task in range(n):
            finish = max(finish, end[task])
        for i in range(n_kept):
            states[count - 1, i] = end[a.kept[i]]
        states[count - 1, n_kept] = finish
        cycle = cycle_length(states, count)
        if cycle > 0:
            growth = 0
            for i in range(n_kept + 1):
                growth = max(growth, states[count - 1, i] - states[count - 1 - cycle, i])
            return growth, cycle, begin
    half = states.shape[0] // 2
    return states[-1, n_kept] - states[half - 1, n_kept], states.shape[0] - half, begin


def mark_edges(
    times: tuple[IntArray, IntArray], places: IntArray, share: IntArray, window: tuple[int, int], edges: IntArray
) -> int:
    """Where the sum of the shares of tasks changes within the window, as `pipeline.overlap._levels`; how many edges."""
    start, end = times
    begin, period = window
    count = 0
    for task in places:
        if share[task] <= 0 or end[task] <= start[task]:
            continue
        length = min(end[task] - start[task], period)
        low = (start[task] - begin) % period
        over = max(low + length - period, 0)
        edges[count, 0], edges[count, 1] = low, share[task]
        edges[count + 1, 0], edges[count + 1, 1] = low + length - over, -share[task]
        count += 2
        if over > 0:
            edges[count, 0], edges[count, 1] = 0, share[task]
            edges[count + 1, 0], edges[count + 1, 1] = over, -share[task]
            count += 2
    return count


def sort_edges(edges: IntArray, count: int) -> None:
    """Puts edges into order, and beside each the sum of the shares from it on and its integral up to it."""
    moves = 0
    for i in range(1, count):
        at, change, j = edges[i, 0], edges[i, 1], i - 1
        while j >= 0 and edges[j, 0] > at:
            edges[j + 1, 0], edges[j + 1, 1] = edges[j, 0], edges[j, 1]
            j -= 1
        edges[j + 1, 0], edges[j + 1, 1] = at, change
        moves += i - 1 - j
        if moves > MOST_MOVES * count:  # far from order
            order = np.argsort(edges[:count, 0], kind="mergesort")
            edges[:count, :2] = edges[:count, :2][order]
            break
    level, area = 0, 0
    for i in range(count):
        if i > 0:
            area += level * (edges[i, 0] - edges[i - 1, 0])
        level += edges[i, 1]
        edges[i, 2], edges[i, 3] = level, area


def until(edges: IntArray, count: int, at: int, window: tuple[int, int]) -> int:
    """As `pipeline.overlap._until`."""
    whole, inside = (at - window[0]) // window[1], (at - window[0]) % window[1]
    last = count - 1
    total = edges[last, 3] + edges[last, 2] * (window[1] - edges[last, 0])
    low, high = 0, count
    while low < high:
        middle = (low + high) // 2
        if edges[middle, 0] <= inside:
            low = middle + 1
        else:
            high = middle
    found: int = whole * total
    if low > 0:
        found += edges[low - 1, 3] + edges[low - 1, 2] * (inside - edges[low - 1, 0])
    return found


def mean_beside(
    times: tuple[IntArray, IntArray], task: int, edges: IntArray, count: int, window: tuple[int, int]
) -> float:
    """Mean over a task's time of the shares that the edges sum up."""
    start, end = times
    length = end[task] - start[task]
    if length <= 0 or count == 0:
        return 0.0
    met = until(edges, count, end[task], window) - until(edges, count, start[task], window)
    mean: float = met / length
    return mean


def slow_down(
    a: Links,
    duration: IntArray,
    times: tuple[IntArray, IntArray],
    begin: int,
    edges: tuple[IntArray, IntArray, IntArray],
    longer: IntArray,
) -> None:
    """Picoseconds that each task takes beside what runs with it on its rank, as `pipeline.overlap` finds them."""
    window = (begin, times[1].max() - begin)
    longer[:] = duration
    if window[1] <= 0:
        return
    most = MOST_LOST / FULL_PACE
    held, traffic, memory = edges
    for cls in range(len(a.comm_ptr) - 1):
        comm = a.comm[a.comm_ptr[cls] : a.comm_ptr[cls + 1]]
        compute = a.compute[a.compute_ptr[cls] : a.compute_ptr[cls + 1]]
        n_held = mark_edges(times, comm, a.held, window, held)
        n_traffic = mark_edges(times, comm, a.traffic, window, traffic)
        n_memory = mark_edges(times, compute, a.memory, window, memory)
        sort_edges(held, n_held)
        sort_edges(traffic, n_traffic)
        sort_edges(memory, n_memory)
        for task in compute:
            lost = mean_beside(times, task, held, n_held, window)
            lost += mean_beside(times, task, traffic, n_traffic, window) * a.memory[task] / FULL_PACE
            longer[task] = np.int64(np.rint(duration[task] / (1.0 - min(lost / FULL_PACE, most))))
        for task in comm:
            lost = mean_beside(times, task, memory, n_memory, window) * a.traffic[task] / FULL_PACE
            longer[task] = np.int64(np.rint(duration[task] / (1.0 - min(lost / FULL_PACE, most))))


HELPERS = (sweep_once, cycle_length, steady_state, mark_edges, sort_edges, until, mean_beside, slow_down)
