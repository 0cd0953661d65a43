"""Speed of the simulator alone, printed as rates. Run with `make bench`; nothing here is a gate."""

import resource
import time

import numpy as np
import pytest

from perfmodel.sim import COMM, COMPUTE, HOST, ArrayProgram, compile_programs, simulate_compiled
from perfmodel.sim.breakdown import breakdown
from perfmodel.sim.overlap import overlapped_with
from perfmodel.sim.path import critical_path
from perfmodel.sim.rivals import OverlapModel
from perfmodel.sim.steady import simulate_steady_compiled
from perfmodel.sim.sweep import Sweeper, warm_up

pytestmark = pytest.mark.bench


def data_parallel(n_kernels, group_every=50, first=0):
    """Host launches a kernel each; every so many a bucket is reduced on the communication stream."""
    kernel = np.arange(n_kernels, dtype=np.int64)
    n_groups = n_kernels // group_every
    host, device = 2 * kernel, 2 * kernel + 1
    size = 2 * n_kernels + n_groups
    place = np.concatenate([host, device]) + np.tile(kernel // group_every, 2)
    stream = np.full(size, COMM, dtype=np.int64)
    stream[place[:n_kernels]], stream[place[n_kernels:]] = HOST, COMPUTE
    is_comm = stream == COMM
    dep_count = np.where(stream == HOST, 0, 1)
    dep_index = (np.arange(size) - 1)[dep_count == 1]
    group = np.full(size, -1, dtype=np.int64)
    group[is_comm] = np.arange(int(is_comm.sum())) + first
    duration = np.where(stream == HOST, 5_000_000, np.where(is_comm, 300_000_000, 6_000_000 + np.arange(size) % 7))
    return ArrayProgram(
        stream=stream,
        duration_ps=duration.astype(np.int64),
        group=group,
        dep_count=dep_count.astype(np.int64),
        dep_index=dep_index.astype(np.int64),
        dep_lag_ps=np.full(len(dep_index), 4_000_000, dtype=np.int64),
    )


def rate(benchmark, capsys, what, n_events, work):
    result = benchmark(work)
    seconds = benchmark.stats.stats.min if benchmark.stats else float("nan")
    with capsys.disabled():
        print(f"\n{what}: {n_events:,} events in {seconds * 1e3:.2f} ms = {n_events / seconds / 1e6:.2f} M events/s")
    return result


@pytest.mark.parametrize("n_kernels", [300, 3_000, 100_000])
def test_simulated_events_per_second(benchmark, capsys, n_kernels):
    """One event is one task simulated: its start and its end."""
    compiled = compile_programs([data_parallel(n_kernels)] * 8)
    warm_up()
    rate(benchmark, capsys, "re-simulation, 8 ranks", compiled.n_tasks, lambda: simulate_compiled(compiled))


def test_plain_python_events_per_second(benchmark, capsys):
    compiled = compile_programs([data_parallel(3_000)] * 8)
    release = np.zeros(compiled.n_tasks, dtype=np.int64)
    sweeper = Sweeper(compiled, compiled.duration_ps, numba=False)
    work = lambda: sweeper.run(release)  # noqa: E731 -- one line, used once
    rate(benchmark, capsys, "plain Python, 8 ranks", compiled.n_tasks, work)


def test_compile_of_arrays(benchmark, capsys):
    programs = [data_parallel(3_000)] * 8
    n_events = sum(len(p.stream) for p in programs)
    rate(benchmark, capsys, "compile, 8 ranks", n_events, lambda: compile_programs(programs))


def test_steady_state(benchmark, capsys):
    compiled = compile_programs([data_parallel(3_000)] * 8)
    steady = simulate_steady_compiled(compiled)
    n_events = compiled.n_tasks * steady.n_iterations
    rate(benchmark, capsys, "steady state", n_events, lambda: simulate_steady_compiled(compiled))


@pytest.mark.parametrize(("n_kernels", "numba"), [(300, False), (300, True), (100_000, True)])
def test_overlap_engine(benchmark, capsys, n_kernels, numba):
    compiled = compile_programs([data_parallel(n_kernels)] * 8)
    model = OverlapModel(held=100, traffic=300, memory=500)
    work = lambda: overlapped_with(compiled, model, None, numba=numba)  # noqa: E731 -- one line, used once
    rate(benchmark, capsys, f"overlap engine, 8 ranks, numba {numba}", compiled.n_tasks, work)


def test_explanations(benchmark, capsys):
    timeline = simulate_compiled(compile_programs([data_parallel(3_000)] * 8))

    def explain():
        return critical_path(timeline), [breakdown(timeline, cls) for cls in range(8)]

    rate(benchmark, capsys, "critical path and breakdowns", timeline.compiled.n_tasks, explain)


def pipeline_1f1b(n_stages, n_micro, layers, kernels_per_layer):
    """1F1B: one class a stage; tensor-parallel collectives are inside the class, stage boundaries are groups."""
    programs = []
    for stage in range(n_stages):
        warm = min(n_stages - stage - 1, n_micro)
        order = [("f", i) for i in range(warm)]
        for i in range(n_micro - warm):
            order += [("f", warm + i), ("b", i)]
        order += [("b", i) for i in range(n_micro - warm, n_micro)]
        programs.append(_stage(stage, n_stages, order, layers * kernels_per_layer))
    return programs


def _stage(stage, n_stages, order, n_kernels):
    streams, durations, groups, dep_task, dep_on = [], [], [], [], []

    def boundary(kind, micro, at):
        streams.append(4 + 2 * at + (kind == "b"))
        durations.append(50_000_000)
        groups.append((micro * 2 + (kind == "b")) * n_stages + at)

    for kind, micro in order:
        into, out = (stage - 1, stage) if kind == "f" else (stage, stage - 1)
        if 0 <= into < n_stages - 1:
            boundary(kind, micro, into)
            dep_task.append(len(streams))
            dep_on.append(len(streams) - 1)
        streams.extend([COMPUTE] * n_kernels)
        durations.extend([100_000_000 if kind == "f" else 200_000_000] * n_kernels)
        groups.extend([-1] * n_kernels)
        if 0 <= out < n_stages - 1:
            dep_task.append(len(streams))
            dep_on.append(len(streams) - 1)
            boundary(kind, micro, out)
    return ArrayProgram(
        stream=np.array(streams),
        duration_ps=np.array(durations),
        group=np.array(groups),
        dep_count=np.bincount(np.array(dep_task, dtype=np.int64), minlength=len(streams)),
        dep_index=np.array(dep_on, dtype=np.int64),
        dep_lag_ps=np.zeros(len(dep_on), dtype=np.int64),
        n_ranks=16_384 // n_stages,
    )


def test_16384_gpus_in_3d_parallel(capsys):
    """16 stages x 64 tensor and data parallel ranks each x 16, 128 micro-batches of 6 layers, 20 kernels a layer."""
    begin = time.perf_counter()
    programs = pipeline_1f1b(n_stages=16, n_micro=128, layers=6, kernels_per_layer=20)
    built = time.perf_counter()
    timeline = simulate_compiled(compile_programs(programs))
    done = time.perf_counter()
    peak_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    with capsys.disabled():
        print(
            f"\n16,384 GPUs: {timeline.compiled.n_tasks:,} events; build {built - begin:.2f} s, "
            f"compile and simulate {done - built:.2f} s, process peak {peak_mib:.0f} MiB"
        )
    # The pipeline's closed form: (m + p - 1) slots of forward and backward, plus p - 1 transfers each way at the ends.
    slot_ps = 120 * 300_000_000
    assert timeline.makespan_ps >= (128 + 15) * slot_ps
