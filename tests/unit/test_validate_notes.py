"""What a row's note decides, against hand-written model files; heads and attention of Hugging Face configs."""

import json

import pytest

from perfmodel.api import extract_graph, predict
from perfmodel.config import load_model
from perfmodel.errors import ConfigError
from perfmodel.validate.notes import as_noted, noted
from perfmodel.validate.suite import COLUMNS, parse_suite

BERT = {
    "model_type": "bert", "hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 128,
    "vocab_size": 99,
}  # fmt: skip
GPT2 = {"model_type": "gpt2", "n_embd": 64, "n_layer": 1, "n_head": 2, "n_positions": 64, "vocab_size": 99}
OLD = {"attention": "eager", "transformers": "4.38"}


@pytest.mark.parametrize(
    ("config", "note", "expected"),
    [
        (GPT2, "torch 2.1.0 + transformers 4.38.1 eager attention; mean of 5", OLD),
        (GPT2, "transformers 4.38", OLD),
        (GPT2, "transformers==4.46.3, attn_implementation='eager'", OLD),
        (GPT2, "transformers 4.46", {}),
        (GPT2, "transformers 4.57 eager attention", {"attention": "eager"}),
        (GPT2 | {"attention": "eager"}, "sdpa attention", {"attention": "sdpa"}),
        (GPT2, "sdpa attention", {}),
        (GPT2, "eager mode; attention masks off", {}),
        (BERT, "Eager attention", {"attention": "eager"}),
    ],
)
def test_words_of_a_note(config, note, expected):
    assert noted(note, load_model(config)) == expected


def test_a_megatron_layer_has_the_attention_of_its_own_code():
    assert noted("sdpa attention", load_model("llama3_405b_megatron")) == {}
    assert noted("eager attention", load_model("resnet50")) == {}


def test_a_noted_row_is_predicted_as_the_file_that_says_the_same(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(GPT2))
    model, remark = as_noted(str(path), "transformers 4.38.1 eager attention")
    (tmp_path / "written.yaml").write_text("hf_config: config.json\nattention: eager\ntransformers: '4.38'\n")
    options = {"batch": 4, "phase": "forward", "bounds": False}
    assert (
        predict(model, "a100", **options).iteration_time_s
        == predict(str(tmp_path / "written.yaml"), "a100", **options).iteration_time_s
        != predict(str(path), "a100", **options).iteration_time_s
    )
    assert remark == "attention eager, transformers 4.38: as the row's note says"


@pytest.mark.parametrize(
    ("key", "value", "attention"),
    [
        ("attn_implementation", "eager", "eager"),
        ("_attn_implementation", "flash_attention_2", "sdpa"),
        ("a", 1, "sdpa"),
    ],
)
def test_attention_that_a_config_names(key, value, attention):
    assert load_model(GPT2 | {key: value}).attention == attention


def test_attention_that_does_not_exist_is_refused():
    with pytest.raises(ConfigError, match="attn_implementation: found 'paged', allowed eager, sdpa"):
        load_model(GPT2 | {"attn_implementation": "paged"})


@pytest.mark.parametrize(
    ("architecture", "head"),
    [
        ("BertForPreTraining", "pretraining"),
        ("BertForSequenceClassification", "classification"),
        ("BertForMaskedLM", "lm"),
        ("BertModel", "lm"),
    ],
)
def test_head_of_a_bert_by_its_class(architecture, head):
    assert load_model(BERT | {"architectures": [architecture]}).head == head


def test_layers_that_a_config_never_skips_are_all_there():
    small = {
        "model_type": "bart", "d_model": 32, "encoder_layers": 2, "decoder_layers": 3, "encoder_attention_heads": 2,
        "decoder_attention_heads": 2, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "vocab_size": 99, "dropout": 0.0,
        "max_position_embeddings": 64, "attention_dropout": 0.0,
    }  # fmt: skip
    graph = extract_graph(small, batch=2, seq_len=16, precision="fp32")
    forward = [op.name for op in graph.ops if op.phase == "forward"]
    # Two linears of a feed-forward layer and four of each attention; a decoder's layer has two attentions; and the head.
    assert sum(name in ("aten.addmm", "aten.mm") for name in forward) == 2 * (2 + 4) + 3 * (2 + 8) + 1


def rows(tmp_path, *, batch="16", seq_len="512", precision="fp32"):
    row = f"a,bert_large,a100,ddp,{batch},{seq_len},{precision},eager,train,1,1,,"
    return parse_suite(f"{','.join(COLUMNS)}\n{row}", "suite.csv", tmp_path)


def test_counts_may_be_written_as_floats(tmp_path):
    (case,) = rows(tmp_path, batch="16.0", seq_len="512.00")
    assert (case.batch_per_rank, case.seq_len) == (16, 512)


def test_a_precision_that_is_not_predicted_fails_its_case_alone(tmp_path):
    from perfmodel.cli.validate import predict_case
    from perfmodel.validate.run_suite import run_case

    (case,) = rows(tmp_path, precision="amp_fp16+fp8")
    result = run_case(case, predict_case)
    assert result.predicted_s is None
    assert "precision: found 'amp_fp16+fp8', allowed fp32, tf32" in result.reason
