"""Constructions that look at all pieces at once: multi-way partition by largest differences, and a beam over splits.

Karmarkar and Karp, The Differencing Method of Set Partitioning (UCB/CSD 82/113, 1982), in the form for several parts: of
partial partitions the two with the largest differences are joined, the largest sums of one to the smallest of the other.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence

import numpy as np

from perfmodel.sharding.layout import Arrays, Floats, Ints

BEAM_WIDTH = 4
Pieces = tuple[Ints, Ints, Floats]  # table and piece of every piece that lies on one rank, and its cost


def largest_differencing(weights: Floats, n_parts: int) -> Ints:
    """The part of each weight, by the largest differencing method.

    >>> largest_differencing(np.array([8.0, 7.0, 6.0, 5.0, 4.0]), 2).tolist()
    [0, 1, 1, 0, 1]
    """
    if not len(weights):
        return np.zeros(0, dtype=np.int64)
    heap: list[tuple[float, int, list[float], list[list[int]]]] = []
    for number, weight in enumerate(np.asarray(weights, dtype=float).tolist()):
        sums = [weight] + [0.0] * (n_parts - 1)
        members: list[list[int]] = [[number], *([] for _ in range(n_parts - 1))]
        heap.append((-weight, number, sums, members))
    heapq.heapify(heap)
    while len(heap) > 1:
        _, order, first, mine = heapq.heappop(heap)
        _, _, second, theirs = heapq.heappop(heap)
        joined = [
            (one + two, both[0] + both[1])
            for one, two, both in zip(first, reversed(second), zip(mine, reversed(theirs), strict=True), strict=True)
        ]
        joined.sort(key=lambda pair: -pair[0])
        sums = [total for total, _ in joined]
        heapq.heappush(heap, (sums[-1] - sums[0], order, sums, [members for _, members in joined]))
    part = np.zeros(len(weights), dtype=np.int64)
    for number, inside in enumerate(heap[0][3]):
        part[inside] = number
    return part


def longest_first(weights: Floats, base: Floats) -> Ints:
    """The part of each weight: the largest first, each to the part with least so far (Graham 1969); `base` lies there."""
    heap = [(load, part) for part, load in enumerate(base.tolist())]
    heapq.heapify(heap)
    part = np.zeros(len(weights), dtype=np.int64)
    for number in np.argsort(-weights, kind="stable").tolist():
        load, least = heap[0]
        heapq.heapreplace(heap, (load + float(weights[number]), least))
        part[number] = least
    return part


def spread(a: Arrays, option: Ints, piece: Ints, *, differencing: bool) -> None:
    """Places the pieces of the chosen options: those bound to groups first, then single ones by a partition of them all.

    Pieces that may not go to every rank, or lie on several, go where their largest rank has least; memory is not looked at.
    """
    n_ranks = len(a.capacity)
    base = np.zeros(n_ranks)
    free: list[tuple[int, int]] = []
    for t in range(len(option)):
        o = int(a.option_ptr[t] + option[t])
        if a.size[o] == 1 and a.n_groups[o] == n_ranks:
            free += [(t, p) for p in range(int(a.n_pieces[o]))]
        else:
            _bind(a, o, piece[t], base)
    weights = np.array([a.cost[a.cost_ptr[a.option_ptr[t] + option[t]] + p].sum() for t, p in free])
    if not differencing or not len(free):
        part = longest_first(weights, base)
    else:
        part = largest_differencing(weights, n_ranks)
        sums = np.bincount(part, weights=weights, minlength=n_ranks)
        rank = np.zeros(n_ranks, dtype=np.int64)
        rank[np.argsort(-sums, kind="stable")] = np.argsort(base, kind="stable")
        part = rank[part]
    for (t, p), rank_of in zip(free, part.tolist(), strict=True):
        piece[t, p] = rank_of  # the groups of such options are the ranks in order


def _bind(a: Arrays, o: int, piece: Ints, base: Floats) -> None:
    """Puts each piece of an option on the group whose fullest rank then has least."""
    first, size = int(a.group_first[o]), int(a.size[o])
    for p in range(int(a.n_pieces[o])):
        at = int(a.cost_ptr[o]) + p * size
        cost = a.cost[at : at + size].sum(axis=1)
        groups = [a.ranks[a.group_ptr[first + g] : a.group_ptr[first + g + 1]] for g in range(int(a.n_groups[o]))]
        piece[p] = min(range(len(groups)), key=lambda g: float((base[groups[g]] + cost).max()))
        base[groups[int(piece[p])]] += cost


def cheapest(a: Arrays) -> Ints:
    """Of each table the option that costs all ranks together least."""
    ends = a.cost_ptr + a.n_pieces * a.size
    total = np.array([a.cost[begin:end].sum() for begin, end in zip(a.cost_ptr.tolist(), ends.tolist(), strict=True)])
    bounds = zip(a.option_ptr[:-1].tolist(), a.option_ptr[1:].tolist(), strict=True)
    return np.array([int(total[begin:end].argmin()) for begin, end in bounds], dtype=np.int64)


def beam_over_splits(
    a: Arrays, evaluate: Callable[[Ints], tuple[float, Ints]], go_on: Callable[[], bool], width: int = BEAM_WIDTH
) -> Ints:
    """Options by table, found by dividing otherwise, one after another, the tables that set the largest load.

    Args:
        a: the problem.
        evaluate: objective and pieces of options by table.
        go_on: False when the time is up.
        width: states kept from step to step.
    """
    start = cheapest(a)
    value, piece = evaluate(start)
    beam = [(value, start, piece)]
    best = beam[0]
    seen = {start.tobytes()}
    while go_on():
        fresh = []
        for _, option, placed in beam:
            table = _heaviest(a, option, placed)
            for other in range(int(a.option_ptr[table + 1] - a.option_ptr[table])):
                tried = option.copy()
                tried[table] = other
                if tried.tobytes() not in seen and go_on():
                    seen.add(tried.tobytes())
                    fresh.append((*evaluate(tried), tried))
        beam = [(value, option, piece) for value, piece, option in sorted(fresh, key=lambda one: one[0])[:width]]
        if not beam or beam[0][0] >= best[0]:
            break
        best = beam[0]
    return best[1]


def _heaviest(a: Arrays, option: Ints, piece: Ints) -> int:
    """Of the tables on the fullest rank the one with most there, if it can be divided otherwise; else of all tables."""
    load = np.zeros(len(a.capacity))
    parts: list[tuple[int, Sequence[int], Floats]] = []
    for t in range(len(option)):
        o = int(a.option_ptr[t] + option[t])
        size = int(a.size[o])
        for p in range(int(a.n_pieces[o])):
            group = int(a.group_first[o] + piece[t, p])
            at = int(a.cost_ptr[o]) + p * size
            ranks = a.ranks[a.group_ptr[group] : a.group_ptr[group] + size]
            cost = a.cost[at : at + size].sum(axis=1)
            load[ranks] += cost
            parts.append((t, ranks.tolist(), cost))
    top = int(load.argmax())
    there = [(float(cost[ranks.index(top)]), t) for t, ranks, cost in parts if top in ranks]
    several = [(cost, t) for cost, t in there if a.option_ptr[t + 1] - a.option_ptr[t] > 1]
    return max(several or there)[1]
