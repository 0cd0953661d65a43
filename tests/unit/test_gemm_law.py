"""The matrix-product law against hand counts of tiles and waves, and what a fit may and may not do to it."""

from dataclasses import replace

import numpy as np
import pytest

from perfmodel.db.device import Fit
from perfmodel.db.loading import load_device
from perfmodel.errors import MissingCalibrationError
from perfmodel.estimate import Source
from perfmodel.kernels import price, price_calls
from perfmodel.kernels.gemm import GemmShape, gemm_call
from perfmodel.kernels.gemm_law import FEATURES, LAW, correction_features, law_parts, products_of
from perfmodel.validate.timed_ops import bmm_op

IDEAL = {
    "floor_s": 0.0, "eff": 1.0, "bw_eff": 1e6, "half_tile": 0.0, "prolog_s": 0.0, "sharp": 12.0, "split_s": 1.0,
    "spread": 0.0, "l2_eff": 1e6, "l2_frac": 1.0, "hot": 0.0, "throttle": 0.0,
}  # fmt: skip


@pytest.fixture(scope="module")
def device():
    """Four SMs of 1 TFLOP/s each at bf16: easy numbers."""
    shipped = load_device("a100_sxm_80gb")
    return replace(shipped, n_sms=4, peak_flops_per_s={"bf16_tensor": 4e12, "fp32": 4e11}, fits={})


def call(m, n, k, batch=1, dtype="bfloat16", **layout):
    size = 2 if dtype == "bfloat16" else 4
    return gemm_call(GemmShape(m=m, n=n, k=k, batch=batch, **layout), dtype=dtype, itemsize_bytes=size)


def ideal_s(device, shape, tile=(128, 128), **changes):
    products = products_of([call(*shape)], device)
    return law_parts({**IDEAL, **changes}, products, device, np.array([tile], dtype=float)).time_s[0]


def test_full_waves_run_at_peak(device):
    # 8 tiles of 128 x 128 on 4 SMs: 2 waves of 2 * 128 * 128 * 1024 FLOPs at 1 TFLOP/s
    assert ideal_s(device, (512, 256, 1024)) == pytest.approx(2 * 2 * 128 * 128 * 1024 / 1e12)


def test_one_tile_more_costs_a_whole_wave(device):
    # 513 rows make 5 x 2 tiles: 3 waves
    assert ideal_s(device, (513, 256, 1024)) == pytest.approx(3 * 2 * 128 * 128 * 1024 / 1e12)


def test_splitting_the_reduction_fills_idle_sms(device):
    # 1 tile would keep 3 SMs idle: 4 parts of k = 256 run at once
    assert ideal_s(device, (128, 128, 1024), split_s=0.0) == pytest.approx(2 * 128 * 128 * 256 / 1e12)


def test_a_batch_multiplies_tiles(device):
    assert ideal_s(device, (128, 128, 1024, 8)) == pytest.approx(2 * 2 * 128 * 128 * 1024 / 1e12)


def test_compulsory_traffic_bounds_a_thin_product(device):
    # 1 x 4096 times 4096 x 4096: 2 * (4096 * 4096 + 2 * 4096) bytes, far below the L2, at 2.039 TB/s
    time_s = ideal_s(device, (1, 4096, 4096), bw_eff=1.0, l2_frac=1e6, eff=1e6)
    assert time_s == pytest.approx(2 * (4096 * 4096 + 2 * 4096) / device.memory_bytes_per_s, rel=1e-3)


def test_feature_matrix_has_the_named_columns(device):
    products = products_of([call(100, 200, 300)], device)
    parts = law_parts(IDEAL | {"bw_eff": 1.0, "l2_eff": 1.0}, products, device, np.array([[128.0, 128.0]]))
    features = correction_features(products, parts, device)
    assert features.shape == (1, len(FEATURES))
    assert features[0, FEATURES.index("log_k")] == pytest.approx(np.log(300))
    assert features[0, FEATURES.index("m_fill_128")] == pytest.approx(100 / 128)


def fitted(device, **segment):
    parameters = {f"bf16_tensor.{k}": v for k, v in {**IDEAL, "bw_eff": 1.0, "l2_eff": 1.0, **segment}.items()}
    parameters["bf16_tensor.compute_capability"] = 8.0
    ranges = {f"bf16_tensor.{name}": (32.0, 65536.0) for name in ("m", "n", "k")}
    fit = Fit(family="gemm", law=LAW, parameters=parameters, fit_range=ranges, low_frac=0.9, high_frac=1.1)
    return replace(device, fits={"gemm": fit})


def test_sources_by_range_and_pipe(device):
    inside, outside = price_calls([call(512, 512, 512), call(512, 512, 16)], fitted(device))
    assert (inside.source, outside.source) == (Source.FITTED, Source.EXTRAPOLATED)
    (borrowed,) = price_calls([call(512, 512, 512, dtype="float32")], fitted(device))
    assert borrowed.source == Source.ROOFLINE  # nothing measured stands in for fp32 vector arithmetic
    half = gemm_call(GemmShape(m=512, n=512, k=512), dtype="float16", itemsize_bytes=2)
    with_half = replace(device, peak_flops_per_s={**device.peak_flops_per_s, "fp16_tensor": 4e12})
    (twin,) = price_calls([half], fitted(with_half))
    assert twin.source == Source.DERIVED
    assert twin.time_s == pytest.approx(inside.time_s)


def test_another_chip_gets_the_law_and_a_wider_range(device):
    (own,) = price_calls([call(512, 512, 512)], fitted(device))
    (other,) = price_calls([call(512, 512, 512)], replace(fitted(device), compute_capability="9.0"))
    assert other.time_s == pytest.approx(own.time_s)
    assert other.source == Source.DERIVED
    assert other.high_s > own.high_s
    assert other.low_s < own.low_s


def test_no_fit_is_the_roofline(device):
    (estimate,) = price_calls([call(512, 512, 512)], device)
    assert estimate.source == Source.ROOFLINE


def test_a_fit_for_another_law_is_refused(device):
    fit = replace(fitted(device).fits["gemm"], law="gemm/0")
    with pytest.raises(MissingCalibrationError, match="gemm/0"):
        price_calls([call(512, 512, 512)], replace(device, fits={"gemm": fit}))


def test_a_narrow_result_costs_what_its_transpose_costs(device):
    calibrated = fitted(device)
    narrow, wide = price_calls([call(4096, 8, 512, trans_b=True), call(8, 4096, 512, trans_b=True)], calibrated)
    assert narrow.time_s == pytest.approx(wide.time_s)


@pytest.mark.parametrize("name", ["a100_sxm_80gb", "h100_sxm", "h200_sxm", "l40s", "v100_pcie_32gb", "t4"])
def test_shipped_fits_extrapolate_by_work(name):
    shipped = load_device(name)
    dtype = "float32" if name in {"v100_pcie_32gb", "t4"} else "bfloat16"
    small, large = price_calls(
        [call(32768, 32768, 32768, dtype=dtype), call(131072, 131072, 131072, dtype=dtype)], shipped
    )
    assert large.source == Source.EXTRAPOLATED
    # (131072 / 32768)^3; a T4 (70 W) throttles further at the far end of its data than its law says beyond it
    assert large.time_s / small.time_s == pytest.approx(64.0, rel=0.4 if name == "t4" else 0.3)


@pytest.mark.parametrize("name", ["a100_sxm_80gb", "h100_sxm"])
def test_shipped_fits_stay_below_the_peak(name):
    shipped = load_device(name)
    sizes = [256, 1000, 2048, 4097, 8192, 20000]
    calls = [call(m, n, k, trans_b=True) for m in sizes for n in sizes for k in sizes]
    for one, estimate in zip(calls, price_calls(calls, shipped), strict=True):
        assert one.work.flops / estimate.time_s < shipped.peak_flops_per_s["bf16_tensor"]


@pytest.mark.parametrize(("device", "measured_us"), [("a100_pcie_40gb", 286.5), ("v100_pcie_32gb", 126.1)])
def test_small_batched_fp32_products_are_slower_on_a100_than_on_v100_as_measured(
    device: str, measured_us: float
) -> None:
    # NeuSight's sweep, bmm 1017 x 30 x 22 x 134: cuBLAS takes a 128x128 tile on A100 and a 64x64 one on V100.
    # A reading holds a launch floor of up to 60 us, which the law leaves out.
    predicted_us = price([bmm_op(1017, 30, 22, 134, "float32")], load_device(device))[0][0].time_s * 1e6
    assert measured_us - 60 < predicted_us < 1.1 * measured_us


def test_a_prologue_is_clocks_so_a_fit_carries_to_a_faster_one(device):
    # Fitted at 1 GHz with a prologue of 2 us: 2000 clocks, which are 1 us at 2 GHz. One tile, one wave.
    fast = replace(device, clock_hz=2e9)
    measured = {"prolog_s": 2e-6, "clock_hz": 1e9}
    slow_s, fast_s, bare_s = (
        ideal_s(d, (128, 128, 64), **more)
        for d, more in ((replace(device, clock_hz=1e9), measured), (fast, measured), (fast, {"prolog_s": 1e-12}))
    )
    assert slow_s - bare_s == pytest.approx(2e-6, rel=1e-3)
    assert fast_s - bare_s == pytest.approx(1e-6, rel=1e-3)
