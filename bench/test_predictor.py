"""Speed of whole predictions, printed as times and rates. Run with `make bench`; nothing here is a gate."""

import resource
import subprocess
import sys
import time
from itertools import cycle

import pytest

from perfmodel.api import Predictor, as_topology
from perfmodel.config import load_plan
from perfmodel.units import KIBI, format_bytes

pytestmark = pytest.mark.bench

CAPS = ("ddp", *(f"ddp,bucket_cap={size}MiB" for size in range(10, 60, 5)))


@pytest.fixture(scope="module", params=["dlrm", "gpt2_large"])
def predictor(request):
    """A predictor that has seen the model and its machines."""
    made = Predictor(request.param, "dgx")
    for plan in CAPS[:3]:
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


@pytest.mark.parametrize("model", ["dlrm", "gpt2_large"])
def test_second_command_line_run(capsys, tmp_path, monkeypatch, model):
    monkeypatch.setenv("PERFMODEL_CACHE", str(tmp_path))
    command = [sys.executable, "-m", "perfmodel.cli", "predict", "--model", model, "--topo", "dgx"]
    times = []
    for _ in range(4):
        begin = time.perf_counter()
        subprocess.run(command, check=True, capture_output=True)
        times.append(time.perf_counter() - begin)
    with capsys.disabled():
        print(f"\nperfmodel predict --model {model}: first {times[0]:.2f} s, then {min(times[1:]):.2f} s")
