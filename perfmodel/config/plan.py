"""PlanSpec: how a model is spread over ranks. From a plan file, a mapping or inline text (`ddp,bucket_cap=50MiB`).

Only what the plan room can place is accepted; any other key is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from perfmodel.config.loading import Source, Spec, list_configs, read_source, validate
from perfmodel.config.quantity import Bytes, PositiveBytes, PositiveCount
from perfmodel.config.reading import check_mapping
from perfmodel.errors import ConfigError, suggest
from perfmodel.units import MEBI

# torch.nn.parallel.DistributedDataParallel, torch 2.13: bucket_cap_mb=25 and dist._DEFAULT_FIRST_BUCKET_BYTES.
DEFAULT_BUCKET_CAP_BYTES = 25 * MEBI
DEFAULT_FIRST_BUCKET_BYTES = 1 * MEBI

STRATEGIES = ("table_wise", "data_parallel")


class DataParallel(Spec):
    """DDP of the dense parameters: gradients in buckets (bytes), all-reduced in the order they become ready.

    With `gradient_as_bucket_view` nothing is copied out of a bucket after its all-reduce.
    """

    bucket_cap: PositiveBytes = DEFAULT_BUCKET_CAP_BYTES
    first_bucket: Bytes = DEFAULT_FIRST_BUCKET_BYTES
    gradient_as_bucket_view: bool = False


def _placement(value: Any) -> Any:
    rank = isinstance(value, int) and not isinstance(value, bool) and value >= 0
    if not rank and value != "data_parallel":
        raise ValueError(f"found {value!r}, allowed a rank (0, 1, ...) or data_parallel")
    return value


class EmbeddingPlan(Spec):
    """How embedding tables are spread.

    `table_wise`: each table whole on one rank, balanced over ranks by what a lookup costs; `data_parallel`: every rank
    has all tables; `explicit`: `placement` gives each table the rank that holds it whole, or `data_parallel`. A table
    is named as in the model file, or by its parameter. `index_exchange`: ranks load their own samples and send indices to
    the tables' owners; without it every rank loads the whole global batch's indices of its tables.
    """

    strategy: Literal["table_wise", "data_parallel", "explicit"] = "table_wise"
    placement: Mapping[str, Annotated[int | str, BeforeValidator(_placement)]] = Field(default_factory=dict)
    index_exchange: bool = True


def _embeddings(value: Any) -> Any:
    if isinstance(value, str):
        if value not in STRATEGIES:
            near = suggest(value, STRATEGIES)
            raise ValueError(f"found {value!r}, allowed {', '.join(STRATEGIES)} or a mapping of tables to ranks{near}")
        return {"strategy": value}
    if isinstance(value, Mapping) and not set(value) & set(EmbeddingPlan.model_fields):
        return {"strategy": "explicit", "placement": value}
    return value


class PlanSpec(Spec):
    """A plan. `accumulate`: micro-batches per iteration; gradients are reduced after the last (`no_sync` before)."""

    name: str = "ddp"
    data_parallel: DataParallel = DataParallel()
    embeddings: Annotated[EmbeddingPlan, BeforeValidator(_embeddings)] = EmbeddingPlan()
    accumulate: PositiveCount = 1


# Names that mean a plan without a file.
BUILT_IN: Mapping[str, Mapping[str, Any]] = {"ddp": {"name": "ddp"}}
# Inline keys that stand for a key inside a section.
_SHORT = dict.fromkeys(("bucket_cap", "first_bucket", "gradient_as_bucket_view"), "data_parallel")


def load_plan(source: Source = "ddp") -> PlanSpec:
    """The plan in a shipped config, a file, a mapping or inline text (`ddp,bucket_cap=50MiB`, `embeddings=table_wise`).

    Inline text is a comma-separated list: first a plan's name or file if any, then `key=value`. Raises ConfigError.
    """
    if isinstance(source, str) and (source in BUILT_IN or "=" in source or "," in source):
        return validate(PlanSpec, _inline(source), f"plan {source!r}")
    where, mapping = read_source("plans", source)
    if not isinstance(source, Mapping):
        mapping = {"name": Path(where).stem, **mapping}
    return validate(PlanSpec, mapping, where)


def _inline(text: str) -> dict[str, Any]:
    where = f"plan {text!r}"
    words = [word.strip() for word in text.split(",")]
    base: dict[str, Any] = {}
    if "=" not in words[0]:
        base = _base(words.pop(0))
    problems = []
    for word in words:
        key, equals, value = word.partition("=")
        if not equals or not key or not value:
            problems.append(f"{where}: found {word!r}, allowed key=value")
            continue
        path = [_SHORT[key], key] if key in _SHORT else key.split(".")
        _put(base, path, _scalar(value))
    if problems:
        raise ConfigError(problems)
    return check_mapping({"name": text, **base}, where)


def _base(name: str) -> dict[str, Any]:
    if name in BUILT_IN:
        return dict(BUILT_IN[name])
    if name in list_configs("plans") or Path(name).is_file():
        return read_source("plans", name)[1]
    known = [*BUILT_IN, *list_configs("plans")]
    raise ConfigError(f"plan {name!r}: no such plan, allowed {', '.join(known)} or key=value{suggest(name, known)}")


def _put(mapping: dict[str, Any], path: list[str], value: Any) -> None:
    *sections, key = path
    for section in sections:
        inner = mapping.get(section)
        mapping[section] = dict(inner) if isinstance(inner, Mapping) else {}
        mapping = mapping[section]
    mapping[key] = value


def _scalar(text: str) -> Any:
    if text in ("true", "false"):
        return text == "true"
    return int(text) if text.lstrip("-").isdigit() else text
