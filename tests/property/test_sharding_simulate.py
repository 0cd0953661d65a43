"""Refilled programs against the whole path of `predict`, placement by placement; compiled flows against the plain ones."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perfmodel.api import Predictor, as_topology
from perfmodel.collectives import exchange
from perfmodel.collectives.group import group_of
from perfmodel.config.plan import load_plan
from perfmodel.config.sharding import TablePlacement
from perfmodel.errors import InfeasiblePlanError
from perfmodel.graph import TableAccess
from perfmodel.kernels.embedding_law import columns_of
from perfmodel.kernels.table_batch import TableBatch, backward_calls, forward_calls
from perfmodel.kernels.table_columns import group_sums, lookup_columns, part_terms, update_columns
from perfmodel.sharding.exchanges import exchange_s, routes_of
from perfmodel.sharding.plan import with_placement
from perfmodel.sharding.simulate import PlanSimulator

ROWS = (100, 70_000, 3_000_000, 40_000, 500_000)
DLRM = {
    "kind": "dlrm", "name": "small", "batch_size": 65_536, "dense_features": 4, "bottom_mlp": [16], "top_mlp": [16, 1],
    "embedding_dim": 16, "optimizer": "sgd", "sparse_optimizer": "rowwise_adagrad", "precision": "fp32",
    "tables": [
        {"name": f"t{i}", "rows": rows, "pooling_factor": pooling, "distribution": {"zipf": zipf}}
        for i, (rows, pooling, zipf) in enumerate(zip(ROWS, (1, 7, 20, 3, 2), (0.0, 1.1, 0.0, 0.8, 1.2), strict=True))
    ],
}  # fmt: skip
BASES = (
    {"name": "plain"},
    {"name": "ahead", "embeddings": {"pipeline": "sparse_dist", "row_precision": "bf16"}},
    {"name": "fetched", "accumulate": 2, "embeddings": {"pipeline": "prefetch"}},
)


@pytest.fixture(scope="module", params=[(1, 0), (1, 1), (1, 2), (2, 0)], ids=lambda p: f"{p[0]} nodes, base {p[1]}")
def both(request):
    nodes, base = request.param
    predictor = Predictor(DLRM, "dgx", nodes=nodes, bounds=False)
    plan = load_plan(BASES[base])
    return predictor, plan, PlanSimulator(predictor.graph(), predictor.topology, plan)


def drawn(rng, n_ranks):
    """A placement of every kind that refilling has to follow."""
    found = {}
    for i in range(len(ROWS)):
        kernel = str(rng.choice(("fused", "fused", "fused", "uvm_caching", "uvm")))
        kind = int(rng.integers(0, 8))
        one, two = (int(r) for r in rng.integers(0, n_ranks, 2))
        body = {"ranks": (one,), "kernel": kernel}
        if kind == 0:
            body = {"sharding": "column_wise", "ranks": (one, two), "kernel": kernel}
        elif kind == 1:
            body = {"sharding": "row_wise", "kernel": kernel}
        elif kind == 2:
            body = {"sharding": "data_parallel", "kernel": "dense"}
        elif kind == 3:
            body = {
                "sharding": "table_row_wise",
                "ranks": tuple(range(one // 8 * 8, one // 8 * 8 + 8)),
                "kernel": kernel,
            }
        found[f"t{i}"] = TablePlacement.model_validate(body)
    return found


def test_refilled_times_are_those_of_the_whole_path(both):
    predictor, plan, simulator = both
    rng = np.random.default_rng(7)
    # Each placement twice over: the second is refilled into the structure that the first has made.
    placements = []
    for _ in range(6):
        first = drawn(rng, predictor.topology.n_ranks)
        moved = {
            name: where if len(where.ranks) != 1 else where.model_copy(update={"ranks": ((where.ranks[0] + 1) % 8,)})
            for name, where in first.items()
        }
        placements += [first, moved]
    found = simulator.times(placements)
    for placement, time in zip(placements, found, strict=True):
        assert time == predictor.run(with_placement(plan, placement)).steady.iteration_ps
    assert simulator.n_whole == 0
    assert len(simulator._templates) < len(placements)


def test_one_structure_holds_all_whole_tables(both):
    predictor, plan, simulator = both
    n_ranks = predictor.topology.n_ranks
    rng = np.random.default_rng(1)
    before = set(simulator._templates)
    placements = []
    for _ in range(20):  # on three ranks: one table, two and two
        ranks, tables = rng.permutation(n_ranks)[[0, 0, 1, 1, 2]], rng.permutation(5)
        placements.append(
            {f"t{table}": TablePlacement(ranks=(int(rank),)) for table, rank in zip(tables, ranks, strict=True)}
        )
    times = simulator.times(placements)
    assert len(set(simulator._templates) - before) <= 1
    assert len(set(times)) >= 4
    for number in (0, 19):
        assert times[number] == predictor.run(with_placement(plan, placements[number])).steady.iteration_ps


def test_a_placement_without_room_is_refused_as_predict_refuses_it():
    model = {
        **DLRM,
        "tables": [{"name": f"t{i}", "rows": 60_000_000, "dim": 128} for i in range(4)],
        "embedding_dim": 128,
    }
    model["bottom_mlp"] = [128]
    predictor = Predictor(model, "dgx", bounds=False)
    plan = load_plan("ddp")
    simulator = PlanSimulator(predictor.graph(), predictor.topology, plan)
    fits = {f"t{i}": TablePlacement(ranks=(i,)) for i in range(4)}
    crowded = {**fits, "t1": TablePlacement(ranks=(0,))}
    spread = {**fits, "t1": TablePlacement(ranks=(5,))}
    found = simulator.times([fits, crowded, spread, {"nowhere": TablePlacement(ranks=(0,))}])
    for placement, said in zip((crowded, {"nowhere": TablePlacement(ranks=(0,))}), (found[1], found[3]), strict=True):
        with pytest.raises(InfeasiblePlanError) as refusal:
            predictor.run(with_placement(plan, placement))
        assert str(said) == str(refusal.value)
    assert found[0] == predictor.run(with_placement(plan, fits)).steady.iteration_ps
    assert found[2] == predictor.run(with_placement(plan, spread)).steady.iteration_ps


def test_the_models_own_operators_take_the_whole_path():
    predictor = Predictor(DLRM, "dgx", bounds=False)
    plan = load_plan("ddp")
    simulator = PlanSimulator(predictor.graph(), predictor.topology, plan)
    own = {f"t{i}": TablePlacement(ranks=(i,), kernel="own") for i in range(len(ROWS))}
    mixed = {**own, "t0": TablePlacement(sharding="row_wise")}
    found = simulator.times([own, mixed])
    assert found[0] == predictor.run(with_placement(plan, own)).steady.iteration_ps
    assert found[1] == predictor.run(with_placement(plan, mixed)).steady.iteration_ps


def test_lookups_wait_for_indices_that_travel_a_batch_ahead():
    predictor = Predictor(DLRM, "dgx", bounds=False)
    placement = {f"t{i}": TablePlacement(ranks=(i,)) for i in range(len(ROWS))}
    for base, waits in ((BASES[0], False), (BASES[1], True)):
        lowered = predictor.run(with_placement(load_plan(base), placement)).classes[0]
        events, tasks = lowered.rank_class.events, lowered.tasks
        found = [
            (events[int(tasks.event[dep.task])].label, events[int(tasks.event[dep.on])].label) for dep in lowered.carry
        ]
        ahead = ("perfmodel.permute_sparse_features", "all_to_all_v indices (table wise)")
        assert (ahead in found) is waits


@given(st.integers(0, 2**32 - 1), st.booleans())
@settings(deadline=None, max_examples=20)
def test_compiled_flows_take_what_plain_ones_take(seed, same_from_all):
    topology, ranks = as_topology("dgx"), tuple(range(8))
    rng = np.random.default_rng(seed)
    sent = rng.integers(0, 5, (8, 8)) * 1e6
    sent = np.tile(sent[0], (8, 1)) if same_from_all else sent
    np.fill_diagonal(sent, 0.0)
    plain, _ = exchange.exchange_time(topology, group_of(topology, ranks), ranks, sent)
    assert exchange_s(routes_of(topology, ranks), sent[None])[0] == plain


@given(
    st.lists(
        st.tuples(st.integers(2, 10**7), st.sampled_from((16, 64, 100, 128)), st.floats(1, 50), st.floats(0, 1.4)),
        min_size=1,
        max_size=4,
    )
)
@settings(deadline=None, max_examples=40)
def test_columns_are_the_features_of_the_rules(tables):
    accesses = [
        TableAccess(parameter=f"t{i}", rows=rows, dim=dim, pooling_factor=pooling, zipf_exponent=zipf)
        for i, (rows, dim, pooling, zipf) in enumerate(tables)
    ]
    batches = [TableBatch(tables=(one,), batch=512, optimizer="adagrad") for one in accesses]
    sums = group_sums(np.array([part_terms(one) for one in batches]), np.zeros(len(tables), dtype=np.int64), 1)
    whole = replace(batches[0], tables=tuple(accesses))
    for call, columns in (
        (forward_calls(whole)[-1], lookup_columns(sums)),
        (backward_calls(whole)[-1], update_columns(sums)),
    ):
        for name, column in columns_of([call]).items():
            assert columns[name].tolist() == column.tolist(), name
