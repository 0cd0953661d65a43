"""Operators that a framework runs as one kernel but torch has no name for. They are recorded by these names."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


@torch.library.custom_op("perfmodel::dot_interaction", mutates_args=())
def dot_interaction(stacked: Tensor, dense: Tensor, n_padding: int) -> Tensor:
    """`dense` (batch, dim), dot products of all pairs of `stacked` (batch, n, dim) below the diagonal, and zeros."""
    pairs = torch.tril_indices(stacked.shape[1], stacked.shape[1], offset=-1, device=stacked.device)
    products = torch.bmm(stacked, stacked.transpose(1, 2))
    zeros = stacked.new_zeros(stacked.shape[0], n_padding)
    return torch.cat([dense, products[:, pairs[0], pairs[1]], zeros], dim=1)


@torch.library.custom_op("perfmodel::dot_interaction_backward", mutates_args=())
def dot_interaction_backward(gradient: Tensor, stacked: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of `stacked` (each pair gives to both of its vectors) and of `dense` from that of the output."""
    n_vectors, dim = stacked.shape[1], stacked.shape[2]
    pairs = torch.tril_indices(n_vectors, n_vectors, offset=-1, device=stacked.device)
    square = gradient.new_zeros(stacked.shape[0], n_vectors, n_vectors)
    square[:, pairs[0], pairs[1]] = gradient[:, dim : dim + pairs.shape[1]]
    return torch.bmm(square + square.transpose(1, 2), stacked), gradient[:, :dim].clone()


@dot_interaction.register_fake
def _(stacked: Tensor, dense: Tensor, n_padding: int) -> Tensor:
    n_vectors, dim = stacked.shape[1], stacked.shape[2]
    return stacked.new_empty(stacked.shape[0], dim + n_vectors * (n_vectors - 1) // 2 + n_padding)


@dot_interaction_backward.register_fake
def _(gradient: Tensor, stacked: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(stacked), stacked.new_empty(stacked.shape[0], stacked.shape[2])


def _remember(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(inputs[0])


def _backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
    (stacked,) = ctx.saved_tensors
    return *dot_interaction_backward(gradient, stacked), None


dot_interaction.register_autograd(_backward, setup_context=_remember)
