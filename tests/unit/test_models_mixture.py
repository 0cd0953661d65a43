"""A mixture of experts: values and gradients of transformers' Mixtral; its config as it is; a trace without host syncs."""

import json
import warnings

import pytest
import torch

from perfmodel.config import load_model
from perfmodel.errors import ConfigError
from perfmodel.extract import trace
from perfmodel.models import build
from perfmodel.models.llama import Llama

WIDTH, FFN, EXPERTS, CHOSEN, TOKENS, BATCH, VOCABULARY = 32, 48, 4, 2, 16, 2, 64
MODEL = {
    "kind": "transformer", "name": "tiny", "architecture": "mixtral", "batch_size": BATCH, "precision": "bf16",
    "vocab_size": VOCABULARY, "hidden_size": WIDTH, "layers": 2, "heads": 4, "kv_heads": 2, "ffn_size": FFN,
    "max_positions": TOKENS, "experts": EXPERTS, "experts_per_token": CHOSEN,
}  # fmt: skip


def theirs(ours: Llama):
    """transformers' model with our weights, its experts' matrices taken from our stacks."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from transformers import MixtralConfig, MixtralForCausalLM

        model = MixtralForCausalLM(
            MixtralConfig(
                vocab_size=VOCABULARY, hidden_size=WIDTH, intermediate_size=FFN, num_hidden_layers=2, num_attention_heads=4,
                num_key_value_heads=2, max_position_embeddings=TOKENS, num_local_experts=EXPERTS,
                num_experts_per_tok=CHOSEN, rope_theta=10000.0,
            )
        )  # fmt: skip
    state = {}
    for name, value in ours.state_dict().items():
        block = name.partition(".mlp.")[0]
        for e in range(EXPERTS) if ".experts." in name else ():
            home = f"{block}.block_sparse_moe.experts.{e}"
            if name.endswith("gate_up_proj"):
                state[f"{home}.w1.weight"], state[f"{home}.w3.weight"] = value[e, :FFN], value[e, FFN:]
            else:
                state[f"{home}.w2.weight"] = value[e]
        if ".experts." not in name:
            state[name.replace("mlp.gate", "block_sparse_moe.gate")] = value
    model.load_state_dict(state)
    return model


def test_values_and_gradients_are_those_of_transformers() -> None:
    torch.manual_seed(0)
    ours = Llama(load_model(MODEL)).float()
    other = theirs(ours)
    tokens = torch.randint(0, VOCABULARY, (BATCH, TOKENS))
    mine, logits = ours(tokens), other(tokens).logits
    assert torch.allclose(mine, logits, atol=1e-5)
    mine.square().mean().backward()
    logits.square().mean().backward()
    experts = ours.model.layers[0].mlp.experts
    for e, expert in enumerate(other.model.layers[0].block_sparse_moe.experts):
        both = torch.cat((expert.w1.weight.grad, expert.w3.weight.grad))
        assert torch.allclose(experts.gate_up_proj.grad[e], both, atol=1e-6)
        assert torch.allclose(experts.down_proj.grad[e], expert.w2.weight.grad, atol=1e-6)
    router = other.model.layers[0].block_sparse_moe.gate.weight.grad
    assert torch.allclose(ours.model.layers[0].mlp.gate.weight.grad, router, atol=1e-6)


@pytest.mark.parametrize("precision", ["bf16", "amp_bf16"])
def test_no_op_of_the_layer_waits_for_the_host_and_experts_work_in_bf16(precision) -> None:
    graph = trace(build(load_model({**MODEL, "precision": precision})))
    inside = [op for op in graph.ops if ".mlp" in op.module]
    assert not any(op.host_sync for op in inside)
    products = [op for op in inside if op.name == "aten._grouped_mm"]
    assert {spec.dtype for op in products for spec in op.inputs[:2]} == {"bfloat16"}
    assert len(products) == 2 * (2 + 4)  # two a layer, each with two gradients


def test_a_hugging_face_config_is_read_as_it_is(tmp_path) -> None:
    """mistralai/Mixtral-8x7B-v0.1: 46,702,792,704 parameters (its model card)."""
    config = {
        "architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "hidden_act": "silu", "hidden_size": 4096,
        "intermediate_size": 14336, "max_position_embeddings": 32768, "num_attention_heads": 32,
        "num_experts_per_tok": 2, "num_hidden_layers": 32, "num_key_value_heads": 8, "num_local_experts": 8,
        "output_router_logits": False, "rms_norm_eps": 1e-05, "rope_theta": 1000000.0, "router_aux_loss_coef": 0.02,
        "sliding_window": None, "tie_word_embeddings": False, "torch_dtype": "bfloat16", "vocab_size": 32000,
    }  # fmt: skip
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    built = build(load_model(path))
    assert sum(p.numel() for p in built.module.parameters()) == 46_702_792_704


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"precision": "fp32"}, "precision: found fp32 with architecture mixtral, allowed bf16 or amp_bf16"),
        ({"experts_per_token": 5}, "experts_per_token: found 5, allowed at most experts 4"),
        ({"architecture": "llama"}, "experts: found with architecture llama, allowed with mixtral"),
    ],
)
def test_what_cannot_be_is_refused(change, words) -> None:
    with pytest.raises(ConfigError, match=words):
        load_model({**MODEL, **change})
