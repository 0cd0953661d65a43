"""Compiled loops of the search: a greedy construction and simulated annealing with incremental evaluation.

A state is the option of each table and the group of each of its pieces; `load` [ranks, components] and `held` [ranks, tiers
of memory] follow every move, so that an evaluation costs one look at the ranks. Moves: a piece to another group, two tables'
pieces exchanged, or a table to another option; half of them begin with a table of the fullest rank, if some draws find one.
The best state seen is kept.
"""

from __future__ import annotations

import numpy as np

from perfmodel.sharding.layout import Arrays, Floats, Ints
from perfmodel.sim.loops import Loop, compiled_loop

SHORT = 1e6  # factor of the objective of a state that is short of memory, when states are compared in the end
PENALTY = 10.0  # objective's factor for each device's memory that a plan is short of
# Temperatures as shares of the first objective: rounds of annealing begin hot, warm and cool in turn, and all end cold.
FIRST_FACTORS = (0.3, 0.06, 0.015)
LAST_FACTOR = 1e-5
TOP_FRAC = 0.5  # of the moves begin with a table of the fullest rank
DRAWS = 32  # tables looked at to find one on the fullest rank
DRAWN_FRAC = 0.5  # of the moves to another option whose pieces go anywhere; the others' go where they cost least


def objective(a: Arrays, load: Floats, held: Floats) -> float:
    """Sum of the components' largest loads, times more if memory is short."""
    total = 0.0
    for k in range(load.shape[1]):
        top = 0.0
        for r in range(load.shape[0]):
            top = max(top, load[r, k])
        total += top
    short = 0.0
    for r in range(load.shape[0]):
        for m in range(held.shape[1]):
            if held[r, m] > a.capacity[r, m]:
                short += (held[r, m] - a.capacity[r, m]) / max(a.capacity[r, m], 1.0)
    return total * (1.0 + PENALTY * short)


def kept_value(a: Arrays, held: Floats, value: float) -> float:
    """An objective as states are compared by it in the end: one that is short of memory loses to any that is not."""
    for r in range(held.shape[0]):
        for m in range(held.shape[1]):
            if held[r, m] > a.capacity[r, m] * (1.0 + 1e-12):
                return value * SHORT
    return value


def apply(a: Arrays, load: Floats, held: Floats, what: tuple[int, int, int], sign: float) -> None:
    """Adds (or takes away) piece p of option o on group g; `what` is (o, p, g)."""
    o, p, g = what
    group = a.group_first[o] + g
    base = a.cost_ptr[o] + p * a.size[o]
    first = a.group_ptr[group]
    for j in range(a.group_ptr[group + 1] - first):
        rank = a.ranks[first + j]
        for k in range(load.shape[1]):
            load[rank, k] += sign * a.cost[base + j, k]
        for m in range(held.shape[1]):
            held[rank, m] += sign * a.memory[base + j, m]


def sort_key(load: Floats) -> float:
    """Breaks ties between equal objectives: even loads are better."""
    total = 0.0
    for r in range(load.shape[0]):
        for k in range(load.shape[1]):
            total += load[r, k] * load[r, k]
    return total


def best_group(a: Arrays, load: Floats, held: Floats, o: int, p: int) -> tuple[int, float]:
    """The group on which a piece raises the objective least, and the objective there."""
    found, least, key = 0, np.inf, np.inf
    for g in range(a.n_groups[o]):
        apply(a, load, held, (o, p, g), 1.0)
        value = objective(a, load, held)
        if value < least * (1.0 + 1e-12):
            even = sort_key(load)
            if value < least * (1.0 - 1e-12) or even < key:
                found, least, key = g, value, even
        apply(a, load, held, (o, p, g), -1.0)
    return found, least


def greedy(a: Arrays, order: Ints, option: Ints, piece: Ints, state: tuple[Floats, Floats]) -> float:
    """Places tables one by one in `order`, each by the option and groups that raise the objective least."""
    load, held = state
    for t in order:
        chosen, least, key = 0, np.inf, np.inf
        for local in range(a.option_ptr[t + 1] - a.option_ptr[t]):
            o = a.option_ptr[t] + local
            value = 0.0
            for p in range(a.n_pieces[o]):
                g, value = best_group(a, load, held, o, p)
                piece[t, p] = g
                apply(a, load, held, (o, p, g), 1.0)
            even = sort_key(load)
            for r in range(
                load.shape[0]
            ):  # what the table costs all ranks together counts too, or early ones are spread
                for k in range(load.shape[1]):
                    value += load[r, k] / load.shape[0]
            for p in range(a.n_pieces[o]):
                apply(a, load, held, (o, p, piece[t, p]), -1.0)
            if value < least * (1.0 - 1e-12) or (value <= least * (1.0 + 1e-12) and even < key):
                chosen, least, key = local, value, even
        o = a.option_ptr[t] + chosen
        option[t] = chosen
        for p in range(a.n_pieces[o]):
            g, _ = best_group(a, load, held, o, p)
            piece[t, p] = g
            apply(a, load, held, (o, p, g), 1.0)
    return kept_value(a, held, objective(a, load, held))


def reload(a: Arrays, option: Ints, piece: Ints, load: Floats, held: Floats) -> float:
    """Fills the loads of a state; its objective."""
    load[:] = 0.0
    held[:] = 0.0
    for t in range(len(option)):
        o = a.option_ptr[t] + option[t]
        for p in range(a.n_pieces[o]):
            apply(a, load, held, (o, p, piece[t, p]), 1.0)
    return kept_value(a, held, objective(a, load, held))


def fullest(load: Floats) -> int:
    """The rank with the largest sum over components."""
    found, most = 0, -1.0
    for r in range(load.shape[0]):
        total = 0.0
        for k in range(load.shape[1]):
            total += load[r, k]
        if total > most:
            found, most = r, total
    return found


def table_on(a: Arrays, option: Ints, piece: Ints, start: tuple[int, int]) -> int:
    """A drawn table with a piece on a rank of its own choice that is the given one; the table given, if draws find none."""
    for _ in range(DRAWS):
        t = np.random.randint(len(option))
        o = a.option_ptr[t] + option[t]
        if a.size[o] == 1:
            for p in range(a.n_pieces[o]):
                if a.ranks[a.group_ptr[a.group_first[o] + piece[t, p]]] == start[1]:
                    return t
    return start[0]


def anneal(  # noqa: C901, PLR0912, PLR0915 -- one flat loop on local names: what numba compiles well
    a: Arrays, option: Ints, piece: Ints, n_steps: int, ends: tuple[float, float], seed: int
) -> float:
    """Improves a state in place over `n_steps` evaluations between two temperatures (s); the best objective."""
    np.random.seed(seed)
    n_tables, n_ranks = len(option), len(a.capacity)
    load, held = np.zeros((n_ranks, a.cost.shape[1])), np.zeros((n_ranks, a.memory.shape[1]))
    best = reload(a, option, piece, load, held)
    now = objective(a, load, held)
    best_option, best_piece = option.copy(), piece.copy()
    kept = np.zeros(piece.shape[1], dtype=np.int64)
    top = fullest(load)
    for step in range(n_steps):
        heat = ends[0] * (ends[1] / ends[0]) ** (step / n_steps)
        kind = np.random.random()
        t = np.random.randint(n_tables)
        if np.random.random() < TOP_FRAC:
            t = table_on(a, option, piece, (t, top))
        o, before = a.option_ptr[t] + option[t], option[t]
        other, q, p = -1, 0, 0
        n_options = a.option_ptr[t + 1] - a.option_ptr[t]
        if kind < 0.25 and n_options > 1:
            p = -1
            for i in range(a.n_pieces[o]):
                kept[i] = piece[t, i]
                apply(a, load, held, (o, i, piece[t, i]), -1.0)
            option[t] = (before + 1 + np.random.randint(n_options - 1)) % n_options
            o = a.option_ptr[t] + option[t]
            drawn = np.random.random() < DRAWN_FRAC
            for i in range(a.n_pieces[o]):
                piece[t, i] = np.random.randint(a.n_groups[o]) if drawn else best_group(a, load, held, o, i)[0]
                apply(a, load, held, (o, i, piece[t, i]), 1.0)
        else:
            p = np.random.randint(a.n_pieces[o])
            kept[0] = piece[t, p]
            if kind < 0.6:
                other = np.random.randint(n_tables)
                oo = a.option_ptr[other] + option[other]
                q = np.random.randint(a.n_pieces[oo])
                if other == t or a.group_first[oo] != a.group_first[o]:
                    other = -1
                else:
                    kept[1] = piece[other, q]
                    apply(a, load, held, (o, p, kept[0]), -1.0)
                    apply(a, load, held, (oo, q, kept[1]), -1.0)
                    piece[t, p], piece[other, q] = kept[1], kept[0]
                    apply(a, load, held, (o, p, kept[1]), 1.0)
                    apply(a, load, held, (oo, q, kept[0]), 1.0)
            if other < 0:
                apply(a, load, held, (o, p, kept[0]), -1.0)
                piece[t, p] = np.random.randint(a.n_groups[o])
                apply(a, load, held, (o, p, piece[t, p]), 1.0)
        value = objective(a, load, held)
        if value <= now or np.random.random() < np.exp((now - value) / heat):
            now = value
            top = fullest(load)
            if value < best * (1.0 - 1e-9) and kept_value(a, held, value) < best * (1.0 - 1e-9):
                best = kept_value(a, held, value)
                best_option[:] = option
                best_piece[:] = piece
            continue
        o = a.option_ptr[t] + option[t]
        if p < 0:
            for i in range(a.n_pieces[o]):
                apply(a, load, held, (o, i, piece[t, i]), -1.0)
            option[t] = before
            o = a.option_ptr[t] + before
            for i in range(a.n_pieces[o]):
                piece[t, i] = kept[i]
                apply(a, load, held, (o, i, kept[i]), 1.0)
        else:
            apply(a, load, held, (o, p, piece[t, p]), -1.0)
            piece[t, p] = kept[0]
            apply(a, load, held, (o, p, kept[0]), 1.0)
            if other >= 0:
                oo = a.option_ptr[other] + option[other]
                apply(a, load, held, (oo, q, piece[other, q]), -1.0)
                piece[other, q] = kept[1]
                apply(a, load, held, (oo, q, kept[1]), 1.0)
    option[:] = best_option
    piece[:] = best_piece
    return reload(a, option, piece, load, held)


def compiled() -> tuple[Loop, Loop, Loop]:
    """`greedy`, `anneal` and `reload`, compiled once, their machine code cached on disk."""
    helpers = (objective, kept_value, apply, sort_key, best_group, fullest, table_on)
    return (
        compiled_loop(greedy, *helpers),
        compiled_loop(anneal, *helpers, reload),
        compiled_loop(reload, *helpers),
    )
