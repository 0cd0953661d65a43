"""What old GPUs run in place of flash attention and bf16: the price, and the note that says so."""

from dataclasses import replace

import pytest

from perfmodel.db import load_device
from perfmodel.graph import Op
from perfmodel.kernels import price, price_calls
from perfmodel.kernels.attention import EFFICIENT, AttentionShape, attention_call
from perfmodel.kernels.substitutes import substitutes
from perfmodel.validate.timed_ops import attention_op, linear_op


def attention(dtype: str = "float16", **more: int) -> Op:
    op = attention_op((8, 16, 16, 2048, 64), causal=False, implementation="auto")
    specs = tuple(replace(spec, dtype=dtype) for spec in (*op.inputs, *op.outputs))
    return replace(op, inputs=specs[: len(op.inputs)], outputs=specs[len(op.inputs) :])


def call(variant: int):
    shape = AttentionShape(
        batch=8, heads=16, kv_heads=16, q_len=4096, kv_len=4096, head_dim=128, v_dim=128, variant=variant
    )
    return attention_call(shape, dtype="bfloat16", itemsize_bytes=2, backward=False)


@pytest.mark.parametrize("name", ["v100_sxm2_16gb", "t4"])
def test_flash_attention_is_the_memory_efficient_kernel_before_ampere(name: str) -> None:
    device = load_device(name)
    (note,) = substitutes([attention()], device)
    assert "memory-efficient" in note
    assert device.compute_capability in note
    flash, efficient = price_calls([call(0), call(EFFICIENT)], device)
    assert flash.time_s == efficient.time_s
    assert flash.source.label == "derived"


def test_the_memory_efficient_kernel_takes_twice_as_long_as_flash_where_there_is_flash() -> None:
    # FlashAttention-2 (Dao 2023), section 4.1: about 2 times faster than its equivalent in xFormers.
    flash, efficient = price_calls([call(0), call(EFFICIENT)], load_device("a100_sxm_80gb"))
    assert 1.7 < efficient.time_s / flash.time_s < 2.3


def test_a_gpu_with_flash_attention_and_bf16_replaces_nothing() -> None:
    assert substitutes([attention("bfloat16")], load_device("a100_sxm_80gb")) == []
    assert substitutes([attention("bfloat16")], load_device("cpu")) == []


@pytest.mark.parametrize("name", ["v100_pcie_32gb", "t4", "p100_pcie_16gb", "p4"])
def test_bf16_without_units_is_noted_and_no_faster_than_fp32(name: str) -> None:
    device = load_device(name)
    half, full = (linear_op(2048, 2048, 2048, dtype, bias=False) for dtype in ("bfloat16", "float32"))
    (note,) = substitutes([half, full, half], device)
    assert "no bf16 arithmetic" in note
    times = [sum(e.time_s for e in found) for found in price([half, full], device)]
    assert times[0] == pytest.approx(times[1], rel=0.35)


def test_fp16_has_units_on_v100_and_none_on_p4() -> None:
    half = linear_op(1024, 1024, 1024, "float16", bias=False)
    assert substitutes([half], load_device("v100_pcie_32gb")) == []
    assert "fp16" in substitutes([half], load_device("p4"))[0]
