"""Reads and writes sharding plans: an `EmbeddingPlan` whose `placement` names every table.

In a file a plan is what `perfmodel predict --plan` takes: a mapping with `embeddings: {placement: {table: ...}}`, as YAML or
JSON. A table's entry is a rank (the whole table there, by the model's own operators), `data_parallel`, or a mapping with the
fields of `TablePlacement`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from perfmodel.config.loading import Source
from perfmodel.config.plan import EmbeddingPlan, PlanSpec, load_plan
from perfmodel.config.sharding import TablePlacement
from perfmodel.errors import ConfigError

Placements = Mapping[str, TablePlacement]


def with_placement(plan: PlanSpec, placement: Placements, name: str | None = None) -> PlanSpec:
    """The plan with another placement of its tables; everything else as it was."""
    embeddings = plan.embeddings.model_copy(update={"strategy": "explicit", "placement": dict(placement)})
    return plan.model_copy(update={"embeddings": embeddings, "name": name or plan.name})


def embedding_plan(placement: Placements, **fields: Any) -> EmbeddingPlan:
    """An explicit plan of these placements; `fields` are other fields of EmbeddingPlan, checked."""
    entries = {name: plain_placement(where) for name, where in placement.items()}
    return EmbeddingPlan.model_validate({"strategy": "explicit", "placement": entries, **fields})


def load_sharding_plan(source: Source | PlanSpec) -> PlanSpec:
    """A plan from a file (YAML or JSON), a mapping or a shipped name. Raises ConfigError, one line for each mistake."""
    return source if isinstance(source, PlanSpec) else load_plan(source)


def plain_placement(placement: TablePlacement) -> dict[str, Any]:
    """A table's entry as plain values, without what is as by default."""
    found = placement.model_dump(mode="json", exclude_defaults=True)
    return {"sharding": placement.sharding, **found, "kernel": placement.kernel}


def plain_plan(plan: PlanSpec) -> dict[str, Any]:
    """A plan as plain values that `load_plan` reads back to an equal one; fields as by default are left out.

    Raises ConfigError for a plan that a file cannot say.
    """
    body = {"name": plan.name, **plan.model_dump(mode="json", exclude_defaults=True, exclude={"name", "embeddings"})}
    sizes = body.get("data_parallel", {})
    sizes.update({key: f"{sizes[key]} B" for key in ("bucket_cap", "first_bucket") if key in sizes})
    body["embeddings"] = _plain_embeddings(plan.embeddings)
    if load_plan(body) != plan:
        raise ConfigError(f"plan {plan.name}: cannot be written to a file without losing part of it")
    return body


def _plain_embeddings(embeddings: EmbeddingPlan) -> dict[str, Any]:
    body = embeddings.model_dump(mode="json", exclude_defaults=True, exclude={"placement", "ssd"})
    placement = {name: plain_placement(where) for name, where in embeddings.placement.items()}
    if embeddings.ssd != EmbeddingPlan().ssd:
        body["ssd"] = f"{embeddings.ssd:.17g} B/s"
    return {"strategy": embeddings.strategy, **body, "placement": placement}


def plan_to_text(plan: PlanSpec, suffix: str) -> str:
    """A plan as the text of a file: JSON for `.json`, else YAML."""
    body = plain_plan(plan)
    if suffix == ".json":
        return json.dumps(body, indent=2) + "\n"
    import yaml

    return str(yaml.safe_dump(body, sort_keys=False, default_flow_style=None, width=120))


def write_plan(plan: PlanSpec, path: str | Path) -> None:
    """Writes a plan file, whole or not at all."""
    target = Path(path)
    part = target.with_name(f".{target.name}.part")
    part.write_text(plan_to_text(plan, target.suffix), encoding="utf-8")
    part.replace(target)
