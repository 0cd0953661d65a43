"""Work of pointwise ops, reductions, norms and softmax against counts by hand."""

from __future__ import annotations

import pytest

from perfmodel.graph import Op, TensorSpec
from perfmodel.kernels import calls_of, work


def spec(index, shape, dtype="float32", strides=None, storage=None):
    step, dense = 1, []
    for size in reversed(shape):
        dense.insert(0, step)
        step *= size
    return TensorSpec(
        id=index,
        shape=tuple(shape),
        dtype=dtype,
        strides=tuple(dense if strides is None else strides),
        storage=index if storage is None else storage,
    )


def op(name, inputs, outputs, names=(), **attrs):
    labels = names or tuple(f"arg{i}" for i in range(len(inputs)))
    return Op(id=0, name=name, inputs=tuple(inputs), input_names=labels, outputs=tuple(outputs), attrs=attrs)


A, B, C = (spec(i, (64, 128)) for i in range(3))
N = 64 * 128  # 8192 elements


def counts(an_op):
    total = work(an_op)
    return total.flops, total.read_bytes, total.write_bytes


@pytest.mark.parametrize(
    ("an_op", "expected"),
    [
        # Two operands of 4 bytes read, one written; one add an element.
        (op("aten.add", [A, B], [C]), (N, 8 * N, 4 * N)),
        # alpha adds a multiply.
        (op("aten.add", [A, B], [C], alpha=2), (2 * N, 8 * N, 4 * N)),
        (op("aten.mul", [A, A], [C]), (N, 4 * N, 4 * N)),  # x * x reads x once
        (op("aten.add_", [A, B], [A]), (N, 8 * N, 4 * N)),  # in place: self is read and written
        (op("aten.relu", [A], [C]), (N, 4 * N, 4 * N)),
        (op("aten.addcmul", [A, B, C], [spec(3, (64, 128))]), (3 * N, 12 * N, 4 * N)),
        # A row of 128 is broadcast over 64: it is read once.
        (op("aten.add", [A, spec(1, (128,))], [C]), (N, 4 * N + 4 * 128, 4 * N)),
        (op("aten.add", [A, spec(1, (64, 128), strides=(0, 1))], [C]), (N, 4 * N + 4 * 128, 4 * N)),
        # A comparison writes bool; where reads a bool mask and two operands.
        (op("aten.gt", [A], [spec(1, (64, 128), "bool")]), (N, 4 * N, N)),
        (op("aten.where", [spec(3, (64, 128), "bool"), A, B], [C]), (N, 9 * N, 4 * N)),
        (op("aten.masked_fill_", [A, spec(3, (64, 128), "bool")], [A]), (N, 5 * N, 4 * N)),
        # fp16 plus fp32 promotes to fp32.
        (op("aten.add", [spec(3, (64, 128), "float16"), B], [C]), (N, 6 * N, 4 * N)),
        (op("aten.threshold_backward", [A, B], [C]), (N, 8 * N, 4 * N)),
        (op("aten.tanh_backward", [A, B], [C]), (3 * N, 8 * N, 4 * N)),  # g * (1 - y * y)
        (op("aten.sigmoid_backward", [A, B], [C]), (3 * N, 8 * N, 4 * N)),  # g * (1 - y) * y
        # (a + bi)(c + di): 4 multiplies, 2 adds; 8 bytes an element.
        (
            op("aten.mul", [spec(i, (16,), "complex64") for i in (0, 1)], [spec(2, (16,), "complex64")]),
            (6 * 16, 2 * 8 * 16, 8 * 16),
        ),
        (
            op("aten.add", [spec(i, (16,), "complex64") for i in (0, 1)], [spec(2, (16,), "complex64")]),
            (2 * 16, 2 * 8 * 16, 8 * 16),
        ),
        # Half of the input is the value, half the gate.
        (op("aten.glu", [A], [spec(1, (64, 64))]), (5 * N // 2, 4 * N, 2 * N)),
        (op("aten.glu_backward", [spec(1, (64, 64)), A], [C]), (9 * N // 2, 6 * N, 4 * N)),
        (op("aten.add", [spec(0, (0, 4)), spec(1, (0, 4))], [spec(2, (0, 4))]), (0, 0, 0)),
        (op("aten.sum", [A], [spec(1, ())]), (N, 4 * N, 4)),
        (op("aten.sum", [A], [spec(1, (128,))], dim=[0]), (N, 4 * N, 4 * 128)),
        (op("aten.mean", [A], [spec(1, (64, 1))], dim=[-1], keepdim=True), (N, 4 * N, 4 * 64)),
        # max along a dimension also writes int64 positions.
        (op("aten.max", [A], [spec(1, (64,)), spec(2, (64,), "int64")], dim=1), (N, 4 * N, 12 * 64)),
        (op("aten.max", [A, B], [C], ("self", "other")), (N, 8 * N, 4 * N)),
        (op("aten.var_mean", [A], [spec(1, (64,)), spec(2, (64,))], dim=[1]), (4 * N, 4 * N, 8 * 64)),
        (op("aten._softmax", [A], [C], dim=-1), (5 * N, 4 * N, 4 * N)),
        # A product of gradient and output, and a kernel that reads product and output: twice 8 bytes in and 4 out.
        (op("aten._softmax_backward_data", [A, B], [C], dim=-1), (4 * N, 16 * N, 8 * N)),
        (op("aten._log_softmax_backward_data", [A, B], [C], dim=-1), (4 * N, 8 * N, 4 * N)),
    ],
    ids=lambda value: value.name if isinstance(value, Op) else None,
)
def test_work_by_hand(an_op, expected):
    assert counts(an_op) == expected


def test_slices_of_one_storage_are_read_apart():
    whole = 100
    halves = [spec(i, (64, 64), strides=(128, 1), storage=whole) for i in (0, 1)]
    assert work(op("aten.mul", halves, [spec(2, (64, 64))])).read_bytes == 2 * 4 * 64 * 64


@pytest.mark.parametrize(
    ("inputs", "output", "vectorised", "n_streams"),
    [
        ([A, B], C, 1, 3),
        ([A], C, 1, 2),
        ([A, spec(1, (128,))], C, 0, 2),  # a broadcast row moves nothing of size
        ([spec(0, (64, 128), strides=(1, 64)), B], C, 0, 3),  # transposed operand
        ([spec(0, (64, 128), strides=(1, 64))], spec(1, (64, 128), strides=(1, 64)), 1, 2),  # same order: as if flat
        ([spec(0, (64, 128), "float16"), B], C, 0, 3),  # two element sizes
        ([spec(0, (64, 128), strides=(256, 1))], C, 0, 2),  # gaps between rows
        ([A, spec(1, ())], C, 1, 2),  # a number
    ],
)
def test_when_16_byte_loads_are_possible(inputs, output, vectorised, n_streams):
    (call,) = calls_of(op("aten.add", inputs, [output]))
    assert (call.features["vectorised"], call.features["n_streams"]) == (vectorised, n_streams)


def test_layer_norm_reads_once_and_writes_statistics():
    x, weight, bias = spec(0, (32, 16, 512)), spec(1, (512,)), spec(2, (512,))
    rows, n = 32 * 16, 32 * 16 * 512
    outputs = [spec(3, (32, 16, 512)), spec(4, (32, 16, 1)), spec(5, (32, 16, 1))]
    an_op = op("aten.native_layer_norm", [x, weight, bias], outputs, normalized_shape=[512])
    assert counts(an_op) == (8 * n, 4 * n + 2 * 4 * 512, 4 * n + 2 * 4 * rows)
    (call,) = calls_of(an_op)
    assert (call.features["rows"], call.features["cols"]) == (rows, 512)


def test_layer_norm_backward_is_two_kernels():
    grad, x, mean, rstd, weight, bias = (
        spec(0, (512, 256)), spec(1, (512, 256)), spec(2, (512, 1)), spec(3, (512, 1)), spec(4, (256,)), spec(5, (256,)),
    )  # fmt: skip
    n, small = 512 * 256, 2 * 4 * 512 + 2 * 4 * 256
    names = ("grad_out", "input", "mean", "rstd", "weight", "bias")
    outputs = [spec(6, (512, 256)), spec(7, (256,)), spec(8, (256,))]
    an_op = op(
        "aten.native_layer_norm_backward", [grad, x, mean, rstd, weight, bias], outputs, names,
        normalized_shape=[256], output_mask=[True, True, True],
    )  # fmt: skip
    to_input, to_weights = (call.work for call in calls_of(an_op))
    assert (to_input.read_bytes, to_input.write_bytes) == (8 * n + small, 4 * n)
    assert (to_weights.read_bytes, to_weights.write_bytes) == (8 * n + small, 2 * 4 * 256)
    frozen = op(an_op.name, an_op.inputs, outputs[:1], names, normalized_shape=[256], output_mask=[True, False, False])
    assert len(calls_of(frozen)) == 1


def test_batch_norm_by_cudnn_reads_twice_by_torch_in_two_kernels():
    x, small = spec(0, (8, 16, 10, 10)), [spec(i, (16,)) for i in range(1, 5)]
    n = 8 * 16 * 100
    names = ("input", "weight", "bias", "running_mean", "running_var")
    outputs = [spec(5, (8, 16, 10, 10)), spec(6, (16,)), spec(7, (16,))]
    fused = op("aten.cudnn_batch_norm", [x, *small], outputs, names, training=True)
    assert counts(fused) == (6 * n, 2 * 4 * n + 4 * 4 * 16, 4 * n + 2 * 4 * 16)
    statistics, pointwise = calls_of(op("aten.native_batch_norm", [x, *small], outputs, names, training=True))
    assert (statistics.work.read_bytes, pointwise.work.read_bytes, pointwise.work.write_bytes) == (4 * n, 4 * n, 4 * n)
    assert statistics.features["rows"] == 16
    assert statistics.features["cols"] == 800
    (inference,) = calls_of(op("aten.native_batch_norm", [x, *small], outputs, names, training=False))
    assert inference.family == "elementwise"
    gradient = op(
        "aten.cudnn_batch_norm_backward", [x, spec(9, (8, 16, 10, 10))], outputs, ("input", "grad_output"), epsilon=1e-5
    )
    assert counts(gradient) == (11 * n, 4 * 4 * n, 4 * n + 2 * 4 * 16)
