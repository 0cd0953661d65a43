"""Batch norm and RMS norm as CUDA runs them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from perfmodel.extract.rewrites.fused import fused
from perfmodel.extract.rewrites.routing import active, arguments, declined, route

# cuDNN's limit on the batch in training, from torch/aten/src/ATen/native/Normalization.cpp.
_CUDNN_MAX_BATCH = 880801
_BATCH_NORM = (
    "input",
    "weight",
    "bias",
    "running_mean",
    "running_var",
    "training",
    "momentum",
    "eps",
    "cudnn_enabled",
)


@route("cuda", "batch_norm")
def batch_norm(*args: Any, **kwargs: Any) -> Any:
    """The batch norm of cuDNN for three or more dimensions with an affine transform and both running statistics or none.

    Conditions of `_select_batch_norm_backend` (Normalization.cpp); one-dimensional inputs (batch, features) and
    bfloat16 keep torch's own kernel. With real values the local kernel runs; a pass over the ops cannot tell, so the
    native operator's name stays.
    """
    call = arguments(_BATCH_NORM, args, kwargs)
    image: Tensor = call["input"]
    weight = call["weight"]
    statistics = call["running_mean"] is not None and call["running_var"] is not None
    takes_cudnn = (
        call["cudnn_enabled"]
        and weight is not None
        and call["bias"] is not None
        and image.dim() >= 3
        and torch.bfloat16 not in (image.dtype, weight.dtype)
        and (statistics or call["training"])
        and image.size(0) <= _CUDNN_MAX_BATCH
        and active().values == "meta"
    )
    if not takes_cudnn:
        return declined("batch_norm", *args, **kwargs)
    active().used.add("batch_norm")
    return torch.ops.aten.cudnn_batch_norm(
        image.contiguous(memory_format=_layout(image)),
        weight,
        call["bias"],
        call["running_mean"],
        call["running_var"],
        call["training"],
        call["momentum"],
        call["eps"],
    )[0]


def _layout(image: Tensor) -> torch.memory_format:
    if image.dim() == 4 and image.is_contiguous(memory_format=torch.channels_last):
        return torch.channels_last
    if image.dim() == 5 and image.is_contiguous(memory_format=torch.channels_last_3d):
        return torch.channels_last_3d
    return torch.contiguous_format


@route("cuda", "rms_norm")
def rms_norm(*args: Any, **kwargs: Any) -> Any:
    """One fused kernel forward and one backward where input and weight have the same type (layer_norm.cpp)."""
    call = arguments(("input", "normalized_shape", "weight", "eps"), args, kwargs)
    image, weight = call["input"], call.get("weight")
    if weight is not None and weight.dtype != image.dtype:
        return declined("rms_norm", *args, **kwargs)
    active().used.add("rms_norm")
    shape, eps = call["normalized_shape"], call.get("eps")

    def compute(value: Tensor, scale: Tensor | None = None) -> Tensor:
        out: Tensor = declined("rms_norm", value, shape, scale, eps)
        return out

    tensors = [image] if weight is None else [image, weight]
    attrs = {"normalized_shape": list(shape), "eps": eps}
    return fused("aten._fused_rms_norm", compute, tensors, ("input", "weight")[: len(tensors)], attrs)
