"""Live cases on several ranks: who is in which group, and what an attribution says of a predicted rank."""

from dataclasses import replace

import pytest
from torch import distributed

from perfmodel.api import predict_run
from perfmodel.config import load_plan
from perfmodel.plan.mesh import mesh_of
from perfmodel.validate.attribute import OTHER
from perfmodel.validate.attribute_ranks import Trained, attribute_ranks, predicted_rank
from perfmodel.validate.live import live_settings, live_topology, table_owners
from perfmodel.validate.live_plans import plan_cases
from perfmodel.validate.train_plans import _groups

DLRM = {
    "kind": "dlrm", "name": "t", "dense_features": 4, "bottom_mlp": [8, 4], "top_mlp": [8, 1], "interaction": "dot",
    "embedding_dim": 4, "batch_size": 64, "tables": [{"rows": 500, "count": 3, "pooling_factor": 2}],
    "sparse_optimizer": "sgd",
}  # fmt: skip


@pytest.mark.parametrize("rank", range(4))
def test_live_groups_are_those_of_the_plans_mesh(rank, monkeypatch):
    monkeypatch.setattr(distributed, "new_group", tuple)
    along, across = _groups(rank, 2, 2)
    mesh = mesh_of(load_plan("pp=2,dp=2,micro_batches=4").mesh, 4)
    assert along == mesh.group(rank, "pp")
    assert across == mesh.group(rank, "dp")


def test_four_ranks_have_a_case_of_stages_and_copies_and_two_have_none():
    assert [case.name for case in plan_cases(4) if "dp2" in case.name] == ["llama-b8-pp2-dp2-x4"]
    assert not [case for case in plan_cases(2) if "dp2" in case.name]
    assert len(plan_cases(2)) + len(plan_cases(4)) >= 12


def test_operators_and_waits_of_a_predicted_rank_add_up_to_its_step():
    run = predict_run(DLRM, live_topology(2), "ddp", bounds=False)
    operators, collectives = predicted_rank(run)
    assert sum(spent for spent, _ in operators.values()) == pytest.approx(run.prediction.iteration_time_s)
    assert operators[OTHER][0] > 0
    # Lengths, indices, rows and their gradients; one bucket.
    assert (collectives["all_to_all"][1], collectives["all_reduce"][1]) == (4.0, 1.0)


def test_a_case_on_two_ranks_is_attributed():
    run = predict_run(DLRM, live_topology(2), "ddp", bounds=False)
    settings = replace(live_settings(2, 2), block_s=0.0)
    rows = attribute_ranks(run, Trained(model=DLRM, owners=table_owners(run.prediction)), settings)
    by_name = {row.name: row for row in rows}
    inside = [row for row in rows if "asked to done" not in row.name]
    assert sum(row.predicted_s for row in inside) == pytest.approx(run.prediction.iteration_time_s)
    assert by_name["all_to_all (asked to done)"].calls == (4.0, 4.0)
    assert by_name["all_reduce (asked to done)"].measured_s > 0
    assert by_name["aten._embedding_bag"].calls[0] == by_name["aten._embedding_bag"].calls[1]
