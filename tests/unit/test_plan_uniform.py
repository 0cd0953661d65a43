"""Tables by rows or columns over all ranks, and inline plans with flow mappings."""

import pytest

from perfmodel.config import load_plan
from perfmodel.errors import ConfigError
from perfmodel.graph import TableAccess
from perfmodel.plan.assign import assign_uniform


def tables(*dims):
    return [TableAccess(parameter=f"t{i}.weight", rows=100, dim=dim) for i, dim in enumerate(dims)]


def test_rows_go_over_all_ranks():
    placed = assign_uniform(tables(8, 128), "row_wise", 4)
    assert [(p.sharding, p.ranks, p.kernel) for p in placed.values()] == [("row_wise", (0, 1, 2, 3), "own")] * 2


def test_columns_have_equal_parts_of_32_or_more():
    placed = assign_uniform(tables(128, 96, 16, 256), "column_wise", 8)
    # 128: four parts of 32; 96: three; 16: whole, one part; 256: eight. Each table goes on where the one before ended.
    assert [p.ranks for p in placed.values()] == [(0, 1, 2, 3), (4, 5, 6), (7,), (0, 1, 2, 3, 4, 5, 6, 7)]


@pytest.mark.parametrize("text", ["embeddings=row_wise", "embeddings=column_wise"])
def test_strategies_are_named_inline(text):
    assert load_plan(text).embeddings.strategy == text.partition("=")[2]


@pytest.mark.parametrize(
    "text",
    [
        "{embeddings: {a: 0, b: {sharding: row_wise, ranks: [0, 1]}}}",
        "embeddings={a: 0, b: {sharding: row_wise, ranks: [0, 1]}}",
        "ddp,embeddings={a: 0, b: {sharding: row_wise, ranks: [0, 1]}},bucket_cap=50MiB",
    ],
)
def test_an_explicit_placement_may_stand_in_one_cell(text):
    plan = load_plan(text)
    assert plan.embeddings.strategy == "explicit"
    assert {name: where.ranks for name, where in plan.embeddings.placement.items()} == {"a": (0,), "b": (0, 1)}


@pytest.mark.parametrize("text", ["embeddings={a: 0", "{embeddings: {a: -1}}", "{tp: 4}", "embeddings=[0, 1]"])
def test_a_slip_is_one_line(text):
    with pytest.raises(ConfigError) as caught:
        load_plan(text)
    assert len(caught.value.problems) == 1
    assert "\n" not in caught.value.problems[0]
