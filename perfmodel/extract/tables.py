"""Says at each op what is known of the embedding table it works on: rows hit, pooling, distribution of indices."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from perfmodel.graph import Op, TableAccess


def with_tables(ops: Iterable[Op], tables: Mapping[int, TableAccess]) -> list[Op]:
    """Copies a table's access statistics to the ops that look it up, make its gradient or update it.

    `tables` maps the storages of tables and of their sparse gradients. An optimizer's intermediate results belong to the
    table whose gradient they were made from.
    """
    owner = dict(tables)
    by_module = {table.parameter.rpartition(".")[0]: table for table in tables.values()}
    found: list[Op] = []
    for op in ops:
        table = next((owner[spec.storage] for spec in (*op.inputs, *op.outputs) if spec.storage in owner), None)
        if table is None and "embedding" in op.name:
            table = by_module.get(op.module)
        if table is None:
            found.append(op)
            continue
        if op.phase == "optimizer":
            owner.update((spec.storage, table) for spec in op.outputs)
        found.append(replace(op, attrs={**op.attrs, **_facts(table)}))
    return found


def _facts(table: TableAccess) -> dict[str, Any]:
    return {
        "parameter": table.parameter,
        "rows": table.rows,
        "pooling_factor": table.pooling_factor,
        "zipf_exponent": table.zipf_exponent,
        "histogram": [list(pair) for pair in table.histogram],
    }
