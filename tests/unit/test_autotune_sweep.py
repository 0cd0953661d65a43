"""Sweeps: resumed equals uninterrupted, whatever cut it off; backends agree; one row for every combination."""

import csv
import json
import pickle
from concurrent.futures import ThreadPoolExecutor

import pytest

from perfmodel.api import Predictor
from perfmodel.autotune import sweep as module
from perfmodel.autotune.front import run_sweep
from perfmodel.autotune.space import Candidate
from perfmodel.autotune.sweep import Journal, Subject
from perfmodel.errors import ConfigError

SMALL = {
    "kind": "transformer", "name": "small", "architecture": "gpt2", "batch_size": 1, "precision": "bf16", "optimizer": "adamw",
    "vocab_size": 512, "hidden_size": 256, "layers": 4, "heads": 4, "max_positions": 128,
}  # fmt: skip
SPACE = {"tp": [1, 2, 3], "pp": [1, 2], "shard": ["nothing", "optimizer", "parameters"], "micro_batch": [1, 2]}


def swept(table, **options):
    return run_sweep(SMALL, "dgx_h100", table, space=SPACE, global_batch=16, backend="sequential", **options)


def test_a_row_for_every_combination(tmp_path) -> None:
    rows = swept(tmp_path / "plans.csv")
    assert len(rows) == 36
    with (tmp_path / "plans.csv").open() as file:
        read = list(csv.DictReader(file))
    assert [row["plan"] for row in read] == [row["plan"] for row in rows]
    ok = [row for row in rows if row["status"] == "ok"]
    assert {row["reason"] == "" for row in ok} == {True}
    assert all(row["reason"] for row in rows if row["status"] == "refused")
    predictor = Predictor(SMALL, "dgx_h100")
    one = ok[5]
    assert one["iteration_time_s"] == predictor.predict(one["plan"], batch=one["micro_batch"]).iteration_time_s
    assert list(tmp_path.iterdir()) == [tmp_path / "plans.csv"], "the journal is gone"


@pytest.mark.parametrize("kept", [0, 1, 7])
def test_resumed_equals_uninterrupted(tmp_path, monkeypatch, kept) -> None:
    """Cut off after so many answers, in the middle of a line; what was answered is not asked again."""
    monkeypatch.setattr(module, "CHUNK", 1)
    whole = tmp_path / "whole.csv"
    swept(whole)
    table = tmp_path / "plans.csv"
    asked = []
    answer = module.answer

    def stops(text, chunk):
        if len(asked) == kept:
            raise KeyboardInterrupt
        asked.append(chunk)
        return answer(text, chunk)

    monkeypatch.setattr(module, "answer", stops)
    with pytest.raises(KeyboardInterrupt):
        swept(table)
    assert not table.exists()
    journal = tmp_path / "plans.csv.journal"
    with journal.open("a") as file:
        file.write('[3, {"pl')
    n_before = len(journal.read_text().splitlines()) - 2
    again = []
    monkeypatch.setattr(module, "answer", lambda text, chunk: again.append(chunk) or answer(text, chunk))
    rows = swept(table)
    assert table.read_bytes() == whole.read_bytes()
    assert len(again) == sum(row["status"] == "ok" for row in rows) - n_before


def test_a_journal_of_another_sweep_is_refused(tmp_path) -> None:
    table = tmp_path / "plans.csv"
    subject = Subject(model="gpt2", topology="dgx", options={})
    with Journal(table, subject, [Candidate(plan="ddp", micro_batch=1)]).appending():
        pass
    with pytest.raises(ConfigError, match="another sweep"):
        swept(table)


def test_tables_and_backends_that_do_not_exist_are_refused(tmp_path) -> None:
    with pytest.raises(ConfigError, match=r"found \.txt, allowed \.csv, \.parquet"):
        swept(tmp_path / "plans.txt")
    with pytest.raises(ConfigError, match="ray is not installed"):
        run_sweep(SMALL, "dgx_h100", tmp_path / "p.csv", space={"tp": [1]}, global_batch=8, backend="ray")


def test_parquet_has_the_rows_of_csv(tmp_path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    rows = swept(tmp_path / "plans.parquet", plans=5)
    assert parquet.read_table(tmp_path / "plans.parquet").to_pylist() == rows


def test_full_detail_has_the_range(tmp_path) -> None:
    rows = swept(tmp_path / "plans.csv", plans=3, detail="full")
    assert all(row["low_s"] < row["iteration_time_s"] < row["high_s"] for row in rows if row["status"] == "ok")


def test_threads_and_copies_of_a_predictor_give_equal_bytes() -> None:
    shared = Predictor(SMALL, "dgx_h100")
    plans = ["tp=2", "pp=2,accumulate=2", "fsdp", "zero1", "ddp,accumulate=2", "tp=2,pp=2,accumulate=4"] * 3
    alone = [Predictor(SMALL, "dgx_h100").predict(plan).to_json() for plan in plans[:6]] * 3
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(lambda plan: shared.predict(plan).to_json(), plans)) == alone
    copy = pickle.loads(pickle.dumps(shared))  # noqa: S301 -- our own bytes
    assert [copy.predict(plan).to_json() for plan in plans[:6]] == alone[:6]


def test_rows_are_plain_values(tmp_path) -> None:
    rows = swept(tmp_path / "plans.csv", plans=4)
    assert json.loads(json.dumps(rows)) == rows
