"""Live cases: the sharded step against plain training of the same model, and attribution against sums by hand."""

import tempfile
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import pytest

from perfmodel.config import load_model
from perfmodel.validate.attribute import OTHER, ProfiledOps, gaps
from perfmodel.validate.live import live_settings, live_topology
from perfmodel.validate.live_cases import SEVERAL, SINGLE
from perfmodel.validate.train import measure
from perfmodel.validate.train_ranks import run_rank

DLRM = {
    "kind": "dlrm", "name": "d", "batch_size": 8, "dense_features": 4, "bottom_mlp": [8], "top_mlp": [4, 1],
    "embedding_dim": 8, "tables": [{"rows": 50, "count": 3, "pooling_factor": 2}],
}  # fmt: skip


@pytest.mark.parametrize("case", [*SINGLE, *SEVERAL], ids=lambda case: case.name)
def test_every_case_is_a_model(case):
    assert load_model(case.model).name == case.name


def test_enough_cases_with_names_of_their_own():
    assert len({case.name for case in SINGLE}) == len(SINGLE) >= 24


def test_one_process_trains():
    timed = measure(DLRM, 1, 0.0)
    assert timed.median_s > 0
    assert timed.n_steps >= 5


@pytest.mark.parametrize("owners", [(1, 1, 1), ()], ids=["one rank without tables", "ddp"])
def test_two_ranks_train(owners):
    model = {**DLRM, "sparse_optimizer": "sgd"} if owners else {"kind": "vision", "name": "r", "depth": 18,
             "image_size": 32, "batch_size": 2, "classes": 4}  # fmt: skip
    with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as pool, tempfile.TemporaryDirectory() as folder:
        store = str(Path(folder) / "store")
        running = [pool.submit(run_rank, rank, 2, store, model, owners, (1, 0.0)) for rank in range(2)]
        timed = [found.result() for found in running]
    assert timed[0].n_steps == timed[1].n_steps


def test_ranks_share_the_cores():
    assert live_settings(2, 1).n_threads == 2
    assert live_settings(8, 2).n_threads == 4
    assert live_settings(2, 4).n_threads == 1
    assert live_topology(3).node.cpus.ranks == 3


def test_gaps_add_up_to_the_error_of_the_step():
    predicted = {"aten.mm": (0.6, 2.0), "aten.add": (0.1, 1.0), "aten.view": (0.0, 1.0)}
    profiled = ProfiledOps(step_s=1.0, by_name={"aten.mm": (0.5, 2.0), "aten.relu": (0.3, 1.0)})
    rows = gaps(predicted, profiled)
    assert sum(row.gap_s for row in rows) == pytest.approx(0.7 - 1.0)
    by_name = {row.name: row.gap_s for row in rows}
    assert by_name == pytest.approx({"aten.relu": -0.3, OTHER: -0.2, "aten.mm": 0.1, "aten.add": 0.1, "aten.view": 0.0})
    assert rows[0].name == "aten.relu"
