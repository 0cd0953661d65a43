"""The question of a search: tables, ranks, what a rank has room for, and what each table may not do."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from perfmodel.config.loading import Spec, validate
from perfmodel.config.sharding import DEFAULT_CACHE_LOAD_FACTOR, Kernel, Precision, Sharding
from perfmodel.errors import ConfigError, suggest
from perfmodel.graph import TableAccess

TIERS = ("device", "host", "ssd")  # of memory
DEFAULT_MIN_PARTITION = 32  # columns; the least that TorchRec's planner cuts a table into
SEARCHED: tuple[Sharding, ...] = (
    "table_wise", "column_wise", "row_wise", "table_row_wise", "grid", "data_parallel"
)  # fmt: skip
MAX_COPIED_ROWS = 20_000  # larger tables are not tried as copies on every rank: their dense gradient is all-reduced


class Constraint(Spec):
    """What one table may do; left out, whatever the search tries.

    `together` names a set of tables that stay whole on one rank, the same for all of them.
    """

    sharding: tuple[Sharding, ...] = ()
    kernels: tuple[Kernel, ...] = ()
    ranks: tuple[int, ...] = ()
    min_partition: int = DEFAULT_MIN_PARTITION
    cache_load_factor: float = DEFAULT_CACHE_LOAD_FACTOR
    precision: Precision = "own"
    together: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """Tables to place on ranks.

    Attributes:
        tables: by the names that plans use.
        n_ranks, batch: ranks, and samples each of them has.
        domains: ranks that share a fast domain (NVLink), in order; every rank is in one.
        free_bytes: device memory that each rank has for tables.
        host_bytes, ssd_bytes: a rank's share of its host's memory and SSDs, for each rank; without limit if not given.
        row_bytes: bytes of a row with its optimizer's state, by the table's parameter.
        constraints: by table.
        kernels, shardings: what the search may choose from; a table's constraint replaces them.
    """

    tables: Mapping[str, TableAccess]
    n_ranks: int
    batch: int
    domains: tuple[tuple[int, ...], ...]
    free_bytes: tuple[int, ...]
    row_bytes: Mapping[str, int]
    host_bytes: tuple[float, ...] = ()
    ssd_bytes: tuple[float, ...] = ()
    constraints: Mapping[str, Constraint] = field(default_factory=dict)
    kernels: tuple[Kernel, ...] = ("fused",)
    shardings: tuple[Sharding, ...] = SEARCHED

    def constraint(self, name: str) -> Constraint:
        """What a table may do."""
        return self.constraints.get(name, _FREE)

    def capacity_bytes(self) -> NDArray[np.float64]:
        """Room of each rank in each tier of memory [ranks, TIERS]."""
        unlimited = (math.inf,) * self.n_ranks
        return np.array(
            [self.free_bytes, self.host_bytes or unlimited, self.ssd_bytes or unlimited], dtype=np.float64
        ).T


_FREE = Constraint()


def read_constraints(
    body: Mapping[str, Any], tables: Sequence[str], where: str = "constraints"
) -> dict[str, Constraint]:
    """Constraints by table from plain values. Raises ConfigError, one line for each mistake."""
    found, problems = {}, []
    for name, entry in body.items():
        if name not in tables:
            problems.append(f"{where}: {name}: the model has no such table{suggest(str(name), list(tables))}")
            continue
        try:
            found[name] = validate(
                Constraint, entry if isinstance(entry, Mapping) else {"sharding": entry}, f"{where}: {name}"
            )
        except ConfigError as error:
            problems += str(error).splitlines()
    if problems:
        raise ConfigError(problems)
    return found
