"""Search problems whose costs come from elsewhere: choices of parts with fixed costs, as TorchRec's enumerator lists them.

The objective of planners that add up prices of shards: the smallest largest sum of a rank. Laid out as the arrays of
`layout`, with one component, so that every search works on them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from perfmodel.errors import InfeasiblePlanError
from perfmodel.sharding.layout import Arrays, Floats, group_arrays
from perfmodel.sharding.options import Groups
from perfmodel.sharding.search import ArraySearch

Spread = Literal["device", "host", "uniform"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """One way to divide a table: the cost of each part and its need of each memory tier [parts, tiers].

    `spread`: `device`, every part on any rank; `host`, part i on the i-th rank of one host; `uniform`, part i on rank i.
    """

    costs: Floats
    memory: Floats
    spread: Spread


@dataclass(frozen=True, slots=True, kw_only=True)
class Balanced:
    """The best assignment: of each table its choice and the rank of each part; the largest sum, and evaluations made."""

    choice: tuple[int, ...]
    ranks: tuple[tuple[int, ...], ...]
    cost: float
    origin: str
    n_evaluations: int


def best_choices(
    search: ArraySearch, tables: Sequence[Sequence[Choice]], budget_s: float, rounds: int | None = None
) -> Balanced:
    """Runs a search of `arrays_of(tables, ...)` for `budget_s` seconds (at most `rounds` rounds of annealing).

    Raises:
        InfeasiblePlanError: nothing that was found fits memory.
    """
    search.run_states(budget_s, rounds)
    state = search.states[0]
    a = search.arrays
    short = search.short(state)
    if short:
        raise InfeasiblePlanError(
            f"no assignment was found that fits memory: rank {short[0]} is short of tier {short[1]}"
        )
    ranks = []
    for table, choices in enumerate(tables):
        option = int(a.option_ptr[table] + state.option[table])
        groups = [
            a.ranks[a.group_ptr[g] : a.group_ptr[g + 1]].tolist()
            for g in (a.group_first[option] + state.piece[table, : a.n_pieces[option]]).tolist()
        ]
        n_parts = len(choices[int(state.option[table])].costs)
        ranks.append(tuple([rank for group in groups for rank in group][:n_parts]))
    return Balanced(
        choice=tuple(state.option.tolist()),
        ranks=tuple(ranks),
        cost=state.cost_s,
        origin=state.origin,
        n_evaluations=search.n_evaluations,
    )


def arrays_of(tables: Sequence[Sequence[Choice]], capacity: Floats, per_host: int) -> Arrays:
    """The arrays of choices; `capacity` [ranks, tiers] is the memory that each rank has."""
    n_ranks = len(capacity)
    everyone = tuple(range(n_ranks))
    single: Groups = tuple((rank,) for rank in everyone)
    flat = [choice for choices in tables for choice in choices]
    wide = {n: _host_groups(n_ranks, per_host, n) for n in {len(c.costs) for c in flat if c.spread == "host"}}
    groups: list[Groups] = [
        single if choice.spread == "device" else (everyone,) if choice.spread == "uniform" else wide[len(choice.costs)]
        for choice in flat
    ]
    n_parts = np.array([len(choice.costs) for choice in flat], dtype=np.int64)
    on_device = np.array([choice.spread == "device" for choice in flat])
    first, group_ptr, ranks = group_arrays(groups)
    return Arrays(
        option_ptr=np.cumsum([0, *map(len, tables)]).astype(np.int64),
        n_pieces=np.where(on_device, n_parts, 1),
        size=np.where(on_device, 1, n_parts),
        cost_ptr=(np.cumsum(n_parts) - n_parts).astype(np.int64),
        cost=np.concatenate([choice.costs for choice in flat]).astype(np.float64)[:, None],
        memory=np.concatenate([choice.memory for choice in flat]).astype(np.float64),
        group_first=first,
        n_groups=np.array([len(found) for found in groups], dtype=np.int64),
        group_ptr=group_ptr,
        ranks=ranks,
        capacity=capacity.astype(np.float64),
    )


def _host_groups(n_ranks: int, per_host: int, n_parts: int) -> Groups:
    """For each host, the rank of each part; parts beyond a host's ranks begin at its first again."""
    hosts: NDArray[np.int64] = np.arange(n_ranks).reshape(-1, per_host)
    return tuple(tuple(row) for row in hosts[:, np.arange(n_parts) % per_host].tolist())
