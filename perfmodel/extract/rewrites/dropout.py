"""Dropout as CUDA runs it: one fused kernel forward, one backward."""

from __future__ import annotations

import torch
from torch import Tensor

from perfmodel.extract.rewrites.routing import active, declined, route


@route("cuda", "dropout")
def dropout(input: Tensor, p: float, train: bool) -> Tensor:
    """`native_dropout` for probabilities strictly between 0 and 1 (Dropout.cpp, is_fused_kernel_acceptable)."""
    if not train or not 0.0 < p < 1.0 or input.numel() == 0:
        kept: Tensor = declined("dropout", input, p, train)
        return kept
    active().used.add("dropout")
    result = torch.ops.aten.native_dropout(input, p, train)
    out: Tensor = result[0]
    return out
