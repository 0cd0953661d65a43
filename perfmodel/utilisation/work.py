"""FLOPs and bytes of ops in a trace, from the shapes the profiler recorded; None where they cannot be known from those.

mm(m×k, k×n): 2mnk FLOPs; convolution: 2 · N·K·P·Q · C/groups · R·S, its two backward products together twice that;
attention: 4 · B·H·S·T·D forward, 10 · B·H·S·T·D backward (five products, FlashAttention-2 section 3.1).
Bytes: each input read once, the result written once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from perfmodel.traces.nccl import itemsize_bytes
from perfmodel.traces.spans import HostSpan, OpArguments

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class OpWork:
    """FLOPs and bytes of one op and the dtype of its arithmetic."""

    flops: int
    bytes: int
    dtype: str


def op_work(op: HostSpan) -> OpWork | None:
    """Work of an op; None if its kind or its shapes are not known."""
    if op.arguments is None:
        return None
    rule = _RULES.get(op.name.removeprefix("aten::").removesuffix("_"))
    shapes = [shape if _is_shape(shape) else () for shape in op.arguments.shapes]
    try:
        found = rule(shapes, op.arguments) if rule else _streamed(op.name, shapes)
    except (IndexError, TypeError, ValueError):
        return None  # shapes that no such op has: a trace may say anything
    if found is None:
        return None
    flops, out_elems = found
    dtypes = [str(d) for d in op.arguments.dtypes]
    dtype = next((d for d in dtypes if itemsize_bytes(d) and d.casefold() not in ("long int", "long", "int")), "")
    sizes = [
        math.prod(shape) * itemsize_bytes(d)
        for shape, d in zip(shapes, dtypes, strict=False)
        if shape and math.prod(shape)
    ]
    return OpWork(flops=flops, bytes=sum(sizes) + out_elems * itemsize_bytes(dtype), dtype=dtype)


def _is_shape(value: Any) -> bool:
    return isinstance(value, tuple) and all(type(part) is int and 0 <= part < 2**40 for part in value)


Found = tuple[int, int] | None  # FLOPs, elements written


def _mm(a: Shape, b: Shape) -> Found:
    (m, k), (inner, n) = a, b
    return (2 * m * n * k, m * n) if inner == k else None


def _bmm(a: Shape, b: Shape) -> Found:
    (batch, m, k), (_, inner, n) = a, b
    return (2 * batch * m * n * k, batch * m * n) if inner == k else None


def _conv(shapes: Sequence[Shape], arguments: OpArguments) -> Found:
    data, weight = shapes[0], shapes[1]
    values = arguments.values
    if len(values) < 6:
        return None
    numbers = [_numbers(value) for value in values]
    lists = [n for n in numbers[2:] if n]
    stride, padding, dilation = lists[0], lists[1], lists[2]
    out = [
        (size + 2 * p - d * (r - 1) - 1) // s + 1
        for size, r, s, p, d in zip(data[2:], weight[2:], stride, padding, dilation, strict=True)
    ]
    n_out = data[0] * weight[0] * math.prod(out)
    return 2 * n_out * math.prod(weight[1:]), n_out


def _numbers(value: Any) -> tuple[int, ...]:
    if isinstance(value, str):
        parts = [part.strip() for part in value.strip("[]").split(",")]
        return tuple(int(part) for part in parts if part.isdecimal()) if value.startswith("[") else ()
    return tuple(part for part in value if type(part) is int) if isinstance(value, tuple) else ()


def _conv_backward(shapes: Sequence[Shape], arguments: OpArguments) -> Found:
    grad, data, weight = shapes[0], shapes[1], shapes[2]
    if len(grad) < 3 or len(weight) != len(grad):
        return None
    return 4 * math.prod(grad) * math.prod(weight[1:]), math.prod(data) + math.prod(weight)


def _attention(shapes: Sequence[Shape], arguments: OpArguments) -> Found:
    batch, heads, length, dim = shapes[0]
    return 4 * batch * heads * length * shapes[1][2] * dim, math.prod(shapes[0])


def _attention_backward(shapes: Sequence[Shape], arguments: OpArguments) -> Found:
    batch, heads, length, dim = shapes[1]
    keys = shapes[2][2]
    return 10 * batch * heads * length * keys * dim, math.prod(shapes[1]) + 2 * math.prod(shapes[2])


_RULES: dict[str, Callable[[Sequence[Shape], OpArguments], Found]] = {
    "mm": lambda shapes, _: _mm(shapes[0], shapes[1]),
    "addmm": lambda shapes, _: _mm(shapes[1], shapes[2]),
    "_addmm_activation": lambda shapes, _: _mm(shapes[1], shapes[2]),
    "bmm": lambda shapes, _: _bmm(shapes[0], shapes[1]),
    "baddbmm": lambda shapes, _: _bmm(shapes[1], shapes[2]),
    "_convolution": _conv,
    "convolution": _conv,
    "mkldnn_convolution": _conv,
    "convolution_backward": _conv_backward,
    **dict.fromkeys(
        (
            "_scaled_dot_product_flash_attention",
            "_scaled_dot_product_efficient_attention",
            "_scaled_dot_product_cudnn_attention",
            "_flash_attention_forward",
        ),
        _attention,
    ),
    **dict.fromkeys(
        (
            "_scaled_dot_product_flash_attention_backward",
            "_scaled_dot_product_efficient_attention_backward",
            "_scaled_dot_product_cudnn_attention_backward",
        ),
        _attention_backward,
    ),
}
_POINTWISE = (
    *("add", "sub", "mul", "div", "neg", "pow", "exp", "log", "sqrt", "rsqrt", "lerp", "addcmul", "addcdiv", "where"),
    *("relu", "threshold", "sigmoid", "tanh", "gelu", "silu", "clamp_min", "masked_fill", "native_dropout"),
    *("threshold_backward", "sigmoid_backward", "tanh_backward", "gelu_backward", "silu_backward"),
    "native_dropout_backward",
)
# Ops that write as many elements as their largest input has; FLOPs an element (1 where an op does arithmetic at all).
_STREAMING = {
    **dict.fromkeys(_POINTWISE, 1),
    **dict.fromkeys(("copy", "clone", "_to_copy", "fill", "zero", "cat", "contiguous"), 0),
    **dict.fromkeys(("native_layer_norm", "native_batch_norm", "_softmax", "_log_softmax"), 8),
}


def _streamed(name: str, shapes: Sequence[Shape]) -> Found:
    plain = name.removeprefix("aten::").removesuffix("_")
    largest = max((math.prod(shape) for shape in shapes if shape), default=0)
    return (_STREAMING[plain] * largest, largest) if plain in _STREAMING and largest else None
