"""The parts of sharded embedding tables: where each lies, its rows and columns, and which share of the lookups it serves.

A batch's indices hit the parts of a row-wise table unevenly where indices are skewed. The row of popularity rank r is
`graph.row_of_rank(r, rows)`, as drawn indices have it; the hottest `HOT_ROWS` rows are followed one by one, all others are
spread over the parts by their number of rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from perfmodel.config.sharding import BY_COLUMNS, BY_ROWS, TablePlacement
from perfmodel.errors import InfeasiblePlanError
from perfmodel.graph import ITEMSIZE_BYTES, TableAccess, row_of_rank

HOT_ROWS = 4096
_DTYPE = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16", "int8": "int8"}
Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class TableShard:
    """One part of a table on one rank.

    `access` is the part as a table of its own: its rows and columns, its share of the pooling factor, the type of its rows.
    `part` counts the table's parts in the order of its placement's ranks. `share_frac` of the table's lookups hit the part.
    """

    name: str
    part: int
    rank: int
    row_offset: int
    column_offset: int
    share_frac: float
    access: TableAccess
    placement: TablePlacement

    @property
    def weight_bytes(self) -> int:
        """Bytes of the part's rows."""
        return self.access.rows * self.access.dim * self.access.itemsize_bytes


def shards_of(table: TableAccess, placement: TablePlacement, n_ranks: int) -> tuple[TableShard, ...]:
    """The parts of a table, in the order of the placement's ranks; parts without rows are left out.

    Of a data-parallel table there is one part a rank. Raises InfeasiblePlanError naming the table if ranks do not exist or
    sizes do not add up.
    """
    if placement.sharding == "data_parallel":
        whole = _typed(table, placement)
        return tuple(_shard(table, placement, (0, rank), (0, 0), (1.0, whole)) for rank in range(n_ranks))
    ranks = placement.ranks or tuple(range(n_ranks))
    if max(ranks) >= n_ranks:
        raise InfeasiblePlanError(
            f"plan places table '{table.parameter}' on rank {max(ranks)}; ranks are 0 to {n_ranks - 1}"
        )
    n_columns = placement.n_column_parts
    n_rows = len(ranks) // n_columns
    widths = column_widths(table.dim, n_columns, placement.widths, table.parameter)
    heights = row_heights(table.rows, n_rows, placement.heights, table.parameter)
    shares = row_shares(table, heights)
    found = []
    for column in range(n_columns):
        for row in range(n_rows):
            if not heights[row]:
                continue
            access = _part_access(table, heights[row], widths[column], shares[row])
            part = column * n_rows + row
            start = (sum(heights[:row]), sum(widths[:column]))
            found.append(_shard(table, placement, (part, ranks[part]), start, (shares[row], _typed(access, placement))))
    return tuple(found)


def _shard(
    table: TableAccess,
    placement: TablePlacement,
    place: tuple[int, int],
    start: tuple[int, int],
    served: tuple[float, TableAccess],
) -> TableShard:
    return TableShard(
        name=table.parameter,
        part=place[0],
        rank=place[1],
        row_offset=start[0],
        column_offset=start[1],
        share_frac=served[0],
        access=served[1],
        placement=placement,
    )


def column_widths(dim: int, n_parts: int, given: Sequence[int] = (), name: str = "") -> tuple[int, ...]:
    """Columns of each part: as given, or dim // n each and the rest to the last. Raises InfeasiblePlanError."""
    if given:
        if sum(given) != dim:
            raise InfeasiblePlanError(
                f"table '{name}' has {dim} columns; the plan's parts have {sum(given)} ({', '.join(map(str, given))})"
            )
        return tuple(given)
    if n_parts > dim:
        raise InfeasiblePlanError(f"table '{name}' has {dim} columns, too few for {n_parts} parts")
    even = dim // n_parts
    return (*(even,) * (n_parts - 1), dim - even * (n_parts - 1))


def row_heights(rows: int, n_parts: int, given: Sequence[int] = (), name: str = "") -> tuple[int, ...]:
    """Rows of each part: as given, or ceil(rows / n) each as long as there are rows. Raises InfeasiblePlanError."""
    if given:
        if sum(given) != rows or len(given) != n_parts:
            raise InfeasiblePlanError(
                f"table '{name}' has {rows} rows for {n_parts} parts; the plan's {len(given)} parts have {sum(given)}"
            )
        return tuple(given)
    block = -(-rows // n_parts)
    return tuple(min(block, max(rows - block * part, 0)) for part in range(n_parts))


@lru_cache(maxsize=65536)
def row_shares(table: TableAccess, heights: tuple[int, ...]) -> tuple[float, ...]:
    """Share of the table's lookups that hit each of its row parts; they add up to 1."""
    if len(heights) == 1:
        return (1.0,)
    hot, rest_frac = _hot_probability(table)
    edges = np.cumsum(heights)
    rows = np.array([row_of_rank(rank, table.rows) for rank in range(len(hot))], dtype=np.int64)
    part = np.searchsorted(edges, rows, side="right")
    count = np.bincount(part, minlength=len(heights))[: len(heights)]
    shares = np.bincount(part, weights=hot, minlength=len(heights))[: len(heights)]
    cold = np.array(heights) - count
    if cold.sum() > 0:
        shares = shares + rest_frac * cold / cold.sum()
    return tuple(float(share) for share in shares / shares.sum())


def _hot_probability(table: TableAccess) -> tuple[Floats, float]:
    """Access probability of the hottest rows, in order, and of all others together."""
    if table.histogram:
        return _hot_of_histogram(table)
    n = min(table.rows, HOT_ROWS)
    if table.zipf_exponent <= 0.0:
        return np.empty(0), 1.0
    s = table.zipf_exponent
    head = np.arange(1, n + 1, dtype=np.float64) ** -s
    low, high = n + 0.5, table.rows + 0.5
    tail = np.log(high / low) if abs(s - 1.0) < 1e-9 else (high ** (1.0 - s) - low ** (1.0 - s)) / (1.0 - s)
    total = float(head.sum() + max(tail, 0.0))
    return head / total, float(max(tail, 0.0)) / total


def _hot_of_histogram(table: TableAccess) -> tuple[Floats, float]:
    total = sum(count * accesses for count, accesses in table.histogram)
    hot: list[float] = []
    for count, accesses in sorted(table.histogram, key=lambda pair: -pair[1]):
        room = min(HOT_ROWS, table.rows) - len(hot)
        hot += [accesses / total] * min(round(count), room)
    return np.array(hot), max(1.0 - float(sum(hot)), 0.0)


def _part_access(table: TableAccess, rows: int, width: int, share: float) -> TableAccess:
    """A part as a table: every rank of popularity falls into it with its share of the rows, so the law stays the same."""
    if rows == table.rows:
        return replace(table, dim=width)
    kept = rows / table.rows
    return replace(
        table,
        rows=rows,
        dim=width,
        pooling_factor=table.pooling_factor * share,
        histogram=tuple((count * kept, accesses) for count, accesses in table.histogram),
    )


def _typed(table: TableAccess, placement: TablePlacement) -> TableAccess:
    if placement.precision == "own":
        return table
    return replace(table, itemsize_bytes=ITEMSIZE_BYTES[_DTYPE[placement.precision]])


def is_row_sharded(placement: TablePlacement) -> bool:
    """Whether partial sums of a table's bags lie on several ranks."""
    return placement.sharding in BY_ROWS


def is_column_sharded(placement: TablePlacement) -> bool:
    """Whether a table's columns lie apart."""
    return placement.sharding in BY_COLUMNS


def by_rank(shards: Mapping[str, Sequence[TableShard]], n_ranks: int) -> list[list[TableShard]]:
    """The parts of all tables by the rank that holds them."""
    found: list[list[TableShard]] = [[] for _ in range(n_ranks)]
    for parts in shards.values():
        for part in parts:
            found[part.rank].append(part)
    return found
