"""Pooling and resampling over images: windows are read through the caches, so each input counts once."""

from __future__ import annotations

import math
from typing import Any

from perfmodel.graph import Op
from perfmodel.kernels.copy import moved, total_bytes
from perfmodel.kernels.registry import KernelCall, kernel_rule

Calls = tuple[KernelCall, ...]


def _window_elems(op: Op) -> int:
    """Elements of one pooling window."""
    size: Any = op.attrs.get("kernel_size", 1)
    return int(size) if isinstance(size, int) else math.prod(int(part) for part in size)


@kernel_rule("aten.max_pool2d_with_indices", "aten.max_pool3d_with_indices", "aten.max_pool2d", "aten.avg_pool2d",
             "aten.avg_pool3d", "aten.avg_pool1d", "aten.adaptive_max_pool2d")  # fmt: skip
def pool(op: Op) -> Calls:
    """One operation an element of each window; maxima also write an index."""
    return moved("pool", total_bytes(op.inputs), op.outputs, flops=op.outputs[0].n_elems * _window_elems(op))


@kernel_rule("aten.max_pool2d_with_indices_backward", "aten.max_pool3d_with_indices_backward",
             "aten.avg_pool2d_backward", "aten.avg_pool3d_backward", "aten.adaptive_max_pool2d_backward",
             "aten._adaptive_avg_pool2d_backward")  # fmt: skip
def pool_backward(op: Op) -> Calls:
    """Reads the gradient (and indices; the input is passed for its shape only), writes the input's gradient."""
    read = [spec for spec, name in zip(op.inputs, op.input_names, strict=True) if name not in {"self", "input"}]
    gradient = op.outputs[0]
    n_elems = read[0].n_elems if read else gradient.n_elems
    return moved("pool", total_bytes(read), gradient, flops=n_elems * _window_elems(op))


@kernel_rule("aten._adaptive_avg_pool2d", "aten.adaptive_avg_pool2d", "aten._adaptive_avg_pool3d")
def adaptive_average(op: Op) -> Calls:
    """Every input element is added once."""
    return moved("pool", total_bytes(op.inputs), op.outputs, flops=op.inputs[0].n_elems)


# FLOPs an output element by interpolation: weights times neighbours.
_NEIGHBOURS = {"nearest": 0, "_nearest_exact": 0, "linear": 3, "bilinear": 7, "trilinear": 15, "bicubic": 31}


def _upsample_flops(op: Op) -> int:
    kind = op.name.removeprefix("aten.").removeprefix("upsample_").removeprefix("_upsample_")
    return max((flops for name, flops in _NEIGHBOURS.items() if kind.startswith(name)), default=0)


@kernel_rule(*(f"aten.upsample_{kind}{suffix}" for suffix in ("", "_backward")
               for kind in ("nearest1d", "nearest2d", "nearest3d", "linear1d", "bilinear2d", "trilinear3d", "bicubic2d")),
             "aten._upsample_nearest_exact2d", "aten._upsample_nearest_exact2d_backward",
             "aten.grid_sampler_2d", "aten.grid_sampler_2d_backward")  # fmt: skip
def resample(op: Op) -> Calls:
    """Reads the input, writes the output; the weights of neighbours cost a few FLOPs an element of the larger side."""
    larger = max(op.inputs[0].n_elems, op.outputs[0].n_elems)
    return moved("pool", total_bytes(op.inputs), op.outputs, flops=_upsample_flops(op) * larger)
