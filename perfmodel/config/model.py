"""Model files -> specs. The kind is `kind`, or told by a key only one has (`entrypoint`, `hf_config`, `model_type`)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from perfmodel.config.dlrm import DlrmSpec
from perfmodel.config.entrypoint import EntrypointSpec
from perfmodel.config.foreign import HuggingFaceSpec, foreign_fields, has_family
from perfmodel.config.huggingface import FAMILIES, config_fields, transformer_fields
from perfmodel.config.loading import Source, read_source, validate
from perfmodel.config.reading import read_mapping
from perfmodel.config.transformer import TransformerSpec
from perfmodel.config.vision import VisionSpec
from perfmodel.errors import ConfigError, suggest

ModelSpec = DlrmSpec | TransformerSpec | VisionSpec | EntrypointSpec | HuggingFaceSpec

KINDS: Mapping[str, type[ModelSpec]] = {
    "dlrm": DlrmSpec,
    "transformer": TransformerSpec,
    "vision": VisionSpec,
    "entrypoint": EntrypointSpec,
    "huggingface": HuggingFaceSpec,
}
# Samples per rank when a Hugging Face config, which has no batch size, is given as the model.
DEFAULT_BATCH_SIZE = 8
# What we add to a Hugging Face config when its fields are written into a model file.
RUN_KEYS = (
    "kind",
    "name",
    "batch_size",
    "precision",
    "optimizer",
    "sequence_length",
    "attention",
    "gradient_checkpointing",
    "head",
    "transformers",
)


def load_model(source: Source, overrides: Mapping[str, Any] | None = None) -> ModelSpec:
    """The model spec in a shipped config, a YAML file, a Hugging Face `config.json` or a mapping.

    Args:
        source: name of a shipped model, path, or mapping with the same keys as a file.
        overrides: top-level keys that replace or add to the file's (`{"batch_size": 64}`).

    Raises:
        ConfigError: one line for each mistake.
    """
    where, mapping = read_source("models", source)
    mapping = {**mapping, **(overrides or {})}
    folder = Path() if isinstance(source, Mapping) else Path(where).parent
    if "hf_config" in mapping:
        mapping = _with_config_file(mapping, where, folder)
    elif "model_type" in mapping:
        mapping = _with_inline_config(mapping, where, Path(where).stem)
    kind = mapping.get("kind", "entrypoint" if "entrypoint" in mapping else None)
    if not isinstance(kind, str) or kind not in KINDS:
        found = "missing" if kind is None else f"found {kind!r}"
        raise ConfigError(f"{where}: kind: {found}, allowed {', '.join(KINDS)}{suggest(str(kind), KINDS)}")
    return validate(KINDS[kind], mapping, where)


def _with_config_file(mapping: Mapping[str, Any], where: str, folder: Path) -> dict[str, Any]:
    """`hf_config: path` (relative to the model file): its fields, under the keys written beside it."""
    given = mapping["hf_config"]
    if not isinstance(given, str):
        raise ConfigError(f"{where}: hf_config: found {given!r}, allowed the path of a config.json")
    path = folder / given
    if not path.is_file():
        raise ConfigError(f"{where}: hf_config: no such file {str(path)!r}")
    config = read_mapping(path)
    fields = foreign_fields(config, ()) if _is_foreign(config) else transformer_fields(config, str(path))
    rest = {key: value for key, value in mapping.items() if key != "hf_config"}
    return {"kind": "transformer", "name": path.stem, "batch_size": DEFAULT_BATCH_SIZE, **fields, **rest}


def _with_inline_config(mapping: Mapping[str, Any], where: str, name: str) -> dict[str, Any]:
    if _is_foreign(mapping):
        fields = foreign_fields(mapping, RUN_KEYS)
    else:
        fields = transformer_fields(mapping, where)
        _refuse_misspelt(mapping, where)
    run = {key: mapping[key] for key in RUN_KEYS if key in mapping}
    return {"kind": "transformer", "name": name, "batch_size": DEFAULT_BATCH_SIZE, **fields, **run}


def _is_foreign(config: Mapping[str, Any]) -> bool:
    """Whether transformers builds the model of a config, not we. Its mixtures of experts choose by values: not those."""
    model_type = str(config.get("model_type"))
    return model_type not in FAMILIES and "num_experts" not in config and has_family(model_type)


def _refuse_misspelt(mapping: Mapping[str, Any], where: str) -> None:
    """Hugging Face configs carry many keys we ignore, but one that is nearly one of ours is a slip."""
    known = [*RUN_KEYS, *config_fields(str(mapping["model_type"]))]
    elsewhere = {key for model_type in FAMILIES for key in config_fields(model_type)}
    problems = [
        f"{where}: {key}: unknown key{near}"
        for key in mapping
        if key not in known and key not in elsewhere and (near := suggest_close(key, known))
    ]
    if problems:
        raise ConfigError(problems)


def suggest_close(key: str, known: list[str]) -> str:
    """As `suggest`, for keys that differ from a known one in a letter or two."""
    near = suggest(key, [name for name in known if abs(len(name) - len(key)) <= 1 and name[:1] == key[:1]])
    target = near.removeprefix("; did you mean '").removesuffix("'?")
    differing = sum(a != b for a, b in zip(key, target, strict=False)) + abs(len(key) - len(target))
    moved = sorted(key) == sorted(target)
    return near if near and (moved or differing <= 2 or key.startswith(target) or target.startswith(key)) else ""
