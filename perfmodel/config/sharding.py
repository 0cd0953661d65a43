"""How one embedding table is spread over ranks: what a plan file, a search and TorchRec's plans have in common."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from perfmodel.config.loading import Spec
from perfmodel.config.quantity import PositiveCount

Sharding = Literal[
    "table_wise", "row_wise", "column_wise", "table_row_wise", "table_column_wise", "grid", "data_parallel"
]
Kernel = Literal["own", "dense", "fused", "uvm", "uvm_caching", "key_value"]
Precision = Literal["own", "fp32", "fp16", "bf16", "int8"]

BY_ROWS = ("row_wise", "table_row_wise", "grid")
BY_COLUMNS = ("column_wise", "table_column_wise", "grid")
Rank = Annotated[int, Field(ge=0)]
DEFAULT_CACHE_LOAD_FACTOR = 0.2  # of FBGEMM's SplitTableBatchedEmbeddingBagsCodegen


class TablePlacement(Spec):
    """Where the parts of one table lie and which kernel looks them up.

    Attributes:
        sharding: `table_wise` (whole, on one rank); `row_wise` (rows over `ranks`); `column_wise` (columns over `ranks`);
            `table_row_wise` and `table_column_wise` (the same over ranks that share a fast domain); `grid` (columns over
            groups of ranks, the rows of each over the group); `data_parallel` (whole, on every rank).
        ranks: one rank a part, of a grid column by column; a rank may hold several column parts. May be left out with
            `row_wise` (all ranks, in order) and must be with `data_parallel`.
        widths: columns of each column part; left out, the table's width is divided evenly and the last part takes the rest.
            A grid needs them.
        heights: rows of each row part; left out, parts of ceil(rows / n) rows, of which the last may be short or empty.
        kernel: `own`, the model's operators, one part at a time; `fused`, one batched operator for all tables of a rank
            whose optimizer runs in its backward (FBGEMM); `dense`, the same with a dense gradient and a dense optimizer;
            `uvm`, rows in host memory, read over the host link; `uvm_caching`, the same behind a row cache in device
            memory; `key_value`, rows on an SSD behind such a cache.
        cache_load_factor: rows that the cache holds, as a share of the part's rows.
        precision: element type of the stored rows (`own`: the model's).
    """

    sharding: Sharding = "table_wise"
    ranks: tuple[Rank, ...] = ()
    widths: tuple[PositiveCount, ...] = ()
    heights: tuple[Annotated[int, Field(ge=0)], ...] = ()
    kernel: Kernel = "fused"
    cache_load_factor: Annotated[float, Field(gt=0.0, le=1.0)] = DEFAULT_CACHE_LOAD_FACTOR
    precision: Precision = "own"

    @model_validator(mode="after")
    def _consistent(self) -> TablePlacement:
        problems = [*self._rank_problems(), *self._part_problems()]
        if problems:
            raise ValueError("\n".join(problems))
        return self

    def _rank_problems(self) -> list[str]:
        n = len(self.ranks)
        if self.sharding == "table_wise" and n != 1:
            return [f"ranks: found {n} with table_wise, allowed 1"]
        if self.sharding == "data_parallel":
            return [f"ranks: found {n} with data_parallel, allowed none (every rank has the table)"] if n else []
        if not n and self.sharding != "row_wise":
            return [f"ranks: found none with {self.sharding}, allowed one for each part"]
        if self.sharding in BY_ROWS and self.n_row_parts and len(set(self.ranks)) != n and self.sharding != "grid":
            return ["ranks: found a rank twice, allowed once (a rank's rows are one part)"]
        return []

    def _part_problems(self) -> list[str]:
        problems = []
        if self.sharding == "grid" and (not self.widths or len(self.ranks) % len(self.widths)):
            problems.append(
                f"widths: found {len(self.widths)} column parts for {len(self.ranks)} ranks of a grid, allowed a divisor"
            )
        if self.widths and self.sharding not in BY_COLUMNS:
            problems.append(f"widths: found with {self.sharding}, allowed with {', '.join(BY_COLUMNS)}")
        elif self.widths and self.sharding != "grid" and len(self.widths) != len(self.ranks):
            problems.append(f"widths: found {len(self.widths)} for {len(self.ranks)} ranks, allowed one for each")
        if self.heights and self.sharding not in BY_ROWS:
            problems.append(f"heights: found with {self.sharding}, allowed with {', '.join(BY_ROWS)}")
        elif self.heights and self.ranks and len(self.heights) != self.n_row_parts:
            problems.append(f"heights: found {len(self.heights)}, allowed {self.n_row_parts}, one for each row part")
        return problems

    @property
    def n_column_parts(self) -> int:
        """Parts along the columns."""
        if self.sharding == "grid":
            return len(self.widths)
        return len(self.ranks) if self.sharding in BY_COLUMNS else 1

    @property
    def n_row_parts(self) -> int:
        """Parts along the rows, as far as `ranks` says (0: over all ranks)."""
        return len(self.ranks) // max(self.n_column_parts, 1) if self.sharding in BY_ROWS else 1


def read_placement(value: Any) -> Any:
    """A table's entry in a plan: a rank (the whole table, by the model's own operators), `data_parallel`, or a mapping."""
    if isinstance(value, TablePlacement | Mapping):
        return value
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return {"sharding": "table_wise", "ranks": (value,), "kernel": "own"}
    if value == "data_parallel":
        return {"sharding": "data_parallel", "kernel": "own"}
    raise ValueError(
        f"found {value!r}, allowed a rank (0, 1, ...), data_parallel, or a mapping with sharding and ranks"
    )
