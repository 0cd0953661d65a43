"""Placements by name, to compare with: what people do without a search."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from perfmodel.config.sharding import TablePlacement
from perfmodel.graph import TableAccess
from perfmodel.sharding.partition import largest_differencing
from perfmodel.sharding.plan import Placements
from perfmodel.sharding.problem import Problem

Weight = Callable[[TableAccess], float]


def _greedy(problem: Problem, weight: Weight) -> Placements:
    """Largest first, each to the rank with the least so far."""
    load = [0.0] * problem.n_ranks
    found = {}
    for name, table in sorted(problem.tables.items(), key=lambda item: -weight(item[1])):
        rank = min(range(problem.n_ranks), key=lambda r: (load[r], r))
        load[rank] += weight(table)
        found[name] = TablePlacement(ranks=(rank,), kernel=problem.kernels[0])
    return {name: found[name] for name in problem.tables}


def _rows(table: TableAccess) -> float:
    return float(table.rows * table.dim)


def _lookups(table: TableAccess) -> float:
    return table.pooling_factor * table.dim


def _size_lookups(table: TableAccess) -> float:
    return table.pooling_factor * table.dim * float(np.log10(max(table.rows, 10)))


def _round_robin(problem: Problem, seed: int) -> Placements:
    return {
        name: TablePlacement(ranks=(i % problem.n_ranks,), kernel=problem.kernels[0])
        for i, name in enumerate(problem.tables)
    }


def _random(problem: Problem, seed: int) -> Placements:
    ranks = np.random.default_rng(seed).integers(0, problem.n_ranks, len(problem.tables)).tolist()
    return {
        name: TablePlacement(ranks=(rank,), kernel=problem.kernels[0])
        for name, rank in zip(problem.tables, ranks, strict=True)
    }


def _table_wise(problem: Problem, seed: int) -> Placements:
    """Whole tables, spread by largest differencing of what they look up."""
    weights = np.array([_lookups(table) for table in problem.tables.values()])
    parts = largest_differencing(weights, problem.n_ranks).tolist()
    return {
        name: TablePlacement(ranks=(rank,), kernel=problem.kernels[0])
        for name, rank in zip(problem.tables, parts, strict=True)
    }


def _row_wise(problem: Problem, seed: int) -> Placements:
    return {name: TablePlacement(sharding="row_wise", kernel=problem.kernels[0]) for name in problem.tables}


def _column_wise(problem: Problem, seed: int) -> Placements:
    """Every table cut into two, or as few parts as its width divides into, dealt round the ranks."""
    found, next_rank = {}, 0
    for name, table in problem.tables.items():
        n = next((k for k in range(2, table.dim + 1) if table.dim % k == 0), 1)
        ranks = tuple((next_rank + i) % problem.n_ranks for i in range(n))
        next_rank += n
        found[name] = TablePlacement(sharding="column_wise", ranks=ranks, kernel=problem.kernels[0])
    return found


BASELINES: Mapping[str, Callable[[Problem, int], Placements]] = {
    "round robin": _round_robin,
    "random": _random,
    "size greedy": lambda problem, seed: _greedy(problem, _rows),
    "lookup greedy": lambda problem, seed: _greedy(problem, _lookups),
    "size x lookup greedy": lambda problem, seed: _greedy(problem, _size_lookups),
    "all table-wise": _table_wise,
    "all row-wise": _row_wise,
    "all column-wise": _column_wise,
}
