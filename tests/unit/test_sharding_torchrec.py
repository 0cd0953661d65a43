"""TorchRec's serialized plans and HugeCTR's matrix; expected values by hand from those projects' own forms."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from perfmodel.config.sharding import TablePlacement
from perfmodel.errors import ConfigError, InfeasiblePlanError
from perfmodel.sharding.hugectr import to_hugectr
from perfmodel.sharding.torchrec import Ranks, TableSize, from_torchrec, to_torchrec, write_torchrec

MODULE = "sparse_arch.embedding_bag_collection"
SIZES = {name: TableSize(rows=10, dim=8) for name in "abcdefg"}
PLAN = {
    "a": TablePlacement(ranks=(3,)),
    "b": TablePlacement(sharding="row_wise", ranks=(0, 1, 2, 3)),
    "c": TablePlacement(sharding="column_wise", ranks=(1, 0), kernel="uvm"),
    "d": TablePlacement(sharding="data_parallel", kernel="dense"),
    "e": TablePlacement(sharding="grid", ranks=(0, 1, 2, 3), widths=(4, 4)),
    "f": TablePlacement(sharding="column_wise", ranks=(1, 0), widths=(6, 2)),
    "g": TablePlacement(sharding="table_row_wise", ranks=(2, 3), heights=(9, 1), kernel="uvm_caching"),
}
RANKS = Ranks(n_ranks=4, per_host=2)


def _entry(name: str, ranks: Ranks = RANKS) -> dict[str, object]:
    plan = to_torchrec({name: PLAN[name]}, SIZES, ranks, dict.fromkeys(SIZES, MODULE))
    found = plan["plan"][MODULE][name]
    assert isinstance(found, dict)
    return found


def test_a_table_on_one_rank_is_one_shard_with_its_device_on_the_host():
    assert _entry("a") == {
        "sharding_type": "table_wise",
        "compute_kernel": "fused",
        "ranks": [3],
        "shards": [{"shard_offsets": [0, 0], "shard_sizes": [10, 8], "placement": "rank:3/cuda:1"}],
    }


def test_rows_are_split_by_the_ceiling_and_the_last_shard_is_short():
    shards = _entry("b")["shards"]
    assert [shard["shard_sizes"] for shard in shards] == [[3, 8], [3, 8], [3, 8], [1, 8]]
    assert [shard["shard_offsets"] for shard in shards] == [[0, 0], [3, 0], [6, 0], [9, 0]]


def test_columns_are_split_in_the_order_of_the_ranks():
    entry = _entry("c", Ranks(n_ranks=2, per_host=2, device="cpu"))
    assert entry["compute_kernel"] == "fused_uvm"
    assert [(s["shard_offsets"], s["placement"]) for s in entry["shards"]] == [
        ([0, 0], "rank:1/cpu"),
        ([0, 4], "rank:0/cpu"),
    ]


def test_a_copied_table_has_every_rank_and_no_shards():
    assert _entry("d") == {"sharding_type": "data_parallel", "compute_kernel": "dense", "ranks": [0, 1, 2, 3]}


def test_a_grid_goes_through_the_rows_of_a_column_part_first():
    entry = _entry("e")
    assert entry["sharding_type"] == "grid_shard"
    assert [s["shard_offsets"] for s in entry["shards"]] == [[0, 0], [5, 0], [0, 4], [5, 4]]


def test_every_kind_of_plan_comes_back_equal(tmp_path: Path):
    written = to_torchrec(PLAN, SIZES, RANKS, dict.fromkeys(SIZES, MODULE))
    write_torchrec(written, tmp_path / "plan.json")
    found = from_torchrec(tmp_path / "plan.json")
    assert dict(found.placement) == PLAN
    assert found.modules == dict.fromkeys(PLAN, MODULE)
    assert found.tables == {name: size for name, size in SIZES.items() if name != "d"}
    assert to_torchrec(found.placement, SIZES, RANKS, found.modules) == json.loads((tmp_path / "plan.json").read_text())


def test_every_mistake_is_one_line():
    broken = {"plan": {MODULE: {"a": {"sharding_type": "table_wisee", "compute_kernel": "fused"}, "b": {}}}}
    with pytest.raises(ConfigError) as caught:
        from_torchrec(broken)
    lines = str(caught.value).splitlines()
    assert len(lines) == 2
    assert "table_wisee" in lines[0]
    assert "did you mean 'table_wise'?" in lines[0]
    assert "b: sharding_type: found nothing" in lines[1]


def test_shards_that_make_no_rectangle_are_refused():
    plan = to_torchrec({"e": PLAN["e"]}, SIZES, RANKS, {"e": MODULE})
    entry = plan["plan"][MODULE]["e"]
    entry["shards"], entry["ranks"] = entry["shards"][:3], entry["ranks"][:3]
    with pytest.raises(ConfigError, match="found 3, allowed rows times columns"):
        from_torchrec(plan)


@pytest.mark.parametrize("content", ["{", "[]", '{"plan": {"m": 3}}'])
def test_files_that_are_no_plan_are_refused(content: str, tmp_path: Path):
    path = tmp_path / "plan.json"
    path.write_text(content)
    with pytest.raises(ConfigError, match=r"plan\.json"):
        from_torchrec(path)


def test_a_table_that_the_model_lacks_is_named():
    with pytest.raises(ConfigError, match="table z: found in the plan, not in the model"):
        to_torchrec({"z": PLAN["a"]}, SIZES, RANKS, {"z": MODULE})


def test_hugectr_names_the_tables_of_each_rank():
    plan = {
        "a": PLAN["a"],
        "b": TablePlacement(sharding="row_wise"),
        "c": PLAN["c"].model_copy(update={"kernel": "fused"}),
        "d": PLAN["d"],
    }
    assert to_hugectr(plan, 4) == {
        "shard_matrix": [["b", "c", "d"], ["b", "c", "d"], ["b", "d"], ["a", "b", "d"]],
        "shard_strategy": [("mp", ["a", "b", ("c", 2)]), ("dp", ["d"])],
    }


def test_hugectr_has_no_rank_without_a_table():
    with pytest.raises(InfeasiblePlanError, match="rank 1: found no table"):
        to_hugectr({"a": TablePlacement(ranks=(0,))}, 2)


def test_hugectr_refuses_what_it_cannot_run_line_by_line():
    with pytest.raises(InfeasiblePlanError) as caught:
        to_hugectr({name: PLAN[name] for name in "cefg"}, 2)
    assert len(str(caught.value).splitlines()) == 4
