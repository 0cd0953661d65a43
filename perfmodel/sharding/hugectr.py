"""Plans for HugeCTR's embedding collection: the shard matrix and the placement strategy of its `EmbeddingCollectionConfig`.

`shard_matrix[rank]` names the tables of which the rank holds a part; `shard_strategy` groups tables by how they are
compressed over ranks (HugeCTR `EmbeddingCollectionConfig.shard`: `mp`, rows split over the ranks that name the table, and
`dp`). HugeCTR splits rows and, from release 23.06, columns by `(table, column parts)`; a grid has no expression in it. The
form is that of its samples/dlrm (sharding/generate_plan.py, NVIDIA-Merlin/HugeCTR @8092533): no rank is without a table.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from perfmodel.config.sharding import TablePlacement
from perfmodel.errors import InfeasiblePlanError


def to_hugectr(placement: Mapping[str, TablePlacement], n_ranks: int) -> dict[str, Any]:
    """`shard_matrix` (tables by rank) and `shard_strategy` of a plan, as `EmbeddingCollectionConfig.shard` takes them.

    Columns that are split are written `(table, parts)`; HugeCTR gives every rank of such a table the same width.

    Raises:
        InfeasiblePlanError: tables whose plan HugeCTR cannot run, one line each.
    """
    problems = [
        f"table {name}: {problem}" for name, where in placement.items() if (problem := _problem(where, n_ranks))
    ]
    if problems:
        raise InfeasiblePlanError("\n".join(problems))
    matrix: list[list[str]] = [[] for _ in range(n_ranks)]
    split: list[str | tuple[str, int]] = []
    copied: list[str] = []
    for name, where in placement.items():
        everywhere = where.sharding in ("data_parallel", "row_wise") and not where.ranks
        for rank in range(n_ranks) if everywhere else sorted(where.ranks):
            matrix[rank].append(name)
        if where.sharding == "data_parallel":
            copied.append(name)
        else:
            split.append((name, where.n_column_parts) if where.n_column_parts > 1 else name)
    empty = [rank for rank, held in enumerate(matrix) if not held]
    if empty:
        raise InfeasiblePlanError(
            f"rank {empty[0]}: found no table, allowed at least one (HugeCTR's planner refuses an empty shard list)"
        )
    strategy: list[tuple[str, list[Any]]] = [("mp", list(split))] if split else []
    return {"shard_matrix": matrix, "shard_strategy": [*strategy, *([("dp", list(copied))] if copied else [])]}


def _problem(where: TablePlacement, n_ranks: int) -> str | None:
    beyond = [rank for rank in where.ranks if rank >= n_ranks]
    if beyond:
        return f"found rank {beyond[0]}, allowed 0 to {n_ranks - 1}"
    if where.sharding == "grid":
        return "found grid, allowed table-, row-, column-wise and data parallel (HugeCTR has no grid)"
    if where.heights or where.widths:
        return "found parts of given sizes, allowed even ones (HugeCTR divides evenly)"
    if len(set(where.ranks)) != len(where.ranks):
        return "found two parts on one rank, allowed one (a row of the shard matrix names a table once)"
    if where.kernel in ("uvm", "uvm_caching", "key_value"):
        return f"found kernel {where.kernel}, allowed kernels that keep rows in device memory"
    return None
