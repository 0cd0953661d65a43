"""Joint tables: the numbers of single tables, by hand counts of ops and rows, on one rank and on several."""

from collections import Counter

import numpy as np
import pytest
import torch

from perfmodel.config import load_model, load_plan
from perfmodel.config.dlrm import Distribution
from perfmodel.errors import ConfigError
from perfmodel.extract import trace
from perfmodel.models import build, materialize
from perfmodel.models.indices import popularity_classes
from perfmodel.plan import RankDevice, place

BATCH, DIM, ROWS = 24, 8, (11, 7, 30)
MODEL = {
    "kind": "dlrm", "name": "d", "dense_features": 3, "bottom_mlp": [5, DIM], "top_mlp": [6, 1], "embedding_dim": DIM,
    "batch_size": BATCH, "optimizer": "sgd", "precision": "amp_fp16", "distribution": {"zipf": 1.2}, "tables": list(ROWS),
}  # fmt: skip


def forward_ops(**changes):
    graph = trace(build(load_model({**MODEL, **changes})))
    return graph, Counter(op.name for op in graph.ops if op.phase == "forward")


@pytest.mark.parametrize("pooling", [1, 2.5])
def test_logits_are_those_of_tables_looked_up_one_by_one(pooling):
    tables = [{"rows": rows, "pooling_factor": pooling, "ragged": True} for rows in ROWS]
    same = {**MODEL, "precision": "fp32", "tables": tables}
    joint = materialize(build(load_model({**same, "joint": "all"})), 3)
    single = materialize(build(load_model(same)), 3)
    dense, [indices], [offsets], _ = joint.args
    first_rows = np.cumsum([0, *ROWS])
    weight = joint.module.sparse_arch.embedding_bags["joint0"].weight
    bags = list(indices.tensor_split(offsets[1:].tolist()))  # sample by sample, a bag for each of the three tables
    alone = []
    for t, bag in enumerate(single.module.sparse_arch.embedding_bags.values()):
        bag.weight.data.copy_(weight[first_rows[t] : first_rows[t + 1]])
        own = [rows - first_rows[t] for rows in bags[t :: len(ROWS)]]
        assert all(((rows >= 0) & (rows < ROWS[t])).all() for rows in own)
        alone.append((torch.cat(own), torch.cumsum(torch.tensor([0, *map(len, own)][:-1]), 0)))
    for part in ("dense_arch", "over_arch"):
        getattr(single.module, part).load_state_dict(getattr(joint.module, part).state_dict())
    found = single.module(dense, [i for i, _ in alone], [o for _, o in alone], [None] * 3)
    torch.testing.assert_close(found, joint.module(*joint.args))


def test_one_lookup_one_cast_and_two_index_copies_for_all_tables():
    (single, before), (joint, after) = forward_ops(), forward_ops(joint="all")
    lookup = next(name for name in before if "embedding_bag" in name)
    assert (before[lookup], after[lookup]) == (3, 1)
    assert before["aten._to_copy"] - after["aten._to_copy"] == 2
    inputs = [sum(op.phase == "input" for op in graph.ops) for graph in (single, joint)]
    assert inputs[0] - inputs[1] == 2 * 2  # indices and offsets of two tables
    [table] = joint.tables
    assert (table.rows, table.pooling_factor) == (sum(ROWS), len(ROWS))
    op = next(op for op in joint.ops if op.name == lookup)
    assert (op.inputs[0].shape, op.outputs[0].shape) == ((sum(ROWS), DIM), (BATCH * len(ROWS), DIM))


def test_gradients_of_joint_rows_are_not_stacked():
    names = Counter(op.name for op in forward_ops(joint="all")[0].ops if op.phase == "backward")
    assert not any("stack" in name or "unbind" in name or "aten.cat" in name for name in names)
    assert names["aten._embedding_bag_backward"] == 1


def test_each_rank_looks_its_group_up_once_for_the_global_batch():
    graph, _ = forward_ops(joint=[["t0", "t2"]])
    plan = load_plan({"embeddings": {"strategy": "explicit", "placement": {"joint0": 1, "t1": 0}}})
    ranks = [RankDevice(device="v100_sxm2_32gb", memory_bytes=1 << 34)] * 2
    found = {rank: c for c in place(graph, plan, ranks).classes for rank in c.ranks}
    bags = {0: 2 * BATCH, 1: 2 * BATCH * 2}
    rows = {0: ROWS[1], 1: ROWS[0] + ROWS[2]}
    for rank, members in found.items():
        lookups = [
            e.op for e in members.events if e.op is not None and "_embedding_bag" in e.op.name and e.phase == "forward"
        ]
        assert [(op.inputs[0].shape, op.outputs[0].shape) for op in lookups] == [((rows[rank], DIM), (bags[rank], DIM))]


@pytest.mark.parametrize("exponent", [0.0, 0.8, 1.45])
def test_classes_share_out_all_accesses_as_the_law_says(exponent):
    rows = 5000
    pairs = np.array(popularity_classes(Distribution(zipf=exponent), rows, 7.0))
    assert pairs[:, 0].sum() == rows
    law = np.arange(1, rows + 1.0) ** -exponent
    each = np.repeat(pairs[:, 1], pairs[:, 0].astype(int))
    np.testing.assert_allclose(each, 7.0 * law / law.sum(), rtol=0.04)
    assert each.sum() == pytest.approx(7.0)


@pytest.mark.parametrize(
    ("joint", "message"),
    [
        ([["t0", "t9"]], "'t9'"),
        ([["t0", "t1"], ["t1"]], "'t1' 2 times"),
        ([[]], "empty group 0"),
        ([["t0", "t3"]], "2 kinds"),
    ],
)
def test_groups_that_cannot_be_looked_up_together_are_refused(joint, message):
    with pytest.raises(ConfigError, match=message):
        load_model({**MODEL, "joint": joint, "tables": [*ROWS, {"rows": 5, "weighted": True}]})
