"""One op for what this machine can only compute in several: a kernel of the target that has no local counterpart."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from perfmodel.extract.rewrites.routing import active


def fused(
    name: str,
    compute: Callable[..., Tensor],
    tensors: Sequence[Tensor],
    names: Sequence[str],
    attrs: Mapping[str, Any],
) -> Tensor:
    """Runs `compute(*tensors)` unseen and records it as one op `name`; its gradient as one op `<name>_backward`.

    The backward op reads the output's gradient, the inputs and the output; autograd keeps inputs and output until then.
    """
    result: Tensor = _Fused.apply(name, compute, tuple(names), dict(attrs), *tensors)  # type: ignore[no-untyped-call] # torch leaves apply untyped
    return result


class _Fused(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, name: str, compute: Any, names: Any, attrs: Any, *tensors: Tensor) -> Tensor:
        recorder = active().recorder
        with recorder.paused():
            out: Tensor = compute(*tensors)
        ctx.save_for_backward(*tensors, out)
        ctx.call = (name, compute, names, attrs)
        recorder.emit(name, inputs=tensors, names=names, outputs=(out,), attrs=attrs)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        name, compute, names, attrs = ctx.call
        *tensors, out = ctx.saved_tensors
        recorder = active().recorder
        wanted = ctx.needs_input_grad[4:]
        with recorder.paused(), torch.enable_grad():
            leaves = [t.detach().requires_grad_(need) for t, need in zip(tensors, wanted, strict=True)]
            again = compute(*leaves)
        with recorder.paused():
            asked = [leaf for leaf, need in zip(leaves, wanted, strict=True) if need]
            found = iter(torch.autograd.grad(again, asked, gradients[0]))
        results = tuple(next(found) if need else None for need in wanted)
        recorder.emit(
            f"{name}_backward",
            inputs=(gradients[0], *tensors, out),
            names=("grad_out", *names, "out"),
            outputs=tuple(result for result in results if result is not None),
            attrs=attrs,
        )
        return (None, None, None, None, *results)
