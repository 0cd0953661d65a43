"""Llama (Touvron et al. 2023; grouped-query attention as in Llama 3) and Mixtral (Jiang et al. 2024, arXiv:2401.04088).

Names and operators are those of transformers.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as fn

from perfmodel.config.transformer import TransformerSpec
from perfmodel.models.blocks import (
    ACTIVATIONS,
    RmsNorm,
    Rotary,
    causal_bias,
    fused_attention,
    repeat_heads,
    rotate,
    run_blocks,
    split_heads,
    tie,
)
from perfmodel.models.mixture import MixtureOfExperts


class Attention(nn.Module):
    """Causal self-attention with rotary positions and shared key-value heads."""

    def __init__(self, spec: TransformerSpec) -> None:
        super().__init__()
        width, head_dim, bias = spec.hidden_size, spec.width_of_head, spec.has_bias("attention")
        self.q_proj = nn.Linear(width, spec.heads * head_dim, bias=bias)
        self.k_proj = nn.Linear(width, spec.groups * head_dim, bias=bias)
        self.v_proj = nn.Linear(width, spec.groups * head_dim, bias=bias)
        self.o_proj = nn.Linear(spec.heads * head_dim, width, bias=bias)
        self.head_dim, self.n_shared = head_dim, spec.heads // spec.groups
        self.dropout, self.fused = spec.attention_dropout, spec.attention == "sdpa"

    def forward(self, x: Tensor, mask: Tensor | None, cosine: Tensor, sine: Tensor) -> Tensor:
        """(batch, tokens, width) to the same shape."""
        query = split_heads(self.q_proj(x), self.head_dim)
        key = split_heads(self.k_proj(x), self.head_dim)
        value = split_heads(self.v_proj(x), self.head_dim)
        query, key = rotate(query, cosine, sine), rotate(key, cosine, sine)
        dropout = self.dropout if self.training else 0.0
        scale = self.head_dim**-0.5
        if self.fused:
            out = fused_attention(query, key, value, dropout=dropout, scale=scale, causal=True)
        else:
            key, value = repeat_heads(key, self.n_shared), repeat_heads(value, self.n_shared)
            scores = torch.matmul(query, key.transpose(2, 3)) * scale
            if mask is not None:
                scores = scores + mask
            chances = fn.softmax(scores, dim=-1, dtype=torch.float32).to(query.dtype)
            chances = fn.dropout(chances, p=dropout, training=self.training)
            out = torch.matmul(chances, value).transpose(1, 2).contiguous()
        projected: Tensor = self.o_proj(out.reshape(*x.shape[:-1], -1).contiguous())
        return projected


class GatedMlp(nn.Module):
    """Down(act(gate(x)) * up(x)) (SwiGLU: Shazeer 2020, arXiv:2002.05202)."""

    def __init__(self, spec: TransformerSpec) -> None:
        super().__init__()
        bias = spec.has_bias("mlp")
        self.gate_proj = nn.Linear(spec.hidden_size, spec.ffn, bias=bias)
        self.up_proj = nn.Linear(spec.hidden_size, spec.ffn, bias=bias)
        self.down_proj = nn.Linear(spec.ffn, spec.hidden_size, bias=bias)
        self.act_fn = ACTIVATIONS[spec.act]()

    def forward(self, x: Tensor) -> Tensor:
        """(batch, tokens, width) to the same shape."""
        out: Tensor = self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))
        return out


class Layer(nn.Module):
    """Pre-norm attention and gated feed-forward (with `mixtral` a mixture of such), each with its residual."""

    def __init__(self, spec: TransformerSpec) -> None:
        super().__init__()
        self.self_attn = Attention(spec)
        self.mlp = MixtureOfExperts(spec) if spec.architecture == "mixtral" else GatedMlp(spec)
        self.input_layernorm = RmsNorm(spec.hidden_size, spec.norm_epsilon)
        self.post_attention_layernorm = RmsNorm(spec.hidden_size, spec.norm_epsilon)

    def forward(self, x: Tensor, mask: Tensor | None, cosine: Tensor, sine: Tensor) -> Tensor:
        """(batch, tokens, width) to the same shape."""
        x = x + self.self_attn(self.input_layernorm(x), mask, cosine, sine)
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class Body(nn.Module):
    """Token embedding, layers and the last norm."""

    def __init__(self, spec: TransformerSpec) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(spec.vocab_size, spec.hidden_size)
        self.layers = nn.ModuleList(Layer(spec) for _ in range(spec.layers))
        self.norm = RmsNorm(spec.hidden_size, spec.norm_epsilon)
        self.rotary_emb = Rotary(spec.width_of_head, spec.rope_theta)
        self.fused, self.recompute = spec.attention == "sdpa", spec.gradient_checkpointing

    def forward(self, tokens: Tensor) -> Tensor:
        """Hidden states (batch, tokens, width) of token ids (batch, tokens)."""
        hidden = self.embed_tokens(tokens)
        mask = None if self.fused else causal_bias(hidden)
        cosine, sine = self.rotary_emb(hidden)
        hidden = run_blocks(self.layers, hidden, mask, cosine, sine, recompute=self.recompute)
        out: Tensor = self.norm(hidden)
        return out


class Llama(nn.Module):
    """Logits (batch, tokens, vocabulary) of token ids (batch, tokens)."""

    def __init__(self, spec: TransformerSpec) -> None:
        super().__init__()
        self.model = Body(spec)
        self.lm_head = nn.Linear(spec.hidden_size, spec.vocab_size, bias=False)
        tie(self.lm_head, self.model.embed_tokens, spec)

    def forward(self, input_ids: Tensor) -> Tensor:
        """Runs the body and the head."""
        logits: Tensor = self.lm_head(self.model(input_ids))
        return logits
