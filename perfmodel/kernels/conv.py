"""Convolutions: which kernels a convolution and its backward run, and their work. The law is in `conv_law`.

A kernel is one of three products over the same seven sizes: forward, input gradient (dgrad) or weight gradient (wgrad).
A transposed convolution's forward is the dgrad of the convolution with the same weight. Features of the family `conv`,
always of the *direct* convolution (input [batch, c_in, ...] to output [batch, c_out, ...]):

- `kind`: 0 forward, 1 dgrad, 2 wgrad.
- `batch`, `c_in`, `c_out`, `groups`; `in_h`, `in_w`, `out_h`, `out_w`: sizes (a third spatial dimension is folded into
  h).
- `taps_h`, `taps_w`, `stride_h`, `stride_w`, `dilation`: the filter.
- `channels_last`: 1 if the activations are stored with channels contiguous (NHWC).
- `itemsize_bytes`.

A bias costs its own kernels: one addition over the output forward, one reduction over the output gradient backward.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from perfmodel.estimate import Work
from perfmodel.graph import Op, TensorSpec
from perfmodel.kernels.elementwise import pointwise_calls
from perfmodel.kernels.gemm import bias_grad_call, math_pipe
from perfmodel.kernels.registry import KernelCall, kernel_rule

FORWARD, DGRAD, WGRAD = 0, 1, 2


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvShape:
    """Sizes of one direct convolution; tuples hold one entry per spatial dimension."""

    batch: int
    c_in: int
    c_out: int
    image: tuple[int, ...]
    out: tuple[int, ...]
    taps: tuple[int, ...]
    stride: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int = 1
    channels_last: bool = False

    @property
    def input_elems(self) -> int:
        """Elements of the input."""
        return self.batch * self.c_in * math.prod(self.image)

    @property
    def output_elems(self) -> int:
        """Elements of the output."""
        return self.batch * self.c_out * math.prod(self.out)

    @property
    def weight_elems(self) -> int:
        """Elements of the weight."""
        return self.c_out * (self.c_in // self.groups) * math.prod(self.taps)


def conv_work(shape: ConvShape, kind: int, itemsize_bytes: int) -> Work:
    """Work of one convolution kernel: the three kinds do the same multiplications and swap which tensor is written.

    FLOPs count every tap of every output, padding included, as `torch.utils.flop_counter` does.
    """
    flops = 2 * shape.output_elems * (shape.c_in // shape.groups) * math.prod(shape.taps)
    sizes = [shape.output_elems, shape.input_elems, shape.weight_elems]
    written = sizes[kind]
    return Work(
        flops=flops,
        read_bytes=(sum(sizes) - written) * itemsize_bytes,
        write_bytes=written * itemsize_bytes,
    )


def conv_call(shape: ConvShape, kind: int, *, dtype: str, itemsize_bytes: int, pipe: str = "") -> KernelCall:
    """The kernel call of one convolution kernel of `kind` FORWARD, DGRAD or WGRAD."""
    return KernelCall(
        family="conv",
        work=conv_work(shape, kind, itemsize_bytes),
        dtype=dtype,
        pipe=pipe or math_pipe(dtype),
        features={
            "kind": float(kind),
            "batch": float(shape.batch),
            "c_in": float(shape.c_in),
            "c_out": float(shape.c_out),
            "groups": float(shape.groups),
            "in_h": float(math.prod(shape.image[:-1])),
            "in_w": float(shape.image[-1]),
            "out_h": float(math.prod(shape.out[:-1])),
            "out_w": float(shape.out[-1]),
            "taps_h": float(math.prod(shape.taps[:-1])),
            "taps_w": float(shape.taps[-1]),
            "stride_h": float(max(shape.stride[:-1], default=1)),
            "stride_w": float(shape.stride[-1]),
            "dilation": float(max(shape.dilation)),
            "channels_last": float(shape.channels_last),
            "itemsize_bytes": float(itemsize_bytes),
        },
    )


def _per_dim(value: Any, n_dims: int, default: int) -> tuple[int, ...]:
    """A stride-like argument as one integer per spatial dimension."""
    if value is None or value == []:
        return (default,) * n_dims
    if isinstance(value, int):
        return (value,) * n_dims
    return tuple(int(v) for v in value) if len(value) == n_dims else (int(value[0]),) * n_dims


def _is_channels_last(spec: TensorSpec) -> bool:
    return len(spec.shape) > 2 and spec.strides[1] == 1 and spec.shape[1] > 1


def _shape_of(op: Op, image: TensorSpec, weight: TensorSpec, out: TensorSpec) -> ConvShape:
    """The direct convolution from `image` to `out`, whose weight is [c_out, c_in / groups, *taps]."""
    n_dims = len(weight.shape) - 2
    return ConvShape(
        batch=math.prod(image.shape[: -n_dims - 1]),
        c_in=image.shape[-n_dims - 1],
        c_out=out.shape[-n_dims - 1],
        image=image.shape[-n_dims:],
        out=out.shape[-n_dims:],
        taps=weight.shape[2:],
        stride=_per_dim(op.attrs.get("stride"), n_dims, 1),
        dilation=_per_dim(op.attrs.get("dilation"), n_dims, 1),
        groups=int(op.attrs.get("groups", 1) or 1),
        channels_last=_is_channels_last(image),
    )


def _call(op: Op, shape: ConvShape, kind: int, spec: TensorSpec) -> KernelCall:
    pipe = math_pipe(spec.dtype, allow_tf32=bool(op.attrs.get("allow_tf32", False)))
    return conv_call(shape, kind, dtype=spec.dtype, itemsize_bytes=spec.itemsize_bytes, pipe=pipe)


@kernel_rule(
    "aten.convolution",
    "aten._convolution",
    "aten.cudnn_convolution",
    "aten.mkldnn_convolution",
    "aten.conv1d",
    "aten.conv2d",
    "aten.conv3d",
)
def convolution_rule(op: Op) -> tuple[KernelCall, ...]:
    """One forward kernel (dgrad if transposed) and, on a GPU, one addition if there is a bias."""
    image, weight = op.inputs[:2]
    out = op.outputs[0]
    if out.n_elems == 0:
        return ()
    if op.attrs.get("transposed", False):
        main = _call(op, _shape_of(op, out, weight, image), DGRAD, image)
    else:
        main = _call(op, _shape_of(op, image, weight, out), FORWARD, image)
    return (main, *pointwise_calls((out, op.inputs[2]), (out,), 1, op_kind=0)) if len(op.inputs) > 2 else (main,)


@kernel_rule(
    "aten.cudnn_convolution_transpose", "aten.conv_transpose1d", "aten.conv_transpose2d", "aten.conv_transpose3d"
)
def convolution_transpose_rule(op: Op) -> tuple[KernelCall, ...]:
    """As `convolution_rule` for operators that are transposed by name."""
    return convolution_rule(replace(op, attrs={**op.attrs, "transposed": True}))


@kernel_rule("aten.convolution_backward", "aten.mkldnn_convolution_backward")
def convolution_backward_rule(op: Op) -> tuple[KernelCall, ...]:
    """Up to three kernels by `output_mask`: input gradient, weight gradient, bias gradient."""
    grad, image, weight = op.inputs[:3]
    if grad.n_elems == 0:
        return ()
    mask: Sequence[bool] = op.attrs.get("output_mask") or (True, True, True)
    transposed = bool(op.attrs.get("transposed", False))
    shape = _shape_of(op, grad, weight, image) if transposed else _shape_of(op, image, weight, grad)
    calls: list[KernelCall] = []
    if mask[0]:
        calls.append(_call(op, shape, FORWARD if transposed else DGRAD, image))
    if mask[1]:
        calls.append(_call(op, shape, WGRAD, image))
    if len(mask) > 2 and mask[2]:
        calls.append(bias_grad_call(grad, grad.shape[1], inner=not _is_channels_last(grad)))
    return tuple(calls)
