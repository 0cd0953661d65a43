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


def change(at, size, where=0):
    return {"name": "[memory]", "ts": at, "args": {"Bytes": size, "Addr": where}}


def test_the_peak_is_that_of_the_counted_step_on_top_of_what_lives_before_it():
    mark = {"name": "counted step", "ts": 10.0, "dur": 5.0}
    before = [change(1, 100), change(2, 900, 1), change(3, -900, 1)]
    assert peak_in_step([*before, mark, change(11, 7, 1), change(12, -7, 1), change(20, 500, 1)]) == 107
    # In order of time, and the start of the step counts.
    assert peak_in_step([change(12, -20, 2), mark, *before]) == 100


def test_what_gloo_frees_unseen_ends_with_its_collective():
    mark = {"name": "counted step", "ts": 10.0, "dur": 9.0}
    call = {"name": "c10d::_reduce_scatter_base_", "ts": 11.0, "dur": 1.0}
    work = {"name": "gloo:all_reduce", "ts": 11.5, "dur": 2.5}
    copy = change(11.2, 64, 1)
    assert peak_in_step([mark, change(1, 100), copy, change(15, 50, 2), call, work]) == 164  # not 214: it ended at 14
    assert peak_in_step([mark, change(1, 100), copy, change(13, 50, 2), call, work]) == 214
    handed = [change(2, 30, 3), change(17, 5, 3)]  # given out again, so it was freed: with the first collective's end
    assert peak_in_step([mark, change(1, 100), *handed, change(15, 50, 2), work]) == 155


PIPELINE = "pp=2,micro_batches=4,pipeline.deallocate_outputs=false"


@pytest.mark.parametrize(
    ("architecture", "plan"),
    [
        ("gpt2", "ddp,gradient_as_bucket_view=true"),  # buckets stay all the time, gradients lie in them
        ("gpt2", "fsdp"),  # every copy of FSDP2 and gloo
        ("llama", PIPELINE),  # receive buffers and outputs of all micro-batches
    ],
)
def test_two_ranks_hold_what_is_predicted(architecture, plan):
    model = {**MODEL, "architecture": architecture}
    case = LiveCase(name="small", model=model, plan=plan)
    (gap,) = compare_peaks([case], live_settings(2, 2), [predict(model, live_topology(2), plan, bounds=False)])
    assert abs(gap.error_frac) < 0.02


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
