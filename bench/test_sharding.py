"""Speed and quality of sharding searches, printed. Run with `make bench`; nothing here is a gate."""

import json
import time
from pathlib import Path

import numpy as np
import pytest

from perfmodel.api import Predictor, as_topology
from perfmodel.autotune.sharding import rank_sharding
from perfmodel.config import load_plan
from perfmodel.config.plan import EmbeddingPlan
from perfmodel.config.sharding import TablePlacement
from perfmodel.db import load_device
from perfmodel.errors import InfeasiblePlanError
from perfmodel.graph import TableAccess
from perfmodel.sharding.cost import ShardTimes
from perfmodel.sharding.exact import optimum
from perfmodel.sharding.find import SearchOptions
from perfmodel.sharding.plan import with_placement
from perfmodel.sharding.problem import Problem
from perfmodel.sharding.search import Search
from perfmodel.sharding.simulate import PlanSimulator
from perfmodel.sharding.surrogate import Surrogate
from perfmodel.units import GIBI

pytestmark = pytest.mark.bench

TABLES = Path(__file__).parents[1].parent / "shared" / "data" / "sharding" / "synth_856.json"
STEPS = 2_000_000


class Drawn:
    """Costs of parts by size, with noise that belongs to the table."""

    def __init__(self, seed):
        self.seed = seed

    def shard_times(self, shards):
        found = []
        for shard in shards:
            rng = np.random.default_rng([self.seed, int(shard.name[1:]), shard.access.dim])
            scale = shard.share_frac * shard.access.dim
            times = (scale * rng.uniform(0.5, 1), scale * rng.uniform(0.5, 2), rng.uniform(0, 9))
            found.append(ShardTimes(lookup_s=times[0], update_s=times[1], output_s=times[2]))
        return found


def synthetic(n_tables, topology):
    body = json.loads(TABLES.read_text(encoding="utf-8"))["tables"][:n_tables]
    tables = {
        f"t{i}": TableAccess(parameter=f"t{i}", rows=t["row"], dim=t["dim"], pooling_factor=t["pooling_factor"])
        for i, t in enumerate(body)
    }
    return Problem(
        tables=tables,
        n_ranks=topology.n_ranks,
        batch=1024,
        domains=topology.domains(),
        free_bytes=(60 * GIBI,) * topology.n_ranks,
        row_bytes={name: table.dim * 4 + 4 for name, table in tables.items()},
    )


def searching(problem, topology, seed=0):
    device = load_device(topology.ranks[0].device)
    return Search(problem, Surrogate(problem, EmbeddingPlan(), device, topology, "rowwise_adagrad"), seed=seed)


@pytest.mark.parametrize(("n_tables", "machine", "nodes"), [(26, "dgx", 1), (100, "dgx", 1), (800, "dgx_h100", 16)])
def test_search(capsys, n_tables, machine, nodes):
    if not TABLES.is_file():
        pytest.skip("needs shared/data/sharding")
    topology = as_topology(machine, nodes)
    problem = synthetic(n_tables, topology)
    searching(synthetic(2, topology), topology).run(0.1, rounds=1)  # loads the compiled loops
    begin = time.perf_counter()
    search = searching(problem, topology)
    laid_out = time.perf_counter()
    found = search.run(20.0)
    done = time.perf_counter()
    state = search.states[0]
    search._anneal(search.layout.arrays, state.option.copy(), state.piece.copy(), STEPS // 10, (1e-9, 1e-12), 1)
    rate = STEPS // 10 / (time.perf_counter() - done)
    with capsys.disabled():
        print(
            f"\n{n_tables} tables on {topology.n_ranks} ranks: prices {laid_out - begin:.1f} s, "
            f"search {done - laid_out:.1f} s, {search.n_evaluations:,} evaluations; annealing alone {rate:,.0f} a second; "
            f"cost {found[0].cost_s * 1e3:.3f} ms by '{found[0].origin}'"
        )


def test_optimum_of_small_problems(capsys):
    hits = 0
    for seed in range(100):
        rng = np.random.default_rng(seed)
        tables = {f"t{i}": TableAccess(parameter=f"t{i}", rows=int(rng.integers(50, 5000)), dim=64) for i in range(4)}
        problem = Problem(
            tables=tables, n_ranks=3, batch=8, domains=((0, 1, 2),), free_bytes=(2_000_000,) * 3,
            row_bytes=dict.fromkeys(tables, 64 * 4 + 4),
        )  # fmt: skip
        search = Search(problem, Drawn(seed), seed=seed)
        hits += search.run(60.0)[0].cost_s <= optimum(search.layout)[0] * (1 + 1e-9)
    with capsys.disabled():
        print(f"\noptimum found in {hits} of 100 problems of 4 tables on 3 ranks")


def test_full_model_plans(capsys):
    """Plans that were not simulated before, table-wise at random, by the refilled program; ten against the whole path."""
    made = Predictor("dlrm", "dgx")
    plan = load_plan("ddp")
    simulator = PlanSimulator(made.graph(), made.topology, plan, settings=made.settings)
    rng = np.random.default_rng(0)

    def drawn(n):
        ranks = rng.integers(0, 8, (n, 26)).tolist()
        return [{f"t{i}": TablePlacement(ranks=(rank,)) for i, rank in enumerate(row)} for row in ranks]

    simulator.times(drawn(100))  # loads the compiled loops and makes the structures
    checked = drawn(10)
    for placement, found in zip(checked, simulator.times(checked), strict=True):
        if not isinstance(found, InfeasiblePlanError):
            assert found == made.run(with_placement(plan, placement)).steady.iteration_ps
    asked = drawn(1000)
    begin = time.perf_counter()
    times = simulator.times(asked)
    each = (time.perf_counter() - begin) / sum(not isinstance(one, InfeasiblePlanError) for one in times)
    with capsys.disabled():
        print(f"\n26 tables on 8 ranks, whole model: {each * 1e3:.2f} ms a plan that runs, {1 / each:,.0f} plans/s")


def test_many_tables_on_many_ranks(capsys):
    """800 tables on 128 H100, from the surrogate's best to the whole model's iteration with memory and range."""
    if not TABLES.is_file():
        pytest.skip("needs shared/data/sharding")
    body = json.loads(TABLES.read_text(encoding="utf-8"))["tables"][:800]
    tables = [
        {"name": f"t{i}", "rows": t["row"], "dim": t["dim"], "pooling_factor": max(t["pooling_factor"], 1)}
        for i, t in enumerate(body)
    ]
    model = {
        "kind": "dlrm", "name": "synthetic", "batch_size": 512, "dense_features": 13, "bottom_mlp": [512, 256],
        "top_mlp": [512, 256, 1], "interaction": "cat", "optimizer": "sgd", "tables": tables, "precision": "fp32",
        "sparse_optimizer": {"name": "rowwise_adagrad", "fused": True},
    }  # fmt: skip
    begin = time.perf_counter()
    ranking = rank_sharding(model, "dgx_h100", nodes=16, search=SearchOptions(budget_s=20.0, top=1, baselines=False))
    best = ranking.plans[0]
    with capsys.disabled():
        print(
            f"\n800 tables on 128 ranks: {time.perf_counter() - begin:.1f} s in all, {ranking.search_s:.1f} s of search with "
            f"{ranking.n_evaluations:,} priced and {ranking.n_simulated} simulated; {best.iteration_time_s * 1e3:.2f} ms "
            f"({best.prediction.low_s * 1e3:.2f} to {best.prediction.high_s * 1e3:.2f}) by '{best.origin}', imbalance "
            f"{best.imbalance:.2f}; {'; '.join(tier.text for tier in best.tiers)}"
        )
