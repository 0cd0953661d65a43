"""Parts that the transformer architectures share. Each dispatches the operators of its counterpart in transformers 4.57."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as fn
from torch.utils.checkpoint import checkpoint

from perfmodel.config.transformer import TransformerSpec

# Label value that cross-entropy skips (torch's own default).
IGNORED_LABEL = -100


class NewGelu(nn.Module):
    """GELU's tanh form spelled out in tensor operations, as the original GPT-2 does (Hendrycks and Gimpel 2016)."""

    def forward(self, x: Tensor) -> Tensor:
        """Elementwise."""
        half = 0.5 * x
        inner = math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))
        return half * (1.0 + torch.tanh(inner))


ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    "gelu": nn.GELU,
    "gelu_new": NewGelu,
    "gelu_tanh": lambda: nn.GELU(approximate="tanh"),
    "relu": nn.ReLU,
    "silu": nn.SiLU,
}


class Projection(nn.Module):
    """A linear layer whose weight is stored (in, out), as GPT-2's checkpoints do: one addmm without a transpose."""

    def __init__(self, n_in: int, n_out: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(n_in, n_out).normal_(std=0.02))
        self.bias = nn.Parameter(torch.zeros(n_out))

    def forward(self, x: Tensor) -> Tensor:
        """(..., in) to (..., out)."""
        flat = torch.addmm(self.bias, x.view(-1, x.shape[-1]), self.weight)
        return flat.view(*x.shape[:-1], self.weight.shape[1])


class RmsNorm(nn.Module):
    """Root-mean-square norm (Zhang and Sennrich 2019) computed in fp32 by separate operators, as Llama does."""

    def __init__(self, width: int, epsilon: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.epsilon = epsilon

    def forward(self, x: Tensor) -> Tensor:
        """Normalises the last dimension."""
        wide = x.to(torch.float32)
        variance = wide.pow(2).mean(-1, keepdim=True)
        return self.weight * (wide * torch.rsqrt(variance + self.epsilon)).to(x.dtype)


class Rotary(nn.Module):
    """Cosines and sines of rotary positions (Su et al. 2021), computed in each forward pass as Llama does."""

    inverse_frequency: Tensor

    def __init__(self, head_dim: int, theta: float) -> None:
        super().__init__()
        steps = torch.arange(0, head_dim, 2, dtype=torch.int64).to(torch.float32) / head_dim
        self.register_buffer("inverse_frequency", 1.0 / theta**steps, persistent=False)

    @torch.no_grad()
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """(1, tokens, head_dim) cosines and sines in the dtype of x (batch, tokens, ...)."""
        positions = torch.arange(x.shape[1], device=x.device).unsqueeze(0)
        angles = (self.inverse_frequency[None, :, None].float() @ positions[:, None, :].float()).transpose(1, 2)
        both = torch.cat((angles, angles), dim=-1)
        return both.cos().to(x.dtype), both.sin().to(x.dtype)


def rotate(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Applies rotary positions to (batch, heads, tokens, head_dim)."""
    along = x * cosine.unsqueeze(1)
    half = x.shape[-1] // 2
    first, second = x[..., :half], x[..., half:]
    return along + torch.cat((-second, first), dim=-1) * sine.unsqueeze(1)


def split_heads(x: Tensor, head_dim: int) -> Tensor:
    """(batch, tokens, width) to (batch, heads, tokens, head_dim), without a copy."""
    return x.view(*x.shape[:-1], -1, head_dim).transpose(1, 2)


def repeat_heads(x: Tensor, times: int) -> Tensor:
    """Key-value heads repeated for grouped-query attention."""
    if times == 1:
        return x
    batch, heads, tokens, width = x.shape
    return x[:, :, None].expand(batch, heads, times, tokens, width).reshape(batch, heads * times, tokens, width)


def causal_bias(like: Tensor) -> Tensor:
    """(batch, 1, tokens, tokens) for hidden states (batch, tokens, width): 0 where a token may look, else the lowest."""
    batch_size, n_tokens, _ = like.shape
    positions = torch.arange(n_tokens, device=like.device)
    allowed = positions <= positions.view(-1, 1)
    allowed = allowed.view(1, 1, n_tokens, n_tokens).expand(batch_size, 1, n_tokens, n_tokens)
    zero = torch.zeros((), dtype=like.dtype, device=like.device)
    lowest = torch.full((), torch.finfo(like.dtype).min, dtype=like.dtype, device=like.device)
    return torch.where(allowed, zero, lowest)


def fused_attention(
    query: Tensor, key: Tensor, value: Tensor, *, dropout: float, scale: float | None, causal: bool
) -> Tensor:
    """Scaled dot-product attention in one call; heads last but one in the result (batch, tokens, heads, head_dim)."""
    grouped = query.shape[1] != key.shape[1]
    out = fn.scaled_dot_product_attention(
        query, key, value, dropout_p=dropout, scale=scale, is_causal=causal, enable_gqa=grouped
    )
    return out.transpose(1, 2).contiguous()


def run_blocks(blocks: nn.ModuleList, hidden: Tensor, *context: Tensor | None, recompute: bool) -> Tensor:
    """Runs each block on the hidden states; with `recompute` nothing inside a block is kept for backward."""
    for block in blocks:
        hidden = checkpoint(block, hidden, *context, use_reentrant=False) if recompute else block(hidden, *context)
    return hidden


def next_token_loss(labels: Tensor, logits: Tensor) -> Tensor:
    """Cross-entropy in fp32 of each token's logits (batch, tokens, vocabulary) and the token after it."""
    wide = logits.float()
    shifted = fn.pad(labels, (0, 1), value=IGNORED_LABEL)[..., 1:].contiguous()
    return fn.cross_entropy(wide.view(-1, logits.shape[-1]), shifted.view(-1), ignore_index=IGNORED_LABEL)


def masked_token_loss(labels: Tensor, logits: Tensor) -> Tensor:
    """Cross-entropy in fp32 of the tokens whose label is not ignored."""
    wide = logits.float()
    return fn.cross_entropy(wide.view(-1, logits.shape[-1]), labels.view(-1), ignore_index=IGNORED_LABEL)


def tie(head: nn.Linear, embedding: nn.Embedding, spec: TransformerSpec) -> None:
    """Gives the head the embedding's weight where the spec says so."""
    if spec.tied:
        head.weight = embedding.weight
