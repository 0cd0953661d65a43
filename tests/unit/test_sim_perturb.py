"""Stragglers and jitter: seeded, mean-preserving, and slower runs for slower ranks."""

import numpy as np
import pytest

from perfmodel.errors import GraphError
from perfmodel.sim import COMM, COMPUTE, HOST, Program, Task, compile_programs, simulate_compiled
from perfmodel.sim.perturb import Jitter, perturbed_durations, spread


def ring(n_classes=4, n=50):
    tasks = []
    for i in range(n):
        tasks.append(Task(stream=HOST, duration_ps=500))
        tasks.append(Task(stream=COMPUTE, duration_ps=10_000, deps=((len(tasks) - 1, 100),)))
        tasks.append(Task(stream=COMM, duration_ps=1_000, deps=((len(tasks) - 1, 0),), group=i))
    return compile_programs([Program(tasks=tasks)] * n_classes)


def test_a_straggler_slows_everyone_by_its_factor():
    compiled = ring()
    durations = perturbed_durations(compiled, slowdowns={2: 1.5})
    assert durations[compiled.tasks_of(2)][:3].tolist() == [750, 15_000, 1_000]
    assert np.array_equal(durations[compiled.tasks_of(1)], compiled.duration_ps[compiled.tasks_of(1)])
    timeline = simulate_compiled(compiled, durations)
    # Launch, 50 kernels of 15 us back to back on the straggler, and the last collective, as the others overlap compute.
    assert timeline.makespan_ps == 750 + 100 + 50 * 15_000 + 1_000


def test_the_same_seed_gives_the_same_run_and_another_seed_another():
    compiled, jitter = ring(), Jitter(compute_frac=0.1)
    one, same, other = (perturbed_durations(compiled, jitter=jitter, seed=seed) for seed in (1, 1, 2))
    assert np.array_equal(one, same)
    assert not np.array_equal(one, other)


def test_jitter_has_mean_one_and_the_asked_for_spread():
    compiled = compile_programs([Program(tasks=[Task(stream=COMPUTE, duration_ps=10**9)] * 20_000)])
    factor = perturbed_durations(compiled, jitter=Jitter(compute_frac=0.2), seed=3) / 10**9
    # Standard errors for 20,000 draws: 0.0014 of the mean, about 0.0012 of the deviation.
    assert factor.mean() == pytest.approx(1.0, abs=0.006)
    assert factor.std() == pytest.approx(0.2, abs=0.006)


def test_kinds_without_jitter_keep_their_durations():
    compiled = ring()
    durations = perturbed_durations(compiled, jitter=Jitter(host_frac=0.5), seed=0)
    unchanged = durations == compiled.duration_ps
    assert unchanged[compiled.stream != HOST].all()
    assert not unchanged[compiled.stream == HOST].all()


def test_waiting_for_the_slowest_costs_more_than_the_mean():
    compiled = ring()
    runs = spread(compiled, Jitter(compute_frac=0.3), seeds=range(20))
    assert runs.makespans_ps == tuple(sorted(runs.makespans_ps))
    calm = simulate_compiled(compiled).makespan_ps
    assert runs.percentile_ps(0.0) > calm
    assert runs.percentile_ps(0.5) <= runs.percentile_ps(0.95)


@pytest.mark.parametrize("slowdowns", [{4: 1.1}, {0: 0.0}, {0: float("nan")}])
def test_impossible_stragglers_are_refused(slowdowns):
    with pytest.raises(GraphError, match="slowdown"):
        perturbed_durations(ring(), slowdowns=slowdowns)
