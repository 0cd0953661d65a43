"""Transformer-XL (Dai et al. 2019, arXiv:1901.02860) as NVIDIA/DeepLearningExamples trains it (pytorch/mem_transformer.py).

Segments with a memory of the last one, relative positions, layer norm after each half, adaptive softmax in clusters of words.
How many targets fall into each cluster depends on the data; here it is what Zipf's law with exponent 1 gives (an assumption).
Used by `entrypoint: "perfmodel.models.transformer_xl:transformer_xl"`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as fn

Inputs = tuple[Tensor, Tensor, list[Tensor]]

# wt103_base.yaml and wt103_large.yaml of the examples; the vocabulary and the cutoffs are of WikiText-103 (train.py).
WORDS, CUTOFFS = 267_735, (19_997, 39_997, 199_997)
SIZES = {
    "base": (
        {"layers": 16, "width": 512, "heads": 8, "head_dim": 64, "inner": 2048, "div": 1, "vocab": WORDS},
        (0.1, 0.0),
        CUTOFFS,
    ),
    "large": (
        {"layers": 18, "width": 1024, "heads": 16, "head_dim": 64, "inner": 4096, "div": 4, "vocab": WORDS},
        (0.2, 0.2),
        CUTOFFS,
    ),
    "tiny": (
        {"layers": 2, "width": 32, "heads": 2, "head_dim": 16, "inner": 48, "div": 2, "vocab": 100},
        (0.0, 0.0),
        (20, 60),
    ),
}


class RelativeAttention(nn.Module):
    """Multi-head attention over memory and segment, scores by content and by distance."""

    def __init__(self, width: int, heads: int, head_dim: int, dropouts: tuple[float, float]) -> None:
        super().__init__()
        self.heads, self.head_dim = heads, head_dim
        self.qkv_net = nn.Linear(width, 3 * heads * head_dim, bias=False)
        self.r_net = nn.Linear(width, heads * head_dim, bias=False)
        self.o_net = nn.Linear(heads * head_dim, width, bias=False)
        self.drop, self.dropatt = nn.Dropout(dropouts[0]), nn.Dropout(dropouts[1])
        self.layer_norm = nn.LayerNorm(width)

    def forward(self, x: Tensor, r: Tensor, biases: tuple[Tensor, Tensor], mask: Tensor, memory: Tensor) -> Tensor:
        """(tokens, batch, width) to the same shape."""
        n, batch, _ = x.shape
        both = torch.cat([memory, x], 0)
        query, key, value = torch.chunk(self.qkv_net(both), 3, dim=-1)
        query, key, value = (part.view(-1, batch, self.heads, self.head_dim) for part in (query[-n:], key, value))
        distance = self.r_net(r).view(-1, self.heads, self.head_dim)
        by_content = torch.matmul((query + biases[0]).permute(1, 2, 0, 3), key.permute(1, 2, 3, 0))
        by_distance = torch.matmul((query + biases[1]).permute(1, 2, 0, 3), distance.permute(1, 2, 0))
        scores = (by_content + _shifted(by_distance)).mul_(self.head_dim**-0.5)
        scores = scores.float().masked_fill(mask, -float("inf")).type_as(scores)
        chances = self.dropatt(fn.softmax(scores, dim=-1))
        mixed = torch.matmul(chances, value.permute(1, 2, 0, 3)).permute(2, 0, 1, 3)
        out = self.drop(self.o_net(mixed.contiguous().view(n, batch, -1)))
        found: Tensor = self.layer_norm(x + out)
        return found


def _shifted(scores: Tensor) -> Tensor:
    """Row i of (batch, heads, n, m) moved left by n - 1 - i, so that columns become positions (section 3.3, appendix B)."""
    batch, heads, n, m = scores.shape
    padded = torch.cat([scores.new_zeros(batch, heads, n, 1), scores], dim=3).view(batch, heads, m + 1, n)
    return padded.narrow(2, 1, m).reshape(batch, heads, n, m)


class Layer(nn.Module):
    """Attention and feed-forward, each followed by a layer norm."""

    def __init__(self, width: int, heads: int, head_dim: int, inner: int, dropouts: tuple[float, float]) -> None:
        super().__init__()
        self.attention = RelativeAttention(width, heads, head_dim, dropouts)
        drop = dropouts[0]
        self.core = nn.Sequential(
            nn.Linear(width, inner), nn.ReLU(), nn.Dropout(drop), nn.Linear(inner, width), nn.Dropout(drop)
        )
        self.layer_norm = nn.LayerNorm(width)

    def forward(self, x: Tensor, r: Tensor, biases: tuple[Tensor, Tensor], mask: Tensor, memory: Tensor) -> Tensor:
        """(tokens, batch, width) to the same shape."""
        x = self.attention(x, r, biases, mask, memory)
        found: Tensor = self.layer_norm(x + self.core(x))
        return found


class TransformerXl(nn.Module):
    """The language model and its adaptive softmax; returns the mean loss of a segment."""

    def __init__(self, sizes: dict[str, int], dropouts: tuple[float, float], cutoffs: Sequence[int]) -> None:
        super().__init__()
        width, div = sizes["width"], sizes["div"]
        self.ends = (0, *cutoffs, sizes["vocab"])
        narrow = [width // div**i for i in range(len(self.ends) - 1)]
        if div == 1:
            self.embeddings = nn.ModuleList([nn.Embedding(sizes["vocab"], width)])
        else:
            self.embeddings = nn.ModuleList(
                nn.Embedding(end - begin, d) for (begin, end), d in zip(pairwise(self.ends), narrow, strict=True)
            )
        self.projections = nn.ModuleList(nn.Linear(d, width, bias=False) for d in (narrow if div > 1 else ()))
        heads, head_dim = sizes["heads"], sizes["head_dim"]
        self.r_w_bias = nn.Parameter(torch.zeros(heads, head_dim))
        self.r_r_bias = nn.Parameter(torch.zeros(heads, head_dim))
        self.drop = nn.Dropout(dropouts[0])
        self.layers = nn.ModuleList(
            Layer(width, heads, head_dim, sizes["inner"], dropouts) for _ in range(sizes["layers"])
        )
        self.cluster_weight = nn.Parameter(torch.zeros(len(cutoffs), width))
        self.cluster_bias = nn.Parameter(torch.zeros(len(cutoffs)))
        # The head's own projection; those of the other clusters are the embedding's (`tie_projs` of train.py).
        self.head_projection = nn.Linear(width, width, bias=False) if div > 1 else None
        self.out_bias = nn.Parameter(torch.zeros(sizes["vocab"]))
        self.width, self.scale = width, width**0.5

    def forward(self, tokens: Tensor, targets: Tensor, memories: list[Tensor]) -> Tensor:
        """(tokens, batch) numbers, targets and one (memory, batch, width) a layer and one more, to a scalar."""
        n, batch = tokens.shape
        span = n + memories[0].shape[0]
        x = self.drop(self._embed(tokens))
        mask = torch.ones(n, span, dtype=torch.bool, device=x.device).triu(1 + memories[0].shape[0])
        places = torch.arange(span - 1, -1, -1.0, device=x.device, dtype=x.dtype)
        rates = 1 / 10000 ** (torch.arange(0.0, self.width, 2.0, device=x.device, dtype=x.dtype) / self.width)
        angles = torch.outer(places, rates)
        r = self.drop(torch.cat([angles.sin(), angles.cos()], dim=-1))
        held = [x]
        for layer, memory in zip(self.layers, memories[:-1], strict=True):
            x = layer(x, r, (self.r_w_bias, self.r_r_bias), mask, memory)
            held.append(x)
        with torch.no_grad():  # what the next segment remembers
            _ = [
                torch.cat([memory, h], 0)[-memory.shape[0] :].detach() for memory, h in zip(memories, held, strict=True)
            ]
        return self._loss(self.drop(x).view(n * batch, -1), targets.view(-1))

    def _embed(self, tokens: Tensor) -> Tensor:
        if not len(self.projections):
            return self.embeddings[0](tokens) * self.scale  # type: ignore[no-any-return]  # nn.Module's call is untyped
        flat = tokens.view(-1)
        found = torch.zeros(flat.shape[0], self.width, device=tokens.device, dtype=self.out_bias.dtype)
        for cluster, (table, project) in enumerate(zip(self.embeddings, self.projections, strict=True)):
            rows = self._rows(flat, cluster)
            made = project(table(flat.index_select(0, rows) - self.ends[cluster]))
            found = found.index_copy(0, rows, made.to(found.dtype))
        whole: Tensor = found.view(*tokens.shape, -1) * self.scale
        return whole

    def _rows(self, words: Tensor, cluster: int) -> Tensor:
        """Where the words of a cluster are; how many is assumed (`cluster_counts`), so that shapes need no values."""
        inside = (words >= self.ends[cluster]) & (words < self.ends[cluster + 1])
        count = cluster_counts(self.ends, len(words))[cluster]
        return torch.nonzero_static(inside, size=count).squeeze(1)

    def _logits(self, x: Tensor, cluster: int) -> Tensor:
        begin, end = self.ends[cluster], self.ends[cluster + 1]
        weight, bias = self._table(cluster), self.out_bias[begin:end]
        if cluster == 0:
            weight = torch.cat([weight, self.cluster_weight], 0)
            bias = torch.cat([bias, self.cluster_bias], 0)
        if self.head_projection is None:
            return fn.linear(x, weight, bias)
        narrowed = self.head_projection(x) if cluster == 0 else torch.matmul(x, self.projections[cluster].weight)  # type: ignore[arg-type]  # as below
        return fn.linear(narrowed, weight) + bias

    def _table(self, cluster: int) -> Tensor:
        if self.head_projection is not None:
            return self.embeddings[cluster].weight  # type: ignore[return-value]  # an Embedding's weight
        return self.embeddings[0].weight[self.ends[cluster] : self.ends[cluster + 1]]  # type: ignore[index]  # as above

    def _loss(self, x: Tensor, targets: Tensor) -> Tensor:
        head = fn.log_softmax(self._logits(x, 0).float(), dim=1)
        losses = []
        for cluster in range(len(self.ends) - 1):
            rows = self._rows(targets, cluster)
            words = (targets.index_select(0, rows) - self.ends[cluster]).unsqueeze(1)
            chances = head.index_select(0, rows)
            if cluster == 0:
                losses.append(-chances.gather(1, words).squeeze(1))
            else:
                tail = fn.log_softmax(self._logits(x.index_select(0, rows), cluster).float(), dim=1)
                losses.append(-(chances[:, -cluster] + tail.gather(1, words).squeeze(1)))
        return torch.cat(losses).mean()


def cluster_counts(ends: Sequence[int], n: int) -> list[int]:
    """Words in each cluster of `n`, at least one: the harmonic sums of Zipf's law with exponent 1."""
    sums = _harmonic_parts(tuple(ends))
    rare = [max(1, round(n * part / sum(sums))) for part in sums[1:]]
    return [n - sum(rare), *rare]


@cache
def _harmonic_parts(ends: tuple[int, ...]) -> list[float]:
    return [sum(1 / rank for rank in range(begin + 1, end + 1)) for begin, end in pairwise(ends)]


def transformer_xl(
    *, size: str, batch: int, tokens: int, memory: int
) -> tuple[TransformerXl, Inputs, Callable[[Tensor], Tensor]]:
    """The `base` or `large` model of the examples' WikiText-103 configurations with a segment and its memory.

    Args:
        size: `base` or `large`; `tiny` has the shape of `large` at a size that runs anywhere.
        batch: sequences.
        tokens: of a segment of each sequence.
        memory: tokens before it whose hidden states are attended to.
    """
    sizes, dropouts, cutoffs = SIZES[size]
    model = TransformerXl(sizes, dropouts, cutoffs)
    words = [
        begin
        for begin, count in zip(model.ends, cluster_counts(model.ends, tokens * batch), strict=False)
        for _ in range(count)
    ]
    segment = torch.tensor(words).view(tokens, batch)
    memories = [torch.zeros(memory, batch, sizes["width"]) for _ in range(sizes["layers"] + 1)]
    return model, (segment, segment.clone(), memories), _mean_loss


def _mean_loss(loss: Tensor) -> Tensor:
    return loss
