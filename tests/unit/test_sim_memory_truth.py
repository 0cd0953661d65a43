"""Peak memory from the graph's lifetimes against torch's own count of live bytes while the step really runs on the CPU."""

import json

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from perfmodel.config import load_model
from perfmodel.extract import trace
from perfmodel.models import build, make_optimizers, materialize
from perfmodel.sim import COMPUTE, Program, Task, simulate
from perfmodel.sim.memory import EXACT, Allocation, memory_over_time

LIMIT_FRAC = 0.05
DECODER = {"kind": "transformer", "hidden_size": 64, "layers": 3, "heads": 4, "max_positions": 64, "batch_size": 4}
MODELS = {
    "dlrm": {
        "kind": "dlrm",
        "dense_features": 13,
        "bottom_mlp": [64, 16],
        "top_mlp": [64, 1],
        "embedding_dim": 16,
        "batch_size": 128,
        "tables": [1000, {"rows": 2000, "pooling_factor": 3}, 500],
    },
    "resnet": {"kind": "vision", "depth": 18, "batch_size": 4, "image_size": 64, "classes": 10},
    "gpt2": {**DECODER, "architecture": "gpt2", "vocab_size": 300},
    "gpt2_adamw": {**DECODER, "architecture": "gpt2", "vocab_size": 300, "optimizer": "adamw"},
    "gpt2_checkpointed": {**DECODER, "architecture": "gpt2", "vocab_size": 300, "gradient_checkpointing": True},
}


def predicted(graph):
    program = Program(tasks=[Task(stream=COMPUTE, duration_ps=1)] * len(graph.ops))
    allocations = [
        Allocation(bytes=s.bytes, born=s.born, dies=None if s.dies >= len(graph.ops) else s.dies)
        for s in graph.storages
    ]
    return memory_over_time(simulate([program]), 0, allocations, EXACT).peak_bytes


def measured(built, folder):
    """Largest live bytes that torch's CPU allocator reports during the second step, above what lives before it."""
    real = materialize(built, 1)
    optimizers = make_optimizers(real)

    def step():
        output = real.module(*real.args, **real.kwargs)  # a training loop's variable keeps it alive through backward
        real.loss(output).backward()
        for optimizer in optimizers:
            optimizer.step()

    step()
    for optimizer in optimizers:
        optimizer.zero_grad(set_to_none=True)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        step()
    profiler.export_chrome_trace(str(folder / "trace.json"))
    events = json.loads((folder / "trace.json").read_text())["traceEvents"]
    changes = [(e["ts"], e["args"]["Bytes"]) for e in events if e["name"] == "[memory]"]
    live = peak = 0
    for _, change in sorted(changes, key=lambda row: row[0]):
        live += change
        peak = max(peak, live)
    return peak


@pytest.mark.parametrize("name", MODELS)
def test_peak_is_what_torch_counts(name, tmp_path):
    torch.manual_seed(0)
    built = build(load_model({"name": name, **MODELS[name]}))
    graph = trace(built, target="cpu")
    before = sum(s.bytes for s in graph.storages if s.born < 0)
    # What lives before the step is left out on both sides: it would only flatter the comparison.
    assert predicted(graph) - before == pytest.approx(measured(built, tmp_path), rel=LIMIT_FRAC)
