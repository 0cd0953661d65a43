"""TorchRec's sharding plans in and out, in their serialized form; needs no TorchRec.

The form is what `torchrec.distributed.types.ShardingPlan._serialize` gives: `{"plan": {module: {table: {sharding_type,
compute_kernel, ranks, shards: [{shard_sizes, shard_offsets, placement}]}}}}`, sizes and offsets as (rows, columns), a
placement as `rank:3/cuda:3`. A data-parallel table has no shards. What the form leaves out (cache size, element type) keeps
its default here.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from perfmodel.config.sharding import BY_COLUMNS, BY_ROWS, TablePlacement
from perfmodel.errors import ConfigError, suggest
from perfmodel.plan.shards import column_widths, row_heights

SHARDING_TYPES = {"grid": "grid_shard"}  # ours -> TorchRec's, where they differ
KERNELS = {
    "own": "dense",
    "dense": "dense",
    "fused": "fused",
    "uvm": "fused_uvm",
    "uvm_caching": "fused_uvm_caching",
    "key_value": "key_value",
}
_OUR_SHARDING = {
    SHARDING_TYPES.get(name, name): name for name in (*BY_ROWS, *BY_COLUMNS, "table_wise", "data_parallel")
}
_OUR_KERNEL = {theirs: ours for ours, theirs in KERNELS.items() if ours != "own"}


@dataclass(frozen=True, slots=True, kw_only=True)
class TableSize:
    """Rows and columns of a table."""

    rows: int
    dim: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranks:
    """The ranks a TorchRec plan is written for: how many, how many on a host, and their kind of device."""

    n_ranks: int
    per_host: int
    device: str = "cuda"

    def placement(self, rank: int) -> str:
        """A rank as TorchRec writes it."""
        return f"rank:{rank}/{self.device}" if self.device == "cpu" else f"rank:{rank}/cuda:{rank % self.per_host}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """One shard of a table: (rows, columns) of its size and of its offset, and its rank."""

    size: tuple[int, int]
    offset: tuple[int, int]
    rank: int


def torchrec_shards(name: str, size: TableSize, where: TablePlacement, n_ranks: int) -> tuple[Shard, ...]:
    """The shards of a table as TorchRec counts them: empty ones too, columns outermost. Raises InfeasiblePlanError."""
    if where.sharding == "data_parallel":
        return ()
    ranks = where.ranks or tuple(range(n_ranks))
    widths = column_widths(size.dim, where.n_column_parts, where.widths, name)
    heights = row_heights(size.rows, len(ranks) // len(widths), where.heights, name)
    spots = [(column, row) for column in range(len(widths)) for row in range(len(heights))]
    return tuple(
        Shard(size=(heights[row], widths[column]), offset=(sum(heights[:row]), sum(widths[:column])), rank=rank)
        for (column, row), rank in zip(spots, ranks, strict=True)
    )


def to_torchrec(
    placement: Mapping[str, TablePlacement], tables: Mapping[str, TableSize], ranks: Ranks, modules: Mapping[str, str]
) -> dict[str, Any]:
    """A plan in TorchRec's serialized form.

    Args:
        placement: where each table lies.
        tables: sizes of the tables.
        ranks: whom the plan is for.
        modules: path of the module (an `EmbeddingBagCollection`) that has each table.

    Raises:
        ConfigError: a table of the placement whose size or module is not given.
        InfeasiblePlanError: sizes of parts that do not add up.
    """
    missing = [name for name in placement if name not in tables or name not in modules]
    if missing:
        raise ConfigError(
            "\n".join(f"table {name}: found in the plan, not in the model{suggest(name, tables)}" for name in missing)
        )
    plan: dict[str, dict[str, Any]] = {}
    for name, where in placement.items():
        plan.setdefault(modules[name], {})[name] = _entry(name, tables[name], where, ranks)
    return {"plan": plan}


def _entry(name: str, size: TableSize, where: TablePlacement, ranks: Ranks) -> dict[str, Any]:
    shards = torchrec_shards(name, size, where, ranks.n_ranks)
    entry: dict[str, Any] = {
        "sharding_type": SHARDING_TYPES.get(where.sharding, where.sharding),
        "compute_kernel": KERNELS[where.kernel],
        "ranks": [shard.rank for shard in shards] if shards else list(range(ranks.n_ranks)),
    }
    if shards:
        entry["shards"] = [
            {
                "shard_offsets": list(shard.offset),
                "shard_sizes": list(shard.size),
                "placement": ranks.placement(shard.rank),
            }
            for shard in shards
        ]
    return entry


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchRecPlan:
    """A TorchRec plan as ours: the placement of every table, its size as far as shards tell it, and its module."""

    placement: Mapping[str, TablePlacement]
    tables: Mapping[str, TableSize]
    modules: Mapping[str, str]


def from_torchrec(source: str | Path | Mapping[str, Any]) -> TorchRecPlan:
    """Reads TorchRec's serialized form from a JSON file or a mapping. Raises ConfigError, one line for each mistake."""
    name, data = ("plan", source) if isinstance(source, Mapping) else (str(source), _read(Path(source)))
    modules = data.get("plan") if isinstance(data, Mapping) else None
    if not isinstance(modules, Mapping):
        raise ConfigError(f"{name}: plan: found no mapping of modules, allowed TorchRec's serialized ShardingPlan")
    problems: list[str] = []
    found: dict[str, tuple[str, TablePlacement, TableSize | None]] = {}
    for module, tables in modules.items():
        for table, entry in _items(tables, f"{name}: plan.{module}", problems):
            if table in found:
                problems.append(f"{name}: plan.{module}.{table}: found a second time, allowed once in a plan")
                continue
            try:
                found[table] = (module, *_placement(entry))
            except (ValueError, KeyError, TypeError) as error:
                problems.append(f"{name}: plan.{module}.{table}: {_words(error)}")
    if problems:
        raise ConfigError("\n".join(problems))
    return TorchRecPlan(
        placement={table: where for table, (_, where, _) in found.items()},
        tables={table: size for table, (_, _, size) in found.items() if size is not None},
        modules={table: module for table, (module, _, _) in found.items()},
    )


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: {error}") from error


def _items(tables: Any, where: str, problems: list[str]) -> Sequence[tuple[str, Any]]:
    if isinstance(tables, Mapping):
        return list(tables.items())
    problems.append(f"{where}: found {tables!r}, allowed a mapping of tables")
    return []


def _words(error: Exception) -> str:
    if isinstance(error, KeyError):
        return f"{error.args[0]}: found nothing, allowed a value (TorchRec's serialized ShardingPlan)"
    return "; ".join(str(error).splitlines())


def _placement(entry: Mapping[str, Any]) -> tuple[TablePlacement, TableSize | None]:
    sharding, kernel = our_sharding(entry["sharding_type"]), our_kernel(entry["compute_kernel"])
    if sharding == "data_parallel":
        return TablePlacement.model_validate({"sharding": sharding, "kernel": kernel}), None
    shards = sorted(
        (_shard(shard, rank) for shard, rank in zip(entry["shards"], entry["ranks"], strict=True)),
        key=lambda shard: (shard.offset[1], shard.offset[0]),
    )
    columns = dict.fromkeys(shard.offset[1] for shard in shards)
    first = [shard for shard in shards if shard.offset[1] == shards[0].offset[1]]
    widths = [next(s.size[1] for s in shards if s.offset[1] == column) for column in columns]
    heights = [shard.size[0] for shard in first]
    size = TableSize(rows=sum(heights), dim=sum(widths))
    if len(first) * len(widths) != len(shards):
        raise ValueError(f"shards: found {len(shards)}, allowed rows times columns of parts")
    fields: dict[str, Any] = {"sharding": sharding, "kernel": kernel, "ranks": tuple(shard.rank for shard in shards)}
    if sharding in BY_COLUMNS and (sharding == "grid" or tuple(widths) != column_widths(size.dim, len(widths))):
        fields["widths"] = tuple(widths)
    if sharding in BY_ROWS and tuple(heights) != row_heights(size.rows, len(heights)):
        fields["heights"] = tuple(heights)
    return TablePlacement.model_validate(fields), size


def our_sharding(name: Any) -> str:
    """Our name of one of TorchRec's sharding types. Raises ValueError."""
    return _named("sharding_type", name, _OUR_SHARDING)


def our_kernel(name: Any) -> str:
    """Our name of one of TorchRec's compute kernels. Raises ValueError."""
    return _named("compute_kernel", name, _OUR_KERNEL)


def _named(key: str, value: Any, names: Mapping[str, str]) -> str:
    if value not in names:
        raise ValueError(f"{key}: found {value!r}, allowed {', '.join(sorted(names))}{suggest(str(value), names)}")
    return names[value]


def _shard(shard: Mapping[str, Any], rank: int) -> Shard:
    (rows, columns), (row, column) = shard["shard_sizes"], shard["shard_offsets"]
    return Shard(size=(rows, columns), offset=(row, column), rank=rank)


def write_torchrec(plan: Mapping[str, Any], path: str | Path) -> None:
    """Writes a serialized plan as JSON, whole or not at all."""
    target = Path(path)
    part = target.with_name(f".{target.name}.part")
    part.write_text(json.dumps(plan, indent=2) + "\n", encoding="utf-8")
    part.replace(target)
