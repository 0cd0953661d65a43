"""JSON Schemas of the files people write, made from the specs; editors complete and check YAML with them.

The files in `config/schemas/` are what `schema_text` gives; a test holds them to it (`make schemas` writes them anew).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from perfmodel.config.device import DeviceSpec
from perfmodel.config.model import ModelSpec
from perfmodel.config.plan import PlanSpec
from perfmodel.config.topology import TopologySpec
from perfmodel.units import format_bytes, format_rate, format_time

FOLDER = Path(__file__).parent / "schemas"
DIALECT = "https://json-schema.org/draft/2020-12/schema"
KINDS: dict[str, tuple[str, Any]] = {
    "model": ("A model and how it is trained: configs/models/*.yaml", ModelSpec),
    "topology": ("A machine: configs/topologies/*.yaml", TopologySpec),
    "plan": ("How a model is spread over ranks: configs/plans/*.yaml", PlanSpec),
    "device": ("A device's datasheet: kernels_db/<device>/device.yaml", DeviceSpec),
}
# Short forms that a loader widens before pydantic sees the value: (spec, key) -> what else the file may say.
_SHORT_FORMS: dict[tuple[str, str], list[dict[str, Any]]] = {
    ("NodeSpec", "gpus"): [{"$ref": "#/$defs/GpuSpec"}],
    **{
        ("PcieSpec", key): [{"type": "array", "items": {"type": "array"}}]
        for key in ("switches", "switch_trees", "host_bridges", "sockets")
    },
    ("TopologySpec", "env"): [{"type": "object"}],
    ("Table", "pooling_factor"): [{"type": "number"}],
    ("Table", "distribution"): [{"type": ["string", "number"]}],
    ("DlrmSpec", "distribution"): [{"type": ["string", "number"]}],
    ("DlrmSpec", "interaction"): [{"type": "string"}],
    ("PlanSpec", "mesh"): [{"type": "object", "additionalProperties": {"type": ["integer", "string"]}}],
    ("PlanSpec", "embeddings"): [{"type": "string"}, {"type": "object"}],
    ("EmbeddingPlan", "placement"): [{"type": "object"}],
    **{
        (spec, key): [{"type": "string"}]
        for spec in ("DlrmSpec", "TransformerSpec", "VisionSpec", "EntrypointSpec")
        for key in ("optimizer", "embedding_optimizer", "sparse_optimizer")
    },
}
_SHOW = {"bytes": format_bytes, "seconds": format_time, "bytes_per_s": format_rate}


def schema(kind: str) -> dict[str, Any]:
    """The JSON Schema of one kind of file. Quantities are text with a unit, as in the file."""
    title, spec = KINDS[kind]
    body = TypeAdapter(spec).json_schema()
    for name, part in [*body.get("$defs", {}).items(), (getattr(spec, "__name__", ""), body)]:
        _widen(name, part.get("properties", {}))
    return {"$schema": DIALECT, "title": title, **{k: _clean(v) for k, v in body.items() if k != "title"}}


def _widen(spec: str, properties: dict[str, Any]) -> None:
    """Adds the short forms of a spec's keys."""
    for key, value in properties.items():
        if (spec, key) in _SHORT_FORMS:
            about = {word: value.pop(word) for word in ("default", "description") if word in value}
            properties[key] = {**about, "anyOf": [value, *_SHORT_FORMS[spec, key]]}
    if spec == "DlrmSpec":
        properties["tables"]["items"] = {"anyOf": [properties["tables"]["items"], {"type": ["integer", "string"]}]}


def _clean(value: Any) -> Any:
    if isinstance(value, list):
        return [_clean(item) for item in value]
    if not isinstance(value, dict):
        return value
    found = {key: _clean(item) for key, item in value.items() if key != "title" or not isinstance(item, str)}
    show = _SHOW.get(found.get("x-quantity", ""))
    default = found.get("default")
    if show is not None and isinstance(default, int | float):
        found["default"] = show(default, None)
    return found


def schema_text(kind: str) -> str:
    """The schema as the text of its file."""
    return json.dumps(schema(kind), indent=1, sort_keys=True) + "\n"


def schema_path(kind: str) -> Path:
    """Where a schema's file lies in the package."""
    return FOLDER / f"{kind}.schema.json"


def write_schemas() -> None:
    """Writes every schema file anew."""
    FOLDER.mkdir(exist_ok=True)
    for kind in KINDS:
        schema_path(kind).write_text(schema_text(kind), encoding="utf-8")
