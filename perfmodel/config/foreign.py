"""Hugging Face configs of families that are not built here: the model is transformers' own, where it is installed."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from perfmodel.config.quantity import PositiveCount
from perfmodel.config.training import ADAMW, OptimizerField, TrainedSpec


class HuggingFaceSpec(TrainedSpec):
    """A model that transformers builds from its own config: text in (causal, masked, sequence to sequence) or images in.

    Attributes:
        config: the fields of the `config.json`.
        sequence_length: tokens per sample; by default the positions that the config names, at most 2,048.
        attention: `eager` or `sdpa`; by default what transformers takes for the family.
        gradient_checkpointing: recompute each block in backward.
    """

    kind: Literal["huggingface"] = "huggingface"
    optimizer: OptimizerField = ADAMW
    config: dict[str, Any] = Field(description="the fields of a Hugging Face config.json")
    sequence_length: PositiveCount | None = None
    attention: Literal["eager", "sdpa"] | None = None
    gradient_checkpointing: bool = False


def has_family(model_type: str) -> bool:
    """Whether the installed transformers has a family of this name; says no without it, and imports nothing."""
    found = importlib.util.find_spec("transformers")
    if found is None or found.origin is None:
        return False
    return (Path(found.origin).parent / "models" / model_type.replace("-", "_")).is_dir()


def foreign_fields(config: Mapping[str, Any], run_keys: tuple[str, ...]) -> dict[str, Any]:
    """Fields of a HuggingFaceSpec from a config in which our own keys may stand too."""
    return {"kind": "huggingface", "config": {key: value for key, value in config.items() if key not in run_keys}}
