"""Searches for a placement: greedy constructions in several orders, annealing from the best, until the time is up.

Deterministic for a seed and a number of rounds; the time budget only ends the rounds, with the best found so far.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from perfmodel.config.sharding import TablePlacement
from perfmodel.sharding.anneal import FIRST_FACTORS, LAST_FACTOR, compiled
from perfmodel.sharding.cost import ShardCost
from perfmodel.sharding.layout import Floats, Ints, Layout, lay_out
from perfmodel.sharding.plan import Placements
from perfmodel.sharding.problem import Problem

STEPS_PER_TABLE = 4_000  # evaluations of a round of annealing for each table
MIN_STEPS = 200_000
SLICE_STEPS = 200_000  # evaluations between two looks at the clock, about 0.1 s
MAX_ROUNDS = 8
N_KEPT = 16
MAX_GREEDY_WORK = 4e8  # load entries a greedy construction may touch; beyond, one order is all that is tried


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """A placement with its cost by the search's objective (s), who found it, and after how many evaluations."""

    placement: Placements
    cost_s: float
    origin: str
    n_evaluations: int


@dataclass(slots=True)
class _State:
    option: Ints
    piece: Ints
    cost_s: float
    origin: str


class Search:
    """One search; `best` may be read at any moment, from `progress` too.

    Args:
        problem: what is asked.
        costs: prices of parts.
        seed: of every random choice.
        clock: says the time (s); searches of a given number of rounds do not depend on it.
    """

    def __init__(
        self, problem: Problem, costs: ShardCost, *, seed: int = 0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.problem, self.seed, self.clock = problem, seed, clock
        self.layout: Layout = lay_out(problem, costs)
        self.n_evaluations = 0
        self._kept: list[_State] = []
        self._greedy, self._anneal, self._reload = compiled()

    def run(self, budget_s: float, rounds: int = MAX_ROUNDS) -> list[Found]:
        """The best placements found within `budget_s` seconds (the first greedy one in any case), best first."""
        deadline = self.clock() + budget_s
        for origin, order in self._orders():
            self._keep(self._constructed(origin, order))
            if self.clock() > deadline or self._work() > MAX_GREEDY_WORK:
                break
        for number in range(rounds):
            if self.clock() > deadline:
                break
            self._keep(self._annealed(number, deadline))
        return self.found()

    def improve(self, placement: Placements, budget_s: float) -> list[Found]:
        """As `run`, but from a given placement on; what no option of the search matches is placed greedily."""
        state = self._constructed("greedy by cost", self._orders()[0][1])
        state.origin = "given"
        for number, names in enumerate(self.layout.tables):
            where = placement.get(names[0])
            match = where and self._matching(number, where)
            if match:
                state.option[number], groups = match
                state.piece[number, : len(groups)] = groups
        self._keep(self._state(state.option, state.piece, "given"))
        deadline = self.clock() + budget_s
        for number in range(MAX_ROUNDS):
            if self.clock() > deadline:
                break
            self._keep(self._annealed(number, deadline))
        return self.found()

    def _matching(self, number: int, where: TablePlacement) -> tuple[int, list[int]] | None:
        """The option and groups of a table that are a placement; None if the search has none such."""
        for index, option in enumerate(self.layout.options[number]):
            if option.sharding != where.sharding or len(option.widths) != max(where.n_column_parts, 1):
                continue
            size = len(option.groups[0])
            ranks = where.ranks or option.groups[0]
            chosen = [tuple(ranks[i * size : (i + 1) * size]) for i in range(len(option.widths))]
            if all(group in option.groups for group in chosen):
                return index, [option.groups.index(group) for group in chosen]
        return None

    @property
    def best(self) -> Found:
        """The best placement so far."""
        return self.found()[0]

    def found(self) -> list[Found]:
        """The placements kept, best first."""
        return [
            Found(
                placement=self.layout.placements(state.option, state.piece),
                cost_s=state.cost_s,
                origin=state.origin,
                n_evaluations=self.n_evaluations,
            )
            for state in self._kept
        ]

    def _orders(self) -> list[tuple[str, Ints]]:
        """Orders of tables: by cost, by memory, then shuffled by a little."""
        a = self.layout.arrays
        first = a.cost_ptr[a.option_ptr[:-1]]
        weight, memory = a.cost[first].sum(axis=1), a.memory[first]
        rng = np.random.default_rng(self.seed)
        orders = [
            ("greedy by cost", np.argsort(-weight, kind="stable")),
            ("greedy by size", np.argsort(-memory, kind="stable")),
        ]
        for _ in range(4):
            noisy = weight * rng.uniform(0.7, 1.3, len(weight))
            orders.append(("greedy, shuffled", np.argsort(-noisy, kind="stable")))
        return orders

    def _work(self) -> float:
        a = self.layout.arrays
        return float((a.n_pieces * a.n_groups).sum() * len(a.capacity) * a.cost.shape[1] * 2)

    def _empty(self) -> tuple[Floats, Floats]:
        n_ranks, n_components = len(self.layout.arrays.capacity), self.layout.arrays.cost.shape[1]
        return np.zeros((n_ranks, n_components)), np.zeros(n_ranks)

    def _constructed(self, origin: str, order: Ints) -> _State:
        n = len(self.layout.tables)
        option, piece = np.zeros(n, dtype=np.int64), np.zeros((n, self.layout.max_pieces), dtype=np.int64)
        cost = self._greedy(self.layout.arrays, order.astype(np.int64), option, piece, self._empty())
        a = self.layout.arrays
        self.n_evaluations += int((a.n_pieces * a.n_groups).sum())
        return _State(option, piece, float(cost), origin)

    def _state(self, option: Ints, piece: Ints, origin: str) -> _State:
        return _State(option, piece, float(self._reload(self.layout.arrays, option, piece, *self._empty())), origin)

    def _annealed(self, number: int, deadline: float) -> _State:
        start = self._kept[min(number % 3, len(self._kept) - 1)]
        state = _State(start.option.copy(), start.piece.copy(), start.cost_s, "annealed")
        steps = max(STEPS_PER_TABLE * len(self.layout.tables), MIN_STEPS)
        hot = FIRST_FACTORS[number % len(FIRST_FACTORS)]
        scale, ratio = max(start.cost_s, 1e-12), LAST_FACTOR / hot
        done = 0
        while done < steps:
            size = min(SLICE_STEPS, steps - done)
            ends = tuple(scale * hot * ratio ** (at / steps) for at in (done, done + size))
            seed = self.seed * 1_000_003 + number * 1009 + done % 997
            state.cost_s = float(self._anneal(self.layout.arrays, state.option, state.piece, size, ends, seed))
            done += size
            self.n_evaluations += size
            if self.clock() > deadline:
                break
        return state

    def _keep(self, state: _State) -> None:
        same = any(np.array_equal(state.option, k.option) and np.array_equal(state.piece, k.piece) for k in self._kept)
        if not same:
            self._kept = sorted([*self._kept, state], key=lambda s: s.cost_s)[:N_KEPT]
