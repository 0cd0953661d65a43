"""Bad model files: each mistake is one clear line with its key path; good shorthand is understood."""

import json
import re

import pytest
import yaml

from perfmodel.config import list_configs, load_model
from perfmodel.config.reading import MAX_CONFIG_BYTES
from perfmodel.errors import ConfigError

DLRM = {
    "kind": "dlrm",
    "name": "d",
    "batch_size": 8,
    "dense_features": 3,
    "bottom_mlp": [8, 4],
    "top_mlp": [8, 1],
    "embedding_dim": 4,
    "tables": [10, {"name": "b", "rows": "1k"}],
}
GPT = {
    "kind": "transformer",
    "name": "g",
    "architecture": "gpt2",
    "batch_size": 2,
    "vocab_size": 40,
    "hidden_size": 8,
    "layers": 2,
    "heads": 2,
    "max_positions": 8,
}
VISION = {"kind": "vision", "name": "v", "depth": 50, "batch_size": 2}


def without(spec, key):
    return {name: value for name, value in spec.items() if name != key}


BAD = [
    (without(DLRM, "batch_size"), "batch_size: missing, needs the samples per rank"),
    ({**DLRM, "botom_mlp": [1]}, "botom_mlp: unknown key, allowed name, .*; did you mean 'bottom_mlp'"),
    (
        {**DLRM, "kind": "dlmr"},
        "kind: found 'dlmr', allowed dlrm, transformer, vision, entrypoint, huggingface; did you mean 'dlrm'",
    ),
    (without(DLRM, "kind"), "kind: missing, allowed dlrm, transformer"),
    ({**DLRM, "batch_size": "8 MiB"}, "batch_size: found '8 MiB', allowed a whole number .*unknown unit 'MiB'"),
    ({**DLRM, "batch_size": 0}, "batch_size: found 0, allowed more than 0"),
    ({**DLRM, "batch_size": -4}, "batch_size: found .-4., allowed a whole number such as .*, not negative"),
    ({**DLRM, "batch_size": 2.5}, "batch_size: found 2.5, allowed a whole number"),
    ({**DLRM, "batch_size": True}, "batch_size: found True, allowed a whole number"),
    ({**DLRM, "precision": "fp61"}, "precision: found 'fp61', allowed fp32, tf32, .*; did you mean 'fp16'|'fp32'"),
    (
        {**DLRM, "optimizer": "sdg"},
        "optimizer.name: found 'sdg', allowed sgd, adagrad, adam, adamw; did you mean 'sgd'",
    ),
    ({**DLRM, "optimizer": {"name": "sgd", "momentum": 1.5}}, "optimizer.momentum: found 1.5, allowed less than 1"),
    ({**DLRM, "tables": []}, r"tables: found \[\], allowed at least 1 entries"),
    ({**DLRM, "tables": [{"row": 5}]}, "tables.0.rows: missing, needs the number of rows"),
    (
        {**DLRM, "tables": [{"rows": 5, "pooling_factor": "many"}]},
        "tables.0.pooling_factor: found 'many', allowed a list",
    ),
    ({**DLRM, "tables": [{"rows": 5, "pooling_factor": 0}]}, "pooling_factor.0: found 0, allowed more than 0"),
    ({**DLRM, "tables": [{"rows": 5, "distribution": "zip"}]}, "distribution: found 'zip', .*; did you mean 'zipf'"),
    (
        {**DLRM, "tables": [{"rows": 5, "distribution": {"zipf": -1}}]},
        "distribution.zipf: found -1, allowed at least 0",
    ),
    ({**DLRM, "tables": [{"rows": 5, "dim": 8}]}, "interaction: dot needs one width .* found .4, 8."),
    ({**DLRM, "tables": [{"name": "a", "rows": 5}, {"name": "a", "rows": 6}]}, "tables: 2 tables are called 'a'"),
    ({**DLRM, "interaction": {"kind": "cat", "fused": True}}, "interaction: fused: found with cat, allowed with dot"),
    (without(DLRM, "embedding_dim"), "tables.t0: no dim, and the model has no embedding_dim"),
    ({**DLRM, "bottom_mlp": 8}, "bottom_mlp: found 8, allowed a list"),
    ({**GPT, "heads": 3}, "heads: found 3, allowed a divisor of hidden_size 8"),
    ({**GPT, "kv_heads": 2}, "kv_heads: found with architecture gpt2, allowed with llama"),
    ({**GPT, "sequence_length": 9}, "sequence_length: found 9, allowed at most max_positions 8"),
    ({**GPT, "hidden_dropout": 1.5}, "hidden_dropout: found 1.5, allowed less than 1"),
    ({**GPT, "hidden_dropout": float("nan")}, "hidden_dropout: found nan, allowed a finite number"),
    ({**GPT, "attention": "flash"}, "attention: found 'flash', allowed eager, sdpa"),
    (
        {**GPT, "architecture": "gpt3"},
        "architecture: found 'gpt3', allowed gpt2, opt, llama, mixtral, bert; did you mean 'gpt2'",
    ),
    ({**GPT, "head": "classification"}, "head: found classification with architecture gpt2, allowed lm"),
    ({**VISION, "depth": 51}, "depth: found 51, allowed 18, 34, 50, 101, 152"),
    ({**VISION, "batch_size": 1, "image_size": 32}, "batch norm needs more than one value per channel"),
    ({"entrypoint": "no_colon"}, "entrypoint: found 'no_colon', allowed 'package.module:factory'"),
    ({"hf_config": "nowhere.json"}, "hf_config: no such file 'nowhere.json'"),
    ({"hf_config": 3}, "hf_config: found 3, allowed the path of a config.json"),
    ({"model_type": "gpt3"}, "model_type: found 'gpt3', allowed gpt2, opt, llama, mixtral, bert; did you mean 'gpt2'"),
    ({"model_type": "switch_transformers", "num_experts": 4}, "of mixtures of experts mixtral alone is built"),
    ({"model_type": "gpt2", "batch_siz": 4}, "batch_siz: unknown key; did you mean 'batch_size'"),
    ({"model_type": "gpt2", "reorder_and_upcast_attn": True}, "reorder_and_upcast_attn: found True, allowed False"),
    ({"model_type": "gpt2", "activation_function": "mish"}, "activation: found 'mish', allowed gelu, "),
]


@pytest.mark.parametrize(("spec", "says"), BAD)
def test_each_mistake_is_one_clear_line(spec, says):
    with pytest.raises(ConfigError) as caught:
        load_model(spec)
    matching = [line for line in caught.value.problems if re.search(says, line)]
    assert len(matching) == 1, caught.value.problems
    assert all(line.startswith("model (from Python): ") and "\n" not in line for line in caught.value.problems)


def test_the_same_from_a_file_names_the_file(tmp_path):
    for number, (spec, says) in enumerate(BAD):
        if "nan" in says or "nowhere" in says:
            continue
        path = tmp_path / f"bad{number}.yaml"
        path.write_text(yaml.safe_dump(spec))
        with pytest.raises(ConfigError) as caught:
            load_model(path)
        assert any(re.search(says, line) for line in caught.value.problems)
        assert all(line.startswith(f"{path}: ") for line in caught.value.problems)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("kind: dlrm\nkind: vision\n", "kind: duplicate key at line 2"),
        ("kind: vision\ndepth: .nan\n", "depth: found nan, allowed a finite number"),
        ("kind: [vision", "not valid YAML"),
        ("", "the file is empty"),
        (b"\x93NUMPY\x01\x00", "not a text file"),
        (b"# " + b"x" * MAX_CONFIG_BYTES, "allowed a config file of at most"),
    ],
)
def test_a_broken_file_is_one_clear_line(tmp_path, text, says):
    path = tmp_path / "model.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ConfigError) as caught:
        load_model(path)
    assert len(caught.value.problems) == 1
    assert says in caught.value.problems[0]
    assert caught.value.problems[0].startswith(str(path))


def test_a_missing_model_names_the_nearest_shipped_one():
    with pytest.raises(ConfigError, match=r"gpt2_larg: no such file.*did you mean 'gpt2_large'\?"):
        load_model("gpt2_larg")


def test_all_mistakes_come_at_once():
    bad = {
        **without(DLRM, "top_mlp"),
        "batch_size": "x",
        "precision": 16,
        "tables": [{"rows": -1}, {"rows": 5, "x": 1}],
    }
    with pytest.raises(ConfigError) as caught:
        load_model(bad)
    assert len(caught.value.problems) == 5


@pytest.mark.parametrize("name", list_configs("models"))
@pytest.mark.parametrize("suffix", ["", ".yaml"])
def test_shipped_models_load_by_name(name, suffix):
    assert load_model(name + suffix).name == name


def test_overrides_replace_top_level_keys():
    spec = load_model("gpt2", {"batch_size": 3, "sequence_length": 128})
    assert (spec.batch_size, spec.tokens) == (3, 128)


def test_a_hugging_face_config_is_a_model(tmp_path):
    config = {
        "model_type": "gpt2",
        "n_embd": 64,
        "n_layer": 3,
        "n_head": 4,
        "summary_type": "cls_index",
        "vocab_size": 99,
    }
    path = tmp_path / "tiny.json"
    path.write_text(json.dumps(config))
    spec = load_model(path, {"batch_size": 5})
    assert (spec.name, spec.hidden_size, spec.layers, spec.batch_size, spec.tokens) == ("tiny", 64, 3, 5, 1024)
    model = tmp_path / "model.yaml"
    model.write_text("hf_config: tiny.json\nname: mine\nbatch_size: 7\nattention: eager\nprecision: bf16\n")
    spec = load_model(model)
    assert (spec.name, spec.hidden_size, spec.batch_size, spec.attention) == ("mine", 64, 7, "eager")
    model.write_text("hf_config: tiny.json\nbatch_sise: 7\n")
    with pytest.raises(ConfigError, match=r"batch_sise: unknown key, .*did you mean 'batch_size'"):
        load_model(model)


def test_absent_hugging_face_fields_take_its_defaults():
    transformers = pytest.importorskip("transformers", reason="the optional oracle is not installed")
    classes = {"gpt2": "GPT2Config", "opt": "OPTConfig", "llama": "LlamaConfig", "bert": "BertConfig"}
    for model_type, name in classes.items():
        real = getattr(transformers, name)()
        ours = load_model({"model_type": model_type})
        assert ours.vocab_size == real.vocab_size
        assert (ours.hidden_size, ours.layers) == (real.hidden_size, real.num_hidden_layers)
        assert (ours.heads, ours.max_positions) == (real.num_attention_heads, real.max_position_embeddings)
        assert ours.tied == real.tie_word_embeddings
        explicit = load_model({**json.loads(real.to_json_string(use_diff=False)), "model_type": model_type})
        # A Llama config spells out what our spec derives.
        derived = {"name", "head_dim", "kv_heads"}
        assert explicit.model_dump(exclude=derived) == ours.model_dump(exclude=derived)
        assert (explicit.groups, explicit.width_of_head) == (ours.groups, ours.width_of_head)


def test_specs_are_frozen():
    with pytest.raises(Exception, match="frozen"):
        load_model(VISION).depth = 18
