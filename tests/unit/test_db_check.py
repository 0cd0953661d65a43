"""`db check` finds what it promises: every rule has a saboteur, and the shipped database has no problems."""

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from perfmodel.db import Fit, check_db, write_fit
from perfmodel.db.tables import TABLE_PROVENANCE

DATASHEET = """\
name: my_gpu
title: Example GPU 24GB
kind: cuda
architecture: ampere
compute_capability: "8.6"
n_sms: 10
clock: 1.5 GHz
peak: {fp32: 4 TFLOP/s}
memory: 24 GiB
memory_bandwidth: 300 GB/s
l2: 4 MiB
l2_bandwidth: 1 TB/s
smem_per_sm: 100 KiB
kernel_floor: 2 us
host_link: 31.5 GB/s
tdp: 70 W
host: {op_dispatch: 6 us, backward_op: 6 us, launch: 3 us, launch_latency: 2 us, sync: 8 us, source: an example}
cite: {datasheet: an example}
"""
FIT = Fit(
    family="gemm",
    law="gemm/1",
    parameters={"eff": 0.75, "floor_s": 2e-6},
    fit_range={"m": (1.0, 4096.0)},
    heldout={"all": {"n_rows": 3.0, "median": 0.04}},
    provenance=dict.fromkeys(("source", "commit", "licence", "date", "rows", "heldout_rows", "software"), "an example"),
)
# 2 m n k FLOPs of each case at about 2 of 4 TFLOP/s.
TABLE = """\
m,n,k,flops,pipe,time_s
1024,1024,1024,2147483648,fp32,0.00107
1024,1024,2048,4294967296,fp32,0.00215
1024,1024,4096,8589934592,fp32,0.00429
"""


@pytest.fixture
def db(tmp_path: Path) -> Path:
    folder = tmp_path / "my_gpu"
    folder.mkdir()
    (folder / "device.yaml").write_text(DATASHEET)
    write_fit(folder, FIT)
    (folder / "gemm.csv").write_text(TABLE)
    (folder / "gemm.csv.yaml").write_text(yaml.safe_dump(dict.fromkeys(TABLE_PROVENANCE, "an example")))
    return tmp_path


def test_a_sound_database_has_no_problems(db: Path) -> None:
    report = check_db(db)
    assert report.problems == ()
    assert report.remarks == ()
    assert (report.n_devices, report.n_fits) == (1, 1)


def test_the_shipped_database_has_no_problems() -> None:
    assert check_db().problems == ()


def edit(name: str, old: str, new: str) -> Callable[[Path], None]:
    def apply(db: Path) -> None:
        path = db / "my_gpu" / name
        text = path.read_text()
        assert old in text
        path.write_text(text.replace(old, new))

    return apply


def refit(**changes: object) -> Callable[[Path], None]:
    return lambda db: write_fit(db / "my_gpu", replace(FIT, **changes)) and None  # type: ignore[arg-type]


def twin(db: Path) -> None:
    (db / "other").mkdir()
    (db / "other" / "device.yaml").write_text(DATASHEET.replace("name: my_gpu", "name: other"))


@pytest.mark.parametrize(
    ("sabotage", "message"),
    [
        (edit("device.yaml", "n_sms: 10", "n_sms: ten"), "n_sms: found 'ten'"),
        (edit("device.yaml", "name: my_gpu", "name: your_gpu"), "name: found 'your_gpu'"),
        (edit("device.yaml", "tdp: 70 W", "tdp: 70 W\nnearest: my_gpy"), "nearest: found 'my_gpy', allowed a device"),
        (twin, "'Example GPU 24GB' already names my_gpu"),
        (edit("gemm.fit.yaml", "  rows: an example\n", ""), "provenance: missing rows"),
        (edit("gemm.fit.yaml", "eff: 0.75", "eff: fast"), "parameters.eff: found 'fast'"),
        (refit(parameters={"floor_s": -1e-6}), "parameters.floor_s: found -1e-06, allowed a time"),
        (refit(fit_range={"m": (9.0, 1.0)}), "fit_range.m: found [9.0, 1.0]"),
        (refit(heldout={}), "heldout: missing"),
        (refit(heldout={"all": {"median": -0.1}}), "heldout.all.median: found -0.1"),
        (lambda db: (db / "my_gpu" / "conv.fit.npz").write_bytes(b"x") and None, "arrays without a fit"),
        (lambda db: (db / "empty").mkdir(), "a folder without device.yaml"),
        (lambda db: write_fit(db / "_fabrics" / "x", replace(FIT, family="collectives")) and None, "_fabrics"),
        (lambda db: (db / "my_gpu" / "gemm.csv.yaml").unlink(), "no provenance"),
        (edit("gemm.csv.yaml", "driver: an example\n", ""), "missing driver"),
        (edit("gemm.csv", "time_s", "time_ms"), "missing the column time_s"),
        (edit("gemm.csv", "1024,1024,2048", "1024,1024,1024"), "line 3: the same case as line 2"),
        (edit("gemm.csv", "0.00215", "-0.00215"), "line 3: time_s: found '-0.00215'"),
        (edit("gemm.csv", "0.00215", "0"), "line 3: time_s: found '0'"),
        (edit("gemm.csv", "0.00215", "nan"), "line 3: time_s: found 'nan'"),
        (edit("gemm.csv", "0.00215", ""), "line 3: time_s: found ''"),
        # 4.29 GFLOP in 1 ms are 4.29 TFLOP/s, 7 % above the peak of 4.
        (edit("gemm.csv", "0.00215", "0.001"), "line 3: time_s: 4.29e+12 FLOP/s is above the device's peak"),
    ],
)
def test_each_rule_finds_its_saboteur(db: Path, sabotage: Callable[[Path], None], message: str) -> None:
    sabotage(db)
    problems = check_db(db).problems
    assert any(re.search(re.escape(message), problem) for problem in problems), problems


def test_a_row_faster_than_memory_is_found(db: Path) -> None:
    folder = db / "my_gpu"
    # 1 GB in 0.9 ms is 1.1 TB/s; L2 gives 1 TB/s.
    (folder / "gemm.csv").write_text("m,bytes,time_s\n1,1000000000,0.0009\n")
    assert "B/s is above" in check_db(db).problems[0]


def test_a_failed_row_with_a_reason_is_data(db: Path) -> None:
    (db / "my_gpu" / "gemm.csv").write_text("m,time_s,failed\n1,1e-5,\n2,,out of memory\n")
    assert check_db(db).problems == ()


def test_a_time_that_falls_as_work_grows_is_a_remark_only(db: Path) -> None:
    edit("gemm.csv", "0.00429", "0.00180")(db)
    edit("gemm.csv", "8589934592", "7000000000")(db)
    report = check_db(db)
    assert report.problems == ()
    assert len(report.remarks) == 1
    assert "k 2048 -> 4096" in report.remarks[0]
