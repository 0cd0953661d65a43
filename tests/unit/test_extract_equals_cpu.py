"""What is recorded without storage equals what is recorded when the same step really runs on the CPU.

Oracle: real torch on real CPU tensors. Compared: names, overloads, modules, phases, recomputation, argument names,
shapes, types and strides of every op in order, and the size, lifetime and kind of every storage. Known differences,
avoided by the choice of inputs: a coalesced gradient has as many entries as indices (large tables, so that indices do not
repeat), and an image of one pixel leaves its layout open (images of 64 pixels).
"""

from __future__ import annotations

import warnings
from functools import cache

import pytest
import torch

from perfmodel.config.dlrm import DlrmSpec
from perfmodel.config.transformer import TransformerSpec
from perfmodel.config.vision import VisionSpec
from perfmodel.extract import trace
from perfmodel.graph import Graph, Op
from perfmodel.models import build

DLRM = {
    "name": "dlrm",
    "batch_size": 8,
    "dense_features": 13,
    "bottom_mlp": (32, 16),
    "top_mlp": (32, 1),
    "embedding_dim": 16,
    "tables": (
        {"rows": 100_000},
        {"rows": 200_000, "pooling_factor": (3.0,)},
        {"rows": 300_000, "weighted": True, "pooling_factor": (2.0, 1.0)},
    ),
}
TRANSFORMER = {
    "name": "t",
    "batch_size": 2,
    "vocab_size": 101,
    "hidden_size": 32,
    "layers": 2,
    "heads": 4,
    "max_positions": 16,
}
VISION = {"name": "v", "batch_size": 2, "depth": 18, "image_size": 33, "classes": 10}
ADAM_FUSED = {"name": "adamw", "implementation": "fused"}
ADAM_FOREACH = {"name": "adam", "implementation": "foreach"}

SPECS = {
    **{f"dlrm_{name}": DlrmSpec(**DLRM, sparse_optimizer={"name": name}) for name in ("sgd", "adagrad", "adam")},
    "dlrm_rowwise": DlrmSpec(**DLRM, sparse_optimizer={"name": "rowwise_adagrad"}),
    "dlrm_dcn": DlrmSpec(**DLRM, interaction={"kind": "dcnv2", "rank": 8}, optimizer={"name": "adagrad"}),
    "dlrm_amp": DlrmSpec(**DLRM, precision="amp_bf16", interaction={"kind": "cat"}),
    **{
        f"{architecture}_{attention}_{precision}": TransformerSpec(
            **TRANSFORMER, architecture=architecture, attention=attention, precision=precision
        )
        for architecture in ("gpt2", "opt", "llama", "bert")
        for attention, precision in (("sdpa", "fp32"), ("sdpa", "amp_bf16"), ("eager", "amp_bf16"), ("eager", "bf16"))
    },
    "gpt2_recompute": TransformerSpec(**TRANSFORMER, architecture="gpt2", gradient_checkpointing=True),
    "gpt2_recompute_amp": TransformerSpec(
        **TRANSFORMER, architecture="gpt2", gradient_checkpointing=True, precision="amp_bf16"
    ),
    "gpt2_dropout": TransformerSpec(**TRANSFORMER, architecture="gpt2", hidden_dropout=0.1, attention_dropout=0.1),
    "llama_grouped": TransformerSpec(**TRANSFORMER, architecture="llama", kv_heads=2),
    "gpt2_fused": TransformerSpec(**TRANSFORMER, architecture="gpt2", optimizer=ADAM_FUSED),
    "gpt2_foreach": TransformerSpec(**TRANSFORMER, architecture="gpt2", optimizer=ADAM_FOREACH),
    "resnet18": VisionSpec(**VISION),
    "resnet18_last": VisionSpec(**VISION, channels_last=True, precision="amp_bf16"),
    "resnext50": VisionSpec(
        **{**VISION, "depth": 50, "image_size": 32},
        groups=32,
        width_per_group=4,
        optimizer={"name": "sgd", "momentum": 0.9},
    ),
}


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Small convolutions on two threads of a busy machine wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@cache
def traced(name: str, values: str) -> Graph:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torch announces sparse invariant checks, once a process
        return trace(build(SPECS[name]), target="cpu", values=values)


def row(op: Op) -> tuple:
    tensors = (*op.inputs, *op.outputs)
    return (
        (op.phase, op.name, op.overload, op.module, op.recompute, op.input_names),
        tuple((t.shape, t.dtype, t.strides) for t in tensors),
    )


@pytest.mark.parametrize("name", SPECS)
def test_ops_without_storage_are_those_of_the_real_step(name):
    assert [row(op) for op in traced(name, "meta").ops] == [row(op) for op in traced(name, "real").ops]


@pytest.mark.parametrize("name", SPECS)
def test_storages_live_as_long_as_in_the_real_step(name):
    meta, real = (
        [(s.bytes, s.born, s.dies, s.kind) for s in traced(name, values).storages] for values in ("meta", "real")
    )
    assert meta == real


@pytest.mark.parametrize("name", SPECS)
def test_gradients_are_ready_after_the_same_ops(name):
    meta, real = (
        [(p.name, p.grad_op, p.sparse_grad) for p in traced(name, values).parameters] for values in ("meta", "real")
    )
    assert meta == real
    assert all(grad_op is not None for _, grad_op, _ in meta)


def test_the_comparison_sees_one_changed_op():
    ops = [row(op) for op in traced("dlrm_sgd", "meta").ops]
    changed = [(head if index != 7 else (*head[:4], True, head[5]), rest) for index, (head, rest) in enumerate(ops)]
    assert changed != ops
