"""Lower bounds stand beside a prediction, so none may be above it."""

from dataclasses import astuple

from perfmodel.api import predict_run
from perfmodel.pipeline.bounds import find_bounds

MODEL = {
    "kind": "transformer", "name": "t", "architecture": "gpt2", "batch_size": 2, "vocab_size": 200, "hidden_size": 64,
    "layers": 2, "heads": 2, "max_positions": 32,
}  # fmt: skip


def test_no_bound_is_above_the_time_it_bounds():
    # With slowdown a collective issued earlier may meet more work: gpt2_large under FSDP on a DGX A100, 4 samples a GPU, took
    # 341.0 ms and "could not go below" 341.2 ms with an infinite host.
    run = predict_run(MODEL, "dgx_a100", "fsdp")
    programs = run.steady.timeline.compiled
    free = find_bounds(run.classes, programs, (), None, float("inf"))
    short_s = 0.5 * min(astuple(free))
    assert set(astuple(find_bounds(run.classes, programs, (), None, short_s))) == {short_s}
    assert max(astuple(free)) <= 1.001 * run.prediction.iteration_time_s
