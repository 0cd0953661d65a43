"""OPT (Zhang et al. 2022, arXiv:2205.01068) with names and operators as in Hugging Face transformers."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as fn

from perfmodel.config.transformer import TransformerSpec
from perfmodel.models.blocks import ACTIVATIONS, causal_bias, fused_attention, run_blocks, split_heads, tie

# OPT's position table starts with two rows that no position uses.
POSITION_OFFSET = 2


class Attention(nn.Module):
    """Causal self-attention with separate projections; the query is scaled before the product."""

    def __init__(self, spec: TransformerSpec) -> None:
        super().__init__()
        width, bias = spec.hidden_size, spec.has_bias("attention")
        self.k_proj = nn.Linear(width, width, bias=bias)
        self.v_proj = nn.Linear(width, width, bias=bias)
        self.q_proj = nn.Linear(width, width, bias=bias)
        self.out_proj = nn.Linear(width, width, bias=bias)
        self.head_dim, self.dropout = spec.width_of_head, spec.attention_dropout
        self.fused, self.old = spec.attention == "sdpa", spec.transformers == "4.38"

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        """(batch, tokens, width) to the same shape."""
        query = split_heads(self.q_proj(x) * self.head_dim**-0.5, self.head_dim)
        key, value = self.k_proj(x), self.v_proj(x)
        key, value = split_heads(key, self.head_dim), split_heads(value, self.head_dim)
        if self.fused:
            dropout = self.dropout if self.training else 0.0
            out = fused_attention(query, key, value, dropout=dropout, scale=1.0, causal=True)
        else:
            spelled_out = self._spelled_out_4_38 if self.old else self._spelled_out
            out = spelled_out(query, key, value, mask)
        projected: Tensor = self.out_proj(out.reshape(*x.shape[:-1], -1).contiguous())
        return projected

    def _spelled_out(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        scores = torch.matmul(query, key.transpose(-1, -2)) * 1.0
        if mask is not None:
            scores = scores + mask
        chances = fn.softmax(scores, dim=-1, dtype=torch.float32).to(query.dtype)
        chances = fn.dropout(chances, p=self.dropout, training=self.training)
        return torch.matmul(chances, value).transpose(1, 2).contiguous()

    def _spelled_out_4_38(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        """Heads copied and folded into the batch; scores clamped from below after the mask."""
        shape = query.shape
        flat = (-1, shape[2], shape[3])
        key, value = key.contiguous(), value.contiguous()
        query, key, value = query.contiguous().view(flat), key.view(flat), value.view(flat)
        scores = torch.bmm(query, key.transpose(1, 2))
        if mask is not None:
            scores = scores.view(*shape[:2], shape[2], shape[2]) + mask
            lowest = torch.full([], torch.finfo(scores.dtype).min, dtype=scores.dtype, device=scores.device)
            scores = torch.max(scores, lowest).view(-1, shape[2], shape[2])
        chances = fn.dropout(fn.softmax(scores, dim=-1), p=self.dropout, training=self.training)
        return torch.bmm(chances, value).view(shape).transpose(1, 2)


class Layer(nn.Module):
    """Attention and feed-forward with their residuals; the norm before or after each."""

    def __init__(self, spec: TransformerSpec) -> None:
        super().__init__()
        width, bias = spec.hidden_size, spec.has_bias("mlp")
        self.self_attn = Attention(spec)
        self.self_attn_layer_norm = nn.LayerNorm(width)
        self.fc1 = nn.Linear(width, spec.ffn, bias=bias)
        self.fc2 = nn.Linear(spec.ffn, width, bias=bias)
        self.final_layer_norm = nn.LayerNorm(width)
        self.activation_fn = ACTIVATIONS[spec.act]()
        self.dropout, self.pre_norm = spec.hidden_dropout, spec.pre_norm

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        """(batch, tokens, width) to the same shape."""
        attended = self.self_attn(self.self_attn_layer_norm(x) if self.pre_norm else x, mask)
        x = x + fn.dropout(attended, p=self.dropout, training=self.training)
        if not self.pre_norm:
            x = self.self_attn_layer_norm(x)
        shape = x.shape
        x = x.reshape(-1, shape[-1])
        widened = self.fc1(self.final_layer_norm(x) if self.pre_norm else x)
        narrowed = self.fc2(self.activation_fn(widened))
        x = (x + fn.dropout(narrowed, p=self.dropout, training=self.training)).view(shape)
        return x if self.pre_norm else self.final_layer_norm(x)


class Decoder(nn.Module):
    """Embeddings, layers and the last norm."""

    def __init__(self, spec: TransformerSpec) -> None:
        super().__init__()
        width, narrow = spec.hidden_size, spec.embedding_size or spec.hidden_size
        self.embed_tokens = nn.Embedding(spec.vocab_size, narrow)
        self.embed_positions = nn.Embedding(spec.max_positions + POSITION_OFFSET, width)
        self.project_out = nn.Linear(width, narrow, bias=False) if narrow != width else nn.Identity()
        self.project_in = nn.Linear(narrow, width, bias=False) if narrow != width else nn.Identity()
        self.final_layer_norm = nn.LayerNorm(width) if spec.pre_norm else nn.Identity()
        self.layers = nn.ModuleList(Layer(spec) for _ in range(spec.layers))
        self.fused, self.recompute = spec.attention == "sdpa", spec.gradient_checkpointing

    def forward(self, tokens: Tensor) -> Tensor:
        """Hidden states (batch, tokens, width) of token ids (batch, tokens)."""
        words = self.embed_tokens(tokens)
        seen = torch.ones(tokens.shape, device=tokens.device)
        mask = None if self.fused else causal_bias(words)
        positions = (torch.cumsum(seen, dim=1) * seen - 1).long()
        hidden = self.project_in(words) + self.embed_positions(positions + POSITION_OFFSET)
        hidden = run_blocks(self.layers, hidden, mask, recompute=self.recompute)
        out: Tensor = self.project_out(self.final_layer_norm(hidden))
        return out


class Model(nn.Module):
    """Holds the decoder under the name that checkpoints use."""

    def __init__(self, spec: TransformerSpec) -> None:
        super().__init__()
        self.decoder = Decoder(spec)

    def forward(self, tokens: Tensor) -> Tensor:
        """Hidden states of token ids."""
        hidden: Tensor = self.decoder(tokens)
        return hidden


class Opt(nn.Module):
    """Logits (batch, tokens, vocabulary) of token ids (batch, tokens)."""

    def __init__(self, spec: TransformerSpec) -> None:
        super().__init__()
        self.model = Model(spec)
        self.lm_head = nn.Linear(spec.embedding_size or spec.hidden_size, spec.vocab_size, bias=False)
        tie(self.lm_head, self.model.decoder.embed_tokens, spec)

    def forward(self, input_ids: Tensor) -> Tensor:
        """Runs the decoder and the head."""
        logits: Tensor = self.lm_head(self.model(input_ids))
        return logits
