"""The examples that drive perfmodel from Optuna, joblib and Dask run as they stand."""

import csv
import runpy
from pathlib import Path

import pytest

from perfmodel.api import Predictor
from perfmodel.autotune.front import run_sweep

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"
SPACE = {"tp": [1, 2], "shard": ["nothing", "optimizer"], "micro_batch": [1, 2]}


def test_optuna_finds_what_the_best_of_its_trials_is(capsys) -> None:
    pytest.importorskip("optuna")
    study = runpy.run_path(str(EXAMPLES / "optuna_plans.py"))["main"](n_trials=6)
    values = [trial.value for trial in study.trials if trial.value is not None]
    assert study.best_value == min(values)
    best = study.best_trial
    answer = Predictor("gpt2_large", "dgx_a100_x2").predict(best.user_attrs["plan"], batch=best.params["micro_batch"])
    assert best.value == 1.0 / answer.samples_per_s
    assert "samples/s" in capsys.readouterr().out


def test_the_sweep_example_writes_its_table(tmp_path) -> None:
    table = tmp_path / "plans.csv"
    main = runpy.run_path(str(EXAMPLES / "sweep_10000_plans.py"))["main"]
    n_ok = main(table, n_plans=12, backend="sequential", jobs=1)
    with table.open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 12
    assert sum(row["status"] == "ok" for row in rows) == n_ok


@pytest.mark.filterwarnings("ignore")  # what Dask and tornado warn of while they start and stop is theirs
def test_a_dask_cluster_writes_the_table_that_one_process_does(tmp_path) -> None:
    pytest.importorskip("distributed")
    given = {"space": SPACE, "global_batch": 32}
    run_sweep("gpt2", "dgx_h100", tmp_path / "one.csv", backend="sequential", **given)
    run_sweep("gpt2", "dgx_h100", tmp_path / "dask.csv", backend="dask", jobs=1, **given)
    assert (tmp_path / "dask.csv").read_bytes() == (tmp_path / "one.csv").read_bytes()
