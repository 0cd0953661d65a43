"""The placements that each table may have, flattened for searches: options of pieces, each of which picks a group of ranks.

An option of a table has pieces (column parts); a piece lies on one group of ranks, of which every member holds a part of its
rows: one rank (table- and column-wise), the ranks of a domain (table-row-wise, grid), all ranks (row-wise), or all ranks with
a copy each (data-parallel).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from perfmodel.config.sharding import Kernel, Sharding, TablePlacement
from perfmodel.errors import InfeasiblePlanError
from perfmodel.plan.shards import TableShard, shards_of
from perfmodel.sharding.problem import MAX_COPIED_ROWS, Constraint, Problem

MAX_COLUMN_PARTS = 8
Groups = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """One way of dividing a table: pieces of these widths, each on one of `groups`.

    `parts[p][j]` is what the j-th member of a group holds of piece p (None: nothing is left of the rows).
    """

    table: str
    sharding: Sharding
    kernel: Kernel
    widths: tuple[int, ...]
    groups: Groups
    parts: tuple[tuple[TableShard | None, ...], ...]
    constraint: Constraint

    def placement(self, chosen: Sequence[int]) -> TablePlacement:
        """The placement with piece p on `groups[chosen[p]]`."""
        ranks = tuple(rank for group in chosen for rank in self.groups[group])
        whole = self.sharding in ("data_parallel", "row_wise")
        several = len(self.widths) > 1 or self.sharding == "grid"
        return TablePlacement(
            sharding=self.sharding,
            ranks=() if whole else ranks,
            widths=self.widths if several else (),
            kernel=self.kernel,
            cache_load_factor=self.constraint.cache_load_factor,
            precision=self.constraint.precision,
        )


def options_of(problem: Problem, name: str) -> tuple[Option, ...]:
    """Every option that a table's constraint allows. Raises InfeasiblePlanError if there is none."""
    rule = problem.constraint(name)
    allowed = rule.sharding or problem.shardings
    if rule.together:
        allowed = ("table_wise",)
    found = []
    for kernel in rule.kernels or problem.kernels:
        for sharding in allowed:
            copied = "dense" if sharding == "data_parallel" else kernel
            for widths, groups in _shapes(problem, name, sharding, rule):
                found.append(_option(problem, name, (sharding, copied), widths, groups))
    unique = list({(o.sharding, o.kernel, o.widths): o for o in found}.values())
    if not unique:
        raise InfeasiblePlanError(f"table {name}: its constraints allow no placement on these ranks")
    return tuple(unique)


def _shapes(problem: Problem, name: str, sharding: Sharding, rule: Constraint) -> list[tuple[tuple[int, ...], Groups]]:
    table, everyone = problem.tables[name], (tuple(range(problem.n_ranks)),)
    singles = tuple((rank,) for rank in (rule.ranks or everyone[0]))
    splits = column_splits(table.dim, rule.min_partition)
    if sharding == "table_wise":
        return [((table.dim,), singles)]
    if sharding in ("column_wise", "table_column_wise"):
        return [(widths, singles) for widths in splits]
    if sharding == "row_wise":
        return [((table.dim,), everyone)] if problem.n_ranks > 1 and not rule.ranks else []
    if sharding == "data_parallel":
        small = table.rows <= MAX_COPIED_ROWS or bool(rule.sharding)
        return [((table.dim,), everyone)] if small and not rule.ranks else []
    domains = tuple(d for d in problem.domains if len(d) > 1 and (not rule.ranks or set(d) <= set(rule.ranks)))
    if not domains or len({len(d) for d in domains}) > 1 or (len(domains) == 1 and sharding == "table_row_wise"):
        return []
    if sharding == "table_row_wise":
        return [((table.dim,), domains)]
    return [(widths, domains) for widths in splits]


def column_splits(dim: int, min_partition: int) -> list[tuple[int, ...]]:
    """Even splits of the columns into 2 to MAX_COLUMN_PARTS parts of at least `min_partition`.

    >>> column_splits(128, 32)
    [(64, 64), (32, 32, 32, 32)]
    """
    parts = [n for n in range(2, MAX_COLUMN_PARTS + 1) if dim % n == 0 and dim // n >= min_partition]
    return [(dim // n,) * n for n in parts]


def _option(
    problem: Problem, name: str, how: tuple[Sharding, Kernel], widths: tuple[int, ...], groups: Groups
) -> Option:
    rule, (sharding, kernel) = problem.constraint(name), how
    option = Option(
        table=name, sharding=sharding, kernel=kernel, widths=widths, groups=groups, parts=(), constraint=rule
    )
    shards = shards_of(problem.tables[name], option.placement([0] * len(widths)), problem.n_ranks)
    size = len(groups[0])
    by_part = (
        {shard.part: shard for shard in shards}
        if sharding != "data_parallel"
        else dict.fromkeys(range(size), shards[0])
    )
    parts = tuple(tuple(by_part.get(p * size + j) for j in range(size)) for p in range(len(widths)))
    return Option(
        table=name, sharding=sharding, kernel=kernel, widths=widths, groups=groups, parts=parts, constraint=rule
    )
