"""Fused kernels of Megatron-LM's transformer layer, by the names in which they are recorded.

`megatron/model/fused_bias_gelu.py`, `fused_softmax.py` (scaled_upper_triang_masked_softmax) and the jitted bias_dropout_add of
`transformer.py`. Each is one kernel forward and one backward; gradients of biases are sums over tokens, as autograd adds them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as fn


@torch.library.custom_op("perfmodel::bias_gelu", mutates_args=())
def bias_gelu(x: Tensor, bias: Tensor) -> Tensor:
    """GELU (tanh form) of x + bias."""
    return fn.gelu(x + bias, approximate="tanh")


@torch.library.custom_op("perfmodel::bias_gelu_backward", mutates_args=())
def bias_gelu_backward(gradient: Tensor, x: Tensor, bias: Tensor) -> Tensor:
    """Gradient of x (and, summed over tokens, of bias)."""
    found: Tensor = torch.ops.aten.gelu_backward(gradient, x + bias, approximate="tanh")
    return found


@torch.library.custom_op("perfmodel::bias_dropout_add", mutates_args=())
def bias_dropout_add(x: Tensor, bias: Tensor, residual: Tensor, p: float) -> tuple[Tensor, Tensor]:
    """The residual plus dropout(x + bias), and the mask of what was kept."""
    mask = torch.rand_like(x, dtype=torch.float32) >= p
    return residual + (x + bias) * mask / (1 - p), mask


@torch.library.custom_op("perfmodel::bias_dropout_backward", mutates_args=())
def bias_dropout_backward(gradient: Tensor, mask: Tensor, p: float) -> Tensor:
    """Gradient of x (and, summed over tokens, of bias)."""
    return gradient * mask / (1 - p)


@torch.library.custom_op("perfmodel::causal_softmax", mutates_args=())
def causal_softmax(scores: Tensor, scale: float) -> Tensor:
    """Softmax over the last dimension of scaled scores (matrices, tokens, tokens), later tokens hidden."""
    n = scores.shape[-1]
    hidden = torch.ones(n, n, dtype=torch.bool, device=scores.device).triu(1)
    return torch.softmax((scores * scale).masked_fill(hidden, float("-inf")), dim=-1)


@torch.library.custom_op("perfmodel::causal_softmax_backward", mutates_args=())
def causal_softmax_backward(gradient: Tensor, chances: Tensor, scale: float) -> Tensor:
    """Gradient of the scores."""
    inner = (gradient * chances).sum(-1, keepdim=True)
    return scale * chances * (gradient - inner)


@torch.library.custom_op("perfmodel::swiglu", mutates_args=())
def swiglu(x: Tensor) -> Tensor:
    """silu(gate) * up of gate and up side by side: (..., 2 f) to (..., f)."""
    gate, up = x.chunk(2, dim=-1)
    return fn.silu(gate) * up


@torch.library.custom_op("perfmodel::swiglu_backward", mutates_args=())
def swiglu_backward(gradient: Tensor, x: Tensor) -> Tensor:
    """Gradient of gate and up side by side."""
    gate, up = x.chunk(2, dim=-1)
    chance = torch.sigmoid(gate)
    slope = chance * (1 + gate * (1 - chance))
    return torch.cat((gradient * up * slope, gradient * gate * chance), dim=-1)


@torch.library.custom_op("perfmodel::rotary", mutates_args=())
def rotary(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Rotary positions of (tokens, batch, heads, width); cosine and sine (tokens, 1, 1, width)."""
    first, second = x.chunk(2, dim=-1)
    return x * cosine + torch.cat((-second, first), dim=-1) * sine


@torch.library.custom_op("perfmodel::synchronize", mutates_args=())
def synchronize(x: Tensor) -> None:
    """The host waits for the device, as `torch.cuda.synchronize` makes it; recorded under the name of that wait."""
    if x.is_cuda:
        torch.cuda.synchronize(x.device)


@synchronize.register_fake
def _(x: Tensor) -> None:
    return None


class Apart(torch.autograd.Function):
    """The tensor itself; forward and backward, what comes after it is issued when what came before it is done."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """Waits, then goes on with a view."""
        synchronize(x)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        """Waits before what the tensor was computed from."""
        synchronize(gradient)
        return gradient


@bias_gelu.register_fake
def _(x: Tensor, bias: Tensor) -> Tensor:
    return torch.empty_like(x)


@bias_gelu_backward.register_fake
def _(gradient: Tensor, x: Tensor, bias: Tensor) -> Tensor:
    return torch.empty_like(x)


@bias_dropout_add.register_fake
def _(x: Tensor, bias: Tensor, residual: Tensor, p: float) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), torch.empty_like(x, dtype=torch.bool)


@bias_dropout_backward.register_fake
def _(gradient: Tensor, mask: Tensor, p: float) -> Tensor:
    return torch.empty_like(gradient)


@causal_softmax.register_fake
def _(scores: Tensor, scale: float) -> Tensor:
    return torch.empty_like(scores)


@causal_softmax_backward.register_fake
def _(gradient: Tensor, chances: Tensor, scale: float) -> Tensor:
    return torch.empty_like(chances)


@swiglu.register_fake
def _(x: Tensor) -> Tensor:
    return x.new_empty(*x.shape[:-1], x.shape[-1] // 2)


@swiglu_backward.register_fake
def _(gradient: Tensor, x: Tensor) -> Tensor:
    return torch.empty_like(x)


@rotary.register_fake
def _(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _tokens_summed(gradient: Tensor) -> Tensor:
    return gradient.sum(tuple(range(gradient.dim() - 1)))


def _keep_all(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.save_for_backward(*inputs)


def _keep_mask(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.p = inputs[3]
    ctx.save_for_backward(output[1])


def _keep_output(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.scale = inputs[1]
    ctx.save_for_backward(output)


def _bias_gelu_backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
    found = bias_gelu_backward(gradient, *ctx.saved_tensors)
    return found, _tokens_summed(found)


def _bias_dropout_add_backward(ctx: Any, gradient: Tensor, _: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
    (mask,) = ctx.saved_tensors
    found = bias_dropout_backward(gradient, mask, ctx.p)
    return found, _tokens_summed(found), gradient, None


def _causal_softmax_backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
    (chances,) = ctx.saved_tensors
    return causal_softmax_backward(gradient, chances, ctx.scale), None


def _keep_angles(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.save_for_backward(*inputs[1:])


def _swiglu_backward(ctx: Any, gradient: Tensor) -> Tensor:
    found: Tensor = swiglu_backward(gradient, *ctx.saved_tensors)
    return found


def _rotary_backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
    cosine, sine = ctx.saved_tensors  # the sine's halves are equal, so turning back is turning by the negative angle
    return rotary(gradient, cosine, -sine), None, None


bias_gelu.register_autograd(_bias_gelu_backward, setup_context=_keep_all)
bias_dropout_add.register_autograd(_bias_dropout_add_backward, setup_context=_keep_mask)
swiglu.register_autograd(_swiglu_backward, setup_context=_keep_all)
rotary.register_autograd(_rotary_backward, setup_context=_keep_angles)
causal_softmax.register_autograd(_causal_softmax_backward, setup_context=_keep_output)


class VocabularyCrossEntropy(torch.autograd.Function):
    """Cross-entropy of each token in the steps of `megatron/mpu/cross_entropy.py`.

    Ranks with a part of the vocabulary reduce the largest logit, the target's logit and the sum of exponentials.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor) -> Tensor:
        """(tokens, vocabulary) fp32 logits and (tokens) targets to (tokens)."""
        logits = logits - logits.amax(-1, keepdim=True)
        wanted = logits.gather(1, targets.unsqueeze(1)).squeeze(1)
        exponentials = logits.exp()
        sums = exponentials.sum(-1)
        loss = sums.log() - wanted
        exponentials.div_(sums.unsqueeze(-1))
        ctx.save_for_backward(exponentials, targets)
        return loss

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        """The chances, less one at the target, times the gradient; in the memory of the chances."""
        chances, targets = ctx.saved_tensors
        minus_one = torch.full((targets.shape[0], 1), -1.0, dtype=chances.dtype, device=chances.device)
        chances.scatter_add_(1, targets.unsqueeze(1), minus_one)
        chances.mul_(gradient.unsqueeze(-1))
        return chances, None
