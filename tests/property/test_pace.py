"""The pace of a segmented plan against the simulation of its tasks: equal to the picosecond where nothing slows anything, and
within 0.1 % where compute and collectives slow each other."""

from dataclasses import replace
from functools import lru_cache

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from perfmodel.api import as_topology, extract_graph
from perfmodel.config import load_plan
from perfmodel.errors import ConfigError, InfeasiblePlanError
from perfmodel.pipeline import pace, programs, replay, replay_data, replay_loop
from perfmodel.pipeline.run import TOLERANCE_FRAC, PriceBooks, evaluate_graph, predict_graph
from perfmodel.pipeline.script import NotSegmentedError, script_of
from perfmodel.pipeline.settings import RunSettings
from perfmodel.plan import passes
from perfmodel.units import ps_to_seconds

SMALL = {
    "kind": "transformer", "name": "small", "architecture": "gpt2", "batch_size": 1, "precision": "bf16", "optimizer": "adamw",
    "vocab_size": 512, "hidden_size": 256, "layers": 4, "heads": 4, "max_positions": 128,
}  # fmt: skip
WIDE = SMALL | {"hidden_size": 4096, "heads": 32, "max_positions": 2048}  # its kernels outlast their launches
SETTINGS = RunSettings(bounds=False)
ALONE = RunSettings(bounds=False, overlap=False)  # nothing slows what runs beside it
BOOKS = PriceBooks()


@lru_cache
def small():
    return extract_graph(SMALL)


@lru_cache
def wide():
    return extract_graph(WIDE)


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


def both(text, topology, settings=ALONE, graph=small):
    plan = load_plan(text)
    found = evaluate_graph(graph(), plan, topology, db=None, settings=settings, books=BOOKS)
    return found, predict_graph(graph(), plan, topology, settings=settings, books=BOOKS)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(text=plans)
def test_the_pace_is_that_of_the_simulated_tasks(text) -> None:
    """Without slowdown beside communication, and no stream of this model fills the launch queue."""
    try:
        found, run = both(text, machine("dgx_h100", 2))
    except (ConfigError, InfeasiblePlanError):
        return
    if found is None:
        assert text.startswith("tp=1,pp=1"), "only plain data parallelism has no segments"
        assert "shard=nothing" in text
        return
    assert found.is_exact
    assert found.iteration_time_s == ps_to_seconds(float(run.steady.iteration_ps))
    assert found.memory_bytes == run.prediction.memory_bytes
    assert found.samples == run.prediction.batch_per_rank * run.prediction.replicas


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(text=plans, depth=st.integers(1, 300))
def test_the_pace_behind_a_launch_queue_is_that_of_the_simulated_tasks(text, depth) -> None:
    with pytest.MonkeyPatch.context() as patch:
        for module in (pace, programs):
            patch.setattr(module, "LAUNCH_QUEUE_DEPTH", depth)
        try:
            found, run = both(text, machine("dgx_h100", 2))
        except (ConfigError, InfeasiblePlanError):
            return
    if found is not None:
        assert found.is_exact
        assert found.iteration_time_s == ps_to_seconds(float(run.steady.iteration_ps))


def test_a_short_launch_queue_lengthens_an_iteration_without_numba_as_well(monkeypatch) -> None:
    """A queue of one launch leaves nothing of the host's lead."""
    free, _ = both("tp=2,pp=2,accumulate=2", machine("dgx_h100", 2))
    for module in (pace, programs):
        monkeypatch.setattr(module, "LAUNCH_QUEUE_DEPTH", 1)
    compiled, _ = both("tp=2,pp=2,accumulate=2", machine("dgx_h100", 2))
    monkeypatch.setattr(replay, "has_numba", lambda: False)
    plain, _ = both("tp=2,pp=2,accumulate=2", machine("dgx_h100", 2))
    assert plain == compiled
    assert plain.iteration_time_s > free.iteration_time_s


def test_evaluations_are_the_same_whatever_was_forgotten(monkeypatch) -> None:
    """A sweep over sizes of buckets makes more segments than are kept."""
    plans = [load_plan(f"tp=2,pp=2,accumulate={n},bucket_cap={n}00KiB") for n in (2, 3, 2)]
    topology = machine("dgx_h100", 2)
    kept = [evaluate_graph(small(), plan, topology, db=None, settings=SETTINGS, books=BOOKS) for plan in plans]
    monkeypatch.setattr(passes, "MAX_PASSES", 1)
    monkeypatch.setattr(pace, "MAX_ROWS", 0)
    books = PriceBooks()
    fresh = [evaluate_graph(small(), plan, topology, db=None, settings=SETTINGS, books=books) for plan in plans]
    assert fresh == kept
    assert kept[0] == kept[2] != kept[1]


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(text=plans, name=st.sampled_from(["dgx_h100", "dgx_a100"]))
def test_the_pace_under_slowdown_is_near_that_of_the_simulated_tasks(text, name) -> None:
    """Both search for the same steady state, each in its own way; what they may differ by is what `search` allows for."""
    try:
        found, run = both(text, machine(name, 2), SETTINGS, wide)
    except (ConfigError, InfeasiblePlanError):
        return
    if found is None:
        return
    assert found.iteration_time_s == pytest.approx(run.prediction.iteration_time_s, rel=TOLERANCE_FRAC)
    assert found.memory_bytes == run.prediction.memory_bytes
    parts = found.compute_s + found.host_bound_s + found.wait_s
    assert parts == pytest.approx(found.iteration_time_s, rel=5 * TOLERANCE_FRAC)


@pytest.mark.parametrize("text", ["shard=parameters,accumulate=2", "tp=2,pp=2,accumulate=3,shard=optimizer"])
def test_slowdown_without_numba_is_the_same(monkeypatch, text) -> None:
    compiled, _ = both(text, machine("dgx_a100", 2), SETTINGS, wide)
    monkeypatch.setattr(replay, "has_numba", lambda: False)
    plain, _ = both(text, machine("dgx_a100", 2), SETTINGS, wide)
    alone, _ = both(text, machine("dgx_a100", 2), ALONE, wide)
    assert plain == compiled
    assert not plain.is_exact
    assert plain.iteration_time_s > alone.iteration_time_s, "what runs beside communication slows"


def test_a_kernel_under_a_collective_takes_as_long_as_its_pace_says() -> None:
    """By hand: 1,000 ps of work that memory takes half of, from 0 on; a collective from 400 to 900 holds a tenth and moves so
    much that a kernel of memory alone loses four tenths. It loses 3 of 10: 400 + 500 x 0.7 = 750 of the work is done at 900,
    and the rest at 1,150. The collective met half of the memory for 500 ps."""
    none = {"kernel_ptr": [0, 0, 0, *[1] * 20], "lane_ptr": [0, 1], "lanes": [2]}
    a = replay_data.Plan(**{key: none.get(key, []) for key in replay_data.Plan._fields})
    some = {
        "now": [900], "begin": [400], "holds": [100], "moves": [400], "early": [0], "soon": [0], "met": [0.0],
        "place": [0] * 22, "running": [-1] * 22, "until": [replay_loop.NEVER], "held": [0], "traffic": [0], "area": [0.0],
    }  # fmt: skip
    s = replay_data.State(**{key: some.get(key, []) for key in replay_data.State._fields})
    replay_loop.look_around(a, s, 0, 0, 0)
    assert s.until == [400]
    assert replay_loop.run_over(a, s, 0, (0, 1000, 1000, 500), 0) == 1150
    assert s.met == [500 * 500]


def test_classes_that_share_their_collectives_are_left_to_the_simulator() -> None:
    run = predict_graph(small(), load_plan("tp=2"), machine("dgx_h100", 1), settings=SETTINGS, books=BOOKS)
    twice = replace(run.placement, classes=run.placement.classes * 2)
    with pytest.raises(NotSegmentedError, match="share"):
        script_of(twice, None)
