"""BERT (Devlin et al. 2018) with a masked-language-model head; names and operators as in Hugging Face transformers."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as fn

from perfmodel.config.transformer import TransformerSpec
from perfmodel.models.blocks import ACTIVATIONS, fused_attention, run_blocks, split_heads, tie


class Embeddings(nn.Module):
    """Sum of word, token-type and position embeddings, normalised."""

    position_ids: Tensor

    def __init__(self, spec: TransformerSpec) -> None:
        super().__init__()
        self.word_embeddings = nn.Embedding(spec.vocab_size, spec.hidden_size)
        self.position_embeddings = nn.Embedding(spec.max_positions, spec.hidden_size)
        self.token_type_embeddings = nn.Embedding(spec.token_types, spec.hidden_size)
        self.LayerNorm = nn.LayerNorm(spec.hidden_size, eps=spec.norm_epsilon)
        self.dropout = nn.Dropout(spec.hidden_dropout)
        self.register_buffer("position_ids", torch.arange(spec.max_positions).expand((1, -1)), persistent=False)

    def forward(self, tokens: Tensor, token_types: Tensor) -> Tensor:
        """(batch, tokens, width) of ids (batch, tokens)."""
        hidden = self.word_embeddings(tokens) + self.token_type_embeddings(token_types)
        hidden += self.position_embeddings(self.position_ids[:, : tokens.shape[1]])
        out: Tensor = self.dropout(self.LayerNorm(hidden))
        return out


class SelfAttention(nn.Module):
    """Attention of every token to every token that is not padding."""

    def __init__(self, spec: TransformerSpec) -> None:
        super().__init__()
        self.query = nn.Linear(spec.hidden_size, spec.hidden_size)
        self.key = nn.Linear(spec.hidden_size, spec.hidden_size)
        self.value = nn.Linear(spec.hidden_size, spec.hidden_size)
        self.dropout = nn.Dropout(spec.attention_dropout)
        self.head_dim, self.fused = spec.width_of_head, spec.attention == "sdpa"

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        """(batch, tokens, width) to the same shape."""
        query = split_heads(self.query(x), self.head_dim)
        key = split_heads(self.key(x), self.head_dim)
        value = split_heads(self.value(x), self.head_dim)
        if self.fused:
            dropout = self.dropout.p if self.training else 0.0
            out = fused_attention(query, key, value, dropout=dropout, scale=None, causal=False)
        else:
            scores = torch.matmul(query, key.transpose(-1, -2)) / math.sqrt(self.head_dim)
            if mask is not None:
                scores = scores + mask
            chances = self.dropout(fn.softmax(scores, dim=-1))
            out = torch.matmul(chances, value).permute(0, 2, 1, 3).contiguous()
        return out.view(x.shape)


class Output(nn.Module):
    """Projection, dropout, residual and norm: the second half of attention and of the feed-forward."""

    def __init__(self, spec: TransformerSpec, n_in: int) -> None:
        super().__init__()
        self.dense = nn.Linear(n_in, spec.hidden_size)
        self.LayerNorm = nn.LayerNorm(spec.hidden_size, eps=spec.norm_epsilon)
        self.dropout = nn.Dropout(spec.hidden_dropout)

    def forward(self, x: Tensor, residual: Tensor) -> Tensor:
        """(batch, tokens, n_in) to (batch, tokens, width)."""
        out: Tensor = self.LayerNorm(self.dropout(self.dense(x)) + residual)
        return out


class Attention(nn.Module):
    """Self-attention and its output."""

    def __init__(self, spec: TransformerSpec) -> None:
        super().__init__()
        self.self = SelfAttention(spec)
        self.output = Output(spec, spec.hidden_size)

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        """(batch, tokens, width) to the same shape."""
        out: Tensor = self.output(self.self(x, mask), x)
        return out


class Intermediate(nn.Module):
    """First half of the feed-forward."""

    def __init__(self, spec: TransformerSpec) -> None:
        super().__init__()
        self.dense = nn.Linear(spec.hidden_size, spec.ffn)
        self.intermediate_act_fn = ACTIVATIONS[spec.act]()

    def forward(self, x: Tensor) -> Tensor:
        """(batch, tokens, width) to (batch, tokens, ffn)."""
        out: Tensor = self.intermediate_act_fn(self.dense(x))
        return out


class Layer(nn.Module):
    """Attention and feed-forward, each normalised after its residual."""

    def __init__(self, spec: TransformerSpec) -> None:
        super().__init__()
        self.attention = Attention(spec)
        self.intermediate = Intermediate(spec)
        self.output = Output(spec, spec.ffn)

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        """(batch, tokens, width) to the same shape."""
        x = self.attention(x, mask)
        out: Tensor = self.output(self.intermediate(x), x)
        return out


class Encoder(nn.Module):
    """The layers."""

    def __init__(self, spec: TransformerSpec) -> None:
        super().__init__()
        self.layer = nn.ModuleList(Layer(spec) for _ in range(spec.layers))
        self.recompute = spec.gradient_checkpointing

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        """(batch, tokens, width) to the same shape."""
        return run_blocks(self.layer, x, mask, recompute=self.recompute)


class Pooler(nn.Module):
    """Projection of the first token, for sentence tasks."""

    def __init__(self, spec: TransformerSpec) -> None:
        super().__init__()
        self.dense = nn.Linear(spec.hidden_size, spec.hidden_size)
        self.activation = nn.Tanh()

    def forward(self, x: Tensor) -> Tensor:
        """(batch, tokens, width) to (batch, width)."""
        out: Tensor = self.activation(self.dense(x[:, 0]))
        return out


class Body(nn.Module):
    """Embeddings, encoder and, if asked for, the pooler."""

    def __init__(self, spec: TransformerSpec) -> None:
        super().__init__()
        self.embeddings = Embeddings(spec)
        self.encoder = Encoder(spec)
        self.pooler = None if spec.head == "lm" else Pooler(spec)
        self.fused = spec.attention == "sdpa"

    def forward(self, tokens: Tensor, token_types: Tensor, attention_mask: Tensor) -> tuple[Tensor, Tensor | None]:
        """Hidden states (batch, tokens, width) and, with a pooler, the first token's (batch, width).

        `attention_mask` (batch, tokens) is 1 for tokens that are not padding.
        """
        hidden = self.embeddings(tokens, token_types)
        mask = None
        if not self.fused:
            seen = attention_mask[:, None, None, :].to(hidden.dtype)
            mask = (1.0 - seen) * torch.finfo(hidden.dtype).min
        encoded: Tensor = self.encoder(hidden, mask)
        return encoded, None if self.pooler is None else self.pooler(encoded)


class Transform(nn.Module):
    """Dense layer, activation and norm before the head's decoder."""

    def __init__(self, spec: TransformerSpec) -> None:
        super().__init__()
        self.dense = nn.Linear(spec.hidden_size, spec.hidden_size)
        self.transform_act_fn = ACTIVATIONS[spec.act]()
        self.LayerNorm = nn.LayerNorm(spec.hidden_size, eps=spec.norm_epsilon)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, tokens, width) to the same shape."""
        out: Tensor = self.LayerNorm(self.transform_act_fn(self.dense(x)))
        return out


class Predictions(nn.Module):
    """The masked-language-model head."""

    def __init__(self, spec: TransformerSpec) -> None:
        super().__init__()
        self.transform = Transform(spec)
        self.decoder = nn.Linear(spec.hidden_size, spec.vocab_size)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, tokens, width) to (batch, tokens, vocabulary)."""
        out: Tensor = self.decoder(self.transform(x))
        return out


class Heads(nn.Module):
    """The masked-language-model head and, for pretraining, the next-sentence head."""

    def __init__(self, spec: TransformerSpec) -> None:
        super().__init__()
        self.predictions = Predictions(spec)
        self.seq_relationship = nn.Linear(spec.hidden_size, 2) if spec.head == "pretraining" else None

    def forward(self, encoded: Tensor, pooled: Tensor | None) -> Tensor | tuple[Tensor, Tensor]:
        """Token logits (batch, tokens, vocabulary), and sentence logits (batch, 2) for pretraining."""
        logits: Tensor = self.predictions(encoded)
        if self.seq_relationship is None:
            return logits
        return logits, self.seq_relationship(pooled)


class Bert(nn.Module):
    """BERT with its language-model head, and the next-sentence head for pretraining."""

    def __init__(self, spec: TransformerSpec) -> None:
        super().__init__()
        self.bert = Body(spec)
        self.cls = Heads(spec)
        tie(self.cls.predictions.decoder, self.bert.embeddings.word_embeddings, spec)

    def forward(
        self, input_ids: Tensor, token_type_ids: Tensor, attention_mask: Tensor, predicted: Tensor | None = None
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Logits of token ids, token types and attention mask, all (batch, tokens).

        `predicted` are the places, of all tokens of the batch in a row, that the language-model head is asked for.
        """
        encoded, pooled = self.bert(input_ids, token_type_ids, attention_mask)
        if predicted is not None:
            encoded = torch.index_select(encoded.view(-1, encoded.shape[-1]), 0, predicted)
        logits: Tensor | tuple[Tensor, Tensor] = self.cls(encoded, pooled)
        return logits


class BertClassifier(nn.Module):
    """BERT with a sentence classifier (two classes)."""

    def __init__(self, spec: TransformerSpec) -> None:
        super().__init__()
        self.bert = Body(spec)
        self.dropout = nn.Dropout(spec.hidden_dropout)
        self.classifier = nn.Linear(spec.hidden_size, 2)

    def forward(self, input_ids: Tensor, token_type_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Logits (batch, 2) of token ids, token types and attention mask, all (batch, tokens)."""
        _, pooled = self.bert(input_ids, token_type_ids, attention_mask)
        logits: Tensor = self.classifier(self.dropout(pooled))
        return logits
