"""Families that transformers builds: a graph has the parameters of transformers' model; what cannot be built is one line."""

import json

import pytest

from perfmodel.config import load_model
from perfmodel.config.foreign import HuggingFaceSpec, has_family
from perfmodel.errors import ConfigError
from perfmodel.extract import trace
from perfmodel.models import build, materialize

transformers = pytest.importorskip("transformers", reason="transformers is not installed: pip install -e .[dev]")

SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 90, "intermediate_size": 48}
CONFIGS = {
    "roberta": {**SMALL, "max_position_embeddings": 64},
    "mistral": {**SMALL, "num_key_value_heads": 2, "max_position_embeddings": 64},
    "qwen2": {**SMALL, "num_key_value_heads": 2, "max_position_embeddings": 64},
    "gpt_neox": {**SMALL, "max_position_embeddings": 64},
    "t5": {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, "vocab_size": 90},
    "vit": {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 48,
        "image_size": 32,
    },
}


@pytest.mark.parametrize("family", CONFIGS)
def test_a_step_is_traced_with_all_parameters(family):
    spec = load_model({"model_type": family, **CONFIGS[family]}, {"batch_size": 2})
    assert isinstance(spec, HuggingFaceSpec)
    graph = trace(build(spec))
    n = sum(p.tensor.n_elems for p in graph.parameters)
    config = transformers.AutoConfig.for_model(family, **CONFIGS[family])
    whole = {"roberta": "ForMaskedLM", "vit": "ForImageClassification", "t5": "ForConditionalGeneration"}
    cls = {"gpt_neox": "GPTNeoX", "vit": "ViT", "roberta": "Roberta", "qwen2": "Qwen2"}.get(family, family.title())
    real = getattr(transformers, cls + whole.get(family, "ForCausalLM"))(config)
    assert n == sum(p.numel() for p in real.parameters())
    assert {op.phase for op in graph.ops} >= {"forward", "loss", "backward", "optimizer"}


def test_the_loss_of_a_causal_model_is_that_of_transformers():
    built = materialize(
        build(load_model({"model_type": "qwen2", **CONFIGS["qwen2"]}, {"batch_size": 2, "sequence_length": 9}))
    )
    built.module.eval()
    [inputs] = built.args
    [labels] = built.targets
    ours = built.loss(built.module(inputs))
    theirs = built.module.model(**inputs, labels=labels).loss
    assert ours.item() == pytest.approx(theirs.item(), rel=1e-5)


def test_the_architecture_that_a_config_names_is_built():
    config = {
        "model_type": "bart",
        "architectures": ["BartForCausalLM"],
        "d_model": 32,
        "decoder_layers": 2,
        "vocab_size": 90,
    }
    config |= {"encoder_layers": 2, "decoder_ffn_dim": 48, "encoder_ffn_dim": 48, "max_position_embeddings": 64}
    made = [
        type(build(load_model(c, {"sequence_length": 8})).module.model).__name__
        for c in (config, {**config, "architectures": None})
    ]
    assert made == ["BartForCausalLM", "BartForConditionalGeneration"]


def test_a_config_file_stands_beside_a_suite_or_a_model_file(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mistral", **CONFIGS["mistral"]}))
    (tmp_path / "m.yaml").write_text("hf_config: config.json\nbatch_size: 3\nprecision: bf16\n")
    spec = load_model(str(tmp_path / "m.yaml"))
    assert (spec.kind, spec.batch_size, spec.precision) == ("huggingface", 3, "bf16")
    assert load_model(str(tmp_path / "config.json")).config["model_type"] == "mistral"


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"model_type": "nope_model"}, "model_type: found 'nope_model', allowed gpt2"),
        ({"model_type": "sam"}, "transformers has no head for it"),
        ({"model_type": "mistral", "hidden_act": "nope"}, "transformers cannot build it"),
    ],
)
def test_what_cannot_be_built_is_one_line(config, words):
    with pytest.raises(ConfigError, match=words) as caught:
        build(load_model(config))
    assert "\n" not in str(caught.value)


def test_families_are_known_without_importing_them():
    assert has_family("xlm-roberta")
    assert not has_family("gpt3")
