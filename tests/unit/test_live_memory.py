"""Peaks of live memory: how a trace is read, two real ranks against the prediction, and how a table of them looks."""

import json

import pytest
from click.testing import CliRunner

from perfmodel.api import predict
from perfmodel.cli.validate import validate
from perfmodel.errors import ConfigError
from perfmodel.report.live_memory import render_peaks
from perfmodel.validate.live import live_settings, live_topology
from perfmodel.validate.live_cases import LiveCase
from perfmodel.validate.live_memory import PeakGap, compare_peaks, peak_in_step

MODEL = {
    "kind": "transformer", "name": "small", "architecture": "gpt2", "batch_size": 8, "optimizer": "adamw", "vocab_size": 1000,
    "hidden_size": 64, "layers": 2, "heads": 2, "max_positions": 64, "attention": "eager",
}  # fmt: skip


def change(at, size):
    return {"name": "[memory]", "ts": at, "args": {"Bytes": size}}


def test_the_peak_is_that_of_the_counted_step_on_top_of_what_lives_before_it():
    mark = {"name": "counted step", "ts": 10.0, "dur": 5.0}
    before = [change(1, 100), change(2, 900), change(3, -900)]
    assert peak_in_step([*before, mark, change(11, 7), change(12, -7), change(20, 500)]) == 107
    assert peak_in_step([change(12, -20), mark, *before]) == 100  # in order of time, and the start of the step counts


def test_two_ranks_hold_what_is_predicted():
    plan = "ddp,gradient_as_bucket_view=true"  # buckets stay all the time, gradients lie in them
    case = LiveCase(name="small", model=MODEL, plan=plan)
    (gap,) = compare_peaks([case], live_settings(2, 2), [predict(MODEL, live_topology(2), plan, bounds=False)])
    assert abs(gap.error_frac) < 0.05


def test_peaks_are_shown_with_their_errors():
    gaps = [
        PeakGap(name=name, predicted_bytes=n, measured_bytes=100 << 20)
        for name, n in (("a", 90 << 20), ("b", 104 << 20))
    ]
    assert "| a | 90.0 MiB | 100 MiB | -10.0% |" in render_peaks(gaps, markdown=True)
    assert "mean error 7.0%, worst 10.0%" in render_peaks(gaps)
    found = json.loads(render_peaks(gaps, as_json=True))
    assert [case["error_frac"] for case in found["cases"]] == pytest.approx([-0.1, 0.04])


@pytest.mark.parametrize("more", [["--live"], ["--live", "--plans", "--attribute"]])
def test_memory_is_of_live_plans_alone(more):
    with pytest.raises(ConfigError, match="--memory: goes with --live --plans"):
        CliRunner().invoke(validate, ["--memory", *more], catch_exceptions=False)
