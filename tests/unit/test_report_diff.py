"""Differences of predictions: what changed, and contributions that add up."""

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perfmodel.pipeline.prediction import Breakdown, PathShare, Prediction, RankSummary
from perfmodel.plan import MemoryUse
from perfmodel.report.diff import diff_predictions, render_diff


def prediction(path, **fields):
    total_s = sum(path.values())
    nothing = Breakdown(
        compute_s=total_s, exposed_communication_s=0.0, exposed_copy_s=0.0, wait_s=0.0, host_bound_s=0.0, idle_s=0.0
    )
    rank = RankSummary(
        ranks=(0,), device="a100", breakdown=nothing, hidden_communication_s=0.0, host_busy_s=0.0,
        memory=MemoryUse(parameters_bytes=1024), memory_capacity_bytes=2048,
    )  # fmt: skip
    shares = tuple(PathShare(cause=name, time_s=t, share_frac=t / total_s) for name, t in path.items())
    usual = {
        "model": "m", "topology": "t", "plan": "ddp", "precision": "fp32", "n_ranks": 1, "batch_per_rank": 8,
        "iteration_time_s": total_s, "low_s": total_s, "high_s": total_s, "ranks": (rank,), "top_ops": (),
        "critical_path": shares, "coverage": {"fitted": 1.0}, "work_flops": 0, "model_flops": 0,
    }  # fmt: skip
    return Prediction(**{**usual, **fields})


def test_a_hand_worked_difference():
    before = prediction({"gemm": 4e-3, "all_reduce": 2e-3, "host": 1e-3})
    after = prediction({"gemm": 3e-3, "all_reduce": 2e-3, "copy": 0.5e-3}, plan="ddp,bucket_cap=50MiB")
    found = diff_predictions(before, after)
    rows = {row.cause: row.difference_s for row in found.contributions if row.cause != "rounding"}
    assert rows == pytest.approx({"gemm": -1e-3, "host": -1e-3, "copy": 0.5e-3})
    assert [change.what for change in found.changes] == ["plan"]
    text = render_diff(found)
    assert "7.00 ms -> 5.50 ms: -1.50 ms" in text
    assert "plan: ddp -> ddp,bucket_cap=50MiB" in text


def test_nothing_changed():
    same = prediction({"gemm": 4e-3})
    found = diff_predictions(same, replace(same))
    assert (found.difference_s, found.contributions, found.changes) == (0.0, (), ())
    assert "+0" in render_diff(found)


TIMES = st.dictionaries(st.sampled_from("abcdefgh"), st.floats(1e-9, 1.0), min_size=1)


@given(TIMES, TIMES)
def test_contributions_add_up_exactly(before, after):
    found = diff_predictions(prediction(before), prediction(after))
    total_s = 0.0
    for row in found.contributions:
        total_s += row.difference_s
    assert total_s == pytest.approx(found.difference_s, rel=0, abs=1e-15)


def test_json_has_a_schema_version():
    body = json.loads(diff_predictions(prediction({"a": 1.0}), prediction({"b": 2.0})).to_json())
    assert body["schema_version"] == 1
    assert body["difference_s"] == 1.0
