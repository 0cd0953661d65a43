"""Which products may run on TF32 tensor cores: a mark on ops, since the operator calls are the same."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from perfmodel.graph import Op

_PRODUCTS = frozenset(
    f"aten.{name}" for name in ("mm", "bmm", "addmm", "addmm_", "baddbmm", "baddbmm_", "mv", "addmv", "_cudnn_rnn")
)
# NVIDIA's DLRM: an MLP in one call, and an interaction with a kernel for TF32 (dot_based_interact_ampere).
_PRODUCTS |= {f"perfmodel.{name}{way}" for name in ("mlp", "dot_interaction") for way in ("", "_backward")}
_CONVOLUTIONS = frozenset(f"aten.{name}" for name in ("convolution", "convolution_backward", "cudnn_convolution"))


def tf32(ops: Iterable[Op], precision: str) -> Iterator[Op]:
    """Marks fp32 products and convolutions with `allow_tf32` where torch lets CUDA use TF32.

    Convolutions always (`torch.backends.cudnn.allow_tf32` is True by default), matrix products in precision `tf32` only
    (`torch.backends.cuda.matmul.allow_tf32` is False by default). Devices without TF32 ignore the mark. Fused attention
    in fp32 follows matrix products.
    """
    for op in ops:
        product = op.name in _PRODUCTS or "scaled_dot_product" in op.name
        allowed = op.name in _CONVOLUTIONS or (product and precision == "tf32")
        if allowed and op.inputs and op.inputs[0].dtype == "float32":
            yield replace(op, attrs={**op.attrs, "allow_tf32": True})
        else:
            yield op
