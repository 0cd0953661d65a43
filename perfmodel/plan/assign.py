"""Which rank holds which embedding table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from perfmodel.config.plan import EmbeddingPlan
from perfmodel.config.sharding import Sharding, TablePlacement
from perfmodel.errors import InfeasiblePlanError, suggest
from perfmodel.graph import TableAccess
from perfmodel.plan.memory import MemoryShortfallError
from perfmodel.units import format_bytes

MIN_COLUMNS = (
    32  # of a column part, as TorchRec enumerates them (planner/constants.py, MIN_CW_DIM of its first releases)
)


def assign_tables(
    plan: EmbeddingPlan, tables: Sequence[TableAccess], bytes_per_row: Mapping[str, int], free_bytes: Sequence[int]
) -> dict[str, TablePlacement]:
    """Where a plan puts each table, by parameter name. Raises InfeasiblePlanError; the rest as `assign_table_wise`."""
    if plan.strategy != "explicit" and len(free_bytes) == 1:
        return {table.parameter: TablePlacement(ranks=(0,), kernel="own") for table in tables}
    if plan.strategy == "table_wise":
        owner = assign_table_wise(tables, bytes_per_row, free_bytes)
        return {name: TablePlacement(ranks=(rank,), kernel="own") for name, rank in owner.items()}
    if plan.strategy in {"row_wise", "column_wise"}:
        return assign_uniform(tables, "row_wise" if plan.strategy == "row_wise" else "column_wise", len(free_bytes))
    return assign_explicit(tables, plan.placement, len(free_bytes))


def assign_table_wise(
    tables: Sequence[TableAccess], bytes_per_row: Mapping[str, int], free_bytes: Sequence[int]
) -> dict[str, int]:
    """Whole tables to ranks: largest first, each to the rank with the least lookup traffic among those with room.

    Longest-processing-time-first (Graham 1969) on pooled-lookup bytes, with memory as a constraint. `bytes_per_row` holds,
    for each table, a row with its optimizer state; `free_bytes` what each rank has left for tables. Raises
    InfeasiblePlanError naming the first table that fits nowhere.
    """
    n_ranks = len(free_bytes)
    load = [0.0] * n_ranks
    left = list(free_bytes)
    placed: dict[str, int] = {}

    def size_bytes(table: TableAccess) -> int:
        return table.rows * bytes_per_row[table.parameter]

    def traffic(table: TableAccess) -> float:
        return (table.pooling_factor + 1.0) * table.dim * table.itemsize_bytes

    for table in sorted(tables, key=lambda t: (-size_bytes(t), t.parameter)):
        fitting = [rank for rank in range(n_ranks) if left[rank] >= size_bytes(table)]
        if not fitting:
            short = size_bytes(table) - max(left)
            raise MemoryShortfallError(_no_room(table, size_bytes(table), max(left), n_ranks), short)
        rank = min(fitting, key=lambda r: (load[r], -left[r], r))
        placed[table.parameter] = rank
        load[rank] += traffic(table)
        left[rank] -= size_bytes(table)
    return placed


def assign_uniform(tables: Sequence[TableAccess], sharding: Sharding, n_ranks: int) -> dict[str, TablePlacement]:
    """Every table over the ranks in the same way, by the model's own operators.

    Column parts are as many as ranks where their width divides and is at least `MIN_COLUMNS`; else fewer, the first of each
    table on the rank after the last of the table before it.
    """
    placed: dict[str, TablePlacement] = {}
    first = 0
    for table in tables:
        ranks = tuple(range(n_ranks))
        if sharding == "column_wise":
            n_parts = max(n for n in range(1, n_ranks + 1) if n == 1 or _divides(table.dim, n))
            ranks = tuple((first + part) % n_ranks for part in range(n_parts))
            first = (first + n_parts) % n_ranks
        placed[table.parameter] = TablePlacement(sharding=sharding, ranks=ranks, kernel="own")
    return placed


def _divides(dim: int, n_parts: int) -> bool:
    return dim % n_parts == 0 and dim // n_parts >= MIN_COLUMNS


def assign_explicit(
    tables: Sequence[TableAccess], placement: Mapping[str, TablePlacement], n_ranks: int
) -> dict[str, TablePlacement]:
    """A placement given by table name, by parameter name instead and checked: every table named once, ranks exist.

    A table is named by its parameter (`emb.3.weight`), by that without `.weight`, or by its last part if that is unique.
    Raises InfeasiblePlanError.
    """
    names = _table_names(tables)
    placed: dict[str, TablePlacement] = {}
    for name, where in placement.items():
        if name not in names:
            raise InfeasiblePlanError(
                f"plan places table '{name}', which the model does not have{suggest(name, names)}"
            )
        if names[name] in placed:
            raise InfeasiblePlanError(f"plan places table '{name}' twice")
        if max(where.ranks, default=0) >= n_ranks:
            raise InfeasiblePlanError(
                f"plan places table '{name}' on rank {max(where.ranks)}; ranks are 0 to {n_ranks - 1}"
            )
        placed[names[name]] = where
    missing = sorted({t.parameter for t in tables} - set(placed))
    if missing:
        raise InfeasiblePlanError(f"plan places {len(missing)} table(s) nowhere: {', '.join(missing[:5])}")
    return placed


def _no_room(table: TableAccess, needed_bytes: int, left_bytes: int, n_ranks: int) -> str:
    if left_bytes < 0:
        return (
            f"no rank has room for a table: without any, the emptiest of {n_ranks} ranks is short by "
            f"{format_bytes(-left_bytes)}; use a smaller batch or a device with more memory"
        )
    return (
        f"table {table.parameter} ({table.rows} rows x {table.dim}) needs {format_bytes(needed_bytes)} with its optimizer "
        f"state, but the emptiest of {n_ranks} ranks has {format_bytes(left_bytes)} left; use more ranks, a device with more "
        "memory, or smaller tables"
    )


def _table_names(tables: Sequence[TableAccess]) -> dict[str, str]:
    """Every name a table may go by -> its parameter name."""
    names: dict[str, str] = {}
    for table in tables:
        short = table.parameter.removesuffix(".weight")
        names |= {table.parameter: table.parameter, short: table.parameter}
        names.setdefault(short.rpartition(".")[2], table.parameter)
    return names
