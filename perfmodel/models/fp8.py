"""Linear layers whose products run in FP8, as those of NVIDIA's TransformerEngine with its hybrid format and delayed scaling.

An activation is cast once to E4M3, a gradient to E5M2, each with its transpose in the same kernel, since Hopper's FP8 products
take operands in one layout alone (TransformerEngine, transformer_engine/pytorch/module/linear.py and `cast_transpose`).
Products give 16-bit results. Weights stay 16-bit parameters here; their FP8 copies are made in the first micro-batch of a
step alone (`is_first_microbatch`) and cost nothing here, in time or in memory. Left out as well: the all-reduce of the
largest values, and that norms and activations write FP8 themselves where a layer is fused with its linear.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

ACTIVATION, GRADIENT = torch.float8_e4m3fn, torch.float8_e5m2  # the hybrid format


@torch.library.custom_op("perfmodel::cast_transpose", mutates_args=())
def cast_transpose(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """A matrix in FP8, and its transpose."""
    cast = x.to(dtype)
    return cast, cast.t().contiguous()


@torch.library.custom_op("perfmodel::fp8_product", mutates_args=())
def fp8_product(mat1: Tensor, mat2: Tensor, dtype: torch.dtype) -> Tensor:
    """The product of two matrices in FP8 (a weight stands for its copy), in `dtype`."""
    narrow = mat2 if mat2.dtype in (ACTIVATION, GRADIENT) else mat2.to(ACTIVATION)
    return (mat1.float() @ narrow.float()).to(dtype)


@cast_transpose.register_fake
def _(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x, dtype=dtype), x.new_empty(x.shape[1], x.shape[0], dtype=dtype)


@fp8_product.register_fake
def _(mat1: Tensor, mat2: Tensor, dtype: torch.dtype) -> Tensor:
    return mat1.new_empty(mat1.shape[0], mat2.shape[1], dtype=dtype)


class _Product(torch.autograd.Function):
    """x weight^T of a matrix and a weight (outputs, inputs)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        """(rows, inputs) to (rows, outputs). A frozen weight needs no transpose of the input."""
        if weight.requires_grad:
            cast, turned = cast_transpose(x, ACTIVATION)
            ctx.save_for_backward(weight, turned)
        else:
            cast = x.to(ACTIVATION)
            ctx.save_for_backward(weight)
        out: Tensor = fp8_product(cast, weight.t(), x.dtype)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """Gradients of the input and, unless it is frozen, of the weight."""
        weight, *turned = ctx.saved_tensors
        if turned:
            cast, across = cast_transpose(gradient, GRADIENT)
            of_weight = fp8_product(across, turned[0].t(), weight.dtype)
        else:
            cast, of_weight = gradient.to(GRADIENT), None
        of_input = fp8_product(cast, weight, gradient.dtype) if ctx.needs_input_grad[0] else None
        return of_input, of_weight


class Fp8Linear(nn.Linear):
    """A linear layer with FP8 products; a bias is added to their result."""

    def forward(self, x: Tensor) -> Tensor:
        """(..., inputs) to (..., outputs)."""
        rows: Tensor = _Product.apply(x.reshape(-1, x.shape[-1]), self.weight)  # type: ignore[no-untyped-call]  # torch's
        out = rows.view(*x.shape[:-1], -1)
        return out if self.bias is None else out + self.bias


class Fp8Biased(Fp8Linear):
    """One whose bias is left to the kernel after it."""

    def forward(self, x: Tensor) -> Tensor:
        """The product alone."""
        rows: Tensor = _Product.apply(x.reshape(-1, x.shape[-1]), self.weight)  # type: ignore[no-untyped-call]  # torch's
        return rows.view(*x.shape[:-1], -1)
