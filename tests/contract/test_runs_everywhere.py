"""Every shipped model on one device of each architecture, and every shipped topology: a checked prediction or a reason."""

from functools import cache

import pytest

from perfmodel import predict
from perfmodel.config import load_model, load_plan, load_topology
from perfmodel.config.loading import list_configs
from perfmodel.db import list_devices, load_device
from perfmodel.errors import InfeasiblePlanError
from perfmodel.estimate import Source
from perfmodel.extract import trace
from perfmodel.kernels import price
from perfmodel.models import build
from perfmodel.pipeline.run import predict_graph
from perfmodel.pipeline.settings import RunSettings
from perfmodel.sim.check import check_timeline
from perfmodel.topology import build_topology

MODELS = list_configs("models")
TOPOLOGIES = list_configs("topologies")
SETTINGS = RunSettings(bounds=False)
MACHINES = {load_device(build_topology(load_topology(name)).ranks[0].device).architecture: name for name in TOPOLOGIES}


@cache
def graph_of(name, target):
    """A shipped model at batch 2; transformers with two layers, since layers repeat."""
    overrides = {"batch_size": 2} | ({"layers": 2} if load_model(name).kind == "transformer" else {})
    return trace(build(load_model(name, overrides)), target=target)


def check_prediction(prediction, n_ranks):
    assert prediction.n_ranks == n_ranks
    assert 0 < prediction.low_s <= prediction.iteration_time_s <= prediction.high_s < 3600
    assert sum(prediction.coverage.values()) == pytest.approx(1.0)
    assert Source.UNMODELLED.name.lower() not in prediction.coverage
    assert sorted(rank for summary in prediction.ranks for rank in summary.ranks) == list(range(n_ranks))
    for summary in prediction.ranks:
        assert summary.breakdown.total_s == pytest.approx(prediction.iteration_time_s, rel=1e-6)
        tensors_bytes = summary.memory.total_bytes - summary.memory.allocator_bytes
        assert 0 < tensors_bytes <= summary.memory_capacity_bytes
        if summary.memory.total_bytes > summary.memory_capacity_bytes:
            assert any("allocator" in note for note in prediction.notes)


def run_or_refusal(graph, topology):
    try:
        return predict_graph(graph, load_plan("ddp"), topology, settings=SETTINGS)
    except InfeasiblePlanError as refusal:
        return refusal


@pytest.mark.parametrize("machine", sorted(set(MACHINES.values())))
@pytest.mark.parametrize("model", MODELS)
def test_every_model_on_every_architecture(model, machine):
    topology = build_topology(load_topology(machine))
    device = load_device(topology.ranks[0].device)
    graph = graph_of(model, device.kind)
    run = run_or_refusal(graph, topology)
    if isinstance(run, InfeasiblePlanError):
        assert "needs" in str(run)
        everything = sum(storage.bytes for storage in graph.storages) + sum(p.tensor.bytes for p in graph.parameters)
        assert everything > device.memory_bytes / len(topology.ranks), "refused although nothing need ever be freed"
        return
    assert check_timeline(run.steady.timeline) == []
    check_prediction(run.prediction, len(topology.ranks))


@pytest.mark.parametrize("name", TOPOLOGIES)
def test_every_topology_runs_a_small_model(name):
    n_ranks = len(build_topology(load_topology(name)).ranks)
    check_prediction(predict("dlrm_small", name, batch=64, check=True, bounds=False), n_ranks)


@pytest.mark.parametrize("name", list_devices())
def test_every_device_prices_every_op_of_the_largest_model(name):
    device = load_device(name)
    graph = graph_of("gpt3_175b", device.kind)
    for op, estimates in zip(graph.ops, price(graph.ops, device), strict=True):
        for estimate in estimates:
            assert 0 < estimate.low_s <= estimate.time_s <= estimate.high_s, op
