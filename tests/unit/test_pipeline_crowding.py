"""Processes that take turns on a CPU: pipelines on more stages than cores, by what cores can do in that time."""

import pytest

from perfmodel.api import predict_run
from perfmodel.validate.live import live_topology

MODEL = {
    "kind": "transformer", "name": "tiny", "architecture": "llama", "batch_size": 4, "precision": "fp32",
    "optimizer": "sgd", "vocab_size": 64, "hidden_size": 128, "layers": 4, "heads": 4, "max_positions": 64,
    "attention": "eager",
}  # fmt: skip


def run(plan: str, n_ranks: int):
    return predict_run(MODEL, live_topology(n_ranks), plan, bounds=False)


def work_s(found) -> float:
    """CPU seconds of all ranks at the crowding they were priced for, taken back to a core each."""
    total = 0.0
    for lowered in found.classes:
        crowding = max(1.0, lowered.device.n_processes / lowered.device.n_sms)
        total += (
            float(lowered.tasks.time_s[lowered.program.stream == 1].sum()) / crowding * len(lowered.rank_class.ranks)
        )
    return total


@pytest.mark.parametrize("plan", ["pp=4,micro_batches=4", "pp=4,micro_batches=1"])
def test_cores_do_no_more_work_than_they_can_and_no_less(plan) -> None:
    found = run(plan, 4)
    n_cores, longest = 2, found.prediction.iteration_time_s
    # Never faster than both cores busy all the time; with one micro-batch, one stage runs at a time, at full pace.
    assert longest >= 0.98 * work_s(found) / n_cores
    if "micro_batches=1" in plan:
        crowded = sum(float(c.tasks.time_s[c.program.stream == 1].sum()) for c in found.classes)
        assert longest < 0.75 * crowded  # not at half pace, as if all four computed


def test_replicas_that_compute_together_keep_their_crowding() -> None:
    found = run("ddp", 4)
    assert len(found.classes) == 1
    busy = float(found.classes[0].tasks.time_s[found.classes[0].program.stream == 1].sum())
    assert found.prediction.iteration_time_s >= 0.98 * busy
