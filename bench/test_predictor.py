"""Speed of whole predictions, printed as times and rates. Run with `make bench`; nothing here is a gate."""

import random
import resource
import statistics
import subprocess
import sys
import time
from contextlib import suppress
from itertools import cycle, product

import pytest

from perfmodel.api import Predictor, as_topology
from perfmodel.config import load_plan
from perfmodel.errors import InfeasiblePlanError
from perfmodel.heap import uncollected
from perfmodel.pipeline.run import TOLERANCE_FRAC
from perfmodel.sim.warm import warm_up_all
from perfmodel.units import KIBI, format_bytes

pytestmark = pytest.mark.bench

NEW_PLANS = 100
SMALL_ROWS = 1_000_000  # of tables that fit wherever they are put
CAPS = ("ddp", *(f"ddp,bucket_cap={size}MiB" for size in range(10, 60, 5)))


@pytest.fixture(scope="module", params=["dlrm", "gpt2_large"])
def predictor(request):
    """A predictor that has seen the model and its machines."""
    warm_up_all()
    made = Predictor(request.param, "dgx")
    for plan in CAPS:
        made.predict(plan)
    return request.param, made


def report(benchmark, capsys, what):
    seconds = benchmark.stats.stats.median if benchmark.stats else float("nan")
    with capsys.disabled():
        print(f"\n{what}: {seconds * 1e3:.1f} ms, {1 / seconds:,.0f} predictions/s")


def test_another_plan(benchmark, capsys, predictor):
    name, made = predictor
    plans = cycle([load_plan(text) for text in CAPS])
    benchmark(lambda: made.predict(next(plans)))
    report(benchmark, capsys, f"{name} on 8 ranks, another plan")


def test_a_plan_never_placed(benchmark, capsys, predictor):
    """Every round asks for a bucket size that was never asked for: placed, priced, simulated and explained."""
    name, made = predictor
    sizes = random.Random(0).sample(range(2_000, 120_000), 2 * NEW_PLANS)
    plans = iter(
        [load_plan(f"ddp,bucket_cap={size}KiB,gradient_as_bucket_view={str(size % 2 == 1).lower()}") for size in sizes]
    )
    benchmark.pedantic(lambda: made.predict(next(plans)), rounds=NEW_PLANS, warmup_rounds=10)
    report(benchmark, capsys, f"{name} on 8 ranks, a plan never placed")


def test_tables_placed_otherwise(benchmark, capsys):
    """Every round puts four of DLRM's smaller tables on other ranks than any plan before."""
    made, chosen = Predictor("dlrm", "dgx"), random.Random(0)
    classes = made.run().placement.classes
    usual = {name: rank_class.representative for rank_class in classes for name in rank_class.tables}
    small = [table.parameter for table in made.graph().tables if table.rows < SMALL_ROWS]
    plans = iter(
        [
            load_plan({"embeddings": {**usual, **{name: chosen.randrange(8) for name in chosen.sample(small, 4)}}})
            for _ in range(2 * NEW_PLANS)
        ]
    )
    benchmark.pedantic(lambda: made.predict(next(plans)), rounds=NEW_PLANS, warmup_rounds=10)
    report(benchmark, capsys, "dlrm on 8 ranks, tables placed otherwise")


def test_another_topology(benchmark, capsys, predictor):
    name, made = predictor
    machines = cycle([as_topology(machine) for machine in ("dgx", "pcie_8xa100", "dgx_h100", "dgx_a100_80gb")])
    for _ in range(4):
        made.predict(topology=next(machines))
    benchmark(lambda: made.predict(topology=next(machines)))
    report(benchmark, capsys, f"{name} on 8 ranks, another topology")


def test_many_ranks(capsys):
    """16,384 ranks of one class: data parallel GPT-2 large on 2,048 hosts of 8 H100."""
    made = Predictor("gpt2_large", "dgx_h100")
    made.predict()
    begin = time.perf_counter()
    machine = as_topology("dgx_h100", nodes=2048)
    built = time.perf_counter()
    prediction = made.predict(topology=machine)
    done = time.perf_counter()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * KIBI
    with capsys.disabled():
        print(
            f"\n{prediction.n_ranks} ranks: topology {built - begin:.2f} s, prediction {done - built:.2f} s, "
            f"process peak {format_bytes(peak)}"
        )


def test_many_ranks_in_3d_parallel(capsys):
    """16,384 ranks: GPT-3 175B with tp 8, pp 16, dp 128, 16 micro-batches and ZeRO 1 on 2,048 hosts of 8 H100."""
    made = Predictor("gpt3_175b", "dgx_h100")
    made.graph(batch=1)
    machine, plan = as_topology("dgx_h100", nodes=2048), load_plan("tp=8,pp=16,shard=optimizer,accumulate=16")
    times = []
    for _ in range(3):
        begin = time.perf_counter()
        run = made.run(plan, topology=machine)
        times.append(time.perf_counter() - begin)
    begin = time.perf_counter()
    quick = made.evaluate(plan, topology=machine)
    quick_s = time.perf_counter() - begin
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * KIBI
    n_tasks = sum(len(part.tasks) for part in run.classes)
    assert abs(quick.iteration_time_s / run.prediction.iteration_time_s - 1) <= TOLERANCE_FRAC
    with capsys.disabled():
        print(
            f"\n{run.prediction.n_ranks} ranks in 3D, {n_tasks:,} tasks: first {times[0]:.2f} s, then {min(times[1:]):.2f} s; "
            f"evaluated {quick_s:.2f} s; process peak with torch {format_bytes(peak)}"
        )


def plans_for_128_ranks():
    """Valid plans of an 8B transformer: tensor, pipeline and data parallel, states divided or not, 1 to 16 micro-batches."""
    axes = product((1, 2, 4, 8), (1, 2, 4, 8), ("nothing", "optimizer", "gradients", "parameters"), (1, 2, 4, 8, 16))
    texts = [f"tp={tp},pp={pp},shard={shard},accumulate={n}" for tp, pp, shard, n in axes]
    whole = ("pp=1,", "tp=1,", "shard=nothing")  # plain data parallelism has no segments
    scattered = [text for text in texts if "pp=1," not in text and "shard=gradients" in text]  # refused with stages
    return [load_plan(text) for text in texts if text not in scattered and not all(part in text for part in whole)]


def test_plan_evaluations_per_second(capsys):
    """llama3_8b on 128 H100, its graph extracted: each plan placed, priced, its steady state under slowdown, memory, parts.

    Then all tasks of every plan are simulated, and its time compared.
    """
    made = Predictor("llama3_8b", as_topology("dgx_h100", nodes=16))
    made.graph(batch=1)
    plans = plans_for_128_ranks()
    rates, found = [], {}
    for _ in range(4):
        begin = time.process_time()
        with uncollected():  # as searches and sweeps do
            for plan in plans:
                with suppress(InfeasiblePlanError):
                    found[plan.name] = made.evaluate(plan, batch=1)
        rates.append(len(plans) / (time.process_time() - begin))
    whole = {plan.name: made.predict(plan, batch=1) for plan in plans if plan.name in found}
    off = [abs(found[name].iteration_time_s / whole[name].iteration_time_s - 1) for name in found]
    assert all(found[name].memory_bytes == whole[name].memory_bytes for name in found)
    assert max(off) <= TOLERANCE_FRAC
    with capsys.disabled():
        print(
            f"\nllama3_8b on 128 ranks, {len(plans)} plans ({len(plans) - len(found)} do not fit): {rates[0]:.0f} "
            f"evaluations/s of CPU time while stages and segments are made, then {max(rates[1:]):.0f}/s; iteration times "
            f"within {max(off):.1e} of the simulation of all tasks, {sum(x <= 1e-4 for x in off)} of {len(off)} within 1e-4, "
            f"median {statistics.median(off):.1e}"
        )


@pytest.mark.parametrize("model", ["dlrm", "gpt2_large"])
def test_second_command_line_run(capsys, tmp_path, monkeypatch, model):
    """Including the start of the process. The first run also compiles the modules' bytecode, as installing does."""
    monkeypatch.setenv("PERFMODEL_CACHE", str(tmp_path))
    monkeypatch.setenv("PYTHONPYCACHEPREFIX", str(tmp_path))
    monkeypatch.delenv("PYTHONDONTWRITEBYTECODE", raising=False)
    command = [sys.executable, "-m", "perfmodel.cli", "predict", "--model", model, "--topo", "dgx"]
    times = []
    for _ in range(4):
        begin = time.perf_counter()
        subprocess.run(command, check=True, capture_output=True)
        times.append(time.perf_counter() - begin)
    with capsys.disabled():
        print(f"\nperfmodel predict --model {model}: first {times[0]:.2f} s, then {min(times[1:]):.2f} s")
