"""A user's own module, named by `entrypoint: "package.module:factory"`; the one spec that leads to loading code."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from perfmodel.config.quantity import PositiveCount
from perfmodel.config.training import Run

_ENTRYPOINT = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")


def _entrypoint(value: str) -> str:
    if not _ENTRYPOINT.fullmatch(value):
        raise ValueError(f"found {value!r}, allowed 'package.module:factory'")
    return value


class EntrypointSpec(Run):
    """A factory that returns (module, inputs, loss): inputs a tuple or dict of tensors, loss a callable or None.

    `arguments` are passed to the factory by keyword. `batch_size` defaults to the first dimension of the first input.
    """

    kind: Literal["entrypoint"] = "entrypoint"
    entrypoint: Annotated[str, AfterValidator(_entrypoint)] = Field(description="text 'package.module:factory'")
    arguments: dict[str, Any] = Field(default_factory=dict)
    name: str | None = None
    batch_size: PositiveCount | None = None
