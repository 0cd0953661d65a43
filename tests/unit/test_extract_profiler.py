"""The ops of a real CPU step against torch's profiler, which sees the step without a dispatch mode.

The profiler also reports the operators inside operators, so a recorded op must appear at least as often there; operators
that no other CPU operator of these models calls must appear exactly as often. This finds what tracing itself changes.
"""

from __future__ import annotations

import warnings
from collections import Counter

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from perfmodel.config.dlrm import DlrmSpec
from perfmodel.config.transformer import TransformerSpec
from perfmodel.config.vision import VisionSpec
from perfmodel.extract import trace
from perfmodel.models import build, make_optimizers, materialize

GPT = {"name": "t", "batch_size": 2, "vocab_size": 97, "hidden_size": 32, "layers": 2, "heads": 4, "max_positions": 16}
SPECS = {
    "gpt2": TransformerSpec(**GPT, architecture="gpt2"),
    "llama": TransformerSpec(**GPT, architecture="llama", attention="eager"),
    "bert": TransformerSpec(**GPT, architecture="bert", precision="amp_bf16", attention="eager"),
    "resnet18": VisionSpec(name="v", batch_size=2, depth=18, image_size=32, classes=10),
    "dlrm": DlrmSpec(
        name="d",
        batch_size=8,
        dense_features=13,
        bottom_mlp=(32, 16),
        top_mlp=(32, 1),
        embedding_dim=16,
        tables=({"rows": 100}, {"rows": 200, "pooling_factor": (3.0,)}),
        sparse_optimizer={"name": "rowwise_adagrad"},
    ),
}
EXACT = [
    "mm",
    "addmm",
    "bmm",
    "detach",
    "t",
    "native_layer_norm",
    "native_layer_norm_backward",
    "gelu",
    "gelu_backward",
    "convolution",
    "convolution_backward",
    "native_batch_norm",
    "threshold_backward",
    "_softmax",
    "_softmax_backward_data",
    "nll_loss_forward",
    "_embedding_bag",
    "_embedding_bag_backward",
    "_coalesce",
    "index_put",
    "binary_cross_entropy_with_logits",
    "lerp_",
    "addcdiv_",
    "embedding",
    "embedding_dense_backward",
]
# The kernels of embedding bags and sparse tensors call these.
CALLED_INSIDE = {"dlrm": {"add", "add_", "mul"}}


def profiled(built) -> Counter:
    real = materialize(built)
    optimizers = make_optimizers(real)

    def step() -> None:
        for optimizer in optimizers:
            optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=built.precision == "amp_bf16"):
            loss = real.loss(real.module(*real.args, **real.kwargs))
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()

    step()
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        step()
    names = (event.name for event in profiler.events())
    return Counter(name.removeprefix("aten::") for name in names if name.startswith("aten::"))


@pytest.mark.parametrize("name", SPECS)
def test_recorded_ops_are_those_that_the_profiler_sees(name):
    built = build(SPECS[name])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torch announces sparse invariant checks, once a process
        seen = profiled(built)
        recorded = Counter(op.name.removeprefix("aten.") for op in trace(built, target="cpu").ops)
    assert {op: (count, seen[op]) for op, count in recorded.items() if seen[op] < count} == {}
    exact = {*EXACT, "add", "add_", "mul"} - CALLED_INSIDE.get(name, set())
    assert {op: recorded[op] for op in exact} == {op: seen[op] for op in exact}
