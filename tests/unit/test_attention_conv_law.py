"""Attention and convolution laws against hand counts and against each other; shipped fits at sizes nobody measured."""

from dataclasses import replace

import numpy as np
import pytest

from perfmodel.db.loading import load_device
from perfmodel.estimate import Source
from perfmodel.graph import Op
from perfmodel.kernels import price, price_calls
from perfmodel.kernels.attention import CUDNN, AttentionShape, attention_call
from perfmodel.kernels.attention_law import FEATURES, correction_features, heads_of, law_parts
from perfmodel.kernels.conv import DGRAD, FORWARD, WGRAD, ConvShape, conv_call
from perfmodel.kernels.conv_law import FEATURES as CONV_FEATURES
from perfmodel.kernels.conv_law import convolutions_of, law
from perfmodel.kernels.correction import Segment
from perfmodel.validate.kernel_rows import tensor

ATTENTION_IDEAL = {
    "floor_s": 0.0, "eff": 1.0, "half_dim": 0.0, "exp_share": 0.0, "tail": 0.0, "l2_eff": 1e6, "bw_eff": 1e6,
    "sharp": 12.0, "prolog_s": 0.0, "throttle": 0.0,
}  # fmt: skip
CONV_IDEAL = {
    "floor_s": 0.0, "eff": 1.0, "winograd_2_eff": 0.0, "half_tile": 0.0, "prolog_s": 0.0, "bw_eff": 1e6, "sharp": 12.0,
    "throttle": 0.0,
}  # fmt: skip


@pytest.fixture(scope="module")
def four_sms():
    shipped = load_device("a100_sxm_80gb")
    return replace(shipped, n_sms=4, peak_flops_per_s={"bf16_tensor": 4e12, "fp32": 4e12}, fits={})


def attention(q_len, *, causal=False, backward=False, heads=16, kv_heads=16, kv_len=0, dim=128, **more):
    shape = AttentionShape(
        batch=2, heads=heads, kv_heads=kv_heads, q_len=q_len, kv_len=kv_len or q_len, head_dim=dim, v_dim=dim,
        causal=causal, **more,
    )  # fmt: skip
    return attention_call(shape, dtype="bfloat16", itemsize_bytes=2, backward=backward)


def ideal_attention_s(device, call):
    return law_parts(ATTENTION_IDEAL, heads_of([call], device), device).time_s[0]


def test_attention_without_a_mask_runs_its_products_at_peak(four_sms):
    call = attention(1024)
    assert ideal_attention_s(four_sms, call) == pytest.approx(call.work.flops / 4e12)


def test_a_causal_mask_skips_blocks_above_the_diagonal(four_sms):
    # query tiles of 64: tile i of 16 sees i + 1 blocks of 64 keys, 136 of 256 block pairs
    full, masked = (ideal_attention_s(four_sms, attention(1024, causal=c)) for c in (False, True))
    assert masked / full == pytest.approx(136 / 256)


def test_one_long_tile_bounds_a_small_causal_call(four_sms):
    # 1 head, 1 tile of 64 queries: nothing to spread over the other SMs
    shape = AttentionShape(batch=1, heads=1, kv_heads=1, q_len=64, kv_len=64, head_dim=128, v_dim=128, causal=True)
    call = attention_call(shape, dtype="bfloat16", itemsize_bytes=2, backward=False)
    assert ideal_attention_s(four_sms, call) == pytest.approx(2 * 64 * 64 * 256 / 1e12)


def test_attention_features_have_the_named_columns(four_sms):
    heads = heads_of([attention(512)], four_sms)
    parameters = {**ATTENTION_IDEAL, "l2_eff": 1.0, "bw_eff": 1.0}
    features = correction_features(heads, law_parts(parameters, heads, four_sms), four_sms)
    assert features.shape == (1, len(FEATURES))
    assert features[0, FEATURES.index("log_q_len")] == pytest.approx(np.log(512))


@pytest.mark.parametrize("name", ["a100_sxm_80gb", "h100_sxm", "h200_sxm", "l40s"])
def test_shipped_attention_backward_costs_more_than_its_products(name):
    device = load_device(name)
    forward, backward = price_calls([attention(4096, causal=True), attention(4096, causal=True, backward=True)], device)
    assert 2.5 < backward.time_s / forward.time_s < 5.0
    assert backward.source >= Source.DERIVED


def test_shipped_causal_attention_costs_half_when_long():
    device = load_device("h100_sxm")
    full, masked = price_calls([attention(16384, dim=64), attention(16384, dim=64, causal=True)], device)
    assert masked.time_s / full.time_s == pytest.approx(0.5, abs=0.1)


def test_pytorch_flash_on_hopper_is_slower_than_cudnn():
    device = load_device("h100_sxm")
    flash, cudnn = price_calls([attention(8192), attention(8192, variant=CUDNN)], device)
    assert 1.4 < flash.time_s / cudnn.time_s < 2.0  # FlashAttention-3 (Shah et al. 2024): 1.5 to 2.0 times
    assert flash.source >= Source.DERIVED


def test_grouped_queries_cost_no_more_than_full_heads():
    device = load_device("a100_sxm_80gb")
    grouped, full = price_calls([attention(2048, kv_heads=2, causal=True), attention(2048, causal=True)], device)
    assert grouped.time_s <= full.time_s * 1.05


def convolution(kind=FORWARD, *, batch=8, c_in=64, c_out=128, size=32, taps=3, stride=1, groups=1, dtype="float32"):
    out = (size - 1) // stride + 1
    shape = ConvShape(
        batch=batch, c_in=c_in, c_out=c_out, image=(size, size), out=(out, out), taps=(taps, taps),
        stride=(stride, stride), dilation=(1, 1), groups=groups,
    )  # fmt: skip
    return conv_call(shape, kind, dtype=dtype, itemsize_bytes=4 if dtype == "float32" else 2)


def ideal_conv(device, call, **changes):
    segment = Segment(
        name="fp32", parameters={**CONV_IDEAL, **changes}, arrays={}, fit_range={}, low_frac=1.0, high_frac=1.0,
        source=Source.FITTED, corrected=False,
    )  # fmt: skip
    return law(segment, [call], device)


def test_implicit_gemm_runs_whole_tiles_at_peak(four_sms):
    # m = 8 * 32 * 32 = 8192, n = 128, k = 64 * 9: 64 tiles of 128 x 128 on 4 SMs
    call = convolution()
    assert ideal_conv(four_sms, call).time_s[0] == pytest.approx(call.work.flops / 4e12)


def test_winograd_saves_multiplications(four_sms):
    # F(2 x 2, 3 x 3): 16 products a tile of 4 outputs instead of 36
    call = convolution()
    result = ideal_conv(four_sms, call, winograd_2_eff=1.0, winograd_4_eff=1e-6, transform=0.0)
    assert result.time_s[0] == pytest.approx(call.work.flops / 4e12 * 16 / 36)


def test_winograd_is_not_for_strides(four_sms):
    call = convolution(stride=2)
    plain = ideal_conv(four_sms, call)
    offered = ideal_conv(four_sms, call, winograd_2_eff=1.0, winograd_4_eff=1.0, transform=0.0)
    assert offered.time_s[0] == plain.time_s[0]


@pytest.mark.parametrize("kind", [FORWARD, DGRAD, WGRAD])
@pytest.mark.parametrize("stride", [1, 2])
def test_product_sizes_multiply_to_the_flops(four_sms, kind, stride):
    c = convolutions_of([convolution(kind, stride=stride)], four_sms)
    m, n, k = c.product()
    assert 2 * m[0] * n[0] * k[0] == pytest.approx(c.flops[0])


def test_conv_features_have_the_named_columns(four_sms):
    result = ideal_conv(four_sms, convolution(), bw_eff=1.0)
    assert result.features.shape == (1, len(CONV_FEATURES))
    assert np.isfinite(result.features).all()


@pytest.mark.parametrize("name", ["v100_pcie_32gb", "a100_sxm_80gb", "h100_sxm", "t4"])
def test_shipped_convolutions_of_a_resnet_are_priced_sensibly(name):
    device = load_device(name)
    calls = [convolution(kind, batch=32, c_in=64, c_out=64, size=56) for kind in (FORWARD, DGRAD, WGRAD)]
    for call, estimate in zip(calls, price_calls(calls, device), strict=True):
        rate = call.work.flops / estimate.time_s / device.peak_flops_per_s["fp32"]
        assert 0.1 < rate < 2.5  # Winograd may pass the peak by 2.25 (F(2x2)) to 4 (F(4x4)) at its own efficiency


def test_depthwise_is_bound_by_loads_not_by_tiles():
    device = load_device("v100_pcie_32gb")
    depthwise, dense = price_calls(
        [
            convolution(c_in=256, c_out=256, groups=256, batch=32, size=56),
            convolution(c_in=256, c_out=256, batch=32, size=56),
        ],
        device,
    )
    assert depthwise.time_s < dense.time_s
    moved = (2 * 32 * 256 * 56 * 56) * 4 / device.memory_bytes_per_s
    assert depthwise.time_s > moved


def test_half_precision_convolutions_borrow_the_matrix_product_law():
    device = load_device("v100_pcie_32gb")
    (half,) = price_calls([convolution(batch=64, c_in=256, c_out=256, size=28, dtype="float16")], device)
    (single,) = price_calls([convolution(batch=64, c_in=256, c_out=256, size=28)], device)
    assert half.source == Source.DERIVED
    assert half.time_s < single.time_s


def test_a_forward_op_prices_through_its_rule():
    query = tensor(0, (2, 16, 1024, 128), "bfloat16")
    op = Op(
        id=0,
        name="aten._scaled_dot_product_flash_attention",
        inputs=(query, query, query),
        input_names=("query", "key", "value"),
        outputs=(query,),
        attrs={"is_causal": True},
    )
    ((estimate,),) = price([op], load_device("a100_sxm_80gb"))
    assert estimate.source == Source.FITTED
    assert estimate.low_s < estimate.time_s < estimate.high_s
