"""Finds config files by name or path and turns mappings into frozen specs, with every mistake reported at once."""

from __future__ import annotations

import types
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, get_args, get_origin

from pydantic import BaseModel, ConfigDict, ValidationError

from perfmodel.config.reading import Named, check_mapping, read_mapping
from perfmodel.errors import ConfigError, suggest

Kind = Literal["models", "topologies", "plans", "suites"]
Source = str | Path | Mapping[str, Any]

_SINGULAR = {"models": "model", "topologies": "topology", "plans": "plan", "suites": "suite"}
_SUFFIXES = (".yaml", ".yml", ".json", ".csv")
_SHOWN_CHARS = 60
_MAX_LISTED = 12  # names in one line of a message


class Spec(BaseModel):
    """Base of every spec: strict types, unknown keys refused, frozen."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False)


SpecT = TypeVar("SpecT", bound=BaseModel)


def config_dirs() -> tuple[Path, ...]:
    """Folders that hold the shipped configs: inside the wheel, or the repository root of an editable install."""
    package = Path(__file__).parents[1]
    candidates = (package / "_data" / "configs", package.parent / "configs")
    return tuple(path for path in candidates if path.is_dir())


def list_configs(kind: Kind) -> list[str]:
    """Names of the shipped configs of a kind, sorted, without suffix."""
    found = {p.stem for folder in config_dirs() for p in (folder / kind).glob("*") if p.suffix in _SUFFIXES}
    return sorted(found)


def find_config(kind: Kind, name: str | Path) -> Path:
    """The file meant by `name`: a path as given, else a shipped config by its name, with or without suffix.

    Raises ConfigError that names the nearest shipped config.
    """
    given = Path(name)
    if given == Path() and str(name) != ".":
        raise ConfigError(
            f"{_SINGULAR[kind]}: found an empty name, allowed a shipped one ('perfmodel {kind}') or a file"
        )
    shipped_paths = [folder / kind / f"{given.name}{s}" for folder in config_dirs() for s in ("", *_SUFFIXES)]
    try:
        candidates = [given, *shipped_paths] if given.parent == Path() else [given]
        for candidate in candidates:
            if candidate.is_file():
                return candidate
        if given.is_dir():
            raise ConfigError(f"{name}: found a folder, allowed a {_SINGULAR[kind]} file")
    except OSError as error:
        raise ConfigError(f"{str(name)[:_SHOWN_CHARS]}: cannot be looked up: {error.strerror}") from error
    shipped = list_configs(kind)
    near = suggest(given.stem, shipped)
    listed = (
        ", ".join(shipped) if len(shipped) <= _MAX_LISTED else f"'perfmodel {kind}' lists the {len(shipped)} there are"
    )
    raise ConfigError(f"{name}: no such file, and no shipped {_SINGULAR[kind]} has this name ({listed}){near}")


def read_source(kind: Kind, source: Source) -> tuple[str, dict[str, Any]]:
    """What to call a source (name, path or mapping) in messages, and its mapping. Raises ConfigError."""
    if isinstance(source, Mapping):
        where = source.where if isinstance(source, Named) else f"{_SINGULAR[kind]} (from Python)"
        return where, check_mapping(source, where)
    path = find_config(kind, source)
    return str(path), read_mapping(path)


def load_spec(kind: Kind, source: Source, spec: type[SpecT]) -> SpecT:
    """Reads a source and validates it as `spec`. Raises ConfigError with one line for each mistake."""
    where, mapping = read_source(kind, source)
    return validate(spec, mapping, where)


def validate(spec: type[SpecT], mapping: Mapping[str, Any], where: str) -> SpecT:
    """Validates a mapping as `spec`. Raises ConfigError: `where: key.path: found X, allowed Y; did you mean 'z'?`."""
    try:
        return spec.model_validate(mapping)
    except ValidationError as error:
        faults: list[dict[str, Any]] = [dict(fault) for fault in error.errors()]
        # pydantic counts only the entries that are right, so a list with bad ones is also "too short" to it.
        inner = {tuple(fault["loc"][:depth]) for fault in faults for depth in range(1, len(fault["loc"]))}
        faults = [fault for fault in faults if fault["type"] != "too_short" or tuple(fault["loc"]) not in inner]
        lines = [line for fault in faults for line in _describe(spec, fault, where)]
        raise ConfigError(list(dict.fromkeys(lines))) from None


def _describe(spec: type[BaseModel], fault: Mapping[str, Any], where: str) -> list[str]:
    loc = tuple(part for part in fault["loc"] if not (isinstance(part, str) and part.startswith("function-")))
    place = f"{where}: {'.'.join(str(part) for part in loc)}" if loc else where
    return [f"{place}: {text}" for text in _explain(spec, loc, fault)]


def _explain(spec: type[BaseModel], loc: tuple[Any, ...], fault: Mapping[str, Any]) -> list[str]:
    kind, found, context = fault["type"], _shown(fault["input"]), fault.get("ctx", {})
    if kind == "missing":
        return [f"missing, needs {_field_words(spec, loc)}"]
    if kind == "extra_forbidden":
        allowed = _keys_at(spec, loc[:-1])
        return [f"unknown key, allowed {', '.join(allowed)}{suggest(str(loc[-1]), allowed)}"]
    if kind == "value_error":
        return str(context["error"]).splitlines()
    if kind == "literal_error":
        allowed = _literals(context["expected"])
        near = suggest(str(fault["input"]), allowed)
        return [f"found {found}, allowed {', '.join(allowed)}{near}"]
    bounds = {"greater_than": "more than {gt}", "greater_than_equal": "at least {ge}", "less_than": "less than {lt}"}
    bounds |= {"less_than_equal": "at most {le}", "too_short": "at least {min_length} entries"}
    if kind in bounds:
        return [f"found {found}, allowed {bounds[kind].format(**context)}"]
    return [f"found {found}, allowed {_TYPE_WORDS.get(kind, fault['msg'])}"]


_TYPE_WORDS: Mapping[str, str] = {
    "int_type": "a whole number",
    "float_type": "a number",
    "string_type": "text",
    "bool_type": "true or false",
    "tuple_type": "a list",
    "list_type": "a list",
    "dict_type": "a mapping of keys to values",
    "mapping_type": "a mapping of keys to values",
    "model_type": "a mapping of keys to values",
    "model_attributes_type": "a mapping of keys to values",
    "finite_number": "a finite number",
    "none_required": "nothing (null)",
}


_PLAIN_WORDS: Mapping[str, str] = {str(str): "text", str(int): "a whole number", str(float): "a number"}


def _literals(expected: str) -> list[str]:
    return [word.strip(" '") for word in expected.replace(" or ", ", ").split(",")]


def _shown(value: object) -> str:
    text = repr(value) if not isinstance(value, tuple) else repr(list(value))
    return text if len(text) <= _SHOWN_CHARS else f"{text[: _SHOWN_CHARS - 3]}..."


def _field_words(spec: type[BaseModel], loc: Iterable[Any]) -> str:
    *parents, name = loc
    for model in _models_at(spec, tuple(parents)):
        for key, field in model.model_fields.items():
            if (field.alias or key) == name:
                return field.description or _PLAIN_WORDS.get(str(field.annotation), "a value")
    return "a value"


def _keys_at(spec: type[BaseModel], loc: tuple[Any, ...]) -> list[str]:
    return [field.alias or key for model in _models_at(spec, loc) for key, field in model.model_fields.items()]


def _models_at(spec: type[BaseModel], loc: tuple[Any, ...]) -> list[type[BaseModel]]:
    """The spec classes that a key path can lead to (several where a field is a union)."""
    models = [spec]
    for part in loc:
        if isinstance(part, int):
            continue
        step = [
            inner
            for model in models
            for key, field in model.model_fields.items()
            if (field.alias or key) == part
            for inner in _models_in(field.annotation)
        ]
        models = step or models
    return models


def _models_in(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    if get_origin(annotation) in (Union, types.UnionType, tuple, list, dict, Mapping) or get_args(annotation):
        return [model for arg in get_args(annotation) for model in _models_in(arg)]
    return []
