"""A search problem as flat arrays, for compiled loops.

Table t has options option_ptr[t] to option_ptr[t + 1]. Option o has n_pieces[o] pieces; each lies on one of the groups
group_first[o] + (0 .. n_groups[o] - 1), whose ranks are ranks[group_ptr[g]:group_ptr[g + 1]]. The member at place j of the
group of piece p then bears cost[cost_ptr[o] + p * size[o] + j, k] of component k, and memory[..., m] bytes of tier m (device,
host, SSD). The objective is the sum over components of the largest rank's load, more if memory exceeds `capacity` [ranks, m].
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from perfmodel.graph import TableAccess
from perfmodel.plan.shard_memory import cache_bytes
from perfmodel.plan.shards import TableShard
from perfmodel.sharding.cost import ShardCost
from perfmodel.sharding.options import Groups, Option, options_of
from perfmodel.sharding.plan import Placements
from perfmodel.sharding.problem import TIERS, Problem

CACHED = ("uvm_caching", "key_value")
N_COMPONENTS = 3  # kernels of forward, exchanges, kernels of backward: each waits for its slowest rank

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


class Arrays(NamedTuple):
    """See the module."""

    option_ptr: Ints
    n_pieces: Ints
    size: Ints
    cost_ptr: Ints
    cost: Floats
    memory: Floats
    group_first: Ints
    n_groups: Ints
    group_ptr: Ints
    ranks: Ints
    capacity: Floats


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Layout:
    """A problem's options and arrays. Tables that stay together are one entry of `tables` (their names)."""

    tables: tuple[tuple[str, ...], ...]
    options: tuple[tuple[Option, ...], ...]
    twins: Mapping[tuple[str, int], tuple[Option, ...]]
    arrays: Arrays
    max_pieces: int

    def placements(self, option: Ints, piece: Ints) -> Placements:
        """Placements by table of a state: the option of each entry (within it), the group of each of its pieces."""
        found = {}
        for number, names in enumerate(self.tables):
            chosen = self.options[number][int(option[number])]
            groups = piece[number, : len(chosen.widths)].tolist()
            for name, twin in zip(names, (chosen, *self.twins.get((names[0], int(option[number])), ())), strict=True):
                found[name] = twin.placement(groups)
        return found


def lay_out(problem: Problem, costs: ShardCost) -> Layout:
    """The arrays of a problem under a cost. Raises InfeasiblePlanError for constraints that allow nothing."""
    entries = _entries(problem)
    options: list[tuple[Option, ...]] = []
    twins: dict[tuple[str, int], tuple[Option, ...]] = {}
    for names in entries:
        own = options_of(problem, names[0])
        options.append(own)
        if len(names) > 1:
            twins[names[0], 0] = tuple(options_of(problem, name)[0] for name in names[1:])
    flat = [
        (option, twins.get((names[0], i), ()))
        for names, own in zip(entries, options, strict=True)
        for i, option in enumerate(own)
    ]
    return Layout(
        tables=entries,
        options=tuple(options),
        twins=twins,
        arrays=_arrays(problem, costs, options, flat),
        max_pieces=max(len(option.widths) for option, _ in flat),
    )


def _entries(problem: Problem) -> tuple[tuple[str, ...], ...]:
    together: dict[str, list[str]] = {}
    for name in problem.tables:
        together.setdefault(problem.constraint(name).together or f"\0{name}", []).append(name)
    return tuple(tuple(names) for names in together.values())


def _arrays(
    problem: Problem,
    costs: ShardCost,
    options: Sequence[Sequence[Option]],
    flat: Sequence[tuple[Option, Sequence[Option]]],
) -> Arrays:
    parts: list[TableShard | None] = []
    owner: list[int] = []
    cost_ptr, at = [], 0
    for option, also in flat:
        cost_ptr.append(at)
        own = [part for piece in option.parts for part in piece]
        for other in (option, *also):
            parts += [part for piece in other.parts for part in piece]
            owner += list(range(at, at + len(own)))
        at += len(own)
    present = [i for i, part in enumerate(parts) if part is not None]
    shards = [part for part in parts if part is not None]
    times = costs.shard_times(shards)
    cost = np.zeros((at, N_COMPONENTS))
    memory = np.zeros((at, len(TIERS)))
    rows = [(t.lookup_s, t.input_s + t.output_s + t.gradient_s, t.update_s) for t in times]
    whole = {table.parameter: table for table in problem.tables.values()}
    place = np.array([owner[i] for i in present], dtype=np.int64)
    np.add.at(cost, place, np.array(rows).reshape(-1, N_COMPONENTS))
    np.add.at(memory, place, np.array([tier_bytes(problem, shard, whole[shard.name]) for shard in shards]))
    group_first, group_ptr, ranks = group_arrays([option.groups for option, _ in flat])
    counts = [len(own) for own in options]
    return Arrays(
        option_ptr=np.cumsum([0, *counts]).astype(np.int64),
        n_pieces=np.array([len(o.widths) for o, _ in flat], dtype=np.int64),
        size=np.array([len(o.groups[0]) for o, _ in flat], dtype=np.int64),
        cost_ptr=np.array(cost_ptr, dtype=np.int64),
        cost=cost,
        memory=memory,
        group_first=group_first,
        n_groups=np.array([len(o.groups) for o, _ in flat], dtype=np.int64),
        group_ptr=group_ptr,
        ranks=ranks,
        capacity=problem.capacity_bytes(),
    )


def group_arrays(groups: Sequence[Groups]) -> tuple[Ints, Ints, Ints]:
    """`group_first`, `group_ptr` and `ranks` of options' groups; options with equal groups share them."""
    known: dict[Groups, int] = {}
    group_ptr: list[int] = [0]
    ranks: list[int] = []
    for mine in groups:
        if mine not in known:
            known[mine] = len(group_ptr) - 1
            for group in mine:
                ranks += group
                group_ptr.append(len(ranks))
    first = np.array([known[mine] for mine in groups], dtype=np.int64)
    return first, np.array(group_ptr, dtype=np.int64), np.array(ranks, dtype=np.int64)


def tier_bytes(problem: Problem, shard: TableShard, table: TableAccess) -> tuple[float, float, float]:
    """What a part of `table` needs of each tier: rows with state, or a cache of them; buffers of rows and gradients."""
    buffers = 2.0 * problem.batch * problem.n_ranks * shard.access.dim * 4
    kernel = shard.placement.kernel
    state = problem.row_bytes[shard.name] - table.dim * table.itemsize_bytes
    if state >= table.dim:
        state = state * shard.access.dim // table.dim
    rows = float(shard.weight_bytes + shard.access.rows * state)
    if kernel == "uvm":
        return buffers, rows, 0.0
    if kernel in CACHED:
        cache = buffers + cache_bytes(shard)
        return (cache, rows, 0.0) if kernel == "uvm_caching" else (cache, 0.0, rows)
    dense = shard.access.rows * shard.access.dim * 4 if kernel == "dense" else 0
    return buffers + rows + dense, 0.0, 0.0
