"""Modules of a DLRM whose operators are NVIDIA's (`dlrm_ops`): tables that are gathered from, MLPs that are one call."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from perfmodel.models.dlrm_ops import GatherRows, MlpCall


class GatherTable(nn.Module):
    """A table with one index a feature and sample; rows come in the type that training computes in."""

    def __init__(self, rows: int, dim: int, *, fused: bool, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(rows, dim, dtype=dtype))
        if not self.weight.is_meta:
            nn.init.normal_(self.weight)
        self.fused = fused

    def forward(self, indices: Tensor, compute_dtype: torch.dtype) -> Tensor:
        """(batch, features * dim) of indices (batch, features)."""
        rows: Tensor = GatherRows.apply(self.weight, indices, compute_dtype, self.fused)  # type: ignore[no-untyped-call]
        return rows.flatten(1)


class CallMlp(nn.Module):
    """Linear layers with ReLU after each, as one operator forward and one backward; cast once under autocast."""

    def __init__(self, n_in: int, widths: Sequence[int]) -> None:
        super().__init__()
        self.layers = nn.ModuleList()
        for width in widths:
            self.layers.append(nn.Linear(n_in, width))
            n_in = width

    def forward(self, x: Tensor) -> Tensor:
        """(batch, last width)."""
        parameters = [layer.weight for layer in self.layers] + [layer.bias for layer in self.layers]
        dtype = compute_dtype(x)
        made: Tensor = MlpCall.apply(x.to(dtype), *(p.to(dtype) for p in parameters))  # type: ignore[no-untyped-call]
        return made


class CallTopMlp(nn.Module):
    """`CallMlp` and a linear layer with the output, as NVIDIA's top MLP."""

    def __init__(self, n_in: int, widths: Sequence[int]) -> None:
        super().__init__()
        self.mlp = CallMlp(n_in, widths[:-1])
        self.out = nn.Linear(widths[-2], widths[-1])

    def forward(self, x: Tensor) -> Tensor:
        """(batch, outputs)."""
        logits: Tensor = self.out(self.mlp(x))
        return logits


def compute_dtype(x: Tensor) -> torch.dtype:
    """The type in which matrix products of `x` run: autocast's where it is on."""
    kind = "cpu" if x.device.type == "cpu" else "cuda"
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
