"""A data loader beside the step, against the closed form max(step, batch / workers)."""

import json

import pytest

from perfmodel.api import predict_run
from perfmodel.errors import ConfigError
from perfmodel.pipeline.loader import LOADER_FAMILY, Loader, parse_loader
from perfmodel.pipeline.prediction import Prediction
from perfmodel.report.evidence import timelines
from perfmodel.report.table import render_table
from perfmodel.report.trace import render_trace
from perfmodel.sim.breakdown import breakdowns

MODEL = {
    "kind": "dlrm", "name": "small", "batch_size": 512, "dense_features": 13, "bottom_mlp": [64, 16], "top_mlp": [64, 1],
    "embedding_dim": 16, "tables": [1000] * 4,
}  # fmt: skip


def run(topology="a100", **options):
    return predict_run(MODEL, topology, bounds=False, check=True, **options)


@pytest.mark.parametrize("topology", ["a100", "dgx"])
@pytest.mark.parametrize("slow", [0.5, 0.99, 1.01, 3.0, 20.0])
@pytest.mark.parametrize("workers", [1, 3])
def test_the_pace_is_the_longer_of_step_and_loader(topology, slow, workers):
    step_s = run(topology).prediction.iteration_time_s
    loader = Loader(workers=workers, batch_s=slow * workers * step_s)
    found = run(topology, loader=loader).prediction
    assert found.iteration_time_s == pytest.approx(max(step_s, loader.period_s), rel=1e-6)
    (note,) = [note for note in found.notes if "a batch is ready" in note]
    assert note.startswith("waiting for input" if slow > 1 else "input")


def test_what_waits_for_input_is_on_the_critical_path():
    step_s = run().prediction.iteration_time_s
    found = run(loader=Loader(workers=2, batch_s=20 * step_s)).prediction
    shares = {part.cause: part.share_frac for part in found.critical_path}
    assert shares[LOADER_FAMILY] == pytest.approx(1.0, abs=0.01)
    parts = found.breakdown
    assert parts.input_s > 0.85 * found.iteration_time_s
    assert parts.host_bound_s < 0.15 * found.iteration_time_s
    assert LOADER_FAMILY not in {
        part.cause for part in run(loader=Loader(workers=2, batch_s=step_s)).prediction.critical_path
    }


@pytest.mark.parametrize("topology", ["a100", "dgx"])
@pytest.mark.parametrize("workers", [0, 1, 4])
@pytest.mark.parametrize("batch_s", [1e-5, 4e-3, 60e-3])
def test_the_time_of_the_loader_has_a_part_of_its_own(topology, workers, batch_s):
    """Parts in picoseconds add up to the iteration; without a loader, or with one that keeps up, its part is nothing."""
    found = run(topology, loader=Loader(workers=workers, batch_s=batch_s))
    plain = run(topology).prediction
    for parts in breakdowns(found.steady.timeline):
        assert parts.total_ps == found.steady.timeline.makespan_ps
    for summary in found.prediction.ranks:
        assert summary.breakdown.total_s == pytest.approx(found.prediction.iteration_time_s, rel=1e-9)
    longer_s = found.prediction.iteration_time_s - plain.iteration_time_s
    waited_s = found.prediction.breakdown.input_s
    assert plain.breakdown.input_s == 0.0
    # What the loader adds to the iteration is waited for, but for some us in which the device still works.
    assert longer_s - 20e-6 <= waited_s <= batch_s / max(workers, 1) + 1e-12
    assert Prediction.from_json(found.prediction.to_json()) == found.prediction
    shown = render_table(found.prediction)
    assert ("loader" in shown.split("host-bound")[1].splitlines()[0]) == any(
        rank.breakdown.input_s for rank in found.prediction.ranks
    )


def test_a_prediction_written_before_loaders_had_a_part_is_read():
    body = json.loads(run().prediction.to_json())
    for rank in body["ranks"]:
        del rank["breakdown"]["input_s"]
    assert Prediction.from_json(json.dumps(body)).breakdown.input_s == 0.0


def test_without_workers_the_host_makes_the_batch_itself():
    found, plain = (run(loader=loader).prediction for loader in (Loader(workers=0, batch_s=5e-3), None))
    assert found.iteration_time_s == pytest.approx(plain.iteration_time_s + 5e-3, rel=0.02)


def test_one_worker_that_keeps_one_batch_starts_when_it_is_taken():
    """Its batch is ready a batch's time after the host took the last one, so the host's first task comes on top."""
    found = run(loader=Loader(workers=1, batch_s=50e-3, prefetch_factor=1))
    first = next(info for info in found.classes[0].tasks if info.category == "host")
    assert found.prediction.iteration_time_s == pytest.approx(50e-3 + first.estimate.time_s, rel=1e-6)


def test_words_are_parsed():
    assert parse_loader("workers=4, batch=120 ms") == Loader(workers=4, batch_s=0.12)
    assert parse_loader("workers=0,batch=1 s,prefetch=3") == Loader(workers=0, batch_s=1.0, prefetch_factor=3)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("workers=4", "missing batch"),
        ("batch=1 s", "missing workers"),
        ("workers=x,batch=1 s", "workers: found 'x'"),
        ("workers=1,batch=1", "batch"),
        ("workers=1,workers=2,batch=1 s", "workers twice"),
        ("threads=1,workers=1,batch=1 s", "found 'threads=1'"),
        ("workers=1,batch=1 s,prefetch=0", "prefetch: found 0"),
        ("workers=9999,batch=1 s", "workers: found 9999"),
    ],
)
def test_mistakes_are_named(text, problem):
    with pytest.raises(ConfigError, match=problem):
        parse_loader(text)


def test_a_cpu_has_no_loader():
    with pytest.raises(ConfigError, match="allowed GPUs"):
        run("cpu", loader=Loader(workers=1, batch_s=1.0))


def test_pages_and_traces_name_the_loader():
    found = run(loader=Loader(workers=4, batch_s=0.2))
    (drawn,) = timelines(found)
    lane = next(stream["id"] for stream in drawn["streams"] if stream["name"] == "data loader")
    assert [drawn["names"][n] for n, s in zip(drawn["name"], drawn["stream"], strict=True) if s == lane] == [
        "data loader"
    ]
    events = json.loads(render_trace(found))["traceEvents"]
    named = next(
        event["tid"] for event in events if event["name"] == "thread_name" and event["args"]["name"] == "data loader"
    )
    assert [event["name"] for event in events if event["ph"] == "X" and event["tid"] == named] == ["data loader"]
