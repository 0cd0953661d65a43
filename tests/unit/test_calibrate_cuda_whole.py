"""A whole CUDA calibration on a pretended GPU: an H200 by the shipped laws, with 2 % of noise, that nobody has fitted.

What the session measures comes from those laws; what it fits, and what a prediction then says, must find them again.
"""

import shutil
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from calibrate import build, host_cuda, kernels, measure_cuda, run
from calibrate.build import Prepared, recorded_op
from calibrate.cases.case import Case
from calibrate.cuda_rows import without_l2
from calibrate.measure_cpu import Timing
from perfmodel.db import check_db, load_device
from perfmodel.db.device import Device
from perfmodel.db.loading import db_root
from perfmodel.errors import ConfigError
from perfmodel.kernels import calls_of, price, price_calls
from perfmodel.validate.timed_ops import linear_op

NAME, SHARE, KILLED_AT = "h200_sxm", 0.1, 100
PREPARE = build.prepare


class Host:
    """A machine of known figures."""

    def op_s(self, n_calls: int) -> float:
        return 9e-6 * n_calls

    def backward_s(self, n_nodes: int) -> float:
        return 8e-6 * n_nodes

    def launch_s(self, n_launches: int) -> float:
        return 3e-6 * n_launches

    def sync_s(self) -> float:
        return 5e-6

    def round_trip_s(self) -> float:
        return 10e-6


class Gpu:
    """Stands in for `measure_cuda.time_case`: each case takes what `truth` says, and the session is killed once."""

    def __init__(self, truth: Device) -> None:
        self.met = {"warm": truth, "cold": without_l2(truth)}
        self.noise, self.asked = np.random.default_rng(7), Counter[str]()
        self.known: dict[str, float] = {}
        self.killed = False

    def time_case(self, case: Case, *, budget_s: float, cache_bytes: int) -> Timing:
        if not self.killed and self.asked.total() == KILLED_AT:
            self.killed = True
            raise KeyboardInterrupt
        self.asked[case.key] += 1
        if case.key not in self.known:
            op = recorded_op(case, on_meta(replace(case, state="warm"), "cuda", 0), "cuda")
            self.known[case.key] = sum(e.time_s for e in price_calls(calls_of(op), self.met[case.state]))
        time_s = self.known[case.key] * self.noise.normal(1.0, 0.02)
        return Timing(least_s=time_s, quartile_s=time_s, median_s=time_s, n_calls=60)


def on_meta(case: Case, device: str, cache_bytes: int) -> Prepared:
    """Tensors without storage in place of a GPU's."""
    return PREPARE(case, "meta", cache_bytes)


@pytest.fixture(scope="module")
def truth() -> Device:
    return load_device(NAME)


@pytest.fixture(scope="module")
def calibrated(truth: Device, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The database of one unmeasured H200 after a calibration that was killed and went on."""
    database = tmp_path_factory.mktemp("db")
    (database / NAME).mkdir()
    shutil.copyfile(db_root() / NAME / "device.yaml", database / NAME / "device.yaml")
    gpu = Gpu(truth)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PERFMODEL_DB", str(database))
        patch.setattr(run, "_cuda_name", lambda: "NVIDIA H200")
        patch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
        patch.setattr(build, "prepare", on_meta)
        patch.setattr(measure_cuda, "time_case", gpu.time_case)
        patch.setattr(host_cuda, "CudaHost", Host)
        settings = run.settings_of("cuda", families=("gemm",), limit_s=600.0, out=None, share=SHARE, n_threads=1)
        shown: list[tuple[int, int, str]] = []
        with pytest.raises(KeyboardInterrupt):
            run.measure(settings, lambda *progress: shown.append(progress))
        assert run.measure(settings, lambda *progress: shown.append(progress))
        reports = run.fit(settings, plot=None)
    return database, gpu, settings, reports, shown


def test_nothing_is_measured_twice_and_every_case_three_times(calibrated: Any) -> None:
    _, gpu, _, _, shown = calibrated
    assert gpu.killed
    assert set(gpu.asked.values()) == {kernels.N_ROUNDS}
    assert any(family == "gemm" and 0 < done <= total for done, total, family in shown)


def test_another_gpu_than_the_one_asked_for_is_refused(calibrated: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    _, _, settings, _, _ = calibrated
    monkeypatch.setattr(run, "_cuda_name", lambda: "NVIDIA L4")
    with pytest.raises(ConfigError, match="found h200_sxm, allowed l4: torch sees NVIDIA L4 here"):
        run.measure(settings, lambda *progress: None)


def test_the_host_works_with_one_thread_unless_told_otherwise() -> None:
    asked: dict[str, Any] = {"families": ("gemm",), "limit_s": 60.0, "out": None, "share": 1.0}
    assert run.settings_of(NAME, n_threads=None, **asked).n_threads == 1
    assert run.settings_of("cpu", n_threads=None, **asked).n_threads == load_device("cpu").n_sms


def test_a_second_plan_lies_where_the_law_errs(calibrated: Any) -> None:
    database, gpu, settings, _, _ = calibrated
    chosen = (database / NAME / "rounds" / "gemm.more.jsonl").read_text().splitlines()
    assert len(chosen) > 50
    assert gpu.asked.total() == kernels.N_ROUNDS * sum(len(cases) for cases in _plan(settings, database).values())


def _plan(settings: kernels.Settings, database: Path) -> dict[str, list[Case]]:
    return kernels.plan(replace(settings, out=database / NAME))


def test_the_fits_find_the_device_again(calibrated: Any) -> None:
    _, _, _, (report,), _ = calibrated
    assert report.family == "gemm"
    assert report.error.size > 15
    # Noise alone is 1.3 % in the median; 150 cases of sizes over four octaves are priced within:
    assert float(np.median(report.error)) < 0.06


def test_predictions_use_them(calibrated: Any, truth: Device) -> None:
    database, *_ = calibrated
    own = load_device(NAME, database)
    # Layers of a transformer, none of them a case: forward in bf16 and fp32.
    ops = [
        linear_op(rows, width, inner, dtype, bias=False)
        for dtype in ("bfloat16", "float32")
        for rows in (512, 2048, 8192)
        for width, inner in ((1024, 1024), (4096, 1024), (1024, 4096))
    ]
    found, real = ([sum(e.time_s for e in priced) for priced in price(ops, device)] for device in (own, truth))
    error = np.abs(np.array(found) / np.array(real) - 1.0)
    assert float(np.median(error)) < 0.1
    assert own.fits["gemm"].provenance["source"] == "own calibration of NVIDIA H200"


def test_the_host_is_this_machine(calibrated: Any) -> None:
    database, *_ = calibrated
    host = load_device(NAME, database).host
    # A launch (3 us) is counted apart from the operators that make it; 10 = 3 + latency + 5.
    assert host.op_dispatch_s == pytest.approx(6e-6)
    assert host.backward_op_s == pytest.approx(5e-6)
    assert (host.launch_s, host.launch_latency_s, host.sync_s) == pytest.approx((3e-6, 2e-6, 5e-6))
    assert "measured on NVIDIA H200" in host.source


def test_the_database_has_no_problems_and_a_wrong_host_file_is_one(calibrated: Any, tmp_path: Path) -> None:
    database, *_ = calibrated
    shutil.copytree(database, tmp_path / "db")
    assert check_db(tmp_path / "db").problems == ()
    path = tmp_path / "db" / NAME / "host.yaml"
    path.write_text(path.read_text().replace("sync_s: 5.0e-06", "sync_s: -5.0e-06"))
    (problem,) = check_db(tmp_path / "db").problems
    assert "host.sync_s" in problem
    path.write_text(path.read_text().replace("sync_s: -5.0e-06", "wait_s: 5.0e-06"))
    assert any("wait_s" in found for found in check_db(tmp_path / "db").problems)
