"""GPT as Megatron-LM runs it (Shoeybi et al. 2019; NVIDIA/Megatron-LM v2 and v3, megatron/model/transformer.py).

Tokens come first: (tokens, batch, width). Biases of the attention's output and of the feed-forward layer are added in the
fused kernels that follow; scale, causal mask and softmax are one kernel. Names are Megatron's.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as fn

from perfmodel.config.transformer import TransformerSpec
from perfmodel.models.blocks import run_blocks
from perfmodel.models.fp8 import Fp8Biased, Fp8Linear
from perfmodel.models.megatron_ops import Apart, VocabularyCrossEntropy, bias_dropout_add, bias_gelu, causal_softmax

HIDDEN_SCORE = -10000.0  # megatron/model/utils.py, attention_mask_func


class Biased(nn.Linear):
    """A linear layer whose bias is left to the kernel after it (`skip_bias_add`)."""

    def forward(self, x: Tensor) -> Tensor:
        """The product alone."""
        return fn.linear(x, self.weight)


class SelfAttention(nn.Module):
    """Causal self-attention with one projection for query, key and value, interleaved by head."""

    def __init__(self, spec: TransformerSpec) -> None:
        super().__init__()
        linear, biased = (Fp8Linear, Fp8Biased) if spec.products == "fp8" else (nn.Linear, Biased)
        self.query_key_value = linear(spec.hidden_size, 3 * spec.hidden_size)
        self.dense = biased(spec.hidden_size, spec.hidden_size)
        self.attention_dropout = nn.Dropout(spec.attention_dropout)
        self.head_dim = spec.width_of_head

    def forward(self, x: Tensor) -> Tensor:
        """(tokens, batch, width) to the same shape, without the output's bias."""
        n, batch, _ = x.shape
        mixed = self.query_key_value(x).view(n, batch, -1, 3 * self.head_dim)
        query, key, value = (part.reshape(n, -1, self.head_dim).transpose(0, 1) for part in mixed.chunk(3, dim=-1))
        space = torch.empty(query.shape[0], n, n, dtype=x.dtype, device=x.device)
        scores = torch.baddbmm(space, query, key.transpose(1, 2), beta=0.0, alpha=1.0)
        chances = self.attention_dropout(self._softmax(scores, batch))
        context = torch.bmm(chances, value).view(batch, -1, n, self.head_dim)
        context = context.permute(2, 0, 1, 3).contiguous()
        out: Tensor = self.dense(context.view(n, batch, -1))
        return out

    def _softmax(self, scores: Tensor, batch: int) -> Tensor:
        """Fused for 16-bit scores alone (`FusedScaleMaskSoftmax.is_kernel_available`); else scale, mask and softmax."""
        scale = self.head_dim**-0.5
        if scores.dtype != torch.float32:
            fused: Tensor = causal_softmax(scores, scale)
            return fused
        n = scores.shape[-1]
        later = torch.ones(n, n, dtype=torch.bool, device=scores.device).triu(1)
        masked = (scores * scale).view(batch, -1, n, n).masked_fill(later, HIDDEN_SCORE)
        chances: Tensor = fn.softmax(masked, dim=-1).view(scores.shape)
        return chances


class ParallelMlp(nn.Module):
    """The feed-forward half of a layer."""

    def __init__(self, spec: TransformerSpec) -> None:
        super().__init__()
        biased = Fp8Biased if spec.products == "fp8" else Biased
        self.dense_h_to_4h = biased(spec.hidden_size, spec.ffn)
        self.dense_4h_to_h = biased(spec.ffn, spec.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        """(tokens, batch, width) to the same shape, without the output's bias."""
        out: Tensor = self.dense_4h_to_h(bias_gelu(self.dense_h_to_4h(x), self.dense_h_to_4h.bias))
        return out


class Layer(nn.Module):
    """Pre-norm attention and feed-forward, each with its bias, dropout and residual in one kernel."""

    def __init__(self, spec: TransformerSpec) -> None:
        super().__init__()
        self.input_layernorm = nn.LayerNorm(spec.hidden_size, eps=spec.norm_epsilon)
        self.self_attention = SelfAttention(spec)
        self.post_attention_layernorm = nn.LayerNorm(spec.hidden_size, eps=spec.norm_epsilon)
        self.mlp = ParallelMlp(spec)
        self.dropout = spec.hidden_dropout

    def forward(self, x: Tensor) -> Tensor:
        """(tokens, batch, width) to the same shape."""
        out = self.self_attention(self.input_layernorm(x))
        x, _ = bias_dropout_add(out, self.self_attention.dense.bias, x, self.dropout)
        out = self.mlp(self.post_attention_layernorm(x))
        x, _ = bias_dropout_add(out, self.mlp.dense_4h_to_h.bias, x, self.dropout)
        return x


class Embedding(nn.Module):
    """Token and position embeddings, tokens first, with dropout."""

    def __init__(self, spec: TransformerSpec) -> None:
        super().__init__()
        self.word_embeddings = nn.Embedding(spec.vocab_size, spec.hidden_size)
        self.position_embeddings = nn.Embedding(spec.max_positions, spec.hidden_size)
        self.embedding_dropout = nn.Dropout(spec.embedding_dropout)

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """(batch, tokens) token numbers and positions to (tokens, batch, width)."""
        x = self.word_embeddings(tokens) + self.position_embeddings(positions)
        out: Tensor = self.embedding_dropout(x.transpose(0, 1).contiguous())
        return out


class MegatronGpt(nn.Module):
    """The language model; its output is (batch x tokens, vocabulary) logits."""

    def __init__(self, spec: TransformerSpec) -> None:
        super().__init__()
        self.embedding = Embedding(spec)
        self.layers = nn.ModuleList(Layer(spec) for _ in range(spec.layers))
        self.final_layernorm = nn.LayerNorm(spec.hidden_size, eps=spec.norm_epsilon)
        self.recompute = spec.gradient_checkpointing

    def forward(self, tokens: Tensor) -> Tensor:
        """(batch, tokens) token numbers to logits."""
        positions, _ = positions_and_mask(tokens)
        x = run_blocks(self.layers, self.embedding(tokens, positions), recompute=self.recompute)
        x = self.final_layernorm(x)
        logits = fn.linear(x, self.embedding.word_embeddings.weight)
        return logits.transpose(0, 1).contiguous().view(-1, logits.shape[-1])


class ProfiledGpt(MegatronGpt):
    """The GPT of VIA-Research/vTrain (src/model/gpt_model.py): Megatron's layers, a head with a weight of its own.

    There a tensor-parallel rank has 50257 / ranks rows of the vocabulary, rounded down, and nothing of embedding, head or loss
    is exchanged: give that number as `vocab_size`, and plans `tensor_parallel.vocabulary_parallel: false`. Its iteration times
    are sums of what embedding, layers and head take each by itself, so the host waits between them.
    """

    def __init__(self, spec: TransformerSpec) -> None:
        super().__init__(spec)
        self.lm_head = nn.Linear(spec.hidden_size, spec.vocab_size, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """(batch, tokens) token numbers to (batch, tokens, vocabulary) logits."""
        positions = torch.arange(tokens.shape[1], device=tokens.device).unsqueeze(0).expand_as(tokens)
        x = Apart.apply(self.embedding(tokens, positions))  # type: ignore[no-untyped-call]  # torch leaves it open
        x = Apart.apply(run_blocks(self.layers, x, recompute=self.recompute))  # type: ignore[no-untyped-call]
        logits: Tensor = self.lm_head(self.final_layernorm(x.transpose(0, 1).contiguous()))
        return logits


def profiled_loss(labels: Tensor, logits: Tensor) -> Tensor:
    """Cross-entropy as src/trainer.py calls it: of 16-bit logits, their second dimension the classes."""
    loss: Tensor = fn.cross_entropy(logits, labels)
    return loss


def positions_and_mask(tokens: Tensor) -> tuple[Tensor, Tensor]:
    """What `get_batch` makes of each micro-batch (get_ltor_masks_and_position_ids); the fused softmax masks by itself."""
    n = tokens.shape[1]
    mask = torch.tril(torch.ones(1, n, n, device=tokens.device)).view(1, 1, n, n) < 0.5
    return torch.arange(n, device=tokens.device).unsqueeze(0).expand_as(tokens), mask


def vocabulary_loss(labels: Tensor, logits: Tensor) -> Tensor:
    """Mean cross-entropy in fp32 of (batch x tokens, vocabulary) logits; labels are shifted by the data loader.

    The mean is that of `loss_func` in pretrain_gpt.py, over the tokens of a mask that leaves none out.
    """
    losses: Tensor = VocabularyCrossEntropy.apply(logits.float(), labels.view(-1))  # type: ignore[no-untyped-call]  # torch leaves it open
    mask = torch.ones(losses.shape, dtype=torch.float32, device=losses.device)
    loss: Tensor = torch.sum(losses * mask) / mask.sum()
    return loss
