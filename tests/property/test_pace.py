"""The pace of a segmented plan equals the simulation of its tasks to the picosecond, and is never above a prediction."""

from dataclasses import replace
from functools import lru_cache

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from perfmodel.api import as_topology, extract_graph
from perfmodel.config import load_plan
from perfmodel.errors import ConfigError, InfeasiblePlanError
from perfmodel.pipeline import pace, programs, queued_pace
from perfmodel.pipeline.run import PriceBooks, find_floor, predict_graph
from perfmodel.pipeline.script import NotSegmentedError, script_of
from perfmodel.pipeline.settings import RunSettings
from perfmodel.plan import passes
from perfmodel.units import ps_to_seconds

SMALL = {
    "kind": "transformer", "name": "small", "architecture": "gpt2", "batch_size": 1, "precision": "bf16", "optimizer": "adamw",
    "vocab_size": 512, "hidden_size": 256, "layers": 4, "heads": 4, "max_positions": 128,
}  # fmt: skip
SETTINGS = RunSettings(bounds=False)
ALONE = RunSettings(bounds=False, overlap=False)  # nothing slows what runs beside it
BOOKS = PriceBooks()


@lru_cache
def small():
    return extract_graph(SMALL)


@lru_cache
def machine(name, nodes):
    return as_topology(name, nodes)


plans = st.builds(
    lambda tp, pp, micro, shard, rest: ",".join([f"tp={tp},pp={pp},accumulate={micro},shard={shard}", *rest]),
    st.sampled_from([1, 2, 4]),
    st.sampled_from([1, 2, 4]),
    st.integers(1, 6),
    st.sampled_from(["nothing", "optimizer", "gradients", "parameters"]),
    st.lists(
        st.sampled_from(
            ["sequence=true", "recompute=full", "bucket_cap=1MiB", "schedule=gpipe", "schedule=zero_bubble"]
        ),
        max_size=2,
        unique_by=lambda word: word.partition("=")[0],
    ),
)


def both(text, topology, settings=ALONE):
    plan = load_plan(text)
    floor = find_floor(small(), plan, topology, db=None, settings=settings, books=BOOKS)
    return floor, predict_graph(small(), plan, topology, settings=settings, books=BOOKS)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(text=plans)
def test_the_pace_is_that_of_the_simulated_tasks(text) -> None:
    """Without slowdown beside communication, and no stream of this model fills the launch queue: every floor is exact."""
    try:
        floor, run = both(text, machine("dgx_h100", 2))
    except (ConfigError, InfeasiblePlanError):
        return
    if floor is None:
        assert text.startswith("tp=1,pp=1"), "only plain data parallelism has no segments"
        assert "shard=nothing" in text
        return
    assert floor.iteration_time_s == ps_to_seconds(float(run.steady.iteration_ps))
    assert floor.memory_bytes == run.prediction.memory_bytes
    assert floor.samples == run.prediction.batch_per_rank * run.prediction.replicas


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(text=plans, depth=st.integers(1, 300))
def test_the_pace_behind_a_launch_queue_is_that_of_the_simulated_tasks(text, depth) -> None:
    with pytest.MonkeyPatch.context() as patch:
        for module in (pace, programs):
            patch.setattr(module, "LAUNCH_QUEUE_DEPTH", depth)
        try:
            floor, run = both(text, machine("dgx_h100", 2))
        except (ConfigError, InfeasiblePlanError):
            return
    if floor is not None:
        assert floor.is_exact
        assert floor.iteration_time_s == ps_to_seconds(float(run.steady.iteration_ps))


def test_a_short_launch_queue_lengthens_an_iteration_without_numba_as_well(monkeypatch) -> None:
    """A queue of one launch leaves nothing of the host's lead."""
    free, _ = both("tp=2,pp=2,accumulate=2", machine("dgx_h100", 2))
    for module in (pace, programs):
        monkeypatch.setattr(module, "LAUNCH_QUEUE_DEPTH", 1)
    compiled, _ = both("tp=2,pp=2,accumulate=2", machine("dgx_h100", 2))
    monkeypatch.setattr(queued_pace, "has_numba", lambda: False)
    plain, _ = both("tp=2,pp=2,accumulate=2", machine("dgx_h100", 2))
    assert plain == compiled
    assert plain.iteration_time_s > free.iteration_time_s


def test_floors_are_the_same_whatever_was_forgotten(monkeypatch) -> None:
    """A sweep over sizes of buckets makes more segments than are kept."""
    plans = [load_plan(f"tp=2,pp=2,accumulate={n},bucket_cap={n}00KiB") for n in (2, 3, 2)]
    topology = machine("dgx_h100", 2)
    kept = [find_floor(small(), plan, topology, db=None, settings=SETTINGS, books=BOOKS) for plan in plans]
    monkeypatch.setattr(passes, "MAX_PASSES", 1)
    monkeypatch.setattr(pace, "MAX_TASKS", 0)
    books = PriceBooks()
    fresh = [find_floor(small(), plan, topology, db=None, settings=SETTINGS, books=books) for plan in plans]
    assert fresh == kept
    assert kept[0] == kept[2] != kept[1]


@pytest.mark.parametrize(
    "text", ["shard=parameters", "shard=gradients", "tp=2,pp=2,accumulate=4", "tp=2,shard=optimizer"]
)
def test_the_floor_is_not_above_a_prediction_where_compute_slows_beside_communication(text) -> None:
    floor, run = both(text, machine("dgx_a100", 1), SETTINGS)
    assert not floor.is_exact
    assert floor.iteration_time_s <= run.prediction.iteration_time_s


def test_classes_that_share_their_collectives_are_left_to_the_simulator() -> None:
    run = predict_graph(small(), load_plan("tp=2"), machine("dgx_h100", 1), settings=SETTINGS, books=BOOKS)
    twice = replace(run.placement, classes=run.placement.classes * 2)
    with pytest.raises(NotSegmentedError, match="share"):
        script_of(twice, None)
