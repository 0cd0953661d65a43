"""Searches for a placement: constructions, then annealing from the best of them, until the time is up.

Constructions: pieces of the cheapest options spread by longest first and by largest differencing, the same behind a beam over
ways to divide tables, and greedy ones in several orders. With time to spare a seed and a number of rounds always give the same
placements; where time is short, rounds cool faster, and the best found so far is there at any moment.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from perfmodel.config.sharding import TablePlacement
from perfmodel.sharding.anneal import FIRST_FACTORS, LAST_FACTOR, compiled
from perfmodel.sharding.cost import ShardCost
from perfmodel.sharding.layout import Arrays, Floats, Ints, Layout, lay_out
from perfmodel.sharding.partition import beam_over_splits, cheapest, spread
from perfmodel.sharding.plan import Placements
from perfmodel.sharding.problem import Problem

STEPS_PER_TABLE = 4_000  # evaluations of a round of annealing for each table
MIN_STEPS = 200_000
SLICE_STEPS = 200_000  # evaluations between two looks at the clock, about 0.1 s
MAX_ROUNDS = 8
N_KEPT = 16
BEAM_SHARE = 0.15  # of the time, at most, for the beam over splits
ROUND_SHARE = 0.5  # of the time left, at most, for one round of annealing
MAX_GREEDY_WORK = 4e8  # load entries a greedy construction may touch; beyond, one order is all that is tried


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """A placement with its cost by the search's objective (s), who found it, and after how many evaluations."""

    placement: Placements
    cost_s: float
    origin: str
    n_evaluations: int


@dataclass(slots=True)
class State:
    """The option of each table, the group of each of its pieces, the objective, and who made it."""

    option: Ints
    piece: Ints
    cost_s: float
    origin: str


class ArraySearch:
    """A search over arrays; `states` are the best so far, at any moment.

    Args:
        arrays: what is asked.
        seed: of every random choice.
        clock: says the time (s); with time to spare a number of rounds gives the same states whatever it says.
    """

    def __init__(self, arrays: Arrays, *, seed: int = 0, clock: Callable[[], float] = time.monotonic) -> None:
        self.arrays, self.seed, self.clock = arrays, seed, clock
        self.max_pieces = int(arrays.n_pieces.max())
        self.n_evaluations = 0
        self.states: list[State] = []
        self._greedy, self._anneal, self._reload = compiled()

    @property
    def n_tables(self) -> int:
        """Tables, or sets of them that stay together."""
        return len(self.arrays.option_ptr) - 1

    def run_states(self, budget_s: float, rounds: int | None = None) -> None:
        """Constructions, then annealing from the best of them, for `budget_s` seconds (one construction in any case)."""
        deadline = self.clock() + budget_s
        self.keep(self._partitioned(cheapest(self.arrays), "cheapest, longest first", differencing=False))
        if self.clock() < deadline:
            self.keep(self._partitioned(cheapest(self.arrays), "cheapest, largest differencing", differencing=True))
        if self.clock() < deadline:
            self.keep(self._beamed(min(deadline, self.clock() + BEAM_SHARE * budget_s)))
        for origin, order in self._orders() if self._work() <= MAX_GREEDY_WORK else ():
            if self.clock() > deadline:
                break
            self.keep(self.constructed(origin, order))
        self.anneal_until(deadline, MAX_ROUNDS if rounds is None else rounds)

    def anneal_until(self, deadline: float, rounds: int) -> None:
        """Rounds of annealing until the deadline."""
        for number in range(rounds):
            if self.clock() > deadline:
                break
            self.keep(self._annealed(number, deadline))

    def keep(self, state: State) -> None:
        """Adds a state, if it is new and among the best."""
        same = any(np.array_equal(state.option, k.option) and np.array_equal(state.piece, k.piece) for k in self.states)
        if not same:
            self.states = sorted([*self.states, state], key=lambda s: s.cost_s)[:N_KEPT]

    def state(self, option: Ints, piece: Ints, origin: str) -> State:
        """A state with its objective."""
        self.n_evaluations += 1
        return State(option, piece, float(self._reload(self.arrays, option, piece, *self._empty())), origin)

    def short(self, state: State) -> tuple[int, int] | None:
        """The first rank and tier of memory that a state is short of, if any."""
        load, held = self._empty()
        self._reload(self.arrays, state.option, state.piece, load, held)
        over = np.argwhere(held > self.arrays.capacity)
        return (int(over[0][0]), int(over[0][1])) if len(over) else None

    def constructed(self, origin: str, order: Ints) -> State:
        """Tables placed one after the other, each by the option and groups that raise the objective least."""
        option, piece = self._blank()
        cost = self._greedy(self.arrays, order.astype(np.int64), option, piece, self._empty())
        self.n_evaluations += int((self.arrays.n_pieces * self.arrays.n_groups).sum())
        return State(option, piece, float(cost), origin)

    def _partitioned(self, option: Ints, origin: str, *, differencing: bool) -> State:
        piece = self._blank()[1]
        spread(self.arrays, option, piece, differencing=differencing)
        return self.state(option.copy(), piece, origin)

    def _beamed(self, deadline: float) -> State:
        """The beam's options, spread by largest differencing or longest first, whichever is better."""

        def evaluate(option: Ints) -> tuple[float, Ints]:
            found = self._partitioned(option, "beam", differencing=False)
            return found.cost_s, found.piece

        option = beam_over_splits(self.arrays, evaluate, lambda: self.clock() < deadline)
        ways = [self._partitioned(option, "beam over splits", differencing=way) for way in (False, True)]
        return min(ways, key=lambda one: one.cost_s)

    def _orders(self) -> list[tuple[str, Ints]]:
        """Orders of tables: by cost, by memory, then shuffled by a little."""
        a = self.arrays
        first = a.cost_ptr[a.option_ptr[:-1]]
        weight, memory = a.cost[first].sum(axis=1), a.memory[first].sum(axis=1)
        rng = np.random.default_rng(self.seed)
        orders = [
            ("greedy by cost", np.argsort(-weight, kind="stable")),
            ("greedy by size", np.argsort(-memory, kind="stable")),
        ]
        for _ in range(4):
            noisy = weight * rng.uniform(0.7, 1.3, len(weight))
            orders.append(("greedy, shuffled", np.argsort(-noisy, kind="stable")))
        return orders

    def by_cost(self) -> Ints:
        """Tables, the costliest first."""
        return self._orders()[0][1]

    def _work(self) -> float:
        a = self.arrays
        return float((a.n_pieces * a.n_groups).sum() * len(a.capacity) * a.cost.shape[1] * 2)

    def _blank(self) -> tuple[Ints, Ints]:
        return np.zeros(self.n_tables, dtype=np.int64), np.zeros((self.n_tables, self.max_pieces), dtype=np.int64)

    def _empty(self) -> tuple[Floats, Floats]:
        a = self.arrays
        return np.zeros((len(a.capacity), a.cost.shape[1])), np.zeros(a.capacity.shape)

    def _annealed(self, number: int, deadline: float) -> State:
        """A round of annealing from one of the best states: as many steps as a round has, or half the time that is left."""
        start = self.states[min(number % 3, len(self.states) - 1)]
        state = State(start.option.copy(), start.piece.copy(), start.cost_s, "annealed")
        steps = max(STEPS_PER_TABLE * self.n_tables, MIN_STEPS)
        hot = FIRST_FACTORS[number % len(FIRST_FACTORS)]
        scale, ratio = max(start.cost_s, 1e-12), LAST_FACTOR / hot
        begin = self.clock()
        allotted_s = max((deadline - begin) * ROUND_SHARE, 1e-9)
        done, at, slice_frac = 0, 0.0, 0.0
        while at < 1.0:
            size = min(SLICE_STEPS, steps - done)
            after = min(max((done + size) / steps, at + slice_frac), 1.0)
            ends = tuple(scale * hot * ratio**place for place in (at, after))
            seed = self.seed * 1_000_003 + number * 1009 + done % 997
            state.cost_s = float(self._anneal(self.arrays, state.option, state.piece, size, ends, seed))
            done += size
            self.n_evaluations += size
            elapsed_frac = (self.clock() - begin) / allotted_s
            at, slice_frac = max(after, min(elapsed_frac, 1.0)), elapsed_frac * size / done
            if self.clock() > deadline or done >= steps:
                break
        return state


class Search(ArraySearch):
    """A search of placements; `best` may be read at any moment.

    Args:
        problem: what is asked.
        costs: prices of parts.
        seed, clock: see `ArraySearch`.
    """

    def __init__(
        self, problem: Problem, costs: ShardCost, *, seed: int = 0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.problem = problem
        self.layout: Layout = lay_out(problem, costs)
        super().__init__(self.layout.arrays, seed=seed, clock=clock)

    def run(self, budget_s: float, rounds: int | None = None) -> list[Found]:
        """The best placements found within `budget_s` seconds (the first construction in any case), best first."""
        self.run_states(budget_s, rounds)
        return self.found()

    def improve(self, placement: Placements, budget_s: float) -> list[Found]:
        """As `run`, but from a given placement on; what no option of the search matches is placed greedily."""
        state = self.constructed("greedy by cost", self.by_cost())
        for number, names in enumerate(self.layout.tables):
            where = placement.get(names[0])
            match = where and self._matching(number, where)
            if match:
                state.option[number], groups = match
                state.piece[number, : len(groups)] = groups
        self.keep(self.state(state.option, state.piece, "given"))
        self.anneal_until(self.clock() + budget_s, MAX_ROUNDS)
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
            for state in self.states
        ]
