"""Work and layout of gemm, convolution and attention rules, against hand counts and torch's FLOP counter."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

from perfmodel.graph import Op, TensorSpec
from perfmodel.kernels import attention, conv, gemm
from perfmodel.kernels.registry import RULES

DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}


def spec(tensor, index=0):
    return TensorSpec(
        id=index, shape=tuple(tensor.shape), dtype=DTYPES[tensor.dtype], strides=tuple(tensor.stride()), storage=index
    )


def op(name, tensors, outputs=(), names=(), **attrs):
    return Op(
        id=0,
        name=name,
        inputs=tuple(spec(t, i) for i, t in enumerate(tensors)),
        input_names=tuple(names) or tuple(f"arg{i}" for i in range(len(tensors))),
        outputs=tuple(spec(t, 100 + i) for i, t in enumerate(outputs)),
        attrs=attrs,
    )


def calls(name, tensors, outputs=(), names=(), **attrs):
    return RULES[name](op(name, tensors, outputs, names, **attrs))


def counted_flops(function):
    with FlopCounterMode(display=False) as counter:
        function()
    return counter.get_total_flops()


def test_mm_by_hand():
    a, b = torch.empty(3, 5), torch.empty(5, 7)
    (call,) = calls("aten.mm", [a, b], [a @ b])
    assert call.work.flops == 2 * 3 * 5 * 7
    assert call.work.read_bytes == 4 * (3 * 5 + 5 * 7)
    assert call.work.write_bytes == 4 * 3 * 7
    assert call.pipe == "fp32"


def test_layouts_of_a_linear_layer():
    x, w, grad = torch.empty(64, 32), torch.empty(16, 32), torch.empty(64, 16)
    forward = calls("aten.mm", [x, w.t()], [grad])[0].features
    dgrad = calls("aten.mm", [grad, w], [x])[0].features
    wgrad = calls("aten.mm", [grad.t(), x], [w])[0].features
    assert [(f["trans_a"], f["trans_b"]) for f in (forward, dgrad, wgrad)] == [(0, 1), (0, 0), (1, 0)]
    assert [(f["m"], f["n"], f["k"]) for f in (forward, dgrad, wgrad)] == [(64, 16, 32), (64, 32, 16), (16, 32, 64)]


@pytest.mark.parametrize(
    ("columns", "dtype", "expected"),
    [
        (8, torch.bfloat16, 16),
        (4, torch.bfloat16, 8),
        (367, torch.float16, 2),
        (367, torch.float32, 4),
        (64, torch.float32, 16),
    ],
)
def test_alignment_is_that_of_the_leading_dimension(columns, dtype, expected):
    a, b = torch.empty(10, columns, dtype=dtype), torch.empty(columns, 64, dtype=dtype)
    (call,) = calls("aten.mm", [a, b], [torch.empty(10, 64, dtype=dtype)])
    assert call.features["align_bytes"] == expected


def test_bias_is_an_epilogue_and_a_matrix_is_not():
    a, b = torch.empty(3, 5), torch.empty(5, 7)
    names = ("self", "mat1", "mat2")
    (vector,) = calls("aten.addmm", [torch.empty(7), a, b], [a @ b], names)
    (matrix,) = calls("aten.addmm", [torch.empty(3, 7), a, b], [a @ b], names)
    assert (vector.features["bias"], vector.features["beta"]) == (1, 0)
    assert (matrix.features["bias"], matrix.features["beta"]) == (0, 1)
    assert vector.work.read_bytes == 4 * (15 + 35 + 7)
    assert matrix.work.read_bytes == 4 * (15 + 35 + 21)


def test_tf32_is_a_pipe_of_its_own():
    a, b = torch.empty(3, 5), torch.empty(5, 7)
    (call,) = calls("aten.mm", [a, b], [a @ b], allow_tf32=True)
    assert call.pipe == "tf32_tensor"


def test_an_empty_product_runs_nothing():
    a, b = torch.empty(0, 5), torch.empty(5, 7)
    assert calls("aten.mm", [a, b], [a @ b]) == ()


@pytest.mark.parametrize(
    ("name", "function", "shapes", "names"),
    [
        ("aten.mm", torch.mm, [(33, 17), (17, 9)], ("self", "mat2")),
        ("aten.addmm", torch.addmm, [(9,), (33, 17), (17, 9)], ("self", "mat1", "mat2")),
        ("aten.bmm", torch.bmm, [(4, 33, 17), (4, 17, 9)], ("self", "mat2")),
        ("aten.baddbmm", torch.baddbmm, [(4, 33, 9), (4, 33, 17), (4, 17, 9)], ("self", "batch1", "batch2")),
        ("aten.linear", torch.nn.functional.linear, [(2, 5, 17), (9, 17)], ("input", "weight")),
        ("aten.matmul", torch.matmul, [(2, 5, 17), (17, 9)], ("self", "other")),
        ("aten.matmul", torch.matmul, [(2, 3, 5, 17), (2, 3, 17, 9)], ("self", "other")),
        ("aten.matmul", torch.matmul, [(2, 3, 5, 17), (3, 17, 9)], ("self", "other")),
    ],
)
def test_gemm_flops_equal_torch(name, function, shapes, names):
    tensors = [torch.empty(shape) for shape in shapes]
    flops = counted_flops(lambda: function(*tensors))
    assert sum(c.work.flops for c in calls(name, tensors, [function(*tensors)], names)) == flops


def test_matrix_vector_and_dot_by_hand():
    matrix, vector = torch.empty(6, 4), torch.empty(4)
    assert calls("aten.mv", [matrix, vector], [torch.empty(6)])[0].work.flops == 2 * 6 * 4
    assert calls("aten.dot", [vector, vector], [torch.empty(())])[0].work.flops == 2 * 4
    assert calls("aten.addr", [matrix, torch.empty(6), vector], [matrix])[0].work.flops == 2 * 6 * 4


def test_linear_backward_is_two_products_and_a_sum():
    x, w, grad = torch.empty(2, 5, 17), torch.empty(9, 17), torch.empty(2, 5, 9)
    dgrad, wgrad, bias = calls("aten.linear_backward", [x, grad, w], output_mask=[True, True, True])
    assert dgrad.work.flops == wgrad.work.flops == 2 * 10 * 9 * 17
    assert bias.family == "reduction"


CONVS = [
    ((2, 6, 11, 11), (8, 6, 3, 3), {"stride": 2, "padding": 1}),
    ((2, 6, 11, 11), (6, 1, 3, 3), {"groups": 6}),
    ((2, 6, 11), (8, 6, 3), {"padding": 1}),
    ((1, 4, 5, 6, 7), (8, 2, 3, 3, 3), {"groups": 2}),
]


@pytest.mark.parametrize(("image", "weight", "kwargs"), CONVS)
def test_conv_flops_equal_torch(image, weight, kwargs):
    x = torch.randn(image, requires_grad=True)
    w = torch.randn(weight, requires_grad=True)
    function = getattr(torch.nn.functional, f"conv{len(image) - 2}d")
    out = function(x, w, **kwargs)
    attrs = {"stride": [kwargs.get("stride", 1)], "groups": kwargs.get("groups", 1), "dilation": [1]}
    (forward,) = calls("aten.convolution", [x, w], [out], **attrs)
    assert forward.work.flops == counted_flops(lambda: function(x, w, **kwargs))
    assert forward.work.bytes == 4 * (x.numel() + w.numel() + out.numel())
    backward = calls("aten.convolution_backward", [out, x, w], output_mask=[True, True, False], **attrs)
    assert [c.features["kind"] for c in backward] == [conv.DGRAD, conv.WGRAD]
    if kwargs.get("groups", 1) == 1:  # torch's counter forgets the groups in the weight gradient
        assert sum(c.work.flops for c in backward) == counted_flops(lambda: out.sum().backward())
    assert all(c.work.flops == forward.work.flops for c in backward)


def test_transposed_conv_is_the_input_gradient_of_the_direct_one():
    x, w = torch.randn(2, 8, 5, 5), torch.randn(8, 6, 3, 3)
    out = torch.nn.functional.conv_transpose2d(x, w, stride=2)
    (call,) = calls("aten.convolution", [x, w], [out], stride=[2, 2], dilation=[1, 1], groups=1, transposed=True)
    assert call.features["kind"] == conv.DGRAD
    assert (call.features["c_in"], call.features["c_out"]) == (6, 8)
    assert call.work.flops == counted_flops(lambda: torch.nn.functional.conv_transpose2d(x, w, stride=2))
    assert call.work.write_bytes == 4 * out.numel()


def test_conv_bias_has_kernels_of_its_own():
    x, w, b = torch.randn(2, 6, 9, 9), torch.randn(8, 6, 3, 3), torch.randn(8)
    out = torch.nn.functional.conv2d(x, w, b)
    attrs = {"stride": [1, 1], "dilation": [1, 1], "groups": 1}
    assert [c.family for c in calls("aten.convolution", [x, w, b], [out], **attrs)] == ["conv", "elementwise"]
    backward = calls("aten.convolution_backward", [out, x, w], output_mask=[False, True, True], **attrs)
    assert [c.family for c in backward] == ["conv", "reduction"]
    assert backward[1].work.write_bytes == 4 * 8


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("q_len", "kv_len"), [(7, 7), (5, 9), (9, 5)])
def test_attention_scores_by_brute_force(causal, q_len, kv_len):
    shape = attention.AttentionShape(
        batch=2, heads=3, kv_heads=3, q_len=q_len, kv_len=kv_len, head_dim=8, v_dim=8, causal=causal
    )
    pairs = sum(1 for i in range(q_len) for j in range(kv_len) if j <= i or not causal)
    assert shape.scores == 2 * 3 * pairs


def test_attention_flops_equal_torch_without_a_mask():
    q, k, v = (torch.randn(2, 4, length, 16, requires_grad=True) for length in (12, 20, 20))
    function = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    with FlopCounterMode(display=False) as counter:
        out, lse = function(q, k, v)
        forward_flops = counter.get_total_flops()
        out.sum().backward()
    name = "aten._scaled_dot_product_flash_attention_for_cpu"
    (forward,) = calls(name, [q, k, v], [out, lse], is_causal=False)
    (backward,) = calls(f"{name}_backward", [out, q, k, v, out, lse], is_causal=False)
    by_hand = 2 * (2 * 2 * 4 * 12 * 20 * 16)
    assert forward.work.flops == by_hand
    assert backward.work.flops == by_hand * attention.BACKWARD_PRODUCTS // attention.FORWARD_PRODUCTS
    if forward_flops:  # releases whose counter knows the CPU operator
        assert forward_flops == by_hand
    assert forward.work.read_bytes == 4 * (q.numel() + k.numel() + v.numel())
    assert forward.work.write_bytes == 4 * (q.numel() + 2 * 4 * 12)
    assert (forward.features["variant"], backward.features["backward"]) == (attention.CPU, 1)


def test_attention_flops_equal_torch_on_the_flash_operator():
    q, k, v = torch.empty(2, 4, 12, 16), torch.empty(2, 4, 20, 16), torch.empty(2, 4, 20, 16)
    (forward,) = calls("aten._scaled_dot_product_flash_attention", [q, k, v], [q])
    (backward,) = calls("aten._scaled_dot_product_flash_attention_backward", [q, q, k, v])
    assert forward.work.flops == sdpa_flop_count(q.shape, k.shape, v.shape)
    assert backward.work.flops == sdpa_backward_flop_count(q.shape, q.shape, k.shape, v.shape)


def test_grouped_queries_read_fewer_keys():
    q, k, v = torch.empty(2, 8, 16, 64), torch.empty(2, 2, 16, 64), torch.empty(2, 2, 16, 64)
    (call,) = calls("aten._scaled_dot_product_flash_attention", [q, k, v], [q], is_causal=True)
    assert call.features["kv_heads"] == 2
    assert call.work.read_bytes == 4 * (q.numel() + 2 * k.numel())


def test_math_pipe_names_the_tensor_cores():
    assert [gemm.math_pipe(d) for d in ("float16", "bfloat16", "float64")] == ["fp16_tensor", "bf16_tensor", "fp64"]
