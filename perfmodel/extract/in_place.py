"""Where autograd works in place in a real step, and makes a new tensor only because a dispatch mode watches.

torch asks `isTensorSubclassLike` before it reuses memory in backward, and says yes to everything while a mode is active.
Each case here calls what a step without a mode calls; a test compares with torch's profiler, which needs no mode.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from perfmodel.extract import _torch

Call = tuple[Any, tuple[Any, ...], Mapping[str, Any]]


def _accumulate(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Call | None:
    """A gradient added to one that nobody else holds (torch/csrc/autograd/input_buffer.cpp, can_accumulate_inplace)."""
    held, added = args[0], args[1]
    if kwargs or len(args) > 2 or not isinstance(added, Tensor) or not _torch.is_held_once(held):
        return None
    if held.shape != added.shape or held.dtype != added.dtype or added.layout != torch.strided:
        return None
    return torch.ops.aten.add_.Tensor, args, {}


def _index(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Call:
    """The gradient of indexing goes into fresh zeros (FunctionsManual.cpp, index_backward)."""
    values, indices, source, accumulate = (*args, *kwargs.values())
    return torch.ops.aten._index_put_impl_.default, (values, indices, source, accumulate, True), {}


def _sub(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Call:
    """`sigmoid(x).sub_(target)` (FunctionsManual.cpp, binary_cross_entropy_with_logits_backward)."""
    return torch.ops.aten.sub_.Tensor, args, kwargs


def _mul(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Call:
    """`.mul_(grad)`, as `_sub`."""
    return torch.ops.aten.mul_.Tensor, args, kwargs


_LOGITS = "BinaryCrossEntropyWithLogitsBackward0"
# By autograd node and operator; the empty node stands for any.
_CASES: Mapping[tuple[str, str], Callable[[tuple[Any, ...], Mapping[str, Any]], Call | None]] = {
    ("", "aten.add"): _accumulate,
    ("IndexBackward0", "aten.index_put"): _index,
    (_LOGITS, "aten.sub"): _sub,
    (_LOGITS, "aten.mul"): _mul,
}
_OPERATORS = frozenset(operator for _, operator in _CASES)


def without_mode(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Call | None:
    """What a step without a dispatch mode calls instead, inside backward; None if the same."""
    if name not in _OPERATORS or torch.is_grad_enabled() or not _torch.inside_backward_node():
        return None
    case = _CASES.get((_torch.backward_node_name(), name)) or _CASES.get(("", name))
    return None if case is None else case(args, kwargs)
