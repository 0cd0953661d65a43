"""An optimizer of 16-bit parameters through fp32 copies, as Megatron-LM's Float16OptimizerWithFloat16Params and apex's O2.

A step converts each gradient to fp32, checks all for overflow and takes the loss scale out, clips their common norm, updates
the copies and writes them back to the parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from perfmodel.extract import _torch

CLIP_NORM = 1.0  # Megatron-LM's --clip-grad; changes no time
_EPSILON = 1e-6


class MainParameters(torch.optim.Optimizer):
    """Steps `parameters` through an optimizer that `make` builds of their fp32 copies."""

    def __init__(
        self, parameters: Sequence[nn.Parameter], make: Callable[[Sequence[nn.Parameter]], torch.optim.Optimizer]
    ) -> None:
        super().__init__(parameters, {})
        self.mains = [nn.Parameter(p.detach().to(torch.float32)) for p in parameters]
        self.inner = make(self.mains)
        device = self.mains[0].device
        self.found = torch.zeros((), device=device)
        self.inverse = torch.ones((), device=device)
        for parameter, main in zip(parameters, self.mains, strict=True):
            self.state[parameter] = {"main": main, **self.inner.state[main]}

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override] # no closure: nothing here evaluates a loss twice
        """Updates every parameter that has a gradient."""
        parameters = [p for group in self.param_groups for p in group["params"]]
        gradients = [p.grad.to(torch.float32) for p in parameters]
        _torch.unscale(gradients, self.found, self.inverse)
        self._clip(gradients)
        for main, gradient in zip(self.mains, gradients, strict=True):
            main.grad = gradient
        self.inner.step()
        for main in self.mains:
            main.grad = None
        torch._foreach_copy_(parameters, [main.detach() for main in self.mains])

    def _clip(self, gradients: list[Tensor]) -> None:
        norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients)))
        factor = torch.clamp(CLIP_NORM / (norm + _EPSILON), max=1.0)
        torch._foreach_mul_(gradients, factor)
