"""What a host puts together around all-to-alls, against the bytes that the all-to-alls themselves carry."""

import pytest

from perfmodel.config import load_model, load_plan
from perfmodel.extract import trace
from perfmodel.models import build
from perfmodel.plan import RankDevice, place
from perfmodel.plan.rearrange import RECEIVED_STORAGE, SENT_STORAGE

RANK = RankDevice(device="any", memory_bytes=1 << 40)
DLRM = {
    "kind": "dlrm", "name": "d", "batch_size": 8, "dense_features": 4, "bottom_mlp": [8], "top_mlp": [4, 1],
    "embedding_dim": 8, "tables": [{"rows": 50, "count": 5, "pooling_factor": 2}], "sparse_optimizer": "sgd",
    "interaction": "dot",
}  # fmt: skip
OWNERS = {"t0": 1, "t1": 0, "t2": 0, "t3": 0, "t4": 1}


def classes(target="cpu"):
    graph = trace(build(load_model(DLRM)), target=target)
    return place(graph, load_plan({"embeddings": OWNERS}), [RANK] * 2).classes


def moved(rank_class, storage):
    """(bytes put into a tensor to send, or taken out of a received one; bytes that the exchange carries) by purpose."""
    found = {}
    for event in rank_class.events:
        collective = event.collective
        if collective is None or collective.op != "all_to_all_v":
            continue
        rank = rank_class.representative
        carried = (
            sum(collective.send_bytes[rank])
            if storage == SENT_STORAGE
            else sum(row[rank] for row in collective.send_bytes)
        )
        mine = storage + collective.instance
        specs = [
            spec.bytes
            for other in rank_class.events
            if other.op is not None
            for spec in (other.op.outputs if storage == SENT_STORAGE else other.op.inputs)
            if spec.storage == mine
        ]
        found[collective.purpose] = (sum(specs), carried)
    return found


@pytest.mark.parametrize("rank", [0, 1])
def test_what_is_sent_is_put_together_once(rank):
    assert all(packed == carried for packed, carried in moved(classes()[rank], SENT_STORAGE).values())


@pytest.mark.parametrize("rank", [0, 1])
def test_indices_and_gradients_are_ordered_by_table_and_rows_stay_as_they_come(rank):
    found = moved(classes()[rank], RECEIVED_STORAGE)
    for purpose in ("indices", "row gradients"):
        assert found[purpose][0] == found[purpose][1]
    assert found["pooled rows"][0] == 0


def test_an_exchange_waits_for_what_is_put_together_and_lookups_for_what_is_taken_out():
    events = classes()[0].events
    exchange = next(i for i, e in enumerate(events) if e.collective and e.collective.purpose == "pooled rows")
    before = events[max(events[exchange].after)]
    assert before.op is not None
    assert before.op.name == "aten.cat"
    indices = next(i for i, e in enumerate(events) if e.collective and e.collective.purpose == "indices")
    assert any(indices in e.after for e in events if e.op is not None and e.op.name == "aten.cat")


def test_gpus_copy_nothing():
    assert not any(moved(classes("cuda")[0], SENT_STORAGE)[p][0] for p in ("indices", "pooled rows", "row gradients"))
