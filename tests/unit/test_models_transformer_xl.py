"""Transformer-XL against transformers' own port of it, published sizes, and a real step on the CPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from perfmodel.config import load_model
from perfmodel.extract import trace
from perfmodel.models import build, from_module
from perfmodel.models.transformer_xl import CUTOFFS, SIZES, WORDS, cluster_counts, transformer_xl

TINY = {"size": "tiny", "batch": 3, "tokens": 16, "memory": 8}


# Sizes of transformers' port of the original code (the oracle of the next test) at WikiText-103's sizes, less what the
# examples' code shares: one pair of attention biases instead of one a layer. 192M is what the base model is said to have.
@pytest.mark.parametrize(("size", "million"), [("base", 192.0), ("large", 285.2)])
def test_parameters(size, million):
    built = build(load_model(str(SUITE_MODELS / SUITE_FILES[size])))
    assert built.n_parameters == port_of(size, "meta").num_parameters()
    assert built.n_parameters / 1e6 == pytest.approx(million, abs=0.06)


def test_the_loss_and_every_gradient_are_those_of_the_port():
    torch.manual_seed(0)
    model, (words, _, memories), _ = transformer_xl(**TINY)
    port = port_of("tiny", "cpu")
    _fill(model, port)
    order = torch.randperm(words.numel())
    targets = words.view(-1)[order].view_as(words)
    memories = [torch.randn_like(memory) for memory in memories]
    loss = model(words, targets, memories)
    expected = port_loss(port, words, targets, memories)
    torch.testing.assert_close(loss, expected)
    loss.backward()
    expected.backward()
    theirs = dict(_pairs(model, port))
    for name, parameter in model.named_parameters():
        grad = in_our_layout(name, [other.grad for other in theirs[name]])
        torch.testing.assert_close(parameter.grad, grad, msg=lambda text, name=name: f"{name}: {text}")


def test_a_real_step_is_what_extraction_says():
    built = from_module(*transformer_xl(**TINY), optimizer="adamw")
    meta, real = (trace(built, target="cpu", values=values) for values in ("meta", "real"))
    assert rows(meta) == rows(real)
    assert {op.phase for op in meta.ops} >= {"forward", "backward", "optimizer"}


def test_words_of_a_segment_fill_the_clusters_by_zipf():
    model, (words, targets, _), _ = transformer_xl(size="tiny", batch=4, tokens=32, memory=8)
    found = [int(((words >= a) & (words < b)).sum()) for a, b in zip(model.ends, model.ends[1:], strict=False)]
    weights = 1 / torch.arange(1, 101, dtype=torch.float64)
    shares = torch.stack([weights[:20].sum(), weights[20:60].sum(), weights[60:].sum()]) / weights.sum()
    assert found == pytest.approx([float(share) * 128 for share in shares], abs=1)
    assert torch.equal(words, targets)
    assert sum(cluster_counts((0, *CUTOFFS, WORDS), 16 * 192)) == 16 * 192


SUITE_MODELS = Path(__file__).parents[2] / "configs" / "suites" / "models"
SUITE_FILES = {
    "base": "transformer_xl_base_b16.yaml",
    "large": "transformer_xl_large_b2.yaml",
}


def rows(graph):
    return [(op.phase, op.name, op.module, tuple(t.shape for t in (*op.inputs, *op.outputs))) for op in graph.ops]


def port_of(size, device):
    """`TransfoXLLMHeadModel` of transformers."""
    port = pytest.importorskip("transformers.models.deprecated.transfo_xl.modeling_transfo_xl")
    settings = pytest.importorskip("transformers.models.deprecated.transfo_xl.configuration_transfo_xl")
    sizes, _, cutoffs = SIZES[size]
    config = settings.TransfoXLConfig(
        vocab_size=sizes["vocab"], cutoffs=list(cutoffs), d_model=sizes["width"], d_embed=sizes["width"],
        n_head=sizes["heads"], d_head=sizes["head_dim"], d_inner=sizes["inner"], div_val=sizes["div"],
        n_layer=sizes["layers"], mem_len=TINY["memory"], same_length=False,
        trainer_compatible=True, untie_r=False, dropout=0.0, dropatt=0.0,
    )  # fmt: skip
    with torch.device(device):
        made = port.TransfoXLLMHeadModel(config)
    made.tie_weights()
    return made.train()


def port_loss(port, words, targets, memories):
    """What the port's `forward` does from its parts (its own does not run on this torch), with the whole log-softmax."""
    core, (n, memory) = port.transformer, (len(words), len(memories[0]))
    hidden = core.word_emb(words)
    places = core.pos_emb(torch.arange(n + memory - 1, -1, -1.0))
    mask = torch.ones(n, n + memory, dtype=torch.bool).triu(1 + memory)[:, :, None]
    for layer, past in zip(core.layers, memories[:-1], strict=True):
        hidden = layer(hidden, places, dec_attn_mask=mask, mems=past)[0]
    chances = port.crit(hidden.reshape(words.numel(), -1))
    return -chances.gather(1, targets.view(-1, 1)).mean()


def _pairs(model, port):
    """Each parameter of ours with those of the port that hold the same numbers, one after the other."""
    core, crit = port.transformer, port.crit
    for i, (table, projection) in enumerate(zip(core.word_emb.emb_layers, core.word_emb.emb_projs, strict=True)):
        yield f"embeddings.{i}.weight", [table.weight]
        yield f"projections.{i}.weight", [projection]
    for i, layer in enumerate(core.layers):
        ours = f"layers.{i}"
        for name in ("qkv_net", "r_net", "o_net"):
            yield f"{ours}.attention.{name}.weight", [getattr(layer.dec_attn, name).weight]
        norms = {
            f"{ours}.attention.layer_norm": layer.dec_attn.layer_norm,
            f"{ours}.layer_norm": layer.pos_ff.layer_norm,
        }
        linears = {f"{ours}.core.{k}": layer.pos_ff.CoreNet[k] for k in (0, 3)}
        for name, module in (norms | linears).items():
            yield f"{name}.weight", [module.weight]
            yield f"{name}.bias", [module.bias]
    yield "r_w_bias", [core.r_w_bias]
    yield "r_r_bias", [core.r_r_bias]
    yield "cluster_weight", [crit.cluster_weight]
    yield "cluster_bias", [crit.cluster_bias]
    yield "head_projection.weight", [crit.out_projs[0]]
    yield "out_bias", [layer.bias for layer in crit.out_layers]


def _fill(model, port):
    ours = dict(model.named_parameters())
    named = dict(_pairs(model, port))
    assert set(named) == set(ours)
    with torch.no_grad():
        for name, parts in named.items():
            for part in parts:
                nn.init.normal_(part, std=0.3)
            ours[name].copy_(in_our_layout(name, parts))


def in_our_layout(name, parts):
    """The port has the head's projection the other way round and the clusters' columns in order; the examples from the end."""
    if name == "head_projection.weight":
        return parts[0].t()
    if name.startswith("cluster_"):
        return parts[0].flip(0)
    return parts[0] if len(parts) == 1 else torch.cat(parts)
