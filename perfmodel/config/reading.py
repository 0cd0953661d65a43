"""Files people write -> plain values. YAML 1.2 scalars, no duplicate keys, nothing that is not finite, nothing huge.

`read_mapping` is the only way a config file enters. Lists come back as tuples, so that what was read cannot change.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Hashable, Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from perfmodel.errors import ConfigError
from perfmodel.units import MEBI, format_bytes

# A model with 10,000 written-out tables is 1 MiB; more is a data file given by mistake.
MAX_CONFIG_BYTES = 4 * MEBI
# Values after aliases are expanded; a "billion laughs" file stays under the byte limit and passes this one.
MAX_CONFIG_VALUES = 500_000
MAX_CONFIG_DEPTH = 64

_BASE: type[yaml.SafeLoader] = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class _Loader(_BASE):  # type: ignore[misc, valid-type]  # which base exists depends on whether libyaml was there
    """SafeLoader with YAML 1.2 scalars that collects duplicate keys instead of keeping the last one."""

    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012 -- PyYAML's own protocol

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.duplicates: list[str] = []

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.tag != "tag:yaml.org,2002:merge":
                if key.value in seen:
                    self.duplicates.append(f"{key.value}: duplicate key at line {key.start_mark.line + 1}")
                seen.add(key.value)
        mapping: dict[Hashable, Any] = super().construct_mapping(node, deep)
        return mapping


# The core schema of YAML 1.2: `on`, `12:30:45`, `0777` and dates are not what PyYAML's 1.1 makes of them.
for _tag, _pattern, _first in (
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("bool", r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    ("int", r"[-+]?[0-9][0-9_]*", list("-+0123456789")),
    ("float", r"[-+]?(\.[0-9]+|[0-9][0-9_]*(\.[0-9]*)?)([eE][-+]?[0-9]+)?", list("-+.0123456789")),
    ("float", r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)", list("-+.")),
    ("merge", r"<<", ["<"]),
):
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(f"^(?:{_pattern})$"), _first)


def _construct_int(loader: _Loader, node: yaml.ScalarNode) -> int:
    return int(str(loader.construct_scalar(node)).replace("_", ""))


def _construct_float(loader: _Loader, node: yaml.ScalarNode) -> float:
    text = str(loader.construct_scalar(node)).replace("_", "").lower()
    return float(text.replace(".inf", "inf").replace(".nan", "nan"))


_Loader.add_constructor("tag:yaml.org,2002:int", _construct_int)
_Loader.add_constructor("tag:yaml.org,2002:float", _construct_float)


def read_mapping(path: Path) -> dict[str, Any]:
    """The mapping in a YAML or JSON file. Raises ConfigError with every problem found."""
    text = _read_text(path)
    value = _parse_json(text, path) if path.suffix == ".json" else _parse_yaml(text, path)
    return check_mapping(value, str(path))


class Named(dict[str, Any]):
    """A mapping that knows what to call its origin in messages, such as `stdin`."""

    def __init__(self, mapping: Mapping[str, Any], where: str) -> None:
        super().__init__(mapping)
        self.where = where


def parse_mapping(text: str, where: str) -> Named:
    """The mapping in YAML (or JSON) text that came from `where`. Raises ConfigError with every problem found."""
    if len(text) > MAX_CONFIG_BYTES:
        limit = format_bytes(MAX_CONFIG_BYTES, digits=None)
        raise ConfigError(f"{where}: found {format_bytes(len(text))}, allowed a config of at most {limit}")
    return Named(check_mapping(_parse_yaml(text, Path(where)), where), where)


def check_mapping(value: object, where: str) -> dict[str, Any]:
    """Checks a mapping from a file or from Python: text keys, finite numbers, bounded size. Raises ConfigError."""
    if value is None:
        raise ConfigError(f"{where}: the file is empty, allowed a mapping of keys to values")
    if not isinstance(value, Mapping):
        raise ConfigError(f"{where}: found {_kind(value)}, allowed a mapping of keys to values")
    problems = []
    for n_values, (path, problem) in enumerate(_faults(value, "", 0)):
        if n_values > MAX_CONFIG_VALUES:
            raise ConfigError(f"{where}: more than {MAX_CONFIG_VALUES} values once its aliases are expanded")
        if problem:
            problems.append(f"{where}: {path}: {problem}" if path else f"{where}: {problem}")
    if problems:
        raise ConfigError(problems)
    return {key: _frozen(item) for key, item in value.items()}


def _read_text(path: Path) -> str:
    try:
        size_bytes = path.stat().st_size
        if size_bytes > MAX_CONFIG_BYTES:
            limit = format_bytes(MAX_CONFIG_BYTES, digits=None)
            raise ConfigError(f"{path}: found {format_bytes(size_bytes)}, allowed a config file of at most {limit}")
        raw = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not a text file (byte {error.start} is not UTF-8)") from error
    if "\0" in text:
        raise ConfigError(f"{path}: not a text file (it contains a NUL byte)")
    return text


def _parse_yaml(text: str, path: Path) -> Any:
    loader = _Loader(text)
    try:
        value = loader.get_single_data()
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: not valid YAML: {_yaml_reason(error)}") from error
    except (RecursionError, ValueError) as error:
        raise ConfigError(f"{path}: not usable YAML: {str(error).splitlines()[0]}") from error
    finally:
        loader.dispose()
    if loader.duplicates:
        raise ConfigError([f"{path}: {problem}" for problem in loader.duplicates])
    return value


def _yaml_reason(error: yaml.YAMLError) -> str:
    mark = getattr(error, "problem_mark", None)
    reason = getattr(error, "problem", None) or str(error).splitlines()[0]
    return f"{reason} at line {mark.line + 1}, column {mark.column + 1}" if mark else str(reason)


def _parse_json(text: str, path: Path) -> Any:
    duplicates: list[str] = []

    def no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                duplicates.append(f"{path}: {key}: duplicate key")
            seen.add(key)
        return dict(pairs)

    try:
        value = json.loads(text, object_pairs_hook=no_duplicates)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{path}: not valid JSON: {error.msg} at line {error.lineno}") from error
    except (RecursionError, ValueError) as error:
        raise ConfigError(f"{path}: not usable JSON: {str(error).splitlines()[0]}") from error
    if duplicates:
        raise ConfigError(duplicates)
    return value


def _faults(value: object, path: str, depth: int) -> Iterator[tuple[str, str | None]]:
    """Every value inside, depth first, with what is wrong with it (None: nothing)."""
    if depth > MAX_CONFIG_DEPTH:
        raise ConfigError(
            f"{path[:40]}...: nested deeper than {MAX_CONFIG_DEPTH} levels (an alias that contains itself?)"
        )
    yield path, None
    if isinstance(value, Mapping):
        for key, item in value.items():
            if not isinstance(key, str):
                yield path, f"found the key {key!r}, allowed text (quote it)"
            yield from _faults(item, f"{path}.{key}" if path else f"{key}", depth + 1)
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from _faults(item, f"{path}.{index}", depth + 1)
    elif isinstance(value, float) and not math.isfinite(value):
        yield path, f"found {value}, allowed a finite number"


def _frozen(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _frozen(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return tuple(_frozen(item) for item in value)
    return value


def _kind(value: object) -> str:
    names = {str: "text", int: "a number", float: "a number", bool: "true or false", list: "a list", tuple: "a list"}
    return names.get(type(value), type(value).__name__)
