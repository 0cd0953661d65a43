"""Sparse gradients: a copy that only tracing causes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from perfmodel.extract import _torch


def is_stolen_gradient(name: str, args: tuple[Any, ...]) -> bool:
    """True for the copy of a sparse gradient that autograd makes only because a dispatch mode also holds it.

    Without a mode AccumulateGrad takes the gradient's tensors over (`_sparse_coo_tensor_unsafe`, no copy); the test on
    reference counts in torch/csrc/autograd/functions/accumulate_grad.h fails as soon as Python has seen the tensor.
    """
    return name == "aten.clone" and args[0].layout == torch.sparse_coo and _torch.accumulates_gradient()


def stolen(gradient: Tensor) -> Tensor:
    """The gradient as AccumulateGrad keeps it: the same indices and values."""
    return _torch.sparse_tensor(*_torch.sparse_parts(gradient), gradient, coalesced=gradient.is_coalesced())
