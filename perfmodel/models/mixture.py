"""A mixture of experts in place of a feed-forward layer, without dropped tokens and without synchronising the host.

As transformers does with `experts_implementation="grouped_mm"` and torchtitan's GroupedExperts: the router picks the experts
of each token, rows are sorted by expert, and one grouped product (`torch.nn.functional.grouped_mm`) runs all experts. Every
size is known before the values are, so the layer can be traced, and no kernel waits for the host.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as fn

from perfmodel.config.transformer import TransformerSpec
from perfmodel.models.blocks import ACTIVATIONS


class Experts(nn.Module):
    """All experts of a layer: weights in one tensor each, first dimension the expert."""

    def __init__(self, spec: TransformerSpec) -> None:
        super().__init__()
        n, width, ffn = spec.experts, spec.hidden_size, spec.ffn
        self.gate_up_proj = nn.Parameter(torch.empty(n, 2 * ffn, width).normal_(std=0.02))
        self.down_proj = nn.Parameter(torch.empty(n, width, ffn).normal_(std=0.02))
        self.act_fn = ACTIVATIONS[spec.act]()

    def forward(self, rows: Tensor, ends: Tensor) -> Tensor:
        """Rows (tokens x experts of each, width) sorted by expert, and where each expert's end, to the same shape."""
        gate, up = self._grouped(rows, self.gate_up_proj, ends).chunk(2, dim=-1)
        return self._grouped(self.act_fn(gate) * up, self.down_proj, ends)

    def _grouped(self, rows: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
        """Products of each expert's rows. Autocast leaves them alone, so weights are cast here, as torchtitan does."""
        out: Tensor = fn.grouped_mm(rows, weight.to(rows.dtype).transpose(-2, -1), offs=ends)
        return out


class MixtureOfExperts(nn.Module):
    """Router, experts, and the weighted sum of what a token's experts gave (Shazeer et al. 2017, arXiv:1701.06538)."""

    def __init__(self, spec: TransformerSpec) -> None:
        super().__init__()
        self.gate = nn.Linear(spec.hidden_size, spec.experts, bias=False)
        self.experts = Experts(spec)
        self.n_experts, self.n_chosen = spec.experts, spec.experts_per_token
        self.narrow = torch.bfloat16 if spec.precision == "amp_bf16" else None  # in which rows reach the experts

    def forward(self, x: Tensor) -> Tensor:
        """(batch, tokens, width) to the same shape."""
        tokens = x.view(-1, x.shape[-1])
        chances = fn.softmax(self.gate(tokens), dim=1, dtype=torch.float32)
        weights, chosen = torch.topk(chances, self.n_chosen, dim=-1)
        weights = (weights / weights.sum(dim=-1, keepdim=True)).to(tokens.dtype)
        expert = chosen.reshape(-1)
        order = torch.argsort(expert)
        counts = torch.histc(expert.float(), bins=self.n_experts, min=0, max=self.n_experts - 1)
        ends = torch.cumsum(counts, dim=0, dtype=torch.int32)
        sent = tokens if self.narrow is None else tokens.to(self.narrow)
        rows = sent[torch.div(order, self.n_chosen, rounding_mode="floor")]
        out = self.experts(rows, ends) * weights.reshape(-1)[order].unsqueeze(-1)
        spread: Tensor = out[torch.argsort(order)].view(tokens.shape[0], self.n_chosen, -1)
        return spread.sum(dim=1).view(x.shape)
