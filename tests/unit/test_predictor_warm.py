"""A predictor that has answered other questions says the same of a plan, digit for digit, as one that has not."""

import random

import pytest

from perfmodel.api import Predictor
from perfmodel.errors import InfeasiblePlanError
from perfmodel.pipeline.run import Run

MODEL = {
    "kind": "dlrm",
    "name": "small",
    "batch_size": 256,
    "precision": "amp_fp16",
    "dense_features": 13,
    "bottom_mlp": [64, 32],
    "top_mlp": [64, 32, 1],
    "embedding_dim": 32,
    "tables": [40_000, 200_000, 10_000, 4_000, 90_000, 1_000, 60_000, 300, 70_000, 12_000],
}
CHANGES = (
    "", "gradient_as_bucket_view=true", "compression=fp16", "compression=bf16", "accumulate=2", "broadcast_buffers=false",
    "embeddings=row_wise", "embeddings=column_wise", "embeddings.row_precision=fp16", "embeddings.index_exchange=false",
    "compression=fp16,embeddings=row_wise", "embeddings.bottom_mlp=1",
)  # fmt: skip


def plans(n: int, seed: int) -> list[str]:
    chosen = random.Random(seed)
    sizes = [f"bucket_cap={chosen.randrange(1, 60)}KiB,first_bucket={chosen.randrange(1, 20)}KiB" for _ in range(n)]
    changes = [CHANGES[number % len(CHANGES)] for number in range(n)]
    return [",".join(filter(None, ("ddp", size, change))) for size, change in zip(sizes, changes, strict=True)]


def said(run: Run) -> tuple[object, ...]:
    """Everything a run says: the prediction, its events, and when each task runs."""
    events = [tuple(rank_class.events) for rank_class in run.placement.classes]
    return run.prediction.to_json(), events, run.steady.timeline.start_ps.tolist(), run.steady.timeline.end_ps.tolist()


@pytest.mark.parametrize("options", [{}, {"mode": "compile"}, {"input_copies": "prefetch"}, {"bounds": True}])
def test_a_warm_predictor_says_what_a_cold_one_says(options) -> None:
    warm = Predictor(MODEL, "dgx", **options)
    order = plans(len(CHANGES) * 3, seed=7)
    for plan in order:
        warm.predict(plan)
    graph = warm.graph()
    for plan in order[:: 5 if not options else 11]:
        cold = Predictor(MODEL, "dgx", **options)
        cold._graphs = {(None, "cuda"): graph}  # traced once for all of them
        assert said(warm.run(plan)) == said(cold.run(plan)), plan


def test_what_a_plan_costs_does_not_depend_on_the_machine_asked_before() -> None:
    warm = Predictor(MODEL, "dgx")
    order, machines = plans(6, seed=3), ("dgx_h100", "pcie_8xa100", "dgx")
    for plan in order:
        for machine in machines:
            warm.predict(plan, topology=machine)
    for plan in order[:2]:
        for machine in machines:
            cold = Predictor(MODEL, machine)
            assert warm.predict(plan, topology=machine).to_json() == cold.predict(plan).to_json()


def test_a_plan_that_does_not_fit_is_refused_by_a_warm_predictor_too() -> None:
    warm = Predictor({**MODEL, "tables": [2_000_000_000]}, "dgx")
    for _ in range(2):
        with pytest.raises(InfeasiblePlanError, match="short by"):
            warm.predict("ddp,bucket_cap=5KiB,embeddings=data_parallel")
