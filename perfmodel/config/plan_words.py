"""Inline plans word by word: `tp=4,embeddings={t0: 0, t1: 1}`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from perfmodel.config.reading import parse_mapping

_DECIMAL = re.compile(r"-?\d+\.\d*")


def words_of(text: str) -> list[str]:
    """The parts between commas that stand in no bracket.

    >>> words_of("tp=4, embeddings={a: 0, b: 1}")
    ['tp=4', 'embeddings={a: 0, b: 1}']
    """
    words, depth = [""], 0
    for letter in text:
        depth += (letter in "{[") - (letter in "}]")
        if letter == "," and depth == 0:
            words.append("")
        else:
            words[-1] += letter
    return [word.strip() for word in words]


def value_of(text: str, where: str) -> Any:
    """A word's value: a number, true or false, a YAML flow mapping or list, or the text itself. Raises ConfigError."""
    if text[0] in "{[":
        return parse_mapping(f"value: {text}", where)["value"]
    if text in ("true", "false"):
        return text == "true"
    if text.lstrip("-").isdigit():
        return int(text)
    return float(text) if _DECIMAL.fullmatch(text) else text


def put(mapping: dict[str, Any], path: list[str], value: Any) -> None:
    """Sets a value in nested mappings, which are made or copied on the way."""
    *sections, key = path
    for section in sections:
        inner = mapping.get(section)
        mapping[section] = dict(inner) if isinstance(inner, Mapping) else {}
        mapping = mapping[section]
    mapping[key] = value
