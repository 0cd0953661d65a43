"""What compute and collectives take from each other: shares from the datasheet, by hand, and means over a timeline."""

from dataclasses import replace

import pytest

from perfmodel.api import as_topology, predict_run
from perfmodel.db import load_device
from perfmodel.estimate import Work
from perfmodel.kernels import KernelCall
from perfmodel.pipeline.contention import overlap_model
from perfmodel.pipeline.pricebook import PriceBook
from perfmodel.pipeline.programs import compile_classes
from perfmodel.sim import COMPUTE, Program, Task, compile_programs
from perfmodel.sim.steady import simulate_steady_compiled
from perfmodel.sim.steady_overlap import simulate_overlapped_steady
from perfmodel.sim.steady_slowed import simulate_slowed

MODEL = {
    "kind": "transformer", "architecture": "gpt2", "name": "gpt", "hidden_size": 512, "layers": 2, "heads": 8,
    "max_positions": 128, "vocab_size": 1024, "batch_size": 2,
}  # fmt: skip
FULL = 1000


def shares(topology, **options):
    """By collective (op, channels): its (held, traffic); and the memory shares of kernels by family."""
    run = predict_run(MODEL, topology, options.pop("plan", "ddp"), **options)
    compiled = compile_programs([lowered.program for lowered in run.classes])
    model = overlap_model(run.classes, compiled, run.collectives, run.topology)
    if model is None:
        return {}, {}
    of_collectives, of_kernels = {}, {}
    lowered, tasks = run.classes[0], compiled.tasks_of(0)
    for i, info in enumerate(lowered.tasks):
        collective = lowered.rank_class.events[info.event].collective
        if info.category == "collective":
            key = collective.op, run.collectives[collective.instance].n_channels
            of_collectives[key] = int(model.held[tasks][i]), int(model.traffic[tasks][i])
        elif info.category == "kernel":
            of_kernels.setdefault(info.family, set()).add(int(model.memory[tasks][i]))
    return of_collectives, of_kernels


def test_an_all_reduce_of_a_dgx_a100_by_hand():
    """24 of 108 SMs; three crossings of memory at the 231.6 GB/s that rings reach, of 1,555 GB/s; times 1.29."""
    found, kernels = shares("dgx")
    wanted = 3 * 231.6 / 1555
    expected = round(1290 * 24 / 108), round(1290 * wanted / (1 + wanted))
    assert found["all_reduce", 24] == pytest.approx(expected, abs=1)
    assert kernels["elementwise"] == {FULL}
    assert kernels["norm"] == {FULL}


def test_kernels_bound_by_arithmetic_want_less_memory():
    """Of a product of 4096 in TF32 on A100, memory takes 3 x 64 MiB / 1,555 GB/s of 2 x 4096^3 / 156 TFLOP/s."""
    work = Work(flops=2 * 4096**3, read_bytes=2 * 4 * 4096**2, write_bytes=4 * 4096**2)
    call = KernelCall(family="gemm", work=work, pipe="tf32_tensor")
    peak_s, memory_s = PriceBook(load_device("a100_sxm_40gb"))._ideal_s(call)
    assert memory_s / peak_s == pytest.approx((3 * 4 * 4096**2 / 1555e9) / (2 * 4096**3 / 156e12), rel=1e-3)


def test_one_gpu_has_nothing_to_slow():
    assert shares("a100") == ({}, {})


def test_a_send_between_hosts_holds_two_channels():
    """Its traffic: four crossings at 24.25 GB/s of one card."""
    found, _ = shares(as_topology("dgx", nodes=2), plan="tp=8,pp=2,micro_batches=2")
    (held, traffic), *rest = (share for (op, _), share in found.items() if op == "send_recv")
    wanted = 4 * 24.25 / 1555
    assert not rest
    assert (held, traffic) == pytest.approx((1290 * 2 / 108, 1290 * wanted / (1 + wanted)), abs=1)


def test_without_shares_nothing_slows():
    compiled = compile_programs([Program(tasks=[Task(stream=COMPUTE, duration_ps=10)])])
    found = simulate_slowed(compiled, [], None)
    assert (found.steady.iteration_ps, found.plain_ps) == (10, 10)


@pytest.mark.parametrize("plan", ["ddp,bucket_cap=5MiB", "shard=parameters", "tp=2,accumulate=2"])
def test_a_prediction_takes_what_the_event_engine_finds(plan):
    """To the picosecond, though its sweeps know nothing of the engine's clock."""
    run = predict_run({**MODEL, "hidden_size": 1024, "batch_size": 16}, "dgx", plan, bounds=False)
    compiled, carry = compile_classes(run.classes)
    model = overlap_model(run.classes, compiled, run.collectives, run.topology)
    engine = simulate_overlapped_steady(compiled.programs, model, carry_deps=carry)
    assert run.steady.converged
    assert simulate_steady_compiled(compiled, carry_deps=carry).iteration_ps < run.steady.iteration_ps
    assert run.steady.iteration_ps == engine.iteration_ps
    assert run.prediction.iteration_time_s == pytest.approx(float(engine.iteration_ps) / 1e12, rel=1e-12)


def test_a_note_says_that_iterations_had_not_begun_to_repeat(monkeypatch):
    def unsettled(*given):
        found = simulate_slowed(*given)
        return replace(found, steady=replace(found.steady, converged=False))

    monkeypatch.setattr("perfmodel.pipeline.run.simulate_slowed", unsettled)
    notes = predict_run(MODEL, "dgx", "ddp", bounds=False).prediction.notes
    assert any("had not settled" in note for note in notes)


def test_the_range_holds_that_of_what_is_added():
    """A device on which it is derived: what it adds may be half of that, or two and a half times."""
    big = {**MODEL, "hidden_size": 1024, "batch_size": 16}
    with_it, without = (predict_run(big, "dgx_h100", overlap=overlap).prediction for overlap in (True, False))
    added_s = with_it.iteration_time_s - without.iteration_time_s
    assert added_s > 0
    assert with_it.iteration_time_s - with_it.low_s >= 0.5 * added_s
    assert with_it.high_s - with_it.iteration_time_s >= 1.5 * added_s
