"""Balances parts of tables over ranks where each part has a fixed cost: the smallest largest sum of a rank.

The objective of planners that add up prices of shards (TorchRec's, for one; our `ShardCost`). A table has choices; a choice
has parts, each with a cost and a need of memory, and a rule of where parts may go. Construction: longest parts first, each
table by the choice that leaves the least loaded ranks. Improvement: tables of the most loaded rank move, or change their
choice; when nothing helps, a few random tables are placed anew and the search goes on from there (iterated local search,
Lourenco, Martin, Stuetzle 2003), keeping the best. Seeded; it ends when the time is over or a lower bound is met.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from perfmodel.errors import InfeasiblePlanError

Floats = NDArray[np.float64]
Spread = Literal["device", "host", "uniform"]
KICK_FRAC = 0.04  # of the tables are placed anew when nothing helps, at least two
MOST_TRIED = 24  # tables of the fullest rank that one step tries
PATIENCE = 3  # kicks without a better plan after which the search returns to the best


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """One way to divide a table: the cost of each part and its need of each memory tier.

    `spread`: `device`, every part on any rank; `host`, part i on the i-th rank of one host; `uniform`, part i on rank i.
    """

    costs: Floats
    memory: Floats  # (parts, tiers)
    spread: Spread


@dataclass(frozen=True, slots=True, kw_only=True)
class Balanced:
    """The best assignment: of each table its choice and the rank of each part; the largest sum, and how it went."""

    choice: tuple[int, ...]
    ranks: tuple[tuple[int, ...], ...]
    cost: float
    n_steps: int


def balance(
    tables: Sequence[Sequence[Choice]],
    capacity: Floats,
    per_host: int,
    budget_s: float,
    seed: int = 0,
    clock: Callable[[], float] = time.monotonic,
) -> Balanced:
    """Searches for `budget_s` seconds; `capacity` is (ranks, tiers) of memory.

    Raises:
        InfeasiblePlanError: a table for which no choice fits memory once the others are placed.
    """
    end = clock() + budget_s
    state = _State(tables, capacity, per_host)
    state.construct()
    rng = np.random.default_rng(seed)
    best, best_cost = state.snapshot(), state.cost
    n_steps = n_vain = 0
    while clock() < end and best_cost > state.lower_bound * (1 + 1e-9):
        n_steps += 1
        if state.improve():
            continue
        if state.cost < best_cost * (1 - 1e-12):
            best, best_cost, n_vain = state.snapshot(), state.cost, 0
        else:
            n_vain += 1
        if n_vain >= PATIENCE:
            state.restore(best)
            n_vain = 0
        state.kick(rng)
    if state.cost < best_cost:
        best, best_cost = state.snapshot(), state.cost
    return Balanced(
        choice=tuple(choice for choice, _ in best),
        ranks=tuple(tuple(ranks.tolist()) for _, ranks in best),
        cost=float(best_cost),
        n_steps=n_steps,
    )


Placed = tuple[int, NDArray[np.int64]]


class _State:
    """An assignment under change: load and memory of each rank follow every move."""

    def __init__(self, tables: Sequence[Sequence[Choice]], capacity: Floats, per_host: int) -> None:
        self.tables, self.capacity, self.per_host = tables, capacity, per_host
        self.n_ranks = len(capacity)
        self.load: Floats = np.zeros(self.n_ranks)
        self.left: Floats = capacity.astype(np.float64)
        self.placed: list[Placed | None] = [None] * len(tables)
        self.lower_bound = sum(min(float(c.costs.sum()) for c in choices) for choices in tables) / self.n_ranks
        self.hosts = np.arange(self.n_ranks).reshape(-1, per_host)

    @property
    def cost(self) -> float:
        return float(self.load.max())

    def snapshot(self) -> list[Placed]:
        return [spot for spot in self.placed if spot is not None]

    def restore(self, spots: Sequence[Placed]) -> None:
        for table in range(len(self.tables)):
            self.remove(table)
        for table, spot in enumerate(spots):
            self.put(table, spot)

    def construct(self) -> None:
        """Largest tables first; a table that no longer fits makes room by what memory-light choices the others have."""
        order = sorted(range(len(self.tables)), key=lambda t: -min(float(c.costs.sum()) for c in self.tables[t]))
        for table in order:
            if not self.place(table):
                self._construct_by_memory()
                return

    def _construct_by_memory(self) -> None:
        for table in range(len(self.tables)):
            self.remove(table)
        largest = [min(float(c.memory[:, 0].sum()) for c in choices) for choices in self.tables]
        for table in sorted(range(len(self.tables)), key=lambda t: -largest[t]):
            if not self.place(table):
                raise InfeasiblePlanError(f"table {table}: no choice of {len(self.tables[table])} fits the memory left")

    def put(self, table: int, spot: Placed) -> None:
        choice = self.tables[table][spot[0]]
        np.add.at(self.load, spot[1], choice.costs)
        np.subtract.at(self.left, spot[1], choice.memory)
        self.placed[table] = spot

    def remove(self, table: int) -> Placed | None:
        spot = self.placed[table]
        if spot is not None:
            choice = self.tables[table][spot[0]]
            np.subtract.at(self.load, spot[1], choice.costs)
            np.add.at(self.left, spot[1], choice.memory)
            self.placed[table] = None
        return spot

    def place(self, table: int) -> bool:
        """Puts a table where the largest load stays smallest, then the least is added in all; False if nothing fits."""
        found = self._best_spot(table)
        if found is None:
            return False
        self.put(table, found[1])
        return True

    def _best_spot(self, table: int) -> tuple[tuple[float, float], Placed] | None:
        best: tuple[tuple[float, float], Placed] | None = None
        top = self.cost
        for number, choice in enumerate(self.tables[table]):
            ranks = self._spot(choice)
            if ranks is None:
                continue
            after = self.load[ranks] + choice.costs
            # Where the top stays as it is, less work in all counts, and then even loads.
            score = (max(float(after.max()), top), float(choice.costs.sum()) + float(after.max()) / self.n_ranks)
            if best is None or score < best[0]:
                best = (score, (number, ranks))
        return best

    def _spot(self, choice: Choice) -> NDArray[np.int64] | None:
        """Ranks for the parts of a choice, greedily by load; None where memory is short."""
        if choice.spread == "uniform":
            ranks = np.arange(self.n_ranks)
            return ranks if bool((self.left >= choice.memory).all()) else None
        if choice.spread == "host":
            return self._host_spot(choice)
        return self._device_spot(choice)

    def _host_spot(self, choice: Choice) -> NDArray[np.int64] | None:
        n = len(choice.costs)
        hosts = self.hosts[:, np.arange(n) % self.per_host]
        fits = (self.left[hosts] >= choice.memory).all(axis=(1, 2))
        if not fits.any():
            return None
        peak = np.where(fits, (self.load[hosts] + choice.costs).max(axis=1), np.inf)
        found: NDArray[np.int64] = hosts[int(peak.argmin())]
        return found

    def _device_spot(self, choice: Choice) -> NDArray[np.int64] | None:
        if len(choice.costs) == 1:
            fits = (self.left >= choice.memory[0]).all(axis=1)
            rank = int(np.where(fits, self.load, np.inf).argmin())
            return np.array([rank]) if fits[rank] else None
        load, left = self.load.copy(), self.left.copy()
        ranks = np.zeros(len(choice.costs), dtype=np.int64)
        for part in np.argsort(-choice.costs, kind="stable").tolist():
            fits = (left >= choice.memory[part]).all(axis=1)
            rank = int(np.where(fits, load, np.inf).argmin())
            if not fits[rank]:
                return None
            ranks[part] = rank
            load[rank] += choice.costs[part]
            left[rank] -= choice.memory[part]
        return ranks

    def improve(self) -> bool:
        """One step: of the tables on the fullest rank the move that helps most, alone or with one of the emptiest's."""
        top = int(self.load.argmax())
        before = self._potential()
        mine = [t for t, spot in enumerate(self.placed) if spot is not None and bool((spot[1] == top).any())]
        best: tuple[float, int, Placed] | None = None
        for table in sorted(mine, key=self._weight)[:MOST_TRIED]:
            old = self.remove(table)
            found = self._best_spot(table)
            if found is not None:
                self.put(table, found[1])
                after = self._potential()
                if after < before * (1 - 1e-9) and (best is None or after < best[0]):
                    best = (after, table, found[1])
                self.remove(table)
            if old is not None:
                self.put(table, old)
        if best is not None:
            self.remove(best[1])
            self.put(best[1], best[2])
            return True
        return self._swap(top, mine, before)

    def _swap(self, top: int, mine: Sequence[int], before: float) -> bool:
        """Exchanges a whole table of the fullest rank with a cheaper whole one of another rank, if that helps."""
        whole = [(t, s) for t, s in enumerate(self.placed) if s is not None and len(s[1]) == 1 and self._free(t, s)]
        costs = {t: float(self.tables[t][s[0]].costs[0]) for t, s in whole}
        at = {t: int(s[1][0]) for t, s in whole}
        for table in [t for t in mine if t in costs]:
            gain = np.array([costs[table] - costs[t] for t, _ in whole])
            other = np.array([self.load[at[t]] for t, _ in whole])
            peak = np.where(gain > 0, np.maximum(self.load[top] - gain, other + gain), np.inf)
            number = int(peak.argmin())
            if peak[number] < self.load[top] * (1 - 1e-9) and self._exchange(table, whole[number][0], before):
                return True
        return False

    def _free(self, table: int, spot: Placed) -> bool:
        return self.tables[table][spot[0]].spread == "device"

    def _exchange(self, first: int, second: int, before: float) -> bool:
        one, two = self.remove(first), self.remove(second)
        if one is None or two is None:
            raise RuntimeError("tables to exchange are not placed")
        self.put(first, (one[0], two[1]))
        self.put(second, (two[0], one[1]))
        if bool((self.left >= 0).all()) and self._potential() < before:
            return True
        self.remove(first)
        self.remove(second)
        self.put(first, one)
        self.put(second, two)
        return False

    def _weight(self, table: int) -> float:
        spot = self.placed[table]
        return -float(self.tables[table][spot[0]].costs.sum()) if spot is not None else 0.0

    def _potential(self) -> float:
        """A high power mean of the loads: falls with the largest, and with the number of ranks near it."""
        top = self.cost
        return top * float(((self.load / top) ** 32).sum()) ** (1 / 32) if top > 0 else 0.0

    def kick(self, rng: np.random.Generator) -> None:
        """Places a few tables anew, each by a random choice of those that fit."""
        n = min(len(self.tables), max(2, round(KICK_FRAC * len(self.tables))))
        chosen = rng.choice(len(self.tables), n, replace=False).tolist()
        old = {table: self.remove(table) for table in chosen}
        for table in chosen:
            number = int(rng.integers(len(self.tables[table])))
            ranks = self._spot(self.tables[table][number])
            if (
                ranks is not None
                and float(self.tables[table][number].costs.sum()) < 2 * self.lower_bound * self.n_ranks
            ):
                self.put(table, (number, ranks))
            elif not self.place(table):
                self._back(old)
                return

    def _back(self, old: dict[int, Placed | None]) -> None:
        for table, spot in old.items():
            self.remove(table)
            if spot is not None:
                self.put(table, spot)
