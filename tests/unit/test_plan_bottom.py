"""The bottom MLP on one rank: its products there are of the global batch, nobody else runs it, DDP leaves it out."""

import pytest

from perfmodel.config import load_model, load_plan
from perfmodel.errors import InfeasiblePlanError
from perfmodel.extract import trace
from perfmodel.models import build
from perfmodel.plan import RankDevice, place

MODEL = {
    "kind": "dlrm", "name": "d", "batch_size": 40, "dense_features": 5, "bottom_mlp": [24, 16], "top_mlp": [12, 1],
    "embedding_dim": 16, "optimizer": "sgd", "tables": [{"rows": 100, "count": 3}],
}  # fmt: skip
N_RANKS = 4


@pytest.fixture(scope="module")
def graph():
    return trace(build(load_model(MODEL)))


def placed(graph, **embeddings):
    plan = load_plan({"embeddings": {"strategy": "table_wise", **embeddings}})
    ranks = [RankDevice(device="v100_sxm2_32gb", memory_bytes=1 << 34)] * N_RANKS
    return {rank: found for found in place(graph, plan, ranks).classes for rank in found.ranks}


def bottom_products(rank_class):
    ops = [event.op for event in rank_class.events if event.op is not None]
    inside = [op for op in ops if op.module.startswith("dense_arch") and op.name in ("aten.mm", "aten.addmm")]
    return [tuple(spec.shape for spec in op.inputs if len(spec.shape) == 2) for op in inside]


def test_products_of_the_global_batch_on_one_rank(graph):
    classes = placed(graph, bottom_mlp=2)
    assert [bottom_products(classes[rank]) for rank in (0, 1, 3)] == [[], [], []]
    wide = N_RANKS * 40
    # forward 5 -> 24 -> 16; backward: both weight gradients, and the first layer's input gradient is not needed
    expected = {((wide, 5), (5, 24)), ((wide, 24), (24, 16)), ((16, wide), (wide, 24)), ((wide, 16), (16, 24)),
                ((24, wide), (wide, 5))}  # fmt: skip
    assert set(bottom_products(classes[2])) == expected


def test_its_output_travels_with_the_rows_and_its_gradients_are_not_reduced(graph):
    with_it, without = placed(graph, bottom_mlp=0), placed(graph)

    def sent(classes, purpose):
        found = [e.collective for e in classes[0].events if e.collective and e.collective.purpose == purpose]
        return sum(map(sum, found[0].send_bytes))

    row_bytes = 40 * 16 * 4
    assert (
        sent(with_it, "pooled rows") - sent(without, "pooled rows") == N_RANKS * row_bytes
    )  # one sender, every rank's samples

    def reduced(classes):
        events = classes[0].events
        return sum(e.collective.bytes for e in events if e.collective and e.collective.op == "all_reduce")

    assert reduced(without) - reduced(with_it) == 4 * (5 * 24 + 24 + 24 * 16 + 16)


def test_rows_travel_in_half(graph):
    def bytes_of(classes):
        return {e.collective.purpose: e.collective.bytes for e in classes[0].events if e.collective}

    own, half = bytes_of(placed(graph)), bytes_of(placed(graph, row_precision="fp16"))
    assert half["pooled rows"] * 2 == own["pooled rows"]
    assert half["row gradients"] * 2 == own["row gradients"]
    assert half["indices"] == own["indices"]


def test_a_rank_that_is_not_there(graph):
    with pytest.raises(InfeasiblePlanError, match="bottom MLP on rank 4; ranks are 0 to 3"):
        placed(graph, bottom_mlp=4)


def test_a_model_without_one():
    model = {"kind": "vision", "name": "r", "depth": 18, "image_size": 32, "batch_size": 2}
    graph = trace(build(load_model(model)))
    assert placed(graph, bottom_mlp=0)  # no tables, nothing to spread
