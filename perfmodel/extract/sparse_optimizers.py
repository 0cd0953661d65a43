"""Optimizers of embedding tables with sparse gradients: loops over parameters that touch only the rows looked up."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from perfmodel.extract import _torch
from perfmodel.extract.optimizers import Maker, chosen

# Learning rates change no time.
_LEARNING_RATE = 0.01
_EPSILON = 1e-8


class _SparseLoop(torch.optim.Optimizer):
    """Coalesces each gradient and updates the rows it names; `state` maps state names to their shape from a parameter."""

    state_shapes: ClassVar[Mapping[str, Callable[[Tensor], tuple[int, ...]]]] = {}

    def __init__(self, parameters: Sequence[nn.Parameter], lr: float = _LEARNING_RATE) -> None:
        super().__init__(parameters, {"lr": lr})
        for parameter in parameters:
            for name, shape in self.state_shapes.items():
                zeros = torch.zeros(shape(parameter), device=parameter.device)
                self.state[parameter][name] = zeros

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override] # no closure: nothing here evaluates a loss twice
        """Updates every parameter that has a gradient."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, parameter.grad.coalesce(), group["lr"])

    def _update(self, parameter: Tensor, gradient: Tensor, rate: float) -> None:
        raise NotImplementedError


class SparseAdam(_SparseLoop):
    """The operators of torch/optim/_functional.py, `sparse_adam`, in their order.

    torch's own function makes sparse tensors through a legacy constructor that refuses tensors without storage.
    """

    state_shapes: ClassVar[Mapping[str, Callable[[Tensor], tuple[int, ...]]]] = {
        "exp_avg": lambda p: tuple(p.shape),
        "exp_avg_sq": lambda p: tuple(p.shape),
    }
    betas = (0.9, 0.999)

    def _update(self, parameter: Tensor, gradient: Tensor, rate: float) -> None:
        indices, values = gradient._indices(), gradient._values()
        average, square = self.state[parameter]["exp_avg"], self.state[parameter]["exp_avg_sq"]
        old = average.sparse_mask(gradient)._values()
        update = values.sub(old).mul_(1 - self.betas[0])
        average.add_(_rows(indices, update, gradient))
        old_square = square.sparse_mask(gradient)._values()
        square_update = values.pow(2).sub_(old_square).mul_(1 - self.betas[1])
        square.add_(_rows(indices, square_update, gradient))
        numerator = update.add_(old)
        square_update.add_(old_square)
        denominator = square_update.sqrt_().add_(_EPSILON)
        parameter.add_(_rows(indices, -rate * numerator.div_(denominator), gradient))


class FusedLamb(SparseAdam):
    """LAMB as FBGEMM has it, in a backward kernel: two moments an element, as Adam; the loop stands in until it is fused."""


class RowwiseAdagrad(_SparseLoop):
    """Adagrad with one accumulator a row: the mean square of the row's gradient (Gupta et al. 2014).

    The operators are those of `perfmodel.models.training.RowwiseAdagrad`, which live runs use.
    """

    state_shapes: ClassVar[Mapping[str, Callable[[Tensor], tuple[int, ...]]]] = {"sum": lambda p: (p.shape[0],)}

    def _update(self, parameter: Tensor, gradient: Tensor, rate: float) -> None:
        rows, values = gradient.indices()[0], gradient.values()
        sums = self.state[parameter]["sum"]
        sums.index_add_(0, rows, values.pow(2).mean(dim=1))
        spread = sums.index_select(0, rows).sqrt_().add_(_EPSILON)
        parameter.index_add_(0, rows, values / spread.unsqueeze(1), alpha=-rate)


def _rows(indices: Tensor, values: Tensor, like: Tensor) -> Tensor:
    return _torch.sparse_tensor(indices, values, like, coalesced=False)


_SPARSE: Mapping[str, Maker] = {
    "sgd": torch.optim.SGD,
    "adagrad": torch.optim.Adagrad,
    "adam": SparseAdam,
    "rowwise_adagrad": RowwiseAdagrad,
    "lamb": FusedLamb,
}


def sparse_optimizer(
    name: str, parameters: Sequence[nn.Parameter], options: Mapping[str, Any]
) -> torch.optim.Optimizer:
    """The sparse optimizer with its state in place; `fused` among the options is a rewrite's business."""
    kept = {key: value for key, value in options.items() if key != "fused"}
    return chosen(name, _SPARSE, "sparse_optimizer")(list(parameters), lr=_LEARNING_RATE, **kept)
