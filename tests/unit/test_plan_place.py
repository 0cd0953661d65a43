"""Placement of a small DLRM and a small GPT: volumes by closed form, order as DDP and hybrid-parallel DLRM issue it."""

from collections import Counter
from functools import cache

import pytest

from perfmodel.config import load_model, load_plan
from perfmodel.errors import InfeasiblePlanError
from perfmodel.extract import trace
from perfmodel.graph import Graph
from perfmodel.kernels import work
from perfmodel.models import build
from perfmodel.plan import Placement, RankDevice, place

BATCH, DIM, N_RANKS = 32, 8, 4
POOLING = (1.0, 3.0, 2.0, 5.0, 1.0)
ROWS = (1000, 500, 2000, 100, 50)
MODEL = {
    "kind": "dlrm", "name": "tiny", "batch_size": BATCH, "dense_features": 4, "bottom_mlp": [16, DIM], "top_mlp": [16, 1],
    "embedding_dim": DIM,
    "tables": [{"name": f"t{i}", "rows": r, "pooling_factor": p} for i, (r, p) in enumerate(zip(ROWS, POOLING, strict=True))],
}  # fmt: skip
RANK = RankDevice(device="a100_sxm_40gb", memory_bytes=40 * 2**30)


@cache
def dlrm(sparse_optimizer: str = "sgd") -> Graph:
    return trace(build(load_model({**MODEL, "sparse_optimizer": sparse_optimizer})))


def placed(plan: str = "ddp", n_ranks: int = N_RANKS) -> Placement:
    return place(dlrm(), load_plan(plan), [RANK] * n_ranks)


def collectives(placement: Placement) -> dict:
    return {
        e.collective.instance: e.collective for c in placement.classes for e in c.events if e.collective is not None
    }


def by_purpose(placement: Placement) -> dict:
    return {c.purpose: c for c in collectives(placement).values()}


def test_one_rank_runs_the_graph_as_it_is() -> None:
    placement = placed(n_ranks=1)
    assert [e.op for e in placement.classes[0].events] == list(dlrm().ops)


def test_pooled_rows_move_batch_x_dim_x_4_bytes_per_table_and_pair() -> None:
    placement = placed()
    exchange = by_purpose(placement)["pooled rows"]
    held = {rank: len(c.tables) for c in placement.classes for rank in c.ranks}
    for sender in range(N_RANKS):
        assert exchange.send_bytes[sender] == (held[sender] * BATCH * DIM * 4,) * N_RANKS
    assert sum(map(sum, exchange.send_bytes)) == len(ROWS) * BATCH * DIM * 4 * N_RANKS


def test_row_gradients_go_the_way_back() -> None:
    exchanges = by_purpose(placed())
    there, back = exchanges["pooled rows"].send_bytes, exchanges["row gradients"].send_bytes
    assert back == tuple(zip(*there, strict=True))


def test_indices_move_eight_bytes_each() -> None:
    sent = by_purpose(placed())["indices"].send_bytes
    assert sum(map(sum, sent)) == int(sum(POOLING)) * BATCH * 8 * N_RANKS


def test_without_index_exchange_only_rows_move() -> None:
    purposes = set(by_purpose(placed("ddp,embeddings.index_exchange=false")))
    assert {p for p in purposes if "bucket" not in p} == {"pooled rows", "row gradients"}


def test_lookups_serve_the_global_batch_once() -> None:
    local = sum(work(op).read_bytes for op in dlrm().ops if op.name == "aten._embedding_bag")
    spread = sum(
        work(e.op).read_bytes * len(c.ranks)
        for c in placed().classes
        for e in c.events
        if e.op is not None and e.op.name == "aten._embedding_bag"
    )
    assert spread == pytest.approx(local * N_RANKS, rel=0.02)


def test_all_dense_gradients_are_reduced_once() -> None:
    reduced = sum(c.bytes for c in collectives(placed()).values() if c.op == "all_reduce")
    dense = sum(p.tensor.bytes for p in dlrm().parameters if "embedding" not in p.name)
    assert reduced == dense


def test_every_table_is_on_exactly_one_rank_and_classes_cover_all_ranks() -> None:
    placement = placed()
    tables = Counter(t for c in placement.classes for t in c.tables for _ in c.ranks)
    assert tables == Counter(t.parameter for t in dlrm().tables)
    assert sorted(r for c in placement.classes for r in c.ranks) == list(range(N_RANKS))


def test_lookups_come_before_the_dense_forward_and_their_backward_after_it() -> None:
    for rank_class in placed().classes:
        names = [(e.op.name, e.phase) if e.op else (e.label, e.phase) for e in rank_class.events]
        lookups = [i for i, (n, _) in enumerate(names) if n == "aten._embedding_bag"]
        dense = [i for i, (n, p) in enumerate(names) if n == "aten.addmm" and p == "forward"]
        assert max(lookups, default=-1) < min(dense)
        exchanged = next(i for i, (n, _) in enumerate(names) if "row gradients" in n)
        last_dense = max(i for i, (n, p) in enumerate(names) if n == "aten.mm" and p == "backward")
        backward = [i for i, (n, _) in enumerate(names) if n == "aten._embedding_bag_backward"]
        assert all(i > max(exchanged, last_dense) for i in backward)


def test_interaction_waits_for_the_exchange() -> None:
    events = placed().classes[0].events
    exchange = next(i for i, e in enumerate(events) if e.collective and e.collective.purpose == "pooled rows")
    waiting = next(e for e in events if exchange in e.after)
    assert waiting.op is not None
    assert waiting.op.name == "aten.cat"


def test_the_optimizer_waits_for_every_bucket() -> None:
    events = placed().classes[0].events
    reduces = [i for i, e in enumerate(events) if e.collective and e.collective.op == "all_reduce"]
    first_step = next(i for i, e in enumerate(events) if e.phase == "optimizer")
    waited = {dep for e in events[:first_step] for dep in e.after}
    assert set(reduces) <= waited


def test_accumulation_repeats_the_exchanges_but_reduces_once() -> None:
    once, thrice = placed(), placed("ddp,accumulate=3")
    count = Counter(c.op for c in collectives(thrice).values())
    assert count["all_to_all_v"] == 3 * Counter(c.op for c in collectives(once).values())["all_to_all_v"]
    assert count["all_reduce"] == Counter(c.op for c in collectives(once).values())["all_reduce"]


def test_an_explicit_placement_is_obeyed() -> None:
    plan = load_plan({"embeddings": {"t0": 3, "t1": 3, "t2": 0, "t3": 1, "t4": 1}})
    held = {c.representative: c.tables for c in place(dlrm(), plan, [RANK] * N_RANKS).classes}
    names = {rank: tuple(t.split(".")[-2] for t in tables) for rank, tables in held.items()}
    assert names == {0: ("t2",), 1: ("t3", "t4"), 2: (), 3: ("t0", "t1")}


def test_a_sparse_table_cannot_be_data_parallel() -> None:
    with pytest.raises(InfeasiblePlanError, match="sparse gradients"):
        placed("embeddings=data_parallel")


def test_ranks_without_tables_form_one_class() -> None:
    plan = load_plan({"embeddings": dict.fromkeys(("t0", "t1", "t2", "t3", "t4"), 1)})
    placement = place(dlrm(), plan, [RANK] * N_RANKS)
    assert sorted(c.ranks for c in placement.classes) == [(0, 2, 3), (1,)]


def test_memory_of_tables_is_on_their_owner_only() -> None:
    plan = load_plan({"embeddings": dict.fromkeys(("t0", "t1", "t2", "t3", "t4"), 1)})
    memory = {c.representative: c.memory for c in place(dlrm("adagrad"), plan, [RANK] * N_RANKS).classes}
    weights = sum(ROWS) * DIM * 4
    assert memory[1].parameters_bytes - memory[0].parameters_bytes == weights
    assert memory[1].optimizer_bytes - memory[0].optimizer_bytes == weights  # Adagrad keeps one state of the same size
