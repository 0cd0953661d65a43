"""Embedding lookups: work by hand, reuse that reaches the law, and measured kernels of V100 and H100."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from perfmodel.db import load_device
from perfmodel.graph import Op, TableAccess
from perfmodel.kernels import calls_of, price_calls, work
from perfmodel.kernels.embedding import ACCUMULATE, GATHER, POOL, UPDATE, Lookups, radix_sort
from perfmodel.kernels.embedding_law import hit_share
from perfmodel.kernels.table_batch import TableBatch, backward_calls, forward_calls, table_lookup_work
from perfmodel.validate.kernel_rows import tensor

ROWS, DIM, BATCH, POOLING = 10_000, 64, 256, 20
N = BATCH * POOLING


def bag_op(**attrs):
    weight, indices = tensor(0, (ROWS, DIM), "float32"), tensor(1, (N,), "int64")
    offsets = tensor(2, (BATCH,), "int64")
    outputs = (
        tensor(3, (BATCH, DIM), "float32"),
        tensor(4, (N,), "int64"),
        tensor(5, (BATCH,), "int64"),
        tensor(6, (0,), "int64"),
    )
    return Op(
        id=0,
        name="aten._embedding_bag",
        inputs=(weight, indices, offsets),
        input_names=("weight", "indices", "offsets"),
        outputs=outputs,
        attrs={"mode": 0, **attrs},
    )


def test_bag_forward_by_hand():
    total = work(bag_op())
    assert total.flops == N * DIM  # one add an element gathered
    assert total.read_bytes == N * DIM * 4 + N * 8 + BATCH * 8
    assert total.write_bytes == BATCH * DIM * 4 + N * 8 + BATCH * 8
    (call,) = calls_of(bag_op())
    assert call.features["stage"] == POOL
    assert call.features["pooling"] == POOLING
    # Uniform draws: 10000 (1 - (1 - 1e-4)^5120) distinct rows.
    assert call.features["unique"] == pytest.approx(ROWS * (1 - (1 - 1 / ROWS) ** N), rel=1e-9)


def test_single_lookup_by_hand():
    weight, indices, out = (
        tensor(0, (ROWS, DIM), "float16"),
        tensor(1, (4, 8), "int64"),
        tensor(2, (4, 8, DIM), "float16"),
    )
    op = Op(id=0, name="aten.embedding", inputs=(weight, indices), input_names=("weight", "indices"), outputs=(out,))
    total = work(op)
    assert (total.flops, total.read_bytes, total.write_bytes) == (0, 32 * DIM * 2 + 32 * 8, 32 * DIM * 2)
    assert calls_of(op)[0].features["stage"] == GATHER


def test_dense_gradient_fills_the_table_and_sums_distinct_rows():
    gradient, indices = tensor(0, (6144, DIM), "float32"), tensor(1, (6144,), "int64")
    op = Op(
        id=0,
        name="aten.embedding_dense_backward",
        inputs=(gradient, indices),
        input_names=("grad_output", "indices"),
        outputs=(tensor(2, (ROWS, DIM), "float32"),),
    )
    fill, *ordering, summed = calls_of(op)
    assert (fill.family, fill.work.write_bytes) == ("fill", ROWS * DIM * 4)
    assert {call.family for call in ordering} == {"sort", "scan"}
    unique = ROWS * (1 - (1 - 1 / ROWS) ** 6144)
    assert summed.features["stage"] == ACCUMULATE
    assert summed.work.write_bytes == round(unique) * DIM * 4
    assert summed.work.flops == 6144 * DIM
    few = replace(op, inputs=(tensor(0, (100, DIM), "float32"), tensor(1, (100,), "int64")))
    fill, summed = calls_of(few)  # no sort; 100 lookups are 4 steps of 32
    assert summed.features["serial_steps"] == 4


def test_the_table_statistics_on_the_op_change_reuse():
    uniform, skewed = (calls_of(bag_op(zipf_exponent=exponent))[0] for exponent in (0.0, 1.2))
    assert skewed.features["unique"] < 0.4 * uniform.features["unique"]
    assert skewed.features["hit_1"] > uniform.features["hit_1"]
    (by_histogram,) = calls_of(bag_op(histogram=[[1.0, 1e6], [9999.0, 0.0]]))
    assert by_histogram.features["unique"] == pytest.approx(1.0)  # one row takes every lookup


def test_a_skewed_table_is_looked_up_faster():
    device, tables = load_device("v100_pcie_32gb"), v100_batch((1_000_000,) * 8, 64, 100.0)
    skewed = replace(tables, tables=tuple(replace(table, zipf_exponent=1.2) for table in tables.tables))
    slow, fast = (price_calls(forward_calls(case)[-1:], device)[0].time_s for case in (tables, skewed))
    assert fast < 0.8 * slow


def test_passes_of_a_radix_sort():
    # 20 bits of row number: 3 passes of 8 bits, each reads and writes 12 bytes a pair, and a histogram reads 8 bytes a key.
    calls = radix_sort(1000, 2**20)
    assert len(calls) == 4
    assert sum(call.work.bytes for call in calls) == 1000 * 8 + 3 * 1000 * 24
    assert radix_sort(0, 100) == ()


def test_hits_between_two_cache_sizes():
    columns = {f"hit_{mib}": np.array([0.1 * i]) for i, mib in enumerate((1, 2, 4, 8, 16, 32, 64, 128, 256))}
    assert hit_share(columns, 4 * 2**20)[0] == pytest.approx(0.2)
    assert hit_share(columns, 2**20 * 2**2.5)[0] == pytest.approx(0.25)  # half way in the logarithm
    assert hit_share(columns, 1e3)[0] == 0.0
    assert hit_share(columns, 1e12)[0] == pytest.approx(0.8)


TABLE = TableAccess(parameter="t", rows=ROWS, dim=DIM, pooling_factor=float(POOLING))


def test_batched_tables_by_hand():
    forward = table_lookup_work(TABLE, BATCH)
    # Indices are read twice (bounds check, lookup), bag offsets once.
    assert forward.read_bytes == N * DIM * 4 + 2 * N * 8 + BATCH * 8
    assert forward.write_bytes == BATCH * DIM * 4
    assert forward.flops == N * DIM
    unique = ROWS * (1 - (1 - 1 / ROWS) ** N)
    update = backward_calls(TableBatch(tables=(TABLE,), batch=BATCH, optimizer="rowwise_adagrad"))[-1]
    assert update.features["stage"] == UPDATE
    assert update.work.write_bytes == round(unique * (DIM * 4 + 4))  # a row and its one accumulator
    assert update.work.read_bytes == pytest.approx(N * DIM * 4 + 2 * N * 8 + unique * (DIM * 4 + 4), abs=1)
    adam = backward_calls(TableBatch(tables=(TABLE,), batch=BATCH, optimizer="adam"))[-1]
    assert adam.work.write_bytes == round(unique * DIM * 4 * 3)  # row and two moments


def test_splitting_a_table_by_columns_keeps_the_gathered_bytes():
    halves = [replace(TABLE, dim=DIM // 2) for _ in range(2)]
    whole, split = (
        sum(call.work.flops for call in forward_calls(TableBatch(tables=tables, batch=BATCH)))
        for tables in ((TABLE,), tuple(halves))
    )
    assert whole == split


def test_more_lookups_or_host_memory_never_take_less():
    device = load_device("h100_sxm")

    def seconds(calls):
        return sum(estimate.time_s for estimate in price_calls(calls, device))

    times = [
        seconds(forward_calls(TableBatch(tables=(replace(TABLE, pooling_factor=p),), batch=4096)))
        for p in (1, 4, 16, 64)
    ]
    assert times == sorted(times)
    large = replace(TABLE, rows=10_000_000, dim=128, zipf_exponent=1.05)
    near, cached, far = (
        TableBatch(tables=(large,), batch=8192, placement=placement, cache_load_factor=0.2, warm_batches=50)
        for placement in ("hbm", "uvm_caching", "uvm")
    )
    assert seconds(forward_calls(near)) < seconds(forward_calls(cached)) < seconds(forward_calls(far))
    assert seconds(backward_calls(near)) < seconds(backward_calls(far))


def v100_batch(rows, dim, pooling):
    tables = tuple(TableAccess(parameter=f"t{i}", rows=r, dim=dim, pooling_factor=pooling) for i, r in enumerate(rows))
    return TableBatch(tables=tables, batch=2048)


def test_measured_kernels_of_dlrm_on_v100():
    # owensgroup/ml_perf_model, kernel listing of DLRM_default, batch 2048: lookup 522 us, update 1276 us.
    device, tables = load_device("v100_pcie_32gb"), v100_batch((1_000_000,) * 8, 64, 100.0)
    (lookup,) = price_calls(forward_calls(tables)[-1:], device)
    (update,) = price_calls(backward_calls(tables)[-1:], device)
    assert lookup.time_s == pytest.approx(522e-6, rel=0.10)
    assert update.time_s == pytest.approx(1276e-6, rel=0.10)


@pytest.mark.parametrize(
    ("rows", "placement", "forward_s", "backward_s", "tolerance"),
    [
        # NVIDIA/recsys-examples, FBGEMM on one H100: 10 tables, 104,857 lookups each, dim 128, Zipf 1.05, SGD.
        (1_677_721, "hbm", 0.345e-3, 0.614e-3, 0.15),
        (26_843_545, "uvm", 7.931e-3, 5.629e-3, 0.30),
        (26_843_545, "uvm_caching", 3.986e-3, 0.789e-3, 0.30),
    ],
)
def test_measured_operators_of_fbgemm_on_h100(rows, placement, forward_s, backward_s, tolerance):
    device = load_device("h100_sxm")
    table = TableAccess(parameter="t", rows=rows, dim=128, zipf_exponent=1.05)
    tables = TableBatch(
        tables=(table,) * 10, batch=104_857, pooled=False, placement=placement, cache_load_factor=0.8, warm_batches=100
    )
    forward, backward = (
        sum(estimate.time_s for estimate in price_calls(calls, device))
        for calls in (forward_calls(tables), backward_calls(tables))
    )
    assert forward == pytest.approx(forward_s, rel=tolerance)
    assert backward == pytest.approx(backward_s, rel=tolerance)


def test_distinct_rows_of_the_same_benchmark():
    # The benchmark counted 350,280 distinct rows of 1,048,570 in device memory and 433,723 in the larger tables.
    for rows, counted in ((1_677_721, 350_280), (26_843_545, 433_723)):
        one = Lookups(rows=rows, n_lookups=104_857, n_bags=104_857, row_bytes=512, zipf_exponent=1.05)
        assert 10 * one.unique == pytest.approx(counted, rel=0.05)


def test_ops_of_batched_tables():
    op = Op(
        id=0,
        name="perfmodel.batched_embedding",
        attrs={"tables": [{"rows": ROWS, "dim": DIM, "pooling_factor": 20.0}], "batch": BATCH},
    )
    assert work(op) == table_lookup_work(TABLE, BATCH)
    backward = replace(op, name="perfmodel.batched_embedding_backward", attrs={**op.attrs, "optimizer": "adagrad"})
    assert work(backward) == table_lookup_work(TABLE, BATCH, backward=True, optimizer="adagrad")
