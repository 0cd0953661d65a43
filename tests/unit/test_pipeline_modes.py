"""Execution modes, input copies, overlap, stragglers and jitter, against closed forms and the event engine."""

from fractions import Fraction

import pytest

from perfmodel.api import Predictor, predict_run
from perfmodel.errors import ConfigError
from perfmodel.pipeline.capture import REPLAY_NODE_S, REPLAY_S
from perfmodel.pipeline.contention import overlap_model
from perfmodel.sim.check import check_timeline
from perfmodel.sim.compile import compile_programs
from perfmodel.sim.program import HOST
from perfmodel.sim.steady_overlap import simulate_overlapped_steady
from perfmodel.units import PS_PER_S, format_time

SMALL = {
    "kind": "dlrm", "name": "small", "batch_size": 64, "dense_features": 13, "bottom_mlp": [64, 16], "top_mlp": [64, 1],
    "embedding_dim": 16, "tables": [1000] * 4,
}  # fmt: skip
BIG = {
    "kind": "transformer", "architecture": "gpt2", "name": "big", "hidden_size": 1024, "layers": 4, "heads": 16,
    "max_positions": 512, "vocab_size": 8192, "batch_size": 8, "precision": "amp_bf16",
}  # fmt: skip


def run(model, topology="a100", **options):
    return predict_run(model, topology, check=True, **options)


def host_tasks(found):
    return [info for info in found.classes[0].tasks if info.category == "host"]


def test_a_host_bound_step_takes_the_hosts_time():
    """Every host task of the steady step, one after the other, is the iteration time."""
    found = run(SMALL)
    total_s = sum(info.estimate.time_s for info in host_tasks(found))
    assert found.prediction.iteration_time_s == pytest.approx(total_s, rel=1e-6)


def test_host_time_is_dispatch_and_launches_of_every_op():
    """By hand: each op's dispatch, and the launch of each kernel."""
    found = run(SMALL)
    prices = found.classes[0].prices
    expected_s = prices.of_events("dispatch_s").sum()
    expected_s += prices.of_events("n_kernels").sum() * found.classes[0].device.host.launch_s
    assert sum(info.estimate.time_s for info in host_tasks(found)) == pytest.approx(expected_s)


def test_a_captured_step_has_one_replay():
    found = run(SMALL, mode="cuda_graph")
    eager = run(SMALL)
    copies = sum(e.phase == "input" and e.op.name.endswith("device_copy") for e in found.placement.classes[0].events)
    assert len(host_tasks(found)) == copies + 1
    n_kernels = found.classes[0].prices.of_events("n_kernels").sum() - copies
    # The replay is told from the copies of the inputs, which stay eager, by its size.
    expected_s = REPLAY_S + REPLAY_NODE_S * n_kernels
    replay_s = min((info.estimate.time_s for info in host_tasks(found)), key=lambda t: abs(t - expected_s))
    assert replay_s == pytest.approx(REPLAY_S + REPLAY_NODE_S * n_kernels)
    assert found.prediction.iteration_time_s < 0.5 * eager.prediction.iteration_time_s


def test_kernels_take_the_same_time_captured():
    eager, captured = run(BIG), run(BIG, mode="cuda_graph")
    assert captured.prediction.breakdown.compute_s == pytest.approx(eager.prediction.breakdown.compute_s)


def test_compiled_code_is_faster_on_host_and_device():
    for model in (SMALL, BIG):
        assert run(model, mode="compile").prediction.iteration_time_s < run(model).prediction.iteration_time_s


def test_a_pageable_copy_blocks_the_host_until_it_is_done():
    found = run(BIG, input_copies="pageable")
    lowered, timeline = found.classes[0], found.steady.timeline
    ends, starts = timeline.ends(0), timeline.starts(0)
    syncs = [i for i, info in enumerate(lowered.tasks) if info.category == "sync"]
    copies = [i for i, info in enumerate(lowered.tasks) if info.category == "copy"]
    assert len(syncs) == len(copies) > 0
    assert all(starts[s] >= ends[c] for s, c in zip(syncs, copies, strict=True))


def test_prefetched_inputs_are_waited_for_by_the_next_iteration():
    found = run(BIG, input_copies="prefetch")
    lowered = found.classes[0]
    assert lowered.carry
    for dep in lowered.carry:
        assert lowered.tasks[dep.on].category == "copy"
        assert lowered.tasks[dep.task].category == "kernel"
    assert check_timeline(found.steady.timeline) == []
    assert found.prediction.iteration_time_s <= run(BIG).prediction.iteration_time_s


@pytest.mark.parametrize("topology", ["dgx", "dgx_h100"])
def test_slowdown_beside_communication_agrees_with_the_event_engine(topology):
    """The same shares solved event by event over unrolled iterations, where what a pair takes is cut to whole permille."""
    found, plain = run(BIG, topology), run(BIG, topology, overlap=False)
    compiled = compile_programs([lowered.program for lowered in plain.classes])
    model = overlap_model(plain.classes, compiled, plain.collectives, plain.topology)
    carry = [dep for lowered in plain.classes for dep in lowered.carry]
    engine = simulate_overlapped_steady([lowered.program for lowered in plain.classes], model, carry_deps=carry)
    assert engine.converged
    assert float(found.steady.iteration_ps) == pytest.approx(float(engine.iteration_ps), rel=1e-4)
    assert found.prediction.iteration_time_s > plain.prediction.iteration_time_s


@pytest.mark.parametrize(
    ("topology", "options", "is_said"),
    [("dgx_h100", {}, True), ("dgx", {}, False), ("dgx_h100", {"overlap": False}, False), ("h100", {}, False)],
)
def test_a_device_whose_slowdown_is_derived_says_so(topology, options, is_said):
    """The law was measured on A100; elsewhere it is derived, which matters only where something runs side by side."""
    found = run(BIG, topology, **options)
    said = [note for note in found.prediction.notes if "derived from A100" in note]
    assert bool(said) == is_said
    without = run(BIG, topology, overlap=False).prediction
    added_s = found.prediction.iteration_time_s - without.iteration_time_s
    assert not said or (said[0].startswith("h100_sxm") and format_time(added_s) in said[0])
    slowed = [name for name in found.prediction.provenance if name.endswith("/overlap")]
    assert bool(slowed) == (added_s > 0)


def test_a_straggler_holds_back_the_rest():
    usual, slow = run(BIG, "dgx"), run(BIG, "dgx", stragglers={3: 1.2})
    by_rank = {rank: summary for summary in slow.prediction.ranks for rank in summary.ranks}
    assert sorted(by_rank) == list(range(8))
    assert slow.prediction.ranks[0].ranks == (3,)
    assert by_rank[0].breakdown.wait_s > 0
    ratio = slow.prediction.iteration_time_s / usual.prediction.iteration_time_s
    assert 1.1 < ratio <= 1.2


def test_jitter_gives_ordered_percentiles_and_the_same_ones_twice():
    options = {"jitter": {"compute": 0.1, "comm": 0.2}, "n_samples": 20}
    first, second = (run(SMALL, "dgx", **options).prediction.percentiles for _ in range(2))
    assert first == second
    assert 0 < first["p50"] <= first["p90"] <= first["p99"]


def test_no_jitter_is_the_steady_time():
    found = run(SMALL, "dgx", jitter={"compute": 0.0}, n_samples=2).prediction
    assert list(found.percentiles.values()) == pytest.approx([found.iteration_time_s] * 3)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mode": "cuda_grph"}, "did you mean 'cuda_graph'"),
        ({"input_copies": "pin"}, "allowed pinned, pageable, prefetch"),
        ({"jitter": {"gpu": 0.1}}, "allowed host, compute, comm, copy"),
        ({"jitter": {"comm": -0.1}}, "a fraction from 0"),
        ({"stragglers": {0: 0.0}}, "one above 0"),
        ({"stragglers": {99: 1.1}}, "found rank 99, allowed 0 to 7"),
    ],
)
def test_settings_that_do_not_exist(options, message):
    with pytest.raises(ConfigError, match=message):
        run(SMALL, "dgx", **options)


def test_a_predictor_answers_as_predict_does():
    predictor = Predictor(SMALL, "dgx", bounds=True)
    for plan in ("ddp", "ddp,bucket_cap=1MiB", "ddp", "ddp"):
        assert predictor.predict(plan) == predict_run(SMALL, "dgx", plan).prediction
    assert predictor.predict(topology="dgx_h100").n_ranks == 8
    assert predictor.predict(batch=128).batch_per_rank == 128


def test_time_on_one_cpu_is_the_sum_of_its_ops():
    found = run(SMALL, "cpu")
    total_ps = int(found.classes[0].program.duration_ps.sum())
    assert found.steady.iteration_ps == Fraction(total_ps)
    assert HOST not in found.classes[0].program.stream
    assert found.prediction.iteration_time_s == pytest.approx(total_ps / PS_PER_S)
