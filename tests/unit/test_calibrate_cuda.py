"""A CUDA calibration's fits, from tables whose times a known law made: the fit must find them again."""

import csv
import dataclasses
from pathlib import Path

import numpy as np
import pytest

from calibrate.build import prepare, recorded_op
from calibrate.cases import draw_cases
from calibrate.cases.case import Case, TensorArg
from calibrate.cases.gpu import on_gpu
from calibrate.cuda_rows import OwnRow, Part, read_rows, segment_of
from calibrate.fit_cuda import RECIPES, fit_parts, fit_tables, merged
from calibrate.fitting import assemble
from calibrate.plan_cuda import drawn, expected_s, first_plan, flops_of
from calibrate.session import TABLE_COLUMNS, op_to_json
from perfmodel.db import load_device
from perfmodel.db.device import Device, Fit
from perfmodel.estimate import Source, Work
from perfmodel.kernels import calls_of, price_calls
from perfmodel.kernels.gemm_law import gemm_family
from perfmodel.kernels.registry import KernelCall
from perfmodel.kernels.streaming import streaming_s

N_CASES = 130
EMPTY_ROW = OwnRow(name="", case="", calls=(), time_s=1.0, heldout=False)


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
    half = dataclasses.replace(case, args=tuple(dataclasses.replace(arg, dtype="bfloat16") for arg in case.args))
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
    rows = [row for row in read_rows(table, device) if row.heldout]
    priced = np.array([e.time_s for e in gemm_family([row.calls[0] for row in rows], fitted)])
    error = np.abs(priced / np.array([row.time_s for row in rows]) - 1.0)
    assert sorted(error) == pytest.approx(sorted(report.error), rel=1e-6)


def test_segments_that_were_not_measured_again_stay() -> None:
    old = Fit(family="gemm", law="gemm/1", parameters={"fp32.eff": 0.5, "bf16_tensor.eff": 0.6})
    new = Fit(family="gemm", law="gemm/1", parameters={"bf16_tensor.eff": 0.7})
    assert merged(old, new, ["bf16_tensor"]).parameters == {"fp32.eff": 0.5, "bf16_tensor.eff": 0.7}
    assert merged(dataclasses.replace(old, law="gemm/0"), new, ["bf16_tensor"]).parameters == new.parameters


def test_a_gpu_plan_has_both_types_and_the_flash_attention_of_cuda(device: Device) -> None:
    products = [on_gpu(case, device) for case in draw_cases("gemm")]
    types = [case.args[-1].dtype for case in products]
    assert 0.35 < types.count("bfloat16") / len(types) < 0.65
    names = {on_gpu(case, device).op for case in draw_cases("attention")}
    flash = "aten._scaled_dot_product_flash_attention"
    assert names == {flash, f"{flash}_backward"}


def test_cards_before_ampere_have_fp16_and_memory_efficient_attention() -> None:
    old = load_device("t4")
    types = {on_gpu(case, old).args[-1].dtype for case in draw_cases("gemm")}
    assert types == {"float16", "float32"}
    names = {on_gpu(case, old).op for case in draw_cases("attention")}
    efficient = "aten._scaled_dot_product_efficient_attention"
    assert names == {efficient, f"{efficient}_backward"}


def test_statistics_of_norms_stay_in_32_bit(device: Device) -> None:
    cases = [on_gpu(case, device) for case in draw_cases("norm") if case.op == "aten.native_layer_norm_backward"]
    half = [case for case in cases if case.args[0].dtype == "bfloat16"]
    assert 0.3 < len(half) / len(cases) < 0.7
    for case in half:
        gradient, image, _, mean_arg, rstd_arg, weight, bias, _ = case.args
        assert {gradient.dtype, image.dtype, weight.dtype, bias.dtype} == {"bfloat16"}
        assert {mean_arg.dtype, rstd_arg.dtype} == {"float32"}
    batch = [on_gpu(case, device) for case in draw_cases("norm") if case.op == "aten.native_batch_norm"]
    assert {case.args[0].dtype for case in batch} == {"bfloat16", "float32"}
    assert {arg.dtype for case in batch for arg in case.args[1:5]} == {"float32"}


@pytest.mark.parametrize("name", ["h100_sxm", "t4"])
def test_attention_of_a_gpu_is_recorded_forward_and_backward(name: str) -> None:
    card = load_device(name)
    cases = [on_gpu(case, card) for case in draw_cases("attention", share=0.01)]
    for case in cases:
        (call,) = calls_of(recorded_op(case, prepare(case, "meta", 0), "cuda"))
        batch, heads, length, dim = case.args[0].shape
        sizes = [call.features[key] for key in ("batch", "heads", "q_len", "kv_len", "head_dim")]
        assert sizes == [batch, heads, length, length, dim]
        assert call.features["backward"] == float(case.op.endswith("backward"))
        kernel = "flash2" if name == "h100_sxm" else "efficient"
        assert segment_of(call) == kernel + ("_backward" if case.op.endswith("backward") else "")


def test_small_cold_cases_are_warm_on_a_gpu_for_256_sets_of_them_stay_in_its_cache(device: Device) -> None:
    def product(rows: int) -> Case:
        args = (TensorArg(shape=(rows, 64)), TensorArg(shape=(64, 64)))
        return Case(family="gemm", op="aten.mm", args=args, state="cold")

    # 256 sets, inputs and outputs of one size: 256 x 2 x 4 (rows + 64) 64 bytes against twice 50 MiB.
    assert on_gpu(product(512), device).state == "warm"
    assert on_gpu(product(1024), device).state == "cold"
    assert on_gpu(dataclasses.replace(product(1024), state="fresh"), device).state == "warm"


def test_a_plan_goes_as_far_as_the_device_and_no_longer_than_its_time(device: Device) -> None:
    whole = first_plan(("gemm",), device, share=1.0, limit_s=1e6, rounds=3, budget_s=0.004)["gemm"]
    short = first_plan(("gemm",), device, share=1.0, limit_s=240.0, rounds=3, budget_s=0.004)["gemm"]
    # 10 ms at 66.9 TFLOP/s, the card's FP32 peak, is 669 GFLOP.
    assert 0.2 < max(map(flops_of, whole)) / 669e9 <= 1.0
    assert {case.key for case in short} < {case.key for case in whole}
    assert expected_s(short, device, rounds=3, budget_s=0.004) < 240.0 * 0.8


def test_flops_of_cases_are_those_of_their_kernels(device: Device) -> None:
    for family in ("gemm", "conv", "attention"):
        for case in drawn(device, family, 0, 0.02):
            if case.op.startswith("aten.convolution") and case.args[8 if "back" not in case.op else 9] != 1:
                continue  # depthwise: counted by its groups
            work = sum(call.work.flops for call in calls_of(recorded_op(case, prepare(case, "meta", 0), "cuda")))
            # Masks keep half of an attention, a missing input gradient half of a backward convolution.
            assert 0.4 < work / flops_of(case) < 1.3


def test_a_pattern_fraction_is_found_again(device: Device) -> None:
    def copied(n_bytes: int) -> KernelCall:
        return KernelCall(family="copy", work=Work(read_bytes=n_bytes, write_bytes=n_bytes), dtype="float32")

    calls = [copied(round(2.0**power)) for power in np.linspace(12, 28, 120)]
    times = streaming_s(calls, device, 0.5) + 2e-6
    rows = [dataclasses.replace(EMPTY_ROW, heldout=place % 5 == 0) for place in range(len(calls))]
    parts = [
        Part(row=place, call=call, time_s=float(time_s), whole=True)
        for place, (call, time_s) in enumerate(zip(calls, times, strict=True))
    ]
    found = fit_parts(parts, rows, device, RECIPES["copy"]("all", device)).fit
    assert found.parameters["pattern_frac"] == pytest.approx(0.5, rel=0.03)
    assert found.parameters["extra_s"] == pytest.approx(2e-6, rel=0.1)
    # A device with this fit prices by it, where it was derived before.
    fit = assemble("copy", "streaming/1", {"all": found}, {})
    (priced,) = price_calls(calls[60:61], dataclasses.replace(device, fits={**device.fits, "copy": fit}))
    assert priced.time_s == pytest.approx(float(times[60]), rel=0.03)
    assert priced.source is Source.FITTED


def test_kernels_without_a_law_here_have_no_segment() -> None:
    call = KernelCall(family="transfer", work=Work(), dtype="float32", features={})
    assert segment_of(call) is None
