"""A CUDA calibration's fits, from tables whose times a known law made: the fit must find them again."""

import csv
import dataclasses
from pathlib import Path

import numpy as np
import pytest

from calibrate.build import prepare, recorded_op
from calibrate.cases import draw_cases
from calibrate.cases.case import Case
from calibrate.cases.gpu import on_gpu
from calibrate.fit_cuda import fit_tables, merged, read_rows, segment_of
from calibrate.session import TABLE_COLUMNS, op_to_json
from perfmodel.db import load_device
from perfmodel.db.device import Device, Fit
from perfmodel.estimate import Work
from perfmodel.kernels import calls_of
from perfmodel.kernels.gemm_law import gemm_family
from perfmodel.kernels.registry import KernelCall

N_CASES = 130


@pytest.fixture(scope="module")
def device() -> Device:
    return load_device("h100_sxm")


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory, device: Device) -> Path:
    """Products with the times of the shipped fit of bf16, with 2 % of noise."""
    path = tmp_path_factory.mktemp("own") / "gemm.csv"
    noise = np.random.default_rng(5)
    drawn = [case for case in draw_cases("gemm") if case.op == "aten.mm" and case.bytes < 4e6][:N_CASES]
    rows = [row_of(dataclasses.replace(case, state="warm"), device, noise.normal(1.0, 0.02)) for case in drawn]
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([TABLE_COLUMNS, *rows])
    return path


def row_of(case: Case, device: Device, factor: float) -> list[object]:
    # The op is recorded as bf16, which is what the times are of.
    half = on_gpu(dataclasses.replace(case, family="gemm"))
    assert half is not None
    half = half if half.args[0].dtype == "bfloat16" else dataclasses.replace(
        case, args=tuple(dataclasses.replace(arg, dtype="bfloat16") for arg in case.args)
    )  # fmt: skip
    op = recorded_op(half, prepare(half, "cpu", 0), "cpu")
    (estimate,) = gemm_family(calls_of(op), device)
    time_s = estimate.time_s * factor
    return ["aten.mm.default", "warm", 1, op_to_json(op), half.to_json(), time_s, time_s, time_s, 60, ""]


def test_the_fit_finds_the_times_of_a_known_law(table: Path, device: Device) -> None:
    bare = dataclasses.replace(device, fits={})
    (report,) = fit_tables([table], bare)
    assert report.family == "gemm"
    assert report.n_rows > 80
    assert float(np.median(report.error)) < 0.08
    assert report.fit.law == device.fits["gemm"].law
    # Priced through the device's database entry, the fit gives the report's errors.
    fitted = dataclasses.replace(device, fits={"gemm": report.fit})
    rows = [row for row in read_rows(table) if row.heldout]
    priced = np.array([e.time_s for e in gemm_family([row.call for row in rows], fitted)])
    error = np.abs(priced / np.array([row.time_s for row in rows]) - 1.0)
    assert sorted(error) == pytest.approx(sorted(report.error), rel=1e-6)


def test_segments_that_were_not_measured_again_stay() -> None:
    old = Fit(family="gemm", law="gemm/1", parameters={"fp32.eff": 0.5, "bf16_tensor.eff": 0.6})
    new = Fit(family="gemm", law="gemm/1", parameters={"bf16_tensor.eff": 0.7})
    assert merged(old, new, ["bf16_tensor"]).parameters == {"fp32.eff": 0.5, "bf16_tensor.eff": 0.7}
    assert merged(dataclasses.replace(old, law="gemm/0"), new, ["bf16_tensor"]).parameters == new.parameters


def test_a_gpu_plan_has_both_types_and_the_flash_attention_of_cuda() -> None:
    products = [on_gpu(case) for case in draw_cases("gemm")]
    types = [case.args[-1].dtype for case in products if case is not None]
    assert 0.35 < types.count("bfloat16") / len(types) < 0.65
    attention = [on_gpu(case) for case in draw_cases("attention")]
    names = {case.op for case in attention if case is not None}
    assert names == {"aten._scaled_dot_product_flash_attention"}


def test_kernels_without_a_law_here_have_no_segment() -> None:
    call = KernelCall(family="embedding", work=Work(), dtype="float32", features={})
    assert segment_of(call) is None
