"""Memory of a rank: the plan's peak, the curve over the simulated time, and what the allocator adds, agree with each other.

That the graph's lifetimes give the peak that torch counts while the step really runs is tested in test_sim_memory_truth.py.
"""

import pytest

from perfmodel.api import extract_graph, predict_run
from perfmodel.pipeline.memory import allocator_overhead, memory_curve, with_overhead
from perfmodel.plan import MemoryUse
from perfmodel.sim.memory import PYTORCH

MODELS = {
    "dlrm": {
        "kind": "dlrm", "batch_size": 128, "dense_features": 13, "bottom_mlp": [64, 16], "top_mlp": [64, 1],
        "embedding_dim": 16, "tables": [1000] * 4,
    },
    "gpt2": {
        "kind": "transformer", "architecture": "gpt2", "hidden_size": 64, "layers": 2, "heads": 4, "max_positions": 64,
        "vocab_size": 300, "batch_size": 4, "precision": "amp_bf16", "optimizer": "adamw",
    },
    "resnet": {"kind": "vision", "depth": 18, "batch_size": 4, "image_size": 64, "classes": 10},
}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_peak_of_the_plan_and_of_the_curve_agree(name):
    """By op the live bytes exactly; by task with each request rounded up to 512 bytes."""
    model = {"name": name, **MODELS[name]}
    graph, run = extract_graph(model), predict_run(model, "a100", bounds=False)
    memory = run.prediction.ranks[0].memory
    live = memory.total_bytes - memory.allocator_bytes
    overhead, peak = allocator_overhead(graph, frozenset())
    assert live == peak
    curve = memory_curve(run.classes[0], 0, run.steady.timeline, graph, frozenset())
    assert live <= curve.peak_bytes <= live + PYTORCH.round_bytes * len(graph.storages)
    assert curve.reserved_bytes == pytest.approx(live + overhead, rel=0.05)
    assert memory.allocator_bytes == overhead


@pytest.mark.parametrize("name", MODELS)
def test_nothing_is_in_use_that_was_not_taken(name):
    model = {"name": name, **MODELS[name]}
    graph, run = extract_graph(model), predict_run(model, "a100", bounds=False)
    curve = memory_curve(run.classes[0], 0, run.steady.timeline, graph, frozenset())
    assert curve.bytes.min() >= 0
    assert (curve.time_ps[1:] >= curve.time_ps[:-1]).all()
    assert curve.bytes.max() == curve.peak_bytes <= curve.reserved_bytes


def test_a_rank_with_part_of_the_graph_has_part_of_the_overhead():
    whole = MemoryUse(parameters_bytes=1000, activations_bytes=3000)
    assert with_overhead(whole, (400, 4000)).allocator_bytes == 400
    assert with_overhead(MemoryUse(parameters_bytes=1000), (400, 4000)).allocator_bytes == 100
    assert with_overhead(MemoryUse(parameters_bytes=100_000), (400, 4000)).allocator_bytes == 400
