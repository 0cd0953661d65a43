"""Normalisations and their gradients: layer, RMS, group and batch norm as PyTorch's CUDA kernels run them.

Features of the family `norm`:

- `rows`: groups that are normalised independently; `cols`: elements of each.
- `kind`: LAYER, RMS, GROUP, BATCH or SERVING_RMS (vLLM's kernel). `stage`: FORWARD, GRAD_INPUT or GRAD_WEIGHT, kernels of
  their own (batch norm's backward is one kernel, GRAD_INPUT). `itemsize_bytes`: bytes of an input element.

Work counts what the kernel moves: a kernel that goes over its input twice because a group does not fit on chip (batch norm:
statistics, then the normalised values) reads it twice. FLOPs an element are those of the formulas; a square root or
division per row is left out.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from perfmodel.estimate import Work
from perfmodel.graph import Op, TensorSpec
from perfmodel.kernels.copy import total_bytes, touched_bytes
from perfmodel.kernels.elementwise import PIPE, pointwise_calls
from perfmodel.kernels.registry import KernelCall, kernel_rule

Calls = tuple[KernelCall, ...]

FAMILY = "norm"
LAYER, RMS, GROUP, BATCH, SERVING_RMS = 0, 1, 2, 3, 4
FORWARD, GRAD_INPUT, GRAD_WEIGHT = 0, 1, 2

# Mean 1, squared difference and its sum 3, normalise 2, scale and shift 2.
LAYER_FORWARD_FLOPS = 8
RMS_FORWARD_FLOPS = 4  # square and sum 2, normalise 1, scale 1
LAYER_GRAD_INPUT_FLOPS = 11  # gradient times weight 1, x hat 2, two sums 3, combination 5
RMS_GRAD_INPUT_FLOPS = 8  # gradient times weight 1, x hat 1, one sum 2, combination 4
LAYER_GRAD_WEIGHT_FLOPS = 5  # x hat 2, product and sum 2, sum of gradients 1
RMS_GRAD_WEIGHT_FLOPS = 3
MOMENT_FLOPS = 4  # mean 1, squared difference and sum 3
AFFINE_FLOPS = 2  # one multiply, one add, with constants of the channel


def norm_call(
    shape: tuple[int, int], work: Work, source: TensorSpec, kind: int, stage: int, *, flat: bool = True
) -> KernelCall:
    """One kernel of a normalisation over `shape` = (rows, cols); `flat` if a row lies together in memory."""
    features = {
        "rows": float(shape[0]),
        "cols": float(shape[1]),
        "kind": float(kind),
        "stage": float(stage),
        "flat": float(flat),
        "itemsize_bytes": float(source.itemsize_bytes),
    }
    return KernelCall(family=FAMILY, work=work, dtype=source.dtype, pipe=PIPE, features=features)


def _rows_cols(source: TensorSpec, normalized: object) -> tuple[int, int]:
    """Rows and columns from the op's `normalized_shape` (the last dimensions)."""
    dims = [int(size) for size in normalized] if isinstance(normalized, Sequence) else list(source.shape[-1:])
    cols = math.prod(dims)
    return source.n_elems // max(cols, 1), cols


def _forward(op: Op, kind: int, flops: int) -> Calls:
    source = op.arg("input") or op.inputs[0]
    if source.n_elems == 0:
        return ()
    shape = _rows_cols(source, op.attrs.get("normalized_shape"))
    work = Work(flops=flops * source.n_elems, read_bytes=total_bytes(op.inputs), write_bytes=total_bytes(op.outputs))
    return (norm_call(shape, work, source, kind, FORWARD),)


@kernel_rule("aten.native_layer_norm", "aten.layer_norm")
def layer_norm(op: Op) -> Calls:
    """Reads input, weight and bias once; writes the output and each row's mean and inverse deviation."""
    return _forward(op, LAYER, LAYER_FORWARD_FLOPS)


@kernel_rule("aten._fused_rms_norm", "aten.rms_norm")
def rms_norm(op: Op) -> Calls:
    """Reads input and weight once; writes the output and each row's inverse root mean square."""
    return _forward(op, RMS, RMS_FORWARD_FLOPS)


@kernel_rule("vllm.rms_norm")
def serving_rms_norm(op: Op) -> Calls:
    """RMS norm of the serving engine vLLM, which saves no statistics."""
    return _forward(op, SERVING_RMS, RMS_FORWARD_FLOPS)


def _backward(op: Op, kind: int, flops: tuple[int, int]) -> Calls:
    """The gradient of the input row by row, then that of weight (and bias) by columns: each reads gradient and input."""
    gradient = op.arg("grad_out") or op.inputs[0]
    source = op.arg("input") or op.inputs[1]
    if source.n_elems == 0:
        return ()
    shape = _rows_cols(source, op.attrs.get("normalized_shape"))
    small = total_bytes([spec for spec in op.inputs if spec not in (gradient, source)])
    both = touched_bytes(gradient) + touched_bytes(source) + small
    weights = [spec for spec in op.outputs if spec.n_elems == shape[1] and spec.n_elems < source.n_elems]
    wanted = _mask(op, 1 + len(weights))
    calls = []
    if wanted[0]:
        work = Work(flops=flops[0] * source.n_elems, read_bytes=both, write_bytes=source.bytes)
        calls.append(norm_call(shape, work, source, kind, GRAD_INPUT))
    if any(wanted[1:]):
        work = Work(flops=flops[1] * source.n_elems, read_bytes=both, write_bytes=total_bytes(weights))
        calls.append(norm_call(shape, work, source, kind, GRAD_WEIGHT))
    return tuple(calls)


def _mask(op: Op, n_outputs: int) -> list[bool]:
    mask = op.attrs.get("output_mask")
    return [bool(flag) for flag in mask] if isinstance(mask, Sequence) else [True] * n_outputs


@kernel_rule("aten.native_layer_norm_backward")
def layer_norm_backward(op: Op) -> Calls:
    """Two kernels (ATen/native/cuda/layer_norm_kernel.cu): input's gradient, then gamma's and beta's."""
    return _backward(op, LAYER, (LAYER_GRAD_INPUT_FLOPS, LAYER_GRAD_WEIGHT_FLOPS))


@kernel_rule("aten._fused_rms_norm_backward")
def rms_norm_backward(op: Op) -> Calls:
    """Two kernels, as layer norm without mean and bias."""
    return _backward(op, RMS, (RMS_GRAD_INPUT_FLOPS, RMS_GRAD_WEIGHT_FLOPS))


@kernel_rule("aten.native_group_norm", "aten.group_norm")
def group_norm(op: Op) -> Calls:
    """Moments of each group, per-channel constants, and a pointwise kernel (ATen/native/cuda/group_norm_kernel.cu)."""
    source = op.arg("input") or op.inputs[0]
    if source.n_elems == 0:
        return ()
    shape = _groups(op, source)
    moments = Work(flops=MOMENT_FLOPS * source.n_elems, read_bytes=touched_bytes(source))
    constants = 2 * _images(source) * source.itemsize_bytes
    per_channel = Work(read_bytes=constants, write_bytes=constants)
    return (
        norm_call(shape, moments, source, GROUP, FORWARD),
        norm_call((shape[0], 1), per_channel, source, GROUP, FORWARD),
        *pointwise_calls((source,), op.outputs[:1], AFFINE_FLOPS, op_kind=0),
    )


def _images(source: TensorSpec) -> int:
    """Channels of all samples: N * C."""
    return math.prod(source.shape[:2])


def _groups(op: Op, source: TensorSpec) -> tuple[int, int]:
    groups = int(op.attrs.get("group") or op.attrs.get("num_groups") or 1)
    rows = source.shape[0] * groups
    return rows, source.n_elems // max(rows, 1)


@kernel_rule("aten.native_group_norm_backward")
def group_norm_backward(op: Op) -> Calls:
    """Sums of gradient and gradient times input per channel, the input's gradient pointwise, and small sums for weights."""
    gradient, source = op.inputs[0], op.arg("input") or op.inputs[1]
    if source.n_elems == 0:
        return ()
    shape = _groups(op, source)
    sums = Work(flops=3 * source.n_elems, read_bytes=touched_bytes(gradient) + touched_bytes(source))
    weights = Work(read_bytes=4 * _images(source) * source.itemsize_bytes, write_bytes=total_bytes(op.outputs[1:]))
    return (
        norm_call(shape, sums, source, GROUP, GRAD_INPUT),
        *pointwise_calls((gradient, source), op.outputs[:1], 4, op_kind=0),
        norm_call(shape, weights, source, GROUP, GRAD_WEIGHT),
    )


def _channels(source: TensorSpec) -> tuple[tuple[int, int], bool]:
    """(channels, elements of each) of a batch norm, and whether a channel's elements lie together (not channels last)."""
    channels = source.shape[1] if len(source.shape) > 1 else 1
    flat = len(source.shape) > 2 and source.strides[1] != 1
    return (channels, source.n_elems // max(channels, 1)), flat


def _is_training(op: Op) -> bool:
    flag = op.attrs.get("training", op.attrs.get("train", op.attrs.get("update", True)))
    return bool(flag) and "no_training" not in op.name and "no_update" not in op.name


@kernel_rule("aten.native_batch_norm", "aten._native_batch_norm_legit", "aten._native_batch_norm_legit_no_training",
             "aten._native_batch_norm_legit_functional", "aten._batch_norm_with_update",
             "aten._batch_norm_with_update_functional", "aten._batch_norm_no_update", "aten.cudnn_batch_norm",
             "aten.batch_norm")  # fmt: skip
def batch_norm(op: Op) -> Calls:
    """In training one kernel of cuDNN that reads the input for the statistics and again to normalise; else pointwise.

    PyTorch's own kernels (`aten.native_batch_norm`) are two: statistics, then pointwise.
    """
    source = op.arg("input") or op.inputs[0]
    if source.n_elems == 0:
        return ()
    pointwise = pointwise_calls((source,), op.outputs[:1], AFFINE_FLOPS, op_kind=0)
    if not _is_training(op):
        return pointwise
    shape, flat = _channels(source)
    small = total_bytes(op.outputs[1:])
    if "native_batch_norm" in op.name:
        moments = Work(flops=MOMENT_FLOPS * source.n_elems, read_bytes=touched_bytes(source), write_bytes=small)
        return (norm_call(shape, moments, source, BATCH, FORWARD, flat=flat), *pointwise)
    work = Work(
        flops=(MOMENT_FLOPS + AFFINE_FLOPS) * source.n_elems,
        read_bytes=2 * touched_bytes(source) + total_bytes(op.inputs[1:]),
        write_bytes=total_bytes(op.outputs[:1]) + small,
    )
    return (norm_call(shape, work, source, BATCH, FORWARD, flat=flat),)


@kernel_rule("aten.native_batch_norm_backward", "aten.cudnn_batch_norm_backward", "aten.batch_norm_backward")
def batch_norm_backward(op: Op) -> Calls:
    """Gradient and input are read for two sums per channel and again for the input's gradient.

    One kernel of cuDNN, two of PyTorch's own (`aten.native_batch_norm_backward`).
    """
    gradient = op.arg("grad_output") or op.arg("grad_out") or op.inputs[0]
    source = op.arg("input") or op.inputs[1]
    if source.n_elems == 0:
        return ()
    shape, flat = _channels(source)
    both = touched_bytes(gradient) + touched_bytes(source)
    small = total_bytes(op.outputs[1:])
    if "native" in op.name:
        sums = Work(flops=5 * source.n_elems, read_bytes=both, write_bytes=small)
        placed = pointwise_calls((gradient, source), op.outputs[:1], 6, op_kind=0)
        return (norm_call(shape, sums, source, BATCH, GRAD_INPUT, flat=flat), *placed)
    work = Work(flops=11 * source.n_elems, read_bytes=2 * both, write_bytes=total_bytes(op.outputs[:1]) + small)
    return (norm_call(shape, work, source, BATCH, GRAD_INPUT, flat=flat),)
