"""A data loader beside the step, against the closed form max(step, batch / workers)."""

import pytest

from perfmodel.api import predict_run
from perfmodel.errors import ConfigError
from perfmodel.pipeline.loader import LOADER_FAMILY, Loader, parse_loader

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
    assert found.breakdown.host_bound_s > 0.85 * found.iteration_time_s
    assert LOADER_FAMILY not in {
        part.cause for part in run(loader=Loader(workers=2, batch_s=step_s)).prediction.critical_path
    }


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
