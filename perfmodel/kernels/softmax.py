"""Softmax and log softmax, forward and backward.

Features of the family `softmax`:

- `rows`: vectors that are normalised; `cols`: elements of each.
- `inner`: 1 if a vector lies together in memory (last dimension), else 0 (PyTorch's spatial kernel).
- `backward`, `log`: 1 or 0. `itemsize_bytes`: bytes of an input element.

PyTorch keeps a row of up to 1024 elements in the registers of one warp (ATen/native/cuda/PersistentSoftmax.cuh) and gives
longer rows to a block, which reads them again from cache for each step (maximum, sum, result).
"""

from __future__ import annotations

from perfmodel.estimate import Work
from perfmodel.graph import Op, TensorSpec
from perfmodel.kernels.copy import total_bytes
from perfmodel.kernels.elementwise import PIPE, pointwise_calls
from perfmodel.kernels.registry import KernelCall, kernel_rule

Calls = tuple[KernelCall, ...]

FAMILY = "softmax"
FORWARD_FLOPS = 5  # maximum 1, difference 1, exponential 1, sum 1, division (or difference with the log of the sum) 1
BACKWARD_FLOPS = (
    4  # softmax: product and sum 2, difference and product 2; log: sum 1, exponential 1, product, difference
)


def softmax_call(source: TensorSpec, dim: int, work: Work, *, backward: bool, log: bool) -> KernelCall:
    """The kernel of one softmax of `source` along `dim`."""
    n_dims = max(len(source.shape), 1)
    dim %= n_dims
    cols = source.shape[dim] if source.shape else 1
    features = {
        "rows": float(source.n_elems // max(cols, 1)),
        "cols": float(cols),
        "inner": float(dim == n_dims - 1),
        "backward": float(backward),
        "log": float(log),
        "itemsize_bytes": float(source.itemsize_bytes),
    }
    return KernelCall(family=FAMILY, work=work, dtype=source.dtype, pipe=PIPE, features=features)


def _dim(op: Op) -> int:
    value = op.attrs.get("dim", -1)
    return -1 if value is None else int(value)


@kernel_rule("aten._softmax", "aten._log_softmax", "aten._safe_softmax", "aten.softmax", "aten.log_softmax",
             "aten.special_softmax", "aten.special_log_softmax", "aten._masked_softmax")  # fmt: skip
def softmax(op: Op) -> Calls:
    """Reads the input (and a mask) once and writes the output once."""
    source = op.inputs[0]
    if source.n_elems == 0:
        return ()
    work = Work(
        flops=FORWARD_FLOPS * source.n_elems, read_bytes=total_bytes(op.inputs), write_bytes=total_bytes(op.outputs)
    )
    return (softmax_call(source, _dim(op), work, backward=False, log="log_softmax" in op.name),)


@kernel_rule("aten._softmax_backward_data", "aten._masked_softmax_backward")
def softmax_backward(op: Op) -> Calls:
    """A pointwise product of gradient and output, then the kernel that reads product and output (`softmax_backward_cuda`)."""
    gradient, output = op.inputs[0], op.inputs[1]
    product = pointwise_calls((gradient, output), (gradient,), 1, op_kind=0)
    return (*product, *_gradient(op, BACKWARD_FLOPS - 1)) if gradient.n_elems else ()


@kernel_rule("aten._log_softmax_backward_data")
def log_softmax_backward(op: Op) -> Calls:
    """Reads gradient and output once and writes the input's gradient once."""
    return _gradient(op, BACKWARD_FLOPS)


def _gradient(op: Op, flops: int) -> Calls:
    source = op.inputs[0]
    if source.n_elems == 0:
        return ()
    work = Work(flops=flops * source.n_elems, read_bytes=total_bytes(op.inputs), write_bytes=total_bytes(op.outputs))
    return (softmax_call(source, _dim(op), work, backward=True, log="log_softmax" in op.name),)
