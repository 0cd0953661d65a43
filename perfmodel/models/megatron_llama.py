"""Llama as Megatron-Core runs it (NVIDIA/Megatron-LM core_r0.9, megatron/core/transformer), tokens first.

Fused RMS norm, one projection for query, key and value (grouped by key-value head), fused rotary positions, flash attention,
one projection for gate and up, fused SwiGLU, and the loss of `megatron_ops`. Names are Megatron-Core's, the head's aside.
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as fn

from perfmodel.config.transformer import TransformerSpec
from perfmodel.models.blocks import Rotary, fused_attention, run_blocks
from perfmodel.models.fp8 import Fp8Linear
from perfmodel.models.megatron_ops import rotary, swiglu

LORA_SCALE = 2.0  # alpha over rank; MLPerf's Llama 2 70B has 32 over 16


def linear(spec: TransformerSpec) -> type[nn.Linear]:
    """What the projections of a layer are; adapters and the head stay 16-bit."""
    return Fp8Linear if spec.products == "fp8" else nn.Linear


class SelfAttention(nn.Module):
    """Causal attention whose query heads share key-value heads; `linear_qkv` has a group's queries, its key, its value.

    With `qkv: separate` they are `q_proj`, `k_proj` and `v_proj` instead, as in Llama's own code (meta-llama/llama3).
    With `lora_rank` both projections have low-rank adapters beside them (Hu et al. 2021, arXiv:2106.09685).
    """

    def __init__(self, spec: TransformerSpec) -> None:
        super().__init__()
        self.adapted = spec.lora_rank is not None
        if spec.lora_rank is not None:
            heads = (spec.heads + 2 * spec.groups) * spec.width_of_head
            self.lora_qkv_down = nn.Linear(spec.hidden_size, spec.lora_rank, bias=False)
            self.lora_qkv_up = nn.Linear(spec.lora_rank, heads, bias=False)
            self.lora_proj_down = nn.Linear(spec.heads * spec.width_of_head, spec.lora_rank, bias=False)
            self.lora_proj_up = nn.Linear(spec.lora_rank, spec.hidden_size, bias=False)
        self.groups, self.shared, self.head_dim = spec.groups, spec.heads // spec.groups, spec.width_of_head
        width = (spec.heads + 2 * spec.groups) * self.head_dim
        self.is_joint = spec.qkv == "joint"
        if self.is_joint:
            self.linear_qkv = linear(spec)(spec.hidden_size, width, bias=spec.has_bias("attention"))
        else:
            self.q_proj = self._part(spec, spec.heads)
            self.k_proj = self._part(spec, spec.groups)
            self.v_proj = self._part(spec, spec.groups)
        self.linear_proj = linear(spec)(spec.heads * self.head_dim, spec.hidden_size, bias=spec.has_bias("attention"))

    def forward(self, x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        """(tokens, batch, width) to the same shape."""
        n, batch, _ = x.shape
        query, key, value = self._heads(x)
        query, key = rotary(query, cosine, sine), rotary(key, cosine, sine)
        query, key, value = (part.permute(1, 2, 0, 3) for part in (query, key, value))
        out = fused_attention(query, key, value, dropout=0.0, scale=self.head_dim**-0.5, causal=True)
        out = out.transpose(0, 1).reshape(n, batch, -1)
        projected: Tensor = self.linear_proj(out)
        if self.adapted:
            projected = projected + LORA_SCALE * self.lora_proj_up(self.lora_proj_down(out))
        return projected

    def _part(self, spec: TransformerSpec, heads: int) -> nn.Linear:
        return linear(spec)(spec.hidden_size, heads * self.head_dim, bias=spec.has_bias("attention"))

    def _heads(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values, each (tokens, batch, heads, width of a head)."""
        n, batch, _ = x.shape
        if not self.is_joint:
            query, key, value = (
                part(x).view(n, batch, -1, self.head_dim) for part in (self.q_proj, self.k_proj, self.v_proj)
            )
            return query, key, value
        mixed = self.linear_qkv(x)
        if self.adapted:
            mixed = mixed + LORA_SCALE * self.lora_qkv_up(self.lora_qkv_down(x))
        mixed = mixed.view(n, batch, -1, self.shared + 2, self.head_dim)
        query, key, value = mixed.split((self.shared, 1, 1), dim=3)
        return query.reshape(n, batch, -1, self.head_dim), key.squeeze(3), value.squeeze(3)


class GatedMlp(nn.Module):
    """`linear_fc1` has gate and up side by side."""

    def __init__(self, spec: TransformerSpec) -> None:
        super().__init__()
        self.linear_fc1 = linear(spec)(spec.hidden_size, 2 * spec.ffn, bias=spec.has_bias("mlp"))
        self.linear_fc2 = linear(spec)(spec.ffn, spec.hidden_size, bias=spec.has_bias("mlp"))

    def forward(self, x: Tensor) -> Tensor:
        """(tokens, batch, width) to the same shape."""
        out: Tensor = self.linear_fc2(swiglu(self.linear_fc1(x)))
        return out


class Layer(nn.Module):
    """Pre-norm attention and gated feed-forward, each with its residual."""

    def __init__(self, spec: TransformerSpec) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(spec.hidden_size, eps=spec.norm_epsilon)
        self.self_attention = SelfAttention(spec)
        self.pre_mlp_layernorm = nn.RMSNorm(spec.hidden_size, eps=spec.norm_epsilon)
        self.mlp = GatedMlp(spec)

    def forward(self, x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        """(tokens, batch, width) to the same shape."""
        x = x + self.self_attention(self.input_layernorm(x), cosine, sine)
        out: Tensor = x + self.mlp(self.pre_mlp_layernorm(x))
        return out


class MegatronLlama(nn.Module):
    """The language model; its output is (batch x tokens, vocabulary) logits."""

    def __init__(self, spec: TransformerSpec) -> None:
        super().__init__()
        self.word_embeddings = nn.Embedding(spec.vocab_size, spec.hidden_size)
        self.rotary = Rotary(spec.width_of_head, spec.rope_theta)
        self.layers = nn.ModuleList(Layer(spec) for _ in range(spec.layers))
        self.final_layernorm = nn.RMSNorm(spec.hidden_size, eps=spec.norm_epsilon)
        self.lm_head = nn.Linear(spec.hidden_size, spec.vocab_size, bias=False)
        self.recompute = spec.gradient_checkpointing
        if spec.lora_rank is not None:
            for name, parameter in self.named_parameters():
                parameter.requires_grad_("lora_" in name)

    def forward(self, tokens: Tensor) -> Tensor:
        """(batch, tokens) token numbers to logits."""
        x = self.word_embeddings(tokens)
        cosine, sine = (part.view(part.shape[1], 1, 1, -1) for part in self.rotary(x))
        x = run_blocks(self.layers, x.transpose(0, 1).contiguous(), cosine, sine, recompute=self.recompute)
        logits = fn.linear(self.final_layernorm(x), self.lm_head.weight)
        return logits.transpose(0, 1).contiguous().view(-1, logits.shape[-1])
