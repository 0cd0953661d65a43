"""Megatron-LM's fused kernels: where its softmax kernel applies; products whose rows are not aligned; the host's waits."""

import pytest

from perfmodel.db import load_device
from perfmodel.graph import Op, TensorSpec
from perfmodel.kernels import calls_of, host_cost_s
from perfmodel.kernels.gemm import GemmShape, gemm_call
from perfmodel.kernels.pricing import price_calls


def spec(number: int, *shape: int, dtype: str = "bfloat16") -> TensorSpec:
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= size
    return TensorSpec(id=number, shape=shape, dtype=dtype, strides=tuple(reversed(strides)), storage=number)


def softmax(matrices: int, keys: int, *, backward: bool = False) -> Op:
    name = "perfmodel.causal_softmax_backward" if backward else "perfmodel.causal_softmax"
    inputs = tuple(spec(i, matrices, keys, keys) for i in range(1 + backward))
    return Op(
        id=0, name=name, inputs=inputs, input_names=("scores", "chances")[: len(inputs)],
        outputs=(spec(9, matrices, keys, keys),), attrs={"scale": 0.1}, phase="backward" if backward else "forward",
    )  # fmt: skip


@pytest.mark.parametrize(("matrices", "keys", "fused"), [
    (4, 1024, True), (16, 2048, True),
    (2, 1024, False),  # 16 heads over 8 ranks, one sample: attn_batches % 4
    (6, 1024, False), (4, 2049, False), (4, 16, False), (4, 1022, False),
])  # fmt: skip
def test_the_fused_softmax_takes_the_shapes_that_megatron_lists(matrices, keys, fused) -> None:
    assert (len(calls_of(softmax(matrices, keys))) == 1) is fused


def test_scores_it_does_not_take_cost_five_kernels_and_the_host_as_many_ops() -> None:
    device = load_device("a100")
    for backward in (False, True):
        plain, fused = softmax(2, 1024, backward=backward), softmax(4, 1024, backward=backward)
        calls = calls_of(plain)
        assert len(calls) == 5 + backward  # softmax's backward is a product and a reduction
        assert sum(e.time_s for e in price_calls(calls, device)) > sum(
            e.time_s for e in price_calls(calls_of(fused), device)
        )
        assert host_cost_s(plain, len(calls), device) > host_cost_s(fused, 1, device)


def head(columns: int, dtype: str = "bfloat16") -> float:
    """Seconds of the output layer of GPT-2 on A100, 12 x 1024 tokens."""
    itemsize = 4 if dtype == "float32" else 2
    call = gemm_call(GemmShape(m=12288, n=columns, k=768, trans_b=True), dtype=dtype, itemsize_bytes=itemsize)
    return price_calls([call], load_device("a100"))[0].time_s


def test_padding_the_vocabulary_makes_the_head_nearly_three_times_as_fast() -> None:
    """PyTorch blog of 2023-04-18, nanoGPT on A100: 50257 columns against 50304."""
    assert 2.5 < head(50257) / head(50304) < 3.1


def test_an_even_width_or_fp32_is_not_slowed() -> None:
    assert head(50258) == pytest.approx(head(50304), rel=0.05)
    assert head(50257, "float32") < 1.5 * head(50304, "float32")
