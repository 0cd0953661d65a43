"""Ranks that share the cores of a host: an event loop in which every task runs at the pace that its threads get.

A core goes to one thread at a time, and threads share cores max-min fairly, as Linux's scheduler shares them: a thread that
asks for less than an equal share gets what it asks for, the others divide the rest equally and none gets more than a core.
A compute task asks for whole cores, one for each of its threads. A collective asks for what its transport's threads used
when it was measured alone; where they get less, it takes longer in proportion. Members that wait ask for nothing.

Beside other ranks' compute a task may also be slower than its share of the cores makes it, since memory is shared as well.
Durations are those of tasks alone on the host. Times are floats: what comes out are lengths, which the caller rounds.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from perfmodel.sim.compile import Compiled
from perfmodel.sim.program import COMM, COMPUTE, IntArray

FloatArray = NDArray[np.float64]
DONE_PS = 0.5  # less work than this is none: a clock tick is a picosecond


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """Threads that each task has running, over all ranks of its class, and the share of a core that each asks for.

    `beside` is how many times as long a task takes on the same cores while other ranks compute; `of_rank` are the threads of
    one rank of its class.
    """

    threads: IntArray
    share: FloatArray
    beside: FloatArray
    of_rank: IntArray


def lengths_on_cores(compiled: Compiled, duration_ps: FloatArray, demand: Demand, n_cores: float) -> FloatArray:
    """How long (ps) each task runs, of a collective from the last member's readiness on.

    `duration_ps` is each task's length alone, of a collective the largest of its members'.
    """
    return _Run(compiled, duration_ps, demand, n_cores).lengths()


def paces(running: Sequence[tuple[int, float]], n_cores: float) -> list[float]:
    """Share of their full pace that tasks get; each is (threads, share of a core that each thread asks for).

    >>> paces([(4, 1.0)], 2.0)
    [0.5]
    >>> paces([(2, 1.0), (4, 0.25)], 2.0)  # the small ones get all, the large ones what is left
    [0.5, 1.0]
    """
    left, n_left = n_cores, sum(threads for threads, share in running if share > 0)
    level = 1.0
    for share, threads in sorted((share, threads) for threads, share in running if share > 0):
        level = left / n_left
        if share > level:
            break
        left -= share * threads
        n_left -= threads
        level = 1.0
    return [min(1.0, level / share) if share > 0 else 1.0 for _, share in running]


class _Run:
    """One run of the loop on plain lists; a unit is a lone task or a collective."""

    def __init__(self, compiled: Compiled, duration_ps: FloatArray, demand: Demand, n_cores: float) -> None:
        self.n_cores = n_cores
        wiring, n = compiled.wiring, compiled.n_tasks
        first = np.arange(n)
        grouped = wiring.group >= 0
        first[grouped] = wiring.group_member[wiring.group_ptr[wiring.group[grouped]]]
        self.unit: list[int] = first.tolist()  # a unit goes by the number of its first task
        self.members: list[list[int]] = [[] for _ in range(n)]
        for task, unit in enumerate(self.unit):
            self.members[unit].append(task)
        self.work = np.zeros(n)
        np.maximum.at(self.work, first, duration_ps)
        busy = (compiled.kind == COMPUTE) | (compiled.kind == COMM)
        self.threads = np.bincount(first, weights=demand.threads * busy, minlength=n).astype(np.int64).tolist()
        share = np.zeros(n)
        np.maximum.at(share, first, demand.share * busy)
        self.share: list[float] = share.tolist()
        self.computes: list[bool] = (compiled.kind == COMPUTE).tolist()
        self.beside: list[float] = demand.beside.tolist()
        self.of_rank: list[int] = demand.of_rank.tolist()
        self.followers: list[list[tuple[int, int]]] = [[] for _ in range(n)]
        self.missing = [0] * n
        owner = np.repeat(np.arange(n), np.diff(wiring.dep_ptr)).tolist()
        for task, source, lag in zip(owner, wiring.dep_index.tolist(), compiled.dep_lag_ps.tolist(), strict=True):
            self._after(task, source, lag)
        for task, source in enumerate(wiring.prev.tolist()):
            if source >= 0:
                self._after(task, source, 0)
        self.ready = [0.0] * n  # by unit: the last of what it waited for
        self.start, self.end = np.zeros(n), np.zeros(n)
        self.unit_of_task = first
        self.heap: list[tuple[float, int]] = []

    def _after(self, task: int, source: int, lag_ps: int) -> None:
        self.followers[source].append((self.unit[task], lag_ps))
        self.missing[self.unit[task]] += 1

    def lengths(self) -> FloatArray:
        """Runs to the end."""
        for unit, members in enumerate(self.members):
            if members and not self.missing[unit]:
                heapq.heappush(self.heap, (0.0, unit))
        now, left = 0.0, dict[int, float]()
        while self.heap or left:
            order = list(left)
            pace = self._paces(order)
            finish = min((now + left[u] / p for u, p in zip(order, pace, strict=True)), default=float("inf"))
            then = min(finish, self.heap[0][0]) if self.heap else finish
            for unit, p in zip(order, pace, strict=True):
                left[unit] -= (then - now) * p
            now = then
            for unit in [u for u in order if left[u] <= DONE_PS]:
                del left[unit]
                self._finish(unit, now)
            while self.heap and self.heap[0][0] <= now:
                _, unit = heapq.heappop(self.heap)
                self.start[unit] = now
                if self.work[unit] <= DONE_PS:
                    self._finish(unit, now)
                else:
                    left[unit] = float(self.work[unit])
        found: FloatArray = (self.end - self.start)[self.unit_of_task]
        return found

    def _paces(self, running: Sequence[int]) -> list[float]:
        """Progress of running units against their time alone."""
        found = paces([(self.threads[u], self.share[u]) for u in running], self.n_cores)
        busy = sum(self.threads[u] for u in running if self.computes[u])
        return [
            pace / self.beside[u] if self.computes[u] and busy > self.of_rank[u] else pace
            for u, pace in zip(running, found, strict=True)
        ]

    def _finish(self, unit: int, now: float) -> None:
        self.end[unit] = now
        for task in self.members[unit]:
            for follower, lag_ps in self.followers[task]:
                self.ready[follower] = max(self.ready[follower], now + lag_ps)
                self.missing[follower] -= 1
                if not self.missing[follower]:
                    heapq.heappush(self.heap, (self.ready[follower], follower))
