"""What a row's note says of how its model ran, where no column of a suite can say it.

Two phrases are read, as they stand in published tables: `eager attention` (or `attn_implementation=eager`, `=sdpa`), and
`transformers X.Y`, the release of Hugging Face transformers. They replace what the model file says, because the row knows
better how that run was made; a remark on the case tells so. All other words of a note are for people.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from perfmodel.config import load_model
from perfmodel.config.foreign import HuggingFaceSpec
from perfmodel.config.transformer import TransformerSpec

_EAGER = re.compile(r"\beager attention\b|\battn_implementation\s*=\s*['\"]?eager\b", re.IGNORECASE)
_SDPA = re.compile(r"\bsdpa attention\b|\battn_implementation\s*=\s*['\"]?sdpa\b", re.IGNORECASE)
_RELEASE = re.compile(r"\btransformers\s*(?:==|=)?\s*v?(\d+)\.(\d+)", re.IGNORECASE)
# Hugging Face transformers: GPT-2, OPT and BERT had no fused attention before 4.41; all models were moved to one attention
# function, with the operators of 4.57, in 4.48 (release notes).
_FIRST_FUSED, _FIRST_SHARED_FUNCTION = (4, 41), (4, 48)
_OLD = ("gpt2", "opt", "bert")  # the architectures whose older operators we know

AS_NOTED = "as the row's note says"  # ends the remark


def noted(note: str, spec: object) -> dict[str, str]:
    """Keys of a model file that a note decides for a model, `attention` and `transformers`; empty where it says nothing."""
    hugging_face = isinstance(spec, TransformerSpec) and spec.implementation == "huggingface"
    if not hugging_face and not isinstance(spec, HuggingFaceSpec):
        return {}
    found = {}
    if _EAGER.search(note):
        found["attention"] = "eager"
    elif _SDPA.search(note):
        found["attention"] = "sdpa"
    release = _RELEASE.search(note)
    if release and isinstance(spec, TransformerSpec) and spec.architecture in _OLD:
        version = (int(release.group(1)), int(release.group(2)))
        if version < _FIRST_FUSED:
            found.setdefault("attention", "eager")
        if version < _FIRST_SHARED_FUNCTION and found.get("attention", spec.attention) == "eager":
            found["transformers"] = "4.38"
    return {key: value for key, value in found.items() if getattr(spec, key) != value}


def as_noted(model: str, note: str) -> tuple[str | Mapping[str, Any], str]:
    """The model of a row, with what its note says of it, and the remark to make; the model as it is where it says nothing.

    Raises ConfigError where the model cannot be read.
    """
    if not (_EAGER.search(note) or _SDPA.search(note) or _RELEASE.search(note)):
        return model, ""
    spec = load_model(model)
    found = noted(note, spec)
    if not found:
        return model, ""
    said = ", ".join(f"{key} {value}" for key, value in found.items())
    return {**spec.model_dump(mode="json", exclude_unset=True), "kind": spec.kind, **found}, f"{said}: {AS_NOTED}"
