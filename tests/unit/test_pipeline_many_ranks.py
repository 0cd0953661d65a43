"""Stragglers and jitter on machines of many ranks: who meets whom, and against closed forms for the slowest of them."""

from math import exp, log1p, sqrt
from statistics import NormalDist

import numpy as np
import pytest

from perfmodel.api import predict_run
from perfmodel.pipeline import spread
from perfmodel.pipeline.spread import split_stragglers
from perfmodel.sim import COMM, COMPUTE, Program, Task, compile_programs
from perfmodel.sim.perturb import Jitter
from perfmodel.sim.slowest import slowest_durations, stretches_of

GPT = {
    "kind": "transformer", "architecture": "gpt2", "name": "small", "hidden_size": 1024, "layers": 4, "heads": 16,
    "max_positions": 256, "vocab_size": 8192, "batch_size": 8, "precision": "amp_bf16",
}  # fmt: skip


def run(nodes, plan, **options):
    return predict_run(GPT, "dgx_h100", plan, nodes=nodes, **options)


def test_a_slow_iteration_of_any_of_16384_ranks_is_that_of_a_straggler_as_slow_as_the_slowest():
    """rank=F: the median of the slowest of n factors is that of one at 0.5 ** (1 / n); so slow a straggler takes as long."""
    sigma = sqrt(log1p(0.05**2))
    slowest = exp(sigma * NormalDist().inv_cdf(0.5 ** (1 / 16_384)) - sigma**2 / 2)
    options = {"overlap": False, "mode": "cuda_graph"}
    found = run(2048, "ddp", jitter={"rank": 0.05}, n_samples=200, **options).prediction.percentiles["p50"]
    expected = run(2048, "ddp", stragglers={5: slowest}, **options).prediction.iteration_time_s
    assert found == pytest.approx(expected, rel=0.01)


def test_ranks_as_slow_as_each_other_share_a_class_and_of_many_factors_the_slowest_sets_the_pace():
    usual = run(32, "ddp")
    same = split_stragglers(usual.classes, {3: 1.2, 77: 1.2, 9: 1.1})
    assert sorted(len(part.rank_class.ranks) for part in same) == [1, 2, 253]
    factors = {rank: 1.0 + rank / 1000 for rank in range(256)}
    parts = split_stragglers(usual.classes, factors)
    assert len(parts) == spread.MAX_FACTORS
    assert sorted(rank for part in parts for rank in part.rank_class.ranks) == list(range(256))
    every = run(32, "ddp", stragglers=factors, overlap=False).prediction
    slowest = run(32, "ddp", stragglers={255: 1.255}, overlap=False).prediction
    assert every.iteration_time_s == slowest.iteration_time_s


@pytest.mark.parametrize(
    ("plan", "tied"),
    [
        ("tp=2,pp=2,dp=4,accumulate=2", []),  # neighbouring stages: the pairs of the embedding are those of activations
        ("pp=4,accumulate=4", [(rank, rank + 12) for rank in range(4)]),
        ("ddp", []),
    ],
)
def test_a_rank_meets_the_ranks_of_its_group_and_no_others(plan, tied):
    """Groups of tensor ranks, of replicas, pairs of stages, and first and last stage for tied embeddings."""
    found = run(2, plan)
    compiled, _, _ = spread._every_rank(found.classes, found.steady, [])
    ranks = [rank for lowered in found.classes for rank in lowered.rank_class.ranks]
    wiring = compiled.wiring
    of_task = np.repeat(ranks, np.diff(wiring.offsets))
    met = {
        tuple(sorted(of_task[wiring.group_member[a:b]].tolist()))
        for a, b in zip(wiring.group_ptr, wiring.group_ptr[1:], strict=False)
    }
    expected = set()
    for lowered in found.classes:
        for event in lowered.prices.columns.collectives:
            c = event.collective
            expected |= {tuple(sorted(group)) for group in (c.ranks, *c.siblings)}
    assert met == expected | set(tied)


def test_stretches_of_a_chain_are_those_of_the_slowest_chain():
    """32 pipelines of one class: 4 stretches between pairs, then all meet. Their sum is the largest of 32 sums."""
    tasks = []
    for number in range(4):
        tasks.append(Task(stream=COMPUTE, duration_ps=10**9))
        tasks.append(Task(stream=COMM, duration_ps=0, deps=((len(tasks) - 1, 0),), group=number))
    compiled, jitter = compile_programs([Program(tasks=tasks, n_ranks=32)]), Jitter(compute_frac=0.2)
    meeting = np.where(compiled.kind == COMM, 1, 0)
    meeting[-1] = 32
    stretches, rng = stretches_of(compiled, compiled.duration_ps, meeting, jitter), np.random.default_rng(0)
    drawn = np.array(
        [slowest_durations(compiled, compiled.duration_ps, stretches, jitter, rng)[::2] for _ in range(4_000)]
    )
    sigma = sqrt(log1p(0.04))
    brute = np.exp(np.random.default_rng(1).standard_normal((4_000, 32, 4)) * sigma - sigma**2 / 2) * 1e9
    largest = brute.sum(axis=2).max(axis=1)
    assert np.quantile(drawn.sum(axis=1), [0.1, 0.5, 0.9]) == pytest.approx(
        np.quantile(largest, [0.1, 0.5, 0.9]), rel=0.01
    )
    assert drawn.std(axis=0) == pytest.approx(drawn.std(axis=0)[0], rel=0.1)  # all stretches vary, and alike
    assert drawn.std(axis=0)[0] > 0.15e9
