"""Operators of NVIDIA's DLRM that torch has no name for: gathers of one row a feature, and a whole MLP in one call.

DeepLearningExamples @729963d, PyTorch/Recommendation/DLRM: `dlrm/cuda_src/gather_gpu_fused.cu` (one GPU: rows of all tables
in the type that training computes in; the gradient is copied into fp32 values) and `dlrm/cuda_src/sparse_gather/gather_gpu.cu`
(several GPUs: fp32 rows; the gradient is the values as it is). apex `apex/mlp/mlp.py` and `csrc/mlp_cuda.cu`: layers with
bias and ReLU. They are recorded by the names given here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as fn


@torch.library.custom_op("perfmodel::gather_rows", mutates_args=())
def gather_rows(weight: Tensor, indices: Tensor, dtype: torch.dtype, fused: bool) -> Tensor:
    """Rows (batch, features, dim) of `weight` in `dtype`; unless `fused`, in the weight's type first and then cast."""
    return fn.embedding(indices, weight).to(dtype)


@torch.library.custom_op("perfmodel::gather_rows_backward", mutates_args=())
def gather_rows_backward(gradient: Tensor, dtype: torch.dtype, fused: bool) -> Tensor:
    """Values (batch * features, dim) of the weight's sparse gradient in `dtype`, from the gradient of the rows."""
    return gradient.to(dtype, copy=True)


@gather_rows.register_fake
def _(weight: Tensor, indices: Tensor, dtype: torch.dtype, fused: bool) -> Tensor:
    return weight.new_empty((*indices.shape, weight.shape[1]), dtype=dtype)


@gather_rows_backward.register_fake
def _(gradient: Tensor, dtype: torch.dtype, fused: bool) -> Tensor:
    return gradient.new_empty(gradient.shape, dtype=dtype)


class GatherRows(torch.autograd.Function):
    """`gather_rows` with a sparse gradient of its weight."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, indices: Tensor, dtype: torch.dtype, fused: bool) -> Tensor:
        """(batch, features, dim)."""
        ctx.save_for_backward(weight, indices)
        ctx.fused = fused
        rows: Tensor = gather_rows(weight, indices, dtype, fused)
        return rows

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        """The weight's sparse gradient."""
        weight, indices = ctx.saved_tensors
        # A slice of all features' gradient is copied, as before an all-to-all (dlrm/model/distributed.py, BottomToTop).
        values = gradient.contiguous().view(-1, gradient.shape[-1])
        if ctx.fused or gradient.dtype != weight.dtype:
            values = gather_rows_backward(values, weight.dtype, ctx.fused)
        rows = indices.reshape(1, -1)
        made = torch.ops.aten._sparse_coo_tensor_unsafe(rows, values, weight.shape)
        return made, None, None, None


@torch.library.custom_op("perfmodel::mlp", mutates_args=())
def mlp(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor]) -> list[Tensor]:
    """Outputs of all layers, each with ReLU: (batch, width)."""
    outputs = []
    for weight, bias in zip(weights, biases, strict=True):
        x = torch.relu(fn.linear(x, weight, bias))
        outputs.append(x)
    return outputs


@torch.library.custom_op("perfmodel::mlp_backward", mutates_args=())
def mlp_backward(
    gradient: Tensor, x: Tensor, outputs: Sequence[Tensor], weights: Sequence[Tensor], of_input: bool
) -> list[Tensor]:
    """Gradients of the weights, of the biases and, if `of_input`, of the input, in this order."""
    of_weights, of_biases = [], []
    for layer in reversed(range(len(weights))):
        gradient = gradient * (outputs[layer] > 0)
        below = outputs[layer - 1] if layer else x
        of_weights.append(gradient.T @ below)
        of_biases.append(gradient.sum(0))
        if layer or of_input:
            gradient = gradient @ weights[layer]
    return [*reversed(of_weights), *reversed(of_biases), *([gradient] if of_input else [])]


@mlp.register_fake
def _(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor]) -> list[Tensor]:
    return [x.new_empty(x.shape[0], weight.shape[0]) for weight in weights]


@mlp_backward.register_fake
def _(
    gradient: Tensor, x: Tensor, outputs: Sequence[Tensor], weights: Sequence[Tensor], of_input: bool
) -> list[Tensor]:
    made = [torch.empty_like(weight) for weight in weights]
    made += [weight.new_empty(weight.shape[0]) for weight in weights]
    return [*made, *([torch.empty_like(x)] if of_input else [])]


class MlpCall(torch.autograd.Function):
    """`mlp` of an input, its weights and its biases; backward is one call too."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *parameters: Tensor) -> Tensor:
        """The last layer's output (batch, width)."""
        weights = parameters[: len(parameters) // 2]
        outputs = mlp(x, list(weights), list(parameters[len(weights) :]))
        ctx.save_for_backward(x, *weights, *outputs)
        last: Tensor = outputs[-1]
        return last

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of the input (if it needs one), the weights and the biases."""
        x, *rest = ctx.saved_tensors
        n_layers = len(rest) // 2
        of_input = bool(ctx.needs_input_grad[0])
        found = mlp_backward(gradient.contiguous(), x, rest[n_layers:], rest[:n_layers], of_input)
        return (found[-1] if of_input else None, *found[: 2 * n_layers])
