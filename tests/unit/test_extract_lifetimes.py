"""Storage lifetimes against memory that a real step on the CPU holds.

Oracle: torch's own allocation events. The memory profiler of torch (`profile_memory`) reports every allocation and every
release of the CPU allocator with its size, whoever holds the tensor and without our recorder or its weak references.
"""

from __future__ import annotations

import gc

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from perfmodel.config.dlrm import DlrmSpec
from perfmodel.config.transformer import TransformerSpec
from perfmodel.config.vision import VisionSpec
from perfmodel.extract import trace
from perfmodel.models import BuiltModel, build, make_optimizers, materialize

GPT = {"name": "t", "batch_size": 4, "vocab_size": 211, "hidden_size": 64, "layers": 3, "heads": 4, "max_positions": 32}
SPECS = {
    "gpt2": TransformerSpec(**GPT, architecture="gpt2", optimizer={"name": "adamw"}),
    "gpt2_recompute": TransformerSpec(**GPT, architecture="gpt2", gradient_checkpointing=True),
    "llama": TransformerSpec(**GPT, architecture="llama", attention="eager", optimizer={"name": "sgd"}),
    "resnet18": VisionSpec(name="v", batch_size=8, depth=18, image_size=32, classes=10),
    "dlrm": DlrmSpec(
        name="d",
        batch_size=256,
        dense_features=13,
        bottom_mlp=(128, 32),
        top_mlp=(128, 1),
        embedding_dim=32,
        tables=({"rows": 2000}, {"rows": 1000, "pooling_factor": (4.0,)}),
    ),
}


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Small convolutions on two threads of a busy machine wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def measured_peak_bytes(built: BuiltModel) -> int:
    """Most bytes above what lay there before the step: gradients, activations and temporaries of the second step."""
    real = materialize(built)
    optimizers = make_optimizers(real)

    def step() -> None:
        for optimizer in optimizers:
            optimizer.zero_grad()
        output = real.module(*real.args, **real.kwargs)
        loss = real.loss(output)
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()

    step()
    for optimizer in optimizers:
        optimizer.zero_grad()
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        step()
    events = [e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"]
    held = peak = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return peak


def predicted_peak_bytes(built: BuiltModel) -> int:
    """The same from a graph's storages: everything born in the step."""
    graph = trace(built, target="cpu")
    changes = [0] * (len(graph.ops) + 2)
    for storage in graph.storages:
        if storage.born >= 0:
            changes[storage.born] += storage.bytes
            changes[storage.dies + 1] -= storage.bytes
    held = peak = 0
    for change in changes:
        held += change
        peak = max(peak, held)
    return peak


@pytest.mark.parametrize("name", SPECS)
def test_peak_memory_is_within_five_percent_of_the_allocators(name):
    built = build(SPECS[name])
    assert predicted_peak_bytes(built) == pytest.approx(measured_peak_bytes(built), rel=0.05)


def test_kinds_and_lifetimes_by_hand():
    module = nn.Sequential(nn.Linear(8, 4, bias=False), nn.Tanh())
    module.register_buffer("unused", torch.zeros(5))
    built = BuiltModel(
        name="m", module=module, args=(torch.ones(2, 8),), loss=lambda out: out.sum(), optimizer="adagrad"
    )
    graph = trace(built)
    names = [op.name for op in graph.ops]
    by_kind = {}
    for storage in graph.storages:
        by_kind.setdefault(storage.kind, []).append(storage)
    end = len(graph.ops)
    assert [(s.bytes, s.born, s.dies) for s in by_kind["parameter"]] == [(128, -1, end)]
    assert [(s.bytes, s.born, s.dies) for s in by_kind["buffer"]] == [(20, -1, end)]
    assert [(s.bytes, s.born, s.dies) for s in by_kind["input"]] == [(64, 0, end)]
    assert [(s.bytes, s.born, s.dies) for s in by_kind["optimizer_state"]] == [(128, -1, end)]
    assert [(s.bytes, s.born, s.dies) for s in by_kind["gradient"]] == [(128, names.index("aten.mm", 5), end)]
    product = next(s for s in by_kind["activation"] if s.born == names.index("aten.mm"))
    assert product.dies == names.index("aten.tanh")  # tanh keeps its output, not its input
    tanh = next(s for s in by_kind["activation"] if s.born == names.index("aten.tanh"))
    assert tanh.dies == end  # the caller holds the module's output until the step is over
