"""From an nn.Module to a `Graph`, on tensors without storage. Importing this package does not import torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from perfmodel.extract.twin import Built
    from perfmodel.graph import Graph

__all__ = ["trace"]


def trace(
    built: Built,
    *,
    target: Literal["cuda", "cpu"] = "cuda",
    values: Literal["meta", "real"] = "meta",
    span: Literal["train", "forward_backward", "forward"] = "train",
) -> Graph:
    """The execution graph of one training step of a built model; see `perfmodel.extract.step.trace`."""
    from perfmodel.extract import step

    return step.trace(built, target=target, values=values, span=span)
