"""The optimum of a small search problem by branch and bound: a reference for the search.

Tables are placed one after the other, the costliest first. A partial state cannot end below the sum over components of
max(its largest load, all loads so far and the least that the remaining tables must add, spread evenly); branches that cannot
beat the best known are left out. Exact, so it takes time that grows with the product of the tables' choices.
"""

from __future__ import annotations

from itertools import product

import numpy as np

from perfmodel.sharding.anneal import apply, kept_value, objective
from perfmodel.sharding.layout import Arrays, Floats, Ints, Layout


def optimum(layout: Layout) -> tuple[float, Ints, Ints]:
    """The least objective (s) and a state that has it: options by table, groups by table and piece."""
    return _Branching(layout).run()


class _Branching:
    def __init__(self, layout: Layout) -> None:
        self.a: Arrays = layout.arrays
        n = len(layout.tables)
        self.option, self.piece = np.zeros(n, dtype=np.int64), np.zeros((n, layout.max_pieces), dtype=np.int64)
        n_ranks = len(self.a.capacity)
        self.load, self.held = np.zeros((n_ranks, self.a.cost.shape[1])), np.zeros((n_ranks, self.a.memory.shape[1]))
        least = [self._least(t) for t in range(n)]
        self.order = sorted(range(n), key=lambda t: -float(least[t].sum()))
        rest = np.zeros(self.a.cost.shape[1])
        self.rest: list[Floats] = [rest]
        for t in reversed(self.order):
            rest = rest + least[t]
            self.rest.insert(0, rest)
        self.best = float("inf")
        self.found = (self.option.copy(), self.piece.copy())

    def run(self) -> tuple[float, Ints, Ints]:
        self._branch(0)
        return self.best, *self.found

    def _least(self, table: int) -> Floats:
        """What a table adds to all ranks together at least, by component."""
        a, totals = self.a, []
        for o in range(a.option_ptr[table], a.option_ptr[table + 1]):
            first = a.cost_ptr[o]
            totals.append(a.cost[first : first + a.n_pieces[o] * a.size[o]].sum(axis=0))
        return np.asarray(np.min(totals, axis=0))

    def _branch(self, depth: int) -> None:
        even = (self.load.sum(axis=0) + self.rest[depth]) / len(self.held)
        if float(np.maximum(self.load.max(axis=0), even).sum()) >= self.best:
            return
        if depth == len(self.order):
            value = kept_value(self.a, self.held, objective(self.a, self.load, self.held))
            if value < self.best:
                self.best, self.found = value, (self.option.copy(), self.piece.copy())
            return
        t, a = self.order[depth], self.a
        for o in range(a.option_ptr[t], a.option_ptr[t + 1]):
            self.option[t] = o - a.option_ptr[t]
            for groups in product(range(a.n_groups[o]), repeat=int(a.n_pieces[o])):
                load, held = self.load.copy(), self.held.copy()
                self.piece[t, : len(groups)] = groups
                for p, g in enumerate(groups):
                    apply(a, self.load, self.held, (o, p, g), 1.0)
                self._branch(depth + 1)
                self.load, self.held = load, held
