"""The CPU's law against a hand evaluation, and the shipped fits against what they were not fitted to."""

import dataclasses

import numpy as np
import pytest

from perfmodel.db import load_device
from perfmodel.db.device import Fit
from perfmodel.estimate import Source
from perfmodel.graph import Op, TensorSpec
from perfmodel.kernels import price
from perfmodel.kernels.cpu_features import op_key
from perfmodel.kernels.cpu_law import COLUMNS, LAW, evaluate

PARAMETERS = {
    "fixed_s": 1e-6,
    "fork_s": 2e-6,
    "grain": 1000.0,
    "edge": 1.0,
    "work_per_s": 1e9,
    "shared_bytes_per_s": 1e10,
    "memory_bytes_per_s": 1e9,
    "fresh_bytes_per_s": 1e9,
    "sharp": 1.0,
}


def spec(index: int, *shape: int, strides: tuple[int, ...] = ()) -> TensorSpec:
    plain = tuple(int(np.prod(shape[i + 1 :])) for i in range(len(shape)))
    return TensorSpec(id=index, shape=shape, dtype="float32", strides=strides or plain, storage=index)


def mm(m: int, k: int, n: int, start: int = 0) -> Op:
    a, b, c = spec(start, m, k), spec(start + 1, k, n), spec(start + 2, m, n)
    return Op(id=start, name="aten.mm", inputs=(a, b), input_names=("self", "mat2"), outputs=(c,))


def test_law_by_hand() -> None:
    columns = {name: np.zeros(1) for name in COLUMNS}
    columns |= {"work": np.array([1000.0]), "shared_bytes": np.array([1e4]), "fresh_bytes": np.array([3e3])}
    device = load_device("cpu")
    result = evaluate(PARAMETERS, columns, device)
    # share 1/2: 1.5 of 2 cores, 1000 / 1.5e9 s of work; 1 us / 1.5 from the cache; half a fork; 3 us of new pages.
    assert result.time_s[0] == pytest.approx(1e-6 + 1e-6 + 1000 / 1.5e9 + 1e-6 / 1.5 + 3e-6)


def test_rows_bound_what_threads_share() -> None:
    columns = {name: np.zeros(2) for name in COLUMNS}
    columns |= {"work": np.full(2, 1e9), "parts": np.array([1.0, 3.0])}
    alone, three = evaluate(PARAMETERS, columns, load_device("cpu")).time_s - 1e-6 - 2e-6
    # One row is one thread's; of three rows one thread has two.
    assert alone == pytest.approx(1.0, rel=1e-5)
    assert three == pytest.approx(2 / 3, rel=1e-5)


def test_tails_narrow_rows_and_lanes_cost_what_their_parameters_say() -> None:
    columns = {name: np.zeros(3) for name in COLUMNS}
    columns |= {"work": np.full(3, 1e9), "parts": np.ones(3), "lanes_n": np.array([1.0, 1.0, 4.0])}
    columns |= {"tails": np.array([1e8, 0.0, 0.0]), "narrow": np.array([0.0, 1e9, 0.0])}
    costs = {**PARAMETERS, "tail_s": 1e-9, "narrow_s": 2e-9, "lane": 0.5}
    found = evaluate(costs, columns, load_device("cpu")).time_s - 3e-6
    assert found == pytest.approx([1.1, 3.0, 2.5], rel=1e-5)


def test_a_product_takes_what_its_flops_allow() -> None:
    device = load_device("cpu")
    ((estimate,),) = price([mm(1024, 1024, 1024)], device)
    peak_s = 2 * 1024**3 / device.peak_flops_per_s["fp32"]
    assert peak_s < estimate.time_s < 2 * peak_s
    assert estimate.source is Source.FITTED


def test_views_run_nothing_and_unmeasured_ops_are_still_priced() -> None:
    device = load_device("cpu")
    view = Op(id=0, name="aten.view", inputs=(spec(0, 4, 4),), input_names=("self",), outputs=(spec(0, 16),))
    scan = Op(id=1, name="aten.cumsum", inputs=(spec(1, 64, 64),), input_names=("self",), outputs=(spec(2, 64, 64),))
    nothing, found = price([view, scan], device)
    assert nothing == ()
    assert found
    assert all(part.time_s > 0 for part in found)
    assert max(part.source for part in found) > Source.FITTED


def test_an_op_behind_others_costs_more_than_one_behind_itself() -> None:
    segments = {f"product.{key}": value for key, value in PARAMETERS.items()} | {"product.in_step_s": 5e-6}
    fit = Fit(family="gemm", law=LAW, parameters=segments)
    device = dataclasses.replace(load_device("cpu"), fits={"gemm": fit})
    first, second = (parts[0].time_s for parts in price([mm(8, 8, 8), mm(8, 8, 8, start=10)], device))
    assert first - second == pytest.approx(5e-6, rel=1e-3)


def test_loops_of_one_operator_have_their_own_segments() -> None:
    matrix, row = spec(0, 8, 16), spec(1, 16)
    names = ("self", "other")
    assert op_key(Op(id=0, name="aten.add", inputs=(matrix, matrix), input_names=names, outputs=(matrix,))) == "add"
    assert op_key(Op(id=0, name="aten.add", inputs=(matrix, row), input_names=names, outputs=(matrix,))) == "add_row"
    assert op_key(mm(2, 2, 2)) == "product"
    assert op_key(mm(2, 2, 1)) == op_key(mm(1, 2, 2)) == "product_vector"
    sparse = ("self", "other.indices", "other.values")
    update = Op(id=0, name="aten.add_", inputs=(matrix, row, matrix), input_names=sparse, outputs=(matrix,))
    assert op_key(update) == "add__sparse"


def test_sums_over_all_over_rows_and_over_columns_are_three_loops() -> None:
    def total(out: TensorSpec, dim: list[int] | None) -> Op:
        attrs = {} if dim is None else {"dim": dim}
        names = ("self",)
        return Op(id=0, name="aten.sum", inputs=(spec(0, 8, 16),), input_names=names, outputs=(out,), attrs=attrs)

    assert op_key(total(spec(1), None)) == "sum_all"
    assert op_key(total(spec(1, 8, 1), [1])) == op_key(total(spec(1, 8, 1), [-1])) == "sum_last"
    assert op_key(total(spec(1, 1, 16), [0])) == "sum_first"
