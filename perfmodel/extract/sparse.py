"""Sparse gradients on tensors without storage: what torch lacks there, and what only tracing changes.

Sparse COO kernels for `meta` are few. Each function here stands in for one operator and returns what the CPU kernel
returns, in metadata; a coalesced gradient keeps one entry for each index (how many are distinct, only values tell), so
`nnz` is an upper bound and the kernel model applies the table's own statistics.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from perfmodel.extract import _torch

StandIn = Callable[..., Tensor]


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


_ON_META: Mapping[str, StandIn] = {
    "aten._coalesce": coalesce,
    "aten.sparse_mask": sparse_mask,
    "aten.add_": add_in_place,
}


def stand_in(name: str, args: tuple[Any, ...]) -> StandIn | None:
    """What to run instead of an operator that has no kernel for sparse tensors without storage; None if it has one."""
    made = _ON_META.get(name)
    if made is None or not any(isinstance(a, Tensor) and a.layout == torch.sparse_coo and a.is_meta for a in args):
        return None
    return made


def is_stolen_gradient(name: str, args: tuple[Any, ...]) -> bool:
    """True for the copy of a sparse gradient that autograd makes only because a dispatch mode also holds it.

    Without a mode AccumulateGrad takes the gradient's tensors over (`_sparse_coo_tensor_unsafe`, no copy); the test on
    reference counts in torch/csrc/autograd/functions/accumulate_grad.h fails as soon as Python has seen the tensor.
    """
    return name == "aten.clone" and args[0].layout == torch.sparse_coo and _torch.accumulates_gradient()


def stolen(gradient: Tensor) -> Tensor:
    """The gradient as AccumulateGrad keeps it: the same indices and values."""
    return _torch.sparse_tensor(*_torch.sparse_parts(gradient), gradient, coalesced=gradient.is_coalesced())
