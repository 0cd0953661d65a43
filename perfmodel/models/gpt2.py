"""GPT-2 (Radford et al. 2019) with names and operators as in Hugging Face transformers; GPT-3 differs only in size."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as fn

from perfmodel.config.transformer import TransformerSpec
from perfmodel.models.blocks import (
    ACTIVATIONS,
    Projection,
    causal_bias,
    fused_attention,
    run_blocks,
    split_heads,
    tie,
)


class Attention(nn.Module):
    """Causal self-attention with one projection for query, key and value."""

    bias: Tensor

    def __init__(self, spec: TransformerSpec) -> None:
        super().__init__()
        self.c_attn = Projection(spec.hidden_size, 3 * spec.hidden_size)
        self.c_proj = Projection(spec.hidden_size, spec.hidden_size)
        self.attn_dropout = nn.Dropout(spec.attention_dropout)
        self.resid_dropout = nn.Dropout(spec.hidden_dropout)
        self.head_dim = spec.width_of_head
        self.fused = spec.attention == "sdpa"
        n = spec.max_positions
        seen = torch.tril(torch.ones((n, n), dtype=torch.bool)).view(1, 1, n, n)
        self.register_buffer("bias", seen, persistent=False)

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        """(batch, tokens, width) to the same shape."""
        query, key, value = (split_heads(part, self.head_dim) for part in self.c_attn(x).split(x.shape[-1], dim=2))
        if self.fused:
            dropout = self.attn_dropout.p if self.training else 0.0
            out = fused_attention(query, key, value, dropout=dropout, scale=None, causal=True)
        else:
            out = self._spelled_out(query, key, value, mask)
        out = self.c_proj(out.reshape(*x.shape[:-1], -1).contiguous())
        dropped: Tensor = self.resid_dropout(out)
        return dropped

    def _spelled_out(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        scores = torch.matmul(query, key.transpose(-1, -2))
        dtype, device = scores.dtype, scores.device
        scores = scores / torch.full([], self.head_dim**0.5, dtype=dtype, device=device)
        n = scores.shape[-1]
        lowest = torch.full([], torch.finfo(dtype).min, dtype=dtype, device=device)
        scores = torch.where(self.bias[:, :, :n, :n], scores, lowest)
        if mask is not None:
            scores = scores + mask
        chances = self.attn_dropout(fn.softmax(scores, dim=-1).type(value.dtype))
        return torch.matmul(chances, value).transpose(1, 2)


class Mlp(nn.Module):
    """The feed-forward half of a block."""

    def __init__(self, spec: TransformerSpec) -> None:
        super().__init__()
        self.c_fc = Projection(spec.hidden_size, spec.ffn)
        self.c_proj = Projection(spec.ffn, spec.hidden_size)
        self.act = ACTIVATIONS[spec.act]()
        self.dropout = nn.Dropout(spec.hidden_dropout)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, tokens, width) to the same shape."""
        out: Tensor = self.dropout(self.c_proj(self.act(self.c_fc(x))))
        return out


class Block(nn.Module):
    """Pre-norm attention and feed-forward, each with its residual."""

    def __init__(self, spec: TransformerSpec) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(spec.hidden_size, eps=spec.norm_epsilon)
        self.attn = Attention(spec)
        self.ln_2 = nn.LayerNorm(spec.hidden_size, eps=spec.norm_epsilon)
        self.mlp = Mlp(spec)

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        """(batch, tokens, width) to the same shape."""
        x = self.attn(self.ln_1(x), mask) + x
        out: Tensor = x + self.mlp(self.ln_2(x))
        return out


class Body(nn.Module):
    """Embeddings, blocks and the last norm."""

    def __init__(self, spec: TransformerSpec) -> None:
        super().__init__()
        self.wte = nn.Embedding(spec.vocab_size, spec.hidden_size)
        self.wpe = nn.Embedding(spec.max_positions, spec.hidden_size)
        self.drop = nn.Dropout(spec.embedding_dropout)
        self.h = nn.ModuleList(Block(spec) for _ in range(spec.layers))
        self.ln_f = nn.LayerNorm(spec.hidden_size, eps=spec.norm_epsilon)
        self.masked = spec.attention == "eager" and spec.transformers != "4.38"
        self.recompute = spec.gradient_checkpointing

    def forward(self, tokens: Tensor) -> Tensor:
        """Hidden states (batch, tokens, width) of token ids (batch, tokens)."""
        words = self.wte(tokens)
        positions = torch.arange(tokens.shape[1], device=tokens.device).unsqueeze(0)
        hidden = words + self.wpe(positions)
        mask = causal_bias(hidden) if self.masked else None
        hidden = run_blocks(self.h, self.drop(hidden), mask, recompute=self.recompute)
        out: Tensor = self.ln_f(hidden)
        return out


class Gpt2(nn.Module):
    """Logits (batch, tokens, vocabulary) of token ids (batch, tokens)."""

    def __init__(self, spec: TransformerSpec) -> None:
        super().__init__()
        self.transformer = Body(spec)
        self.lm_head = nn.Linear(spec.hidden_size, spec.vocab_size, bias=False)
        tie(self.lm_head, self.transformer.wte, spec)

    def forward(self, input_ids: Tensor) -> Tensor:
        """Runs the body and the head."""
        logits: Tensor = self.lm_head(self.transformer(input_ids))
        return logits
