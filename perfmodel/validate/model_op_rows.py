"""NeuSight's table of whole models: every node of a one-layer model timed alone, forward and backward (fp32).

Read are the nodes whose kernels the shapes determine: linear layers, GPT-2's addmm, batched matmul, softmax, layer norm and
GELU. Forward values are eager calls timed with events; backward values run the node's grad_fn chain.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator

from perfmodel.graph import Op, TensorSpec
from perfmodel.units import MS_PER_S
from perfmodel.validate.kernel_rows import EAGER_FLOOR, Format, KernelRow, Row, tensor
from perfmodel.validate.timed_ops import bmm_op
from perfmodel.validate.vector_formats import layer_norm_op

FLOAT = "float32"
# What the table shows for the backward of nodes that launch nothing (`add` of two tensors): 11 us on V100, 9 us on A100.
BACKWARD_FLOOR_S = 10e-6

_LINEAR = re.compile(
    r"(^|\.)(dense|query|key|value|lm_head|decoder|fc1|fc2|[qkv]_proj|out_proj|project_in|project_out|seq_relationship)$"
)
_NORM = re.compile(r"(layer_?norm|ln_(1|2|f))$", re.IGNORECASE)


def _read(file: str, row: Row) -> Iterator[KernelRow]:
    if row["dtype"] != FLOAT:
        return
    shapes = [tuple(shape) for shape in json.loads(row["input_shapes"])]
    found = _node(row["target"], shapes, _shape(row["output_shape"]))
    if found is None:
        return
    label, timed, forward, backward = found
    device, key = row["device"], f"{label} {row['input_shapes']} {row['output_shape']}"
    for direction, ops, column in (("forward", forward, "fw_latency"), ("backward", backward, "bw_latency")):
        measured_s = float(row[column] or 0) / MS_PER_S
        if ops and measured_s > 0:
            yield KernelRow(
                device=device,
                family=f"model {label} fp32",
                ops=ops,
                measured_s=measured_s,
                key=key,
                floor=EAGER_FLOOR if direction == "forward" else "",
                timed=timed,
                subset=direction,
                extra_s=BACKWARD_FLOOR_S if direction == "backward" else 0.0,
            )


def _shape(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.strip("()").split(",") if part.strip())


_Found = tuple[str, str, tuple[Op, ...], tuple[Op, ...]]


def _node(target: str, shapes: list[tuple[int, ...]], out: tuple[int, ...]) -> _Found | None:
    """Label, name of its floor, forward ops and backward ops of a node; None if it is not one of those read here."""
    if target == "addmm" and len(shapes) == 3:
        (m, k), n = shapes[1], shapes[2][1]
        return "linear", "linear", *_linear(m, n, k, transposed=False)
    if _LINEAR.search(target) and len(shapes) == 1:
        m = math.prod(shapes[0][:-1])
        return "linear", "linear", *_linear(m, out[-1], shapes[0][-1], transposed=True)
    if target == "matmul" and len(shapes) == 2 and len(shapes[0]) >= 3:
        return "bmm", "bmm", *_matmul(shapes[0], shapes[1])
    return _vector_node(target, shapes, out)


def _vector_node(target: str, shapes: list[tuple[int, ...]], out: tuple[int, ...]) -> _Found | None:
    rows, cols = math.prod(out[:-1]), out[-1] if out else 1
    x, y, grad = (tensor(i, (rows, cols), FLOAT) for i in range(3))
    if target == "softmax":
        forward = _op("aten._softmax", ("self",), (x,), (y,), dim=-1)
        backward = _op("aten._softmax_backward_data", ("grad_output", "output"), (grad, y), (x,), dim=-1)
        return "softmax", "softmax", (forward,), (backward,)
    if target == "gelu":
        backward = _op("aten.gelu_backward", ("grad_output", "self"), (grad, x), (y,))
        return "gelu", "gelu", (_op("aten.gelu", ("self",), (x,), (y,)),), (backward,)
    if _NORM.search(target) and len(shapes) == 1:
        return "layer norm", "ln", (layer_norm_op(rows, cols, FLOAT),), (_norm_backward(rows, cols),)
    return None


def _op(
    name: str, names: tuple[str, ...], inputs: tuple[TensorSpec, ...], outputs: tuple[TensorSpec, ...], **attrs: object
) -> Op:
    return Op(id=0, name=name, inputs=inputs, input_names=names, outputs=outputs, attrs=attrs)


def _norm_backward(rows: int, cols: int) -> Op:
    grad, x, out = (tensor(i, (rows, cols), FLOAT) for i in range(3))
    mean, rstd = (tensor(i, (rows, 1), FLOAT) for i in (3, 4))
    weight, bias, weight_grad, bias_grad = (tensor(i, (cols,), FLOAT) for i in range(5, 9))
    names = ("grad_out", "input", "mean", "rstd", "weight", "bias")
    inputs, outputs = (grad, x, mean, rstd, weight, bias), (out, weight_grad, bias_grad)
    return _op(
        "aten.native_layer_norm_backward", names, inputs, outputs, normalized_shape=[cols], output_mask=[True] * 3
    )


def _linear(m: int, n: int, k: int, *, transposed: bool) -> tuple[tuple[Op, ...], tuple[Op, ...]]:
    """x[m, k] times a weight stored [n, k] (`transposed`, a linear layer) or [k, n] (GPT-2's Conv1D), with a bias."""
    x, grad, bias = tensor(0, (m, k), FLOAT), tensor(1, (m, n), FLOAT), tensor(2, (n,), FLOAT)
    weight = tensor(3, (k, n), FLOAT, transposed=transposed)
    forward = _op("aten.addmm", ("self", "mat1", "mat2"), (bias, x, weight), (grad,))
    names = ("self", "mat2")
    back = tensor(3, (n, k), FLOAT, transposed=not transposed)
    dgrad = _op("aten.mm", names, (grad, back), (x,))
    if transposed:
        wgrad = _op("aten.mm", names, (tensor(1, (n, m), FLOAT, transposed=True), x), (tensor(4, (n, k), FLOAT),))
    else:
        wgrad = _op("aten.mm", names, (tensor(0, (k, m), FLOAT, transposed=True), grad), (tensor(4, (k, n), FLOAT),))
    sums = _op("aten.sum", ("self",), (grad,), (tensor(5, (1, n), FLOAT),), dim=[0], keepdim=True)
    return (forward,), (dgrad, wgrad, sums)


def _matmul(a: tuple[int, ...], b: tuple[int, ...]) -> tuple[tuple[Op, ...], tuple[Op, ...]]:
    """Batched product of attention heads: its gradients are two more. A head-major copy comes first if heads interleave."""
    batch, m, k, n = math.prod(a[:-2]), a[-2], a[-1], b[-1]
    copies = tuple(
        _op("aten.clone", ("self",), (_head_view(shape),), (tensor(9, shape, FLOAT),))
        for shape in (a, b)
        if len(shape) == 4 and shape[0] > 1 and min(shape[-2:]) < max(a[-2], b[-1])
    )
    backward = (bmm_op(batch, m, k, n, FLOAT), bmm_op(batch, k, n, m, FLOAT))
    return (*copies, bmm_op(batch, m, n, k, FLOAT)), backward


def _head_view(shape: tuple[int, ...]) -> TensorSpec:
    """[batch, heads, ...] as a permuted view of [batch, length, heads, dim], the head dimension being the shorter one."""
    batch, heads, rows, cols = shape
    length, dim = max(rows, cols), min(rows, cols)
    by_length, by_dim = heads * dim, 1
    strides = (length * by_length, dim, *((by_length, by_dim) if rows == length else (by_dim, by_length)))
    return TensorSpec(id=8, shape=(batch, heads, rows, cols), dtype=FLOAT, strides=strides, storage=8)


MODEL_OPS_FORMAT = Format(
    "neusight_model_ops",
    frozenset({"device", "model", "target", "input_shapes", "output_shape", "dtype", "fw_latency", "bw_latency"}),
    "",
    _read,
)
