"""Megatron-LM's GPT: the same numbers as the plain GPT-2 with its weights, fused kernels in the graph."""

from collections import Counter

import pytest
import torch
from torch.nn import functional as fn

from perfmodel.config import load_model
from perfmodel.errors import ConfigError
from perfmodel.extract import trace
from perfmodel.models import build
from perfmodel.models.built import BuiltModel
from perfmodel.models.gpt2 import Gpt2
from perfmodel.models.megatron import MegatronGpt, ProfiledGpt, profiled_loss

MODEL = {
    "kind": "transformer", "name": "tiny", "architecture": "gpt2", "batch_size": 2, "precision": "fp32", "optimizer": "adamw",
    "vocab_size": 64, "hidden_size": 32, "layers": 2, "heads": 4, "max_positions": 16, "attention": "eager",
}  # fmt: skip


def spec(**changes):
    return load_model({**MODEL, **changes})


def megatron_from(plain: Gpt2) -> MegatronGpt:
    """Megatron's model with the weights of a plain one: projections transposed, query-key-value interleaved by head."""
    found = MegatronGpt(spec(implementation="megatron"))
    heads, width = 4, 8

    def interleave(weight: torch.Tensor) -> torch.Tensor:
        return weight.view(3, heads, width, -1).transpose(0, 1).reshape(weight.shape)

    source = plain.transformer
    with torch.no_grad():
        found.embedding.word_embeddings.weight.copy_(source.wte.weight)
        found.embedding.position_embeddings.weight.copy_(source.wpe.weight)
        for mine, theirs in zip(found.layers, source.h, strict=True):
            pairs = (
                (mine.input_layernorm, theirs.ln_1), (mine.post_attention_layernorm, theirs.ln_2)
            )  # fmt: skip
            for norm, other in pairs:
                norm.load_state_dict(other.state_dict())
            attention, mlp = mine.self_attention, mine.mlp
            attention.query_key_value.weight.copy_(interleave(theirs.attn.c_attn.weight.t()))
            attention.query_key_value.bias.copy_(interleave(theirs.attn.c_attn.bias.unsqueeze(1)).squeeze(1))
            for linear, projection in (
                (attention.dense, theirs.attn.c_proj), (mlp.dense_h_to_4h, theirs.mlp.c_fc),
                (mlp.dense_4h_to_h, theirs.mlp.c_proj),
            ):  # fmt: skip
                linear.weight.copy_(projection.weight.t())
                linear.bias.copy_(projection.bias)
        found.final_layernorm.load_state_dict(source.ln_f.state_dict())
    return found


def test_it_computes_what_the_plain_model_computes() -> None:
    torch.manual_seed(0)
    plain = Gpt2(spec())
    mine = megatron_from(plain)
    tokens = torch.randint(0, 64, (2, 16))
    expected = plain(tokens)
    got = mine(tokens).view(2, 16, 64)
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)


def test_its_loss_and_gradients_are_those_of_cross_entropy() -> None:
    torch.manual_seed(0)
    plain = Gpt2(spec())
    mine = megatron_from(plain)
    tokens, labels = torch.randint(0, 64, (2, 16)), torch.randint(0, 64, (2, 16))
    from perfmodel.models.megatron import vocabulary_loss

    loss = vocabulary_loss(labels, mine(tokens))
    expected = fn.cross_entropy(plain(tokens).view(-1, 64), labels.view(-1))
    torch.testing.assert_close(loss, expected)
    loss.backward()
    expected.backward()
    torch.testing.assert_close(
        mine.embedding.word_embeddings.weight.grad, plain.transformer.wte.weight.grad, rtol=1e-3, atol=1e-5
    )
    torch.testing.assert_close(
        mine.layers[0].mlp.dense_h_to_4h.bias.grad, plain.transformer.h[0].mlp.c_fc.bias.grad, rtol=1e-3, atol=1e-5
    )
    torch.testing.assert_close(
        mine.layers[0].self_attention.dense.bias.grad,
        plain.transformer.h[0].attn.c_proj.bias.grad,
        rtol=1e-3,
        atol=1e-5,
    )


def test_a_layer_has_its_fused_kernels_once_forward_and_once_backward() -> None:
    changes = {"precision": "bf16", "hidden_dropout": 0.1, "attention_dropout": 0.1}
    built: BuiltModel = build(spec(implementation="megatron", **changes))
    seen = Counter(op.name for op in trace(built).ops)
    layers = MODEL["layers"]
    assert seen["perfmodel.bias_gelu"] == seen["perfmodel.bias_gelu_backward"] == layers
    assert seen["perfmodel.bias_dropout_add"] == seen["perfmodel.bias_dropout_backward"] == 2 * layers
    assert seen["perfmodel.causal_softmax"] == seen["perfmodel.causal_softmax_backward"] == layers
    assert not seen["aten._softmax"]
    assert not seen["aten.gelu"]


def test_fp32_scores_are_masked_apart() -> None:
    seen = Counter(op.name for op in trace(build(spec(implementation="megatron"))).ops)
    assert not seen["perfmodel.causal_softmax"]
    assert seen["aten._softmax"] == seen["aten._softmax_backward_data"] == MODEL["layers"]


@pytest.mark.parametrize("changes", [{"attention": "sdpa"}, {"tied_embeddings": False}, {"activation": "relu"}])
def test_what_megatron_does_not_have_is_refused(changes) -> None:
    with pytest.raises(ConfigError, match="implementation: found megatron, allowed with"):
        spec(implementation="megatron", **changes)


def test_the_profiled_model_is_the_same_network_with_a_head_of_its_own() -> None:
    torch.manual_seed(0)
    plain = Gpt2(spec())
    mine = ProfiledGpt(spec(implementation="vtrain", tied_embeddings=False))
    mine.load_state_dict(
        megatron_from(plain).state_dict() | {"lm_head.weight": plain.transformer.wte.weight.detach().clone()}
    )
    tokens = torch.randint(0, 64, (2, 16))
    torch.testing.assert_close(mine(tokens), plain(tokens), rtol=1e-4, atol=1e-5)
    parts = [mine.lm_head.weight, mine.embedding.word_embeddings.weight]
    head, embedding = torch.autograd.grad(mine(tokens).square().mean(), parts)
    tied = torch.autograd.grad(plain(tokens).square().mean(), plain.transformer.wte.weight)[0]
    torch.testing.assert_close(head + embedding, tied, rtol=1e-3, atol=1e-5)


def test_the_profiled_loss_has_tokens_for_classes() -> None:
    torch.manual_seed(0)
    logits, labels = torch.randn(2, 16, 64), torch.randint(0, 16, (2, 64))
    expected = -torch.log_softmax(logits, dim=1).gather(1, labels.unsqueeze(1)).mean()
    torch.testing.assert_close(profiled_loss(labels, logits), expected)


def test_the_host_waits_between_embedding_layers_and_head() -> None:
    ops = trace(build(spec(implementation="vtrain", tied_embeddings=False, precision="bf16"))).ops
    waits = [op for op in ops if op.name == "perfmodel.synchronize"]
    assert all(op.host_sync and not op.recompute for op in waits)
    assert [op.phase for op in waits] == ["forward", "forward", "backward", "backward"]
    first, second, third, fourth = (op.id for op in waits)
    layers = [op.id for op in ops if op.module.startswith("layers")]
    assert all(first < n < second or third < n < fourth for n in layers)
    head = [op.id for op in ops if op.module == "lm_head"]
    assert all(second < n < third for n in head)


def test_the_profiled_model_has_no_tied_head() -> None:
    with pytest.raises(ConfigError, match="implementation: found vtrain, allowed with"):
        spec(implementation="vtrain")
