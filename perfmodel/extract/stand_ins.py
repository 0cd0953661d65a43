"""Operators that torch cannot run without storage, and results that it shapes for another device than the target.

Sparse COO kernels for `meta` are few. Each stand-in returns what the real kernel returns, in metadata. A coalesced
gradient keeps one entry for each index (how many are distinct, only values tell), so `nnz` is an upper bound and the
kernel model applies the table's own statistics.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch
from torch import Tensor

from perfmodel.extract import _torch

StandIn = Callable[..., Any]


def coalesce(tensor: Tensor) -> Tensor:
    """The tensor with its indices sorted and unique; here: as many entries as before."""
    indices, values = _torch.sparse_parts(tensor)
    return _torch.sparse_tensor(torch.empty_like(indices), torch.empty_like(values), tensor, coalesced=True)


def sparse_mask(tensor: Tensor, mask: Tensor, _accumulate_matches: bool = False) -> Tensor:
    """The dense tensor's rows at the mask's indices."""
    indices, values = _torch.sparse_parts(mask)
    return _torch.sparse_tensor(indices.clone(), torch.empty_like(values, dtype=tensor.dtype), mask, coalesced=True)


def add_in_place(tensor: Tensor, other: Tensor, *, alpha: float = 1.0) -> Tensor:
    """`tensor += alpha * other` for a sparse `other`: writes the rows that it names."""
    return tensor


def in_place(*args: Any, **kwargs: Any) -> None:
    """A fused optimizer step: writes its arguments, returns nothing."""


def _embedding_bag_backward(*args: Any, **kwargs: Any) -> Any:
    """The gradient with the bag of each index given, which the CPU's kernel works out by itself when it is missing."""
    changed = (*args[:3], torch.empty_like(args[1]), *args[4:])
    return torch.ops.aten._embedding_bag_backward.default(*changed, **kwargs)


def _cudnn_rnn_backward(*args: Any, **kwargs: Any) -> Any:
    """Gradients of input, states and weights; torch has the forward kernel for `meta` only."""
    image, weights, _, _, hidden, cell = args[:6]
    no_cell = torch.empty(0, dtype=image.dtype, device=image.device)
    states = (torch.empty_like(hidden), no_cell if cell is None else torch.empty_like(cell))
    return (torch.empty_like(image), *states, [torch.empty_like(weight) for weight in weights])


def _layer_norm_backward(*args: Any, **kwargs: Any) -> Any:
    """Gradients of input, weight and bias as far as wanted; torch works the shapes out through 30 operators."""
    _, image, _, _, _, weight, bias, wanted = args
    like = (torch.empty_like(image, memory_format=torch.contiguous_format), weight, bias)
    return tuple(
        torch.empty_like(part) if want and part is not None else None for part, want in zip(like, wanted, strict=True)
    )


_SHAPES_KNOWN: Mapping[str, StandIn] = {
    "aten._cudnn_rnn_backward": _cudnn_rnn_backward,
    "aten.native_layer_norm_backward": _layer_norm_backward,
}
_SPARSE_ON_META: Mapping[str, StandIn] = {
    "aten._coalesce": coalesce,
    "aten.sparse_mask": sparse_mask,
    "aten.add_": add_in_place,
}
_SAME_SHAPE_FOREACH = frozenset(
    f"aten._foreach_{name}" for name in ("add", "addcdiv", "addcmul", "div", "lerp", "mul", "neg", "sqrt", "sub")
)
_IN_PLACE = frozenset(f"aten.{name}_" for name in ("add", "addcdiv", "addcmul", "div", "lerp", "mul", "sqrt", "sub"))
_FUSED_OPTIMIZERS = frozenset(f"aten._fused_{name}_" for name in ("adam", "adamw", "sgd", "adagrad"))


def optimizer_stand_in(name: str, args: tuple[Any, ...]) -> StandIn | None:
    """What to run instead of an elementwise operator of an optimizer step without storage; None to run it.

    Shapes are known beforehand there, and torch works them out in Python for each of hundreds of parameters.
    """
    if name.startswith("aten._foreach_") and args[0] and args[0][0].is_meta:
        if name.endswith("_"):
            return in_place
        return _for_each if name in _SAME_SHAPE_FOREACH else None
    if name in _IN_PLACE and args[0].is_meta and args[0].layout == torch.strided:
        return _first
    return None


def _for_each(tensors: list[Tensor], *args: Any, **kwargs: Any) -> list[Tensor]:
    return [torch.empty_like(tensor) for tensor in tensors]


def _first(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    return tensor


def stand_in(name: str, args: tuple[Any, ...]) -> StandIn | None:
    """What to run instead of an operator that has no kernel for tensors without storage; None if it has one."""
    if name in _FUSED_OPTIMIZERS:
        return in_place if args[0][0].is_meta else None
    if name == "aten._embedding_bag_backward" and args[3].is_meta and args[3].numel() < args[1].numel():
        return _embedding_bag_backward
    if name in _SHAPES_KNOWN:
        return _SHAPES_KNOWN[name]
    made = _SPARSE_ON_META.get(name)
    if made is None or not any(isinstance(a, Tensor) and a.layout == torch.sparse_coo and a.is_meta for a in args):
        return None
    return made


def corrected(name: str, args: tuple[Any, ...], result: Any, target: Literal["cuda", "cpu"]) -> Any:
    """The result as the target's kernel shapes it, where `meta` does it otherwise.

    Convolutions keep channels last. On the CPU `_embedding_bag` fills other side results, and `native_layer_norm` keeps
    its statistics in the input's type where the weight has that type too.
    """
    if name in _CONVOLUTIONS:
        return _channels_last(args[: 2 if name == "aten.convolution" else 3], result)
    if target == "cuda":
        return result
    if name == "aten._embedding_bag":
        return _embedding_bag_on_cpu(args, result)
    if name == "aten.native_layer_norm" and args[2] is not None and args[2].dtype == args[0].dtype:
        return (result[0], *(torch.empty_like(part, dtype=result[0].dtype) for part in result[1:]))
    return result


def _channels_last(tensors: tuple[Tensor, ...], result: Any) -> Any:
    """CuDNN and oneDNN write channels last if the image or the weight has that layout (ConvUtils.h)."""
    layout = next((form for form in map(_torch.memory_format, tensors[-2:]) if form != torch.contiguous_format), None)
    if layout is None:
        return result
    if isinstance(result, Tensor):
        return torch.empty_like(result, memory_format=layout)
    return tuple(
        torch.empty_like(part, memory_format=layout) if part is not None and part.dim() > 3 else part for part in result
    )


def _embedding_bag_on_cpu(args: tuple[Any, ...], result: Any) -> Any:
    """Sum and mean need no bag of each index on the CPU's fast path (EmbeddingBag.cpp, make_offset2bag_out)."""
    mode = args[4] if len(args) > 4 else 0
    out, _, bag_size, _ = result
    if mode == _MAX_MODE:
        return result
    return (out, bag_size.new_empty(0), bag_size, torch.empty_like(bag_size))


_CONVOLUTIONS = frozenset({"aten.convolution", "aten.convolution_backward"})
_MAX_MODE = 2  # aten's number of EmbeddingBag's mode "max"
