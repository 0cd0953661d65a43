"""Tiers of memory, odds between plans, what a ranking says, pooling factors scaled and extracted anew."""

import math
from dataclasses import replace

import pytest

from perfmodel.api import Predictor
from perfmodel.autotune.sharding import rank_plans, rank_sharding, shard_sensitivity
from perfmodel.config import load_plan, load_topology
from perfmodel.config.sharding import TablePlacement
from perfmodel.errors import ConfigError, InfeasiblePlanError
from perfmodel.pipeline.prediction import PathShare
from perfmodel.plan.facts import facts_of
from perfmodel.report.sharding import plain_ranking, render_ranking
from perfmodel.sharding.find import SearchOptions
from perfmodel.sharding.plan import with_placement
from perfmodel.sharding.problem import Constraint, Problem
from perfmodel.sharding.rank import REPEAT_FRAC, probability_faster
from perfmodel.sharding.refine import refine
from perfmodel.sharding.simulate import PlanSimulator
from perfmodel.units import GIBI

ROWS, DIM = 1_000_000, 64
DLRM = {
    "kind": "dlrm", "name": "small", "batch_size": 4096, "dense_features": 4, "bottom_mlp": [DIM], "top_mlp": [16, 1],
    "embedding_dim": DIM, "optimizer": "sgd", "sparse_optimizer": "adagrad", "precision": "fp32",
    "tables": [{"name": f"t{i}", "rows": ROWS, "pooling_factor": 10} for i in range(4)],
}  # fmt: skip
TABLE_BYTES = ROWS * DIM * 4 * 2  # fp32 rows and as many bytes of Adagrad's state


def machine(memory=None, ssd=None):
    node = {
        "gpus": {"count": 2, "device": "a100_sxm_40gb"},
        "nvlink": {"generation": 3, "links_per_gpu": 12, "switch": True},
    }
    node |= {"memory": memory} if memory else {}
    node |= {"ssd": ssd} if ssd else {}
    return load_topology({"name": "two", "node": node})


def plan(kernel):
    placement = {f"t{i}": {"ranks": [i % 2], "kernel": kernel} for i in range(4)}
    return load_plan({"name": kernel, "embeddings": {"strategy": "explicit", "placement": placement}})


def test_a_hosts_memory_can_refuse_with_the_shortfall():
    needed = 4 * TABLE_BYTES
    with pytest.raises(InfeasiblePlanError, match=r"host: does not fit, host 0 needs .* short by"):
        rank_plans(DLRM, machine(f"{needed - 10**6} B"), [plan("uvm")])
    tight = rank_plans(DLRM, machine(f"{needed + 10**6} B"), [plan("uvm")]).plans[0]
    assert tight.verdict == "tight"
    assert [(tier.name, tier.verdict) for tier in tight.tiers] == [("device", "fits"), ("host", "tight")]
    assert tight.tiers[1].needed_bytes == needed
    roomy = rank_plans(DLRM, machine(f"{2 * needed} B"), [plan("uvm")]).plans[0]
    assert roomy.verdict == "fits"


def test_ssds_have_a_tier_of_their_own():
    needed = 4 * TABLE_BYTES
    found = rank_plans(DLRM, machine("1 kB", f"{2 * needed} B"), [plan("key_value")]).plans[0]
    assert [(tier.name, tier.verdict) for tier in found.tiers] == [("device", "fits"), ("ssd", "fits")]
    with pytest.raises(InfeasiblePlanError, match="ssd: does not fit"):
        rank_plans(DLRM, machine("1 TB", "1 GB"), [plan("key_value")])
    unsaid = rank_plans(DLRM, machine(), [plan("key_value")]).plans[0]
    assert unsaid.tiers[1].verdict == "unknown"


def test_a_search_keeps_to_a_hosts_memory():
    # The host has room for one of the four tables with its state.
    options = SearchOptions(budget_s=1.0, kernels=("uvm", "fused"), top=2)
    ranking = rank_sharding(DLRM, machine(f"{TABLE_BYTES + 10**6} B"), search=options)
    assert all(tier.verdict != "does not fit" for place in ranking.plans for tier in place.tiers)
    text = render_ranking(ranking, 3)
    assert "search cost" in text
    assert "memory, device: fits" in text
    assert ranking.n_simulated > 0
    best = plain_ranking(ranking, 1)["plans"][0]
    assert best["memory"][0]["tier"] == "device"


@pytest.mark.parametrize(
    ("optimizer", "bytes_a_row"),
    [("sgd", 0), ("adagrad", 4 * DIM), ("rowwise_adagrad", 4), ("adam", 8 * DIM), ("lamb", 8 * DIM)],
)
def test_rows_carry_their_optimizers_state(optimizer, bytes_a_row):
    # FBGEMM's OptimType: one fp32 of state an element (Adagrad), a row (row-wise), two moments an element (Adam, LAMB).
    fused = {"name": optimizer, "fused": True}
    graph = Predictor({**DLRM, "sparse_optimizer": fused}, machine()).graph()
    assert set(facts_of(graph).table_row_bytes.values()) == {4 * DIM + bytes_a_row}


def test_lamb_exists_fused_only():
    with pytest.raises(ConfigError, match="allowed true"):
        Predictor({**DLRM, "sparse_optimizer": "lamb"}, machine()).graph()
    found = rank_plans({**DLRM, "sparse_optimizer": {"name": "lamb", "fused": True}}, machine(), [plan("fused")]).plans[
        0
    ]
    # Two tables a rank: fp32 rows and two moments of them.
    held = found.prediction.ranks[0].memory
    assert held.optimizer_bytes == 2 * 2 * ROWS * DIM * 4


def prediction(base, parts):
    total = sum(time for time, _ in parts.values())
    path = tuple(
        PathShare(cause=cause, time_s=time, share_frac=time / total, below_s=spread, above_s=spread)
        for cause, (time, spread) in parts.items()
    )
    return replace(base, iteration_time_s=total, critical_path=path)


def test_odds_are_those_of_the_difference_of_correlated_times():
    base = rank_plans(DLRM, machine(), [plan("fused")]).plans[0].prediction
    first = prediction(base, {"a": (1.0, 0.12816), "b": (1.0, 0.25632)})
    second = prediction(base, {"a": (1.0, 0.12816), "b": (1.5, 0.38448)})
    # `a` is the same in both and cancels; of `b`, known to 20 %, half a second differs: a deviation of 0.1 s, and what the
    # times of 2.0 and 2.5 s repeat to.
    deviation = math.hypot(0.1, 2.0 * REPEAT_FRAC, 2.5 * REPEAT_FRAC)
    wanted = 0.5 * (1 + math.erf(0.5 / deviation / math.sqrt(2)))
    assert probability_faster(first, second) == pytest.approx(wanted, rel=1e-3)
    assert probability_faster(second, first) == pytest.approx(1 - wanted, abs=1e-9)
    assert probability_faster(first, first) == 0.5
    # A plan that is faster by one law and slower by another is less certain than one that is faster by one.
    third = prediction(base, {"a": (2.0, 0.25632), "b": (0.5, 0.12816)})
    assert 0.5 < probability_faster(first, third) < probability_faster(first, second)


def test_pooling_factors_are_extracted_anew():
    model = {**DLRM, "batch_size": 65_536}
    rows = shard_sensitivity(model, machine(), plan("fused"), factors=(0.5, 1.0, 3.0))
    found = {row["factor"]: row["iteration_time_s"] for row in rows if row["what"] == "pooling factors"}
    denser = {**model, "tables": [{**table, "pooling_factor": 30} for table in model["tables"]]}
    assert found[3.0] == Predictor(denser, machine()).predict(plan("fused")).iteration_time_s
    assert found[1.0] == Predictor(model, machine()).predict(plan("fused")).iteration_time_s
    assert found[0.5] < found[1.0] < found[3.0]


def test_refining_by_simulation_unloads_the_fullest_rank():
    predictor = Predictor({**DLRM, "batch_size": 65_536}, machine())
    base = load_plan("ddp")
    simulator = PlanSimulator(predictor.graph(), predictor.topology, base)
    crowded = {f"t{i}": TablePlacement(ranks=(0,)) for i in range(4)}
    names = list(crowded)
    problem = Problem(
        tables={name: facts_of(predictor.graph()).tables[f"sparse_arch.embedding_bags.{name}.weight"].table for name in names},
        n_ranks=2, batch=65_536, domains=((0, 1),), free_bytes=(2**35,) * 2, row_bytes=dict.fromkeys(names, 512),
        constraints={"t0": Constraint(ranks=(0,))},
    )  # fmt: skip
    found, time_s, n_simulated = refine(problem, simulator, crowded, deadline=math.inf, seed=3)
    # Equal tables: two on each rank is the optimum, and the pinned one stays.
    assert sorted(where.ranks[0] for where in found.values()) == [0, 0, 1, 1]
    assert found["t0"].ranks == (0,)
    assert n_simulated > 64
    assert time_s == predictor.predict(with_placement(base, found)).iteration_time_s
    assert time_s < predictor.predict(with_placement(base, crowded)).iteration_time_s


def test_device_memory_is_not_the_hosts():
    found = rank_plans(DLRM, machine("1 kB"), [plan("fused")]).plans[0]
    assert [tier.name for tier in found.tiers] == ["device"]
    assert found.tiers[0].capacity_bytes == 40 * GIBI
