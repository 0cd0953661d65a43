"""Every op of every shipped model has a kernel rule, on both kinds of device. The check itself is tested by losing a rule."""

from functools import cache

import pytest

from perfmodel.config import load_model
from perfmodel.config.loading import list_configs
from perfmodel.db import load_device
from perfmodel.estimate import Source
from perfmodel.extract import trace
from perfmodel.kernels import calls_of, has_rule, price, registered_rules
from perfmodel.kernels.registry import FAMILIES, RULES
from perfmodel.models import build

MODELS = list_configs("models")


@cache
def graph_of(name, target="cuda", **overrides):
    """The graph of a shipped model; transformers with two layers, since layers repeat."""
    spec = load_model(name)
    if spec.kind == "transformer":
        overrides = {"layers": 2, **overrides}
    return trace(build(load_model(name, overrides)), target=target)


def without_rule(graph):
    return sorted({op.name for op in graph.ops if not has_rule(op)})


@pytest.mark.parametrize("target", ["cuda", "cpu"])
@pytest.mark.parametrize("name", MODELS)
def test_no_op_is_unmodelled(name, target):
    graph = graph_of(name, target)
    assert without_rule(graph) == []
    device = load_device("a100_sxm_80gb" if target == "cuda" else "cpu")
    for op, estimates in zip(graph.ops, price(graph.ops, device), strict=True):
        for estimate in estimates:
            assert 0 < estimate.time_s < 600, op  # the largest is a product of 14 TFLOP in bf16 on two cores
            assert estimate.low_s <= estimate.time_s <= estimate.high_s, op
            assert estimate.source is not Source.UNMODELLED


@pytest.mark.parametrize("optimizer", ["sgd", "adagrad", "rowwise_adagrad", "adam"])
@pytest.mark.parametrize("precision", ["fp32", "amp_fp16", "bf16"])
def test_no_op_of_a_dlrm_is_unmodelled(optimizer, precision):
    assert without_rule(graph_of("dlrm_small", sparse_optimizer=optimizer, precision=precision)) == []


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("precision", ["fp32", "tf32", "amp_bf16"])
def test_no_op_of_a_transformer_is_unmodelled(attention, precision):
    assert without_rule(graph_of("gpt2", attention=attention, precision=precision)) == []


def test_the_check_sees_a_missing_rule(monkeypatch):
    registered_rules()
    graph = graph_of("dlrm_small")
    monkeypatch.delitem(RULES, "aten.cat")
    assert without_rule(graph) == ["aten.cat"]


def test_every_rule_names_a_family_with_a_law():
    families = {call.family for name in MODELS for op in graph_of(name).ops for call in calls_of(op)}
    assert families <= set(FAMILIES)
