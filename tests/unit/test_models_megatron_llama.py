"""Megatron-Core's Llama: the numbers of the plain Llama with its weights, gradients of its fused kernels, its graph."""

from collections import Counter

import pytest
import torch

from perfmodel.config import load_model
from perfmodel.errors import ConfigError
from perfmodel.extract import trace
from perfmodel.models import build
from perfmodel.models.llama import Llama
from perfmodel.models.megatron_llama import MegatronLlama
from perfmodel.models.megatron_ops import rotary, swiglu

HEADS, GROUPS, WIDTH, FFN, TOKENS = 4, 2, 32, 48, 16
MODEL = {
    "kind": "transformer", "name": "tiny", "architecture": "llama", "batch_size": 2, "precision": "fp32", "optimizer": "adamw",
    "vocab_size": 64, "hidden_size": WIDTH, "layers": 2, "heads": HEADS, "kv_heads": GROUPS, "ffn_size": FFN,
    "max_positions": TOKENS,
}  # fmt: skip


def spec(**changes):
    return load_model({**MODEL, "implementation": "megatron", **changes})


def megatron_from(plain: Llama) -> MegatronLlama:
    """Megatron's model with the weights of a plain one: queries, key and value of a group side by side, gate before up."""
    found = MegatronLlama(spec())
    head = WIDTH // HEADS

    def by_group(weight: torch.Tensor) -> torch.Tensor:
        return weight.view(GROUPS, -1, head, WIDTH)

    with torch.no_grad():
        found.word_embeddings.weight.copy_(plain.model.embed_tokens.weight)
        found.lm_head.weight.copy_(plain.lm_head.weight)
        found.final_layernorm.weight.copy_(plain.model.norm.weight)
        for mine, theirs in zip(found.layers, plain.model.layers, strict=True):
            attention, mlp = theirs.self_attn, theirs.mlp
            parts = [by_group(part.weight) for part in (attention.q_proj, attention.k_proj, attention.v_proj)]
            mine.self_attention.linear_qkv.weight.copy_(torch.cat(parts, dim=1).reshape(-1, WIDTH))
            mine.self_attention.linear_proj.weight.copy_(attention.o_proj.weight)
            mine.mlp.linear_fc1.weight.copy_(torch.cat((mlp.gate_proj.weight, mlp.up_proj.weight)))
            mine.mlp.linear_fc2.weight.copy_(mlp.down_proj.weight)
            mine.input_layernorm.weight.copy_(theirs.input_layernorm.weight)
            mine.pre_mlp_layernorm.weight.copy_(theirs.post_attention_layernorm.weight)
    return found


def test_it_computes_what_the_plain_model_computes() -> None:
    torch.manual_seed(0)
    plain = Llama(load_model(MODEL))
    mine = megatron_from(plain)
    tokens = torch.randint(0, 64, (2, TOKENS))
    expected = plain(tokens)
    got = mine(tokens).view(2, TOKENS, 64)
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)
    expected.sum().backward()
    got.sum().backward()
    for name, part in (("gate_proj", 0), ("up_proj", 1)):
        theirs = getattr(plain.model.layers[0].mlp, name).weight.grad
        torch.testing.assert_close(
            mine.layers[0].mlp.linear_fc1.weight.grad.chunk(2)[part], theirs, rtol=1e-3, atol=1e-5
        )
    torch.testing.assert_close(
        mine.word_embeddings.weight.grad, plain.model.embed_tokens.weight.grad, rtol=1e-3, atol=1e-5
    )


def test_gradients_of_its_fused_kernels_are_those_of_finite_differences() -> None:
    torch.manual_seed(0)
    assert torch.autograd.gradcheck(swiglu, torch.randn(3, 8, dtype=torch.float64, requires_grad=True))
    angles = torch.rand(3, 1, 1, 2, dtype=torch.float64)
    cosine, sine = (torch.cat((part, part), dim=-1) for part in (angles.cos(), angles.sin()))
    x = torch.randn(3, 2, 2, 4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda value: rotary(value, cosine, sine), x)


def test_a_layer_has_its_fused_kernels() -> None:
    seen = Counter(op.name for op in trace(build(spec(precision="bf16"))).ops)
    layers = MODEL["layers"]
    assert seen["perfmodel.swiglu"] == seen["perfmodel.swiglu_backward"] == layers
    assert seen["perfmodel.rotary"] == 4 * layers  # queries and keys, there and back
    assert seen["aten._fused_rms_norm"] == seen["aten._fused_rms_norm_backward"] == 2 * layers + 1
    assert seen["aten._scaled_dot_product_flash_attention"] == layers


@pytest.mark.parametrize("changes", [{"attention": "eager"}, {"tied_embeddings": True}, {"hidden_dropout": 0.1}])
def test_what_it_does_not_have_is_refused(changes) -> None:
    with pytest.raises(ConfigError, match="implementation: found megatron, allowed with tied_embeddings false"):
        spec(**changes)


def test_low_rank_adapters_alone_are_trained() -> None:
    rank = 4
    graph = trace(build(spec(lora_rank=rank, precision="bf16")))
    trained = [p for p in graph.parameters if p.grad_op is not None]
    head = WIDTH // HEADS
    qkv = (HEADS + 2 * GROUPS) * head
    # Down and up beside both projections (Hu et al. 2021): r (in + out) elements each.
    assert sum(p.tensor.n_elems for p in trained) == MODEL["layers"] * rank * (WIDTH + qkv + 2 * WIDTH)
    assert all("lora_" in p.name for p in trained)
    states = [s for s in graph.storages if s.kind == "optimizer_state"]
    assert sum(s.bytes for s in states) < 3 * 4 * sum(p.tensor.n_elems for p in trained)
    # No weight gradient of a frozen matrix: a linear has two products (forward, input's gradient), an adapter's three.
    frozen = [op for op in graph.ops if op.name == "aten.mm" and op.module.endswith("linear_fc1")]
    assert len(frozen) == 2 * MODEL["layers"]


def test_adapters_are_divided_with_the_projections_they_stand_beside() -> None:
    from perfmodel.config import load_plan
    from perfmodel.plan.tensor_parallel import tensor_parallel

    graph = trace(build(spec(lora_rank=4, precision="bf16")))
    local = tensor_parallel(graph, load_plan("tp=2").tensor_parallel, 2)
    shapes = {p.name.removeprefix("layers.0.self_attention."): p.tensor.shape for p in local.parameters}
    assert shapes["lora_qkv_up.weight"] == ((HEADS + 2 * GROUPS) * WIDTH // HEADS // 2, 4)
    assert shapes["lora_proj_down.weight"] == (4, WIDTH // 2)
    assert shapes["lora_qkv_down.weight"] == (4, WIDTH)


def test_adapters_belong_to_megatrons_llama() -> None:
    with pytest.raises(ConfigError, match="lora_rank: found with architecture llama and implementation huggingface"):
        load_model({**MODEL, "lora_rank": 4})


def test_separate_projections_compute_the_same_and_keep_less() -> None:
    """With Llama's own projections the value is no view of a joint one, which would stay alive until backward."""
    from perfmodel.plan.stage_memory import kept_bytes

    torch.manual_seed(0)
    joint, apart = MegatronLlama(spec()), MegatronLlama(spec(qkv="separate"))
    head = WIDTH // HEADS
    with torch.no_grad():
        for name, parameter in joint.named_parameters():
            if "linear_qkv" not in name:
                apart.get_parameter(name).copy_(parameter)
        for mine, theirs in zip(apart.layers, joint.layers, strict=True):
            groups = theirs.self_attention.linear_qkv.weight.view(GROUPS, -1, head, WIDTH)
            parts = groups.split((HEADS // GROUPS, 1, 1), dim=1)
            for projection, part in zip(("q_proj", "k_proj", "v_proj"), parts, strict=True):
                getattr(mine.self_attention, projection).weight.copy_(part.reshape(-1, WIDTH))
    tokens = torch.randint(0, 64, (2, TOKENS))
    torch.testing.assert_close(apart(tokens), joint(tokens), rtol=1e-4, atol=1e-5)
    kept = [kept_bytes(trace(build(spec(qkv=qkv, precision="bf16")))) for qkv in ("joint", "separate")]
    # A layer's joint projection has (heads + 2 groups) x width of (tokens, batch) in bf16; of it the value alone is wanted.
    over = 2 * TOKENS * (HEADS + GROUPS) * head * 2
    assert kept[0] - kept[1] == MODEL["layers"] * over


def test_separate_projections_belong_to_megatrons_llama_without_adapters() -> None:
    with pytest.raises(ConfigError, match="qkv: found separate with implementation huggingface"):
        load_model({**MODEL, "qkv": "separate"})
    with pytest.raises(ConfigError, match="lora_rank 4, allowed with megatron and without lora_rank"):
        spec(qkv="separate", lora_rank=4)
