"""JSON Schemas: current, accepting every shipped file, refusing mistakes that our own loader refuses."""

import json
from collections.abc import Mapping
from pathlib import Path

import jsonschema
import pytest

from perfmodel.config import schema as schemas
from perfmodel.config.reading import read_mapping

ROOT = Path(__file__).parents[2]
FOLDERS = {
    "model": "configs/models/*.yaml", "topology": "configs/topologies/*.yaml", "plan": "configs/plans/*.yaml",
    "device": "kernels_db/*/device.yaml",
}  # fmt: skip
SHIPPED = [(kind, path) for kind, pattern in FOLDERS.items() for path in sorted(ROOT.glob(pattern))]


def plain(value):
    if isinstance(value, tuple):
        return [plain(item) for item in value]
    return {key: plain(item) for key, item in value.items()} if isinstance(value, Mapping) else value


def faults(kind, mapping):
    return [e.message for e in jsonschema.Draft202012Validator(schemas.schema(kind)).iter_errors(plain(mapping))]


@pytest.mark.parametrize("kind", schemas.KINDS)
def test_the_shipped_schema_is_what_the_specs_say(kind):
    assert schemas.schema_path(kind).read_text() == schemas.schema_text(kind), "run: make schemas"


@pytest.mark.parametrize("kind", schemas.KINDS)
def test_it_is_a_schema(kind):
    jsonschema.Draft202012Validator.check_schema(json.loads(schemas.schema_text(kind)))


@pytest.mark.parametrize(("kind", "path"), SHIPPED, ids=lambda v: v.stem if isinstance(v, Path) else v)
def test_every_shipped_file_passes(kind, path):
    assert faults(kind, read_mapping(path)) == []


@pytest.mark.parametrize(
    ("kind", "change"),
    [
        ("topology", {"nmae": "x"}),  # an unknown key
        ("topology", {"node": {"gpus": {"device": 5}}}),  # a number for a name
        ("plan", {"data_parallel": {"bucket_cap": 25}}),  # a size without a unit
        ("model", {"batch_size": -1}),
    ],
)
def test_mistakes_are_found(kind, change):
    start = {
        "topology": read_mapping(ROOT / "configs/topologies/dgx.yaml"), "plan": {},
        "model": read_mapping(ROOT / "configs/models/gpt2.yaml"),
    }[kind]  # fmt: skip
    assert faults(kind, start) == []
    assert faults(kind, {**start, **change})
