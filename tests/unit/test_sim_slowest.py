"""The slowest of many equal ranks, and iterations that follow each other: against closed forms and brute force."""

from math import exp, log1p, sqrt
from statistics import NormalDist

import numpy as np
import pytest

from perfmodel.pipeline.spread import follow
from perfmodel.sim import COMM, COMPUTE, Program, Task, compile_programs
from perfmodel.sim.perturb import Jitter, perturbed_durations
from perfmodel.sim.slowest import slowest_durations, slowest_normal, stretches_of

MEETS = {"deps": ((0, 0),), "group": 1}


def one_class(n_ranks, work_ps=(10**9,)):
    tasks = [Task(stream=COMPUTE, duration_ps=each) for each in work_ps]
    last = Task(stream=COMM, duration_ps=0, deps=((len(tasks) - 1, 0),), group=1)
    return compile_programs([Program(tasks=[*tasks, last], n_ranks=n_ranks)])


def drawn(compiled, n_ranks, jitter, n_draws, seed=0):
    meeting = np.where(compiled.kind == COMM, n_ranks, 0)
    stretches, rng = stretches_of(compiled, compiled.duration_ps, meeting, jitter), np.random.default_rng(seed)
    return np.array([slowest_durations(compiled, compiled.duration_ps, stretches, jitter, rng) for _ in range(n_draws)])


@pytest.mark.parametrize("n_ranks", [1, 8, 16_384])
@pytest.mark.parametrize("kind", ["compute_frac", "rank_frac"])
def test_the_median_of_the_largest_of_n_lognormals(n_ranks, kind):
    """P(largest <= x) = P(one <= x) ** n: its median is that of one at 0.5 ** (1 / n)."""
    times = drawn(one_class(n_ranks), n_ranks, Jitter(**{kind: 0.1}), 4_000)[:, 0]
    sigma = sqrt(log1p(0.1**2))
    expected = 1e9 * exp(sigma * NormalDist().inv_cdf(0.5 ** (1 / n_ranks)) - sigma**2 / 2)
    assert np.median(times) == pytest.approx(expected, rel=0.01)


def test_the_largest_normal_of_a_million_as_brute_force_finds_it():
    found = slowest_normal(np.full(2_000, 1_000), np.random.default_rng(1))
    brute = np.random.default_rng(2).standard_normal((2_000, 1_000)).max(axis=1)
    assert np.quantile(found, [0.1, 0.5, 0.9]) == pytest.approx(np.quantile(brute, [0.1, 0.5, 0.9]), abs=0.05)


def test_tasks_that_add_up_vary_less_than_one_and_share_by_their_variance():
    """Four equal tasks: the sum varies half as much as each, and each is a quarter of it. 64 ranks drawn one by one agree."""
    work = (10**9,) * 4
    times = drawn(one_class(64, work), 64, Jitter(compute_frac=0.2), 2_000)[:, :4]
    assert (np.ptp(times, axis=1) <= 1).all()
    factors = np.exp(np.random.default_rng(3).standard_normal((2_000, 64, 4)) * sqrt(log1p(0.04)) - log1p(0.04) / 2)
    brute = factors.sum(axis=2).max(axis=1) * 1e9
    assert np.median(times.sum(axis=1)) == pytest.approx(np.median(brute), rel=0.01)


def test_a_collective_is_drawn_once_and_kinds_without_jitter_keep_their_durations():
    compiled = compile_programs(
        [
            Program(
                tasks=[Task(stream=COMPUTE, duration_ps=500), Task(stream=COMM, duration_ps=10**9, **MEETS)],
                n_ranks=512,
            )
        ]
    )
    times = drawn(compiled, 512, Jitter(comm_frac=0.3), 4_000)
    assert (times[:, 0] == 500).all()
    assert times[:, 1].mean() == pytest.approx(1e9, rel=0.02)


def two_ranks():
    """Two ranks that meet at the end of each iteration."""
    rank = Program(tasks=[Task(stream=COMPUTE, duration_ps=10**9), Task(stream=COMM, duration_ps=0, **MEETS)])
    return compile_programs([rank, rank])


def test_two_ranks_that_meet_wait_for_the_larger_of_two_draws():
    """Iteration k ends when the later of both is done, and the compute of k + 1 does not wait for the meeting of k.

    By hand: work is done at A(k) = A(k - 1) + a(k), and so B; they meet at M(k) = max(A(k), B(k)), so a rank that is ahead
    stays ahead: times add up to max(sum a, sum b), not to the sum of the maxima.
    """
    compiled, jitter, seeds = two_ranks(), Jitter(compute_frac=0.3), iter(range(50))
    draws = [perturbed_durations(compiled, jitter=jitter, seed=seed) for seed in range(50)]
    times = follow(compiled, [], np.zeros(4, dtype=np.int64), lambda: draws[next(seeds)], 50)
    sums = np.cumsum(draws, axis=0)
    ends = np.maximum(sums[:, 0], sums[:, 2])
    assert np.cumsum(times) == pytest.approx(ends / 1e12, rel=1e-12)
    assert sum(times) < sum(max(d[0], d[2]) for d in draws) / 1e12


def test_a_delay_goes_on_into_the_next_iteration():
    """Compute that waits for the meeting of the iteration before (a carry dep) is late by what that was late by."""
    from perfmodel.sim.steady import CarryDep

    compiled = two_ranks()
    carry = [CarryDep(cls=cls, task=0, on=1) for cls in (0, 1)]
    usual = compiled.duration_ps
    late = usual.copy()
    late[0] *= 3
    rows = iter([usual, late, usual])
    times = follow(compiled, carry, np.zeros(4, dtype=np.int64), lambda: next(rows), 3)
    assert times == pytest.approx([1e-3, 3e-3, 1e-3])


def test_a_slow_iteration_of_a_rank_stretches_all_of_it_but_communication():
    compiled = compile_programs(
        [
            Program(tasks=[Task(stream=COMPUTE, duration_ps=10**9)] * 3 + [Task(stream=COMM, duration_ps=10**9)])
            for _ in range(2)
        ]
    )
    factor = perturbed_durations(compiled, jitter=Jitter(rank_frac=0.2), seed=5) / 1e9
    assert np.ptp(factor[:3]) < 1e-8
    assert abs(factor[0] - factor[4]) > 1e-3
    assert factor[3] == factor[7] == 1.0
