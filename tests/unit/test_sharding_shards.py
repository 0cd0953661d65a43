"""Parts of sharded tables against hand counts; what they exchange and hold against closed forms."""

import itertools
from functools import cache
from pathlib import Path

import pytest
import yaml

from perfmodel.config import load_model, load_plan
from perfmodel.config.sharding import TablePlacement
from perfmodel.errors import ConfigError, InfeasiblePlanError
from perfmodel.extract import trace
from perfmodel.graph import TableAccess, row_of_rank
from perfmodel.models import build
from perfmodel.plan import RankDevice, place
from perfmodel.plan.shards import row_heights, row_shares, shards_of

BATCH, DIM, N = 32, 64, 4
ROWS, POOLING = (1000, 503, 2000, 10), (1.0, 3.0, 2.0, 1.0)
RANK = RankDevice(device="a100_sxm_40gb", memory_bytes=40 * 2**30)
CASE_39 = (
    Path(__file__).parents[2].parent / "shared" / "cases" / "39-plan-nvlink-domain-larger-than-host" / "machine.yaml"
)


@cache
def dlrm():
    tables = [
        {"name": f"t{i}", "rows": r, "pooling_factor": p} for i, (r, p) in enumerate(zip(ROWS, POOLING, strict=True))
    ]
    spec = {
        "kind": "dlrm", "name": "tiny", "batch_size": BATCH, "dense_features": 4, "bottom_mlp": [16, DIM],
        "top_mlp": [16, 1], "embedding_dim": DIM, "sparse_optimizer": "rowwise_adagrad", "tables": tables,
    }  # fmt: skip
    return trace(build(load_model(spec)))


def placed(where, n=N, **embeddings):
    placement = {f"t{i}": where if isinstance(where, dict) else where[i] for i in range(len(ROWS))}
    plan = load_plan({"name": "p", "embeddings": {"placement": placement, **embeddings}})
    return place(dlrm(), plan, [RANK] * n)


def exchanges(placement):
    found = {e.collective.instance: e.collective for c in placement.classes for e in c.events if e.collective}
    return {c.purpose: c for c in found.values()}


def test_rows_are_split_by_the_ceiling_and_the_last_parts_may_be_empty():
    assert row_heights(10, 4) == (3, 3, 3, 1)
    assert row_heights(5, 4) == (2, 2, 1, 0)
    table = TableAccess(parameter="t", rows=5, dim=8)
    assert [s.rank for s in shards_of(table, TablePlacement(sharding="row_wise"), 4)] == [0, 1, 2]


def test_a_grid_covers_every_element_once():
    table = TableAccess(parameter="t", rows=7, dim=6)
    where = TablePlacement(sharding="grid", ranks=(0, 1, 2, 3, 2, 1), widths=(4, 2))
    cells = list(
        itertools.chain.from_iterable(
            itertools.product(
                range(s.row_offset, s.row_offset + s.access.rows),
                range(s.column_offset, s.column_offset + s.access.dim),
            )
            for s in shards_of(table, where, 4)
        )
    )
    assert sorted(cells) == sorted(itertools.product(range(7), range(6)))


@pytest.mark.parametrize("zipf", [0.0, 0.6, 1.05])
def test_shares_of_row_parts_are_those_of_their_rows(zipf):
    table = TableAccess(parameter="t", rows=3000, dim=8, zipf_exponent=zipf)
    weight = [(rank + 1) ** -zipf for rank in range(3000)]
    brute = [0.0] * 4
    for rank, one in enumerate(weight):
        brute[row_of_rank(rank, 3000) // 750] += one / sum(weight)
    assert row_shares(table, (750,) * 4) == pytest.approx(brute, rel=1e-3)


def test_wrong_plans_are_refused_by_name():
    table = TableAccess(parameter="t", rows=10, dim=8)
    with pytest.raises(InfeasiblePlanError, match="table 't' has 8 columns; the plan's parts have 6"):
        shards_of(table, TablePlacement(sharding="column_wise", ranks=(0, 1), widths=(3, 3)), 2)
    with pytest.raises(ConfigError, match="ranks: found 2 with table_wise, allowed 1"):
        load_plan({"embeddings": {"placement": {"t0": {"sharding": "table_wise", "ranks": [0, 1]}}}})


def test_row_wise_tables_send_each_index_once_and_sum_up_by_reduce_scatter():
    found = exchanges(placed({"sharding": "row_wise"}))
    assert sum(map(sum, found["indices (row wise)"].send_bytes)) == pytest.approx(
        BATCH * sum(POOLING) * 8 * N, rel=0.01
    )
    rows = found["rows (row wise)"]
    assert (rows.op, rows.bytes) == ("reduce_scatter", len(ROWS) * DIM * BATCH * N * 4)
    back = found["row gradients (row wise)"]
    assert (back.op, back.bytes) == ("all_gather", rows.bytes)


def test_column_parts_each_get_all_indices_and_send_their_columns():
    found = exchanges(placed({"sharding": "column_wise", "ranks": (0, 3)}))
    assert sum(map(sum, found["indices (column wise)"].send_bytes)) == 2 * BATCH * sum(POOLING) * 8 * N
    rows = found["rows (column wise)"].send_bytes
    assert rows[0] == (len(ROWS) * BATCH * DIM // 2 * 4,) * N
    assert rows[1] == (0,) * N


def test_rows_over_a_domain_are_summed_there_and_cross_between_equal_places():
    found = exchanges(placed({"sharding": "table_row_wise", "ranks": (2, 3)}))
    inside = found["partial sums in a domain (domain row wise)"]
    assert (inside.op, inside.ranks, inside.bytes) == ("reduce_scatter", (2, 3), len(ROWS) * DIM * BATCH * N * 4)
    rows = found["rows (domain row wise)"].send_bytes
    one = len(ROWS) * DIM * BATCH * 4
    assert rows == ((0,) * N, (0,) * N, (one, 0, one, 0), (0, one, 0, one))


def test_all_tables_of_a_rank_run_as_one_operator():
    placement = placed({"sharding": "row_wise"})
    for rank_class in placement.classes:
        names = [e.op.name for e in rank_class.events if e.op is not None and "batched" in e.op.name]
        assert names == ["perfmodel.batched_embedding", "perfmodel.batched_embedding_backward"]


def test_memory_of_parts_by_tier():
    whole = sum(rows * (DIM * 4 + 4) for rows in ROWS)  # fp32 rows, one fp32 accumulator each
    by_kernel = {}
    for kernel in ("fused", "uvm", "key_value"):
        memory = placed({"sharding": "table_wise", "ranks": (1,), "kernel": kernel}).classes[1].memory
        by_kernel[kernel] = (memory.parameters_bytes + memory.optimizer_bytes, memory.host_bytes, memory.ssd_bytes)
    bare = by_kernel["uvm"][0]
    assert by_kernel["fused"] == (bare + whole, 0, 0)
    assert by_kernel["uvm"][1:] == (whole, 0)
    cached = sum(round(0.2 * rows) * (DIM * 4 + 16) for rows in ROWS)
    assert by_kernel["key_value"] == (bare + cached, 0, whole)


def test_domains_larger_than_a_host():
    if not CASE_39.is_file():
        pytest.skip("needs shared/cases")
    case = yaml.safe_load(CASE_39.read_text(encoding="utf-8"))
    from perfmodel.api import as_topology

    body = {
        "name": "case39", "nodes": case["hosts"],
        "node": {
            "gpus": {"count": case["gpus_per_host"], "device": "gb200"},
            "nvlink": {"generation": 5, "links_per_gpu": 18, "switch": True,
                       "nodes_per_domain": case["gpus_per_nvlink_domain"] // case["gpus_per_host"]},
            "pcie": {"generation": 5, "host_bridges": 2, "sockets": 1},
            "nics": {"count": 2, "kind": "infiniband_ndr"},
        },
        "network": {"kind": "fat_tree"},
    }  # fmt: skip
    machine = as_topology(body)
    assert [place.local_rank for place in machine.ranks] == case["rank_to_device"]
    assert machine.domains() == ((0, 1, 2, 3), (4, 5, 6, 7))
    body["node"]["nvlink"]["nodes_per_domain"] = 1
    assert as_topology(body).fingerprint != machine.fingerprint
