"""What one iteration is: a training step, its forward and backward, or a forward pass; against a count by hand."""

import pytest
from torch import nn

from perfmodel.config import load_model
from perfmodel.extract import trace
from perfmodel.models import build

BERT = {
    "kind": "transformer", "name": "tiny", "architecture": "bert", "vocab_size": 64, "hidden_size": 16, "layers": 2,
    "heads": 2, "max_positions": 8, "batch_size": 2, "attention": "eager", "hidden_dropout": 0.1,
    "attention_dropout": 0.1,
}  # fmt: skip


def phases(graph):
    return {op.phase for op in graph.ops}


def test_forward_runs_no_dropout_and_restores_the_module():
    built = build(load_model(BERT))
    graph = trace(built, span="forward")
    assert phases(graph) == {"forward"}
    assert not [op for op in graph.ops if "dropout" in op.name]
    assert all(parameter.grad_op is None for parameter in graph.parameters)
    assert built.module.training


def test_forward_backward_adds_to_the_gradients_of_the_step_before():
    built = build(load_model(BERT))
    graph = trace(built, span="forward_backward")
    assert phases(graph) == {"forward", "loss", "backward"}
    gradients = {s.id for s in graph.storages if s.kind == "gradient"}
    added = [op for op in graph.ops if op.name == "aten.add_" and op.outputs[0].storage in gradients]
    assert len(added) == sum(1 for _ in built.module.parameters())  # one a parameter; the shared table counts once
    assert all(parameter.grad is None for parameter in built.module.parameters())


@pytest.mark.parametrize("span", ["train", "forward_backward", "forward"])
def test_every_span_of_every_kind(span):
    graph = trace(build(load_model("dlrm_small", {"batch_size": 8})), span=span)
    assert ("optimizer" in phases(graph)) == (span == "train")


def test_batch_norm_uses_running_statistics_in_a_forward_pass():
    built = build(load_model({"kind": "vision", "name": "r", "depth": 18, "image_size": 32, "batch_size": 2}))
    graph = trace(built, span="forward")
    norms = [op for op in graph.ops if "batch_norm" in op.name]
    assert len(norms) == sum(isinstance(part, nn.BatchNorm2d) for part in built.module.modules())
    assert not any(op.attrs.get("training", op.attrs.get("train")) for op in norms)
