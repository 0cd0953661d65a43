"""Optimizers of a BuiltModel: the arguments of each, and the real torch objects."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, Adam, AdamW, SparseAdam
from torch.optim.optimizer import Optimizer as TorchOptimizer

from perfmodel.config.training import Optimizer, SparseOptimizer
from perfmodel.errors import GraphError
from perfmodel.models.built import BuiltModel

# Changes no time; small enough that a few live steps stay finite.
LEARNING_RATE = 1e-3
ADAGRAD_EPSILON = 1e-8


class RowwiseAdagrad(TorchOptimizer):
    """Adagrad with one accumulator a row, for sparse gradients (Gupta et al. 2014; as in FBGEMM and DLRM)."""

    def __init__(self, parameters: Iterable[Tensor], lr: float = LEARNING_RATE, eps: float = ADAGRAD_EPSILON) -> None:
        super().__init__(parameters, {"lr": lr, "eps": eps})
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["sum"] = torch.zeros(parameter.shape[0], device=parameter.device)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # we never take a closure
        """Updates the rows that have a gradient."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group["lr"], group["eps"])

    def _update(self, parameter: Tensor, lr: float, eps: float) -> None:
        gradient = parameter.grad.coalesce()  # type: ignore[union-attr]  # the caller checked
        rows, values = gradient.indices()[0], gradient.values()
        sums = self.state[parameter]["sum"]
        sums.index_add_(0, rows, values.pow(2).mean(dim=1))
        spread = sums.index_select(0, rows).sqrt_().add_(eps)
        parameter.index_add_(0, rows, values / spread.unsqueeze(1), alpha=-lr)


def dense_arguments(optimizer: Optimizer) -> dict[str, Any]:
    """The fields `optimizer` and `optimizer_kwargs` of a BuiltModel."""
    kwargs: dict[str, Any] = {"lr": LEARNING_RATE}
    if optimizer.weight_decay:
        kwargs["weight_decay"] = optimizer.weight_decay
    if optimizer.momentum:
        kwargs["momentum"] = optimizer.momentum
    if optimizer.implementation in ("foreach", "fused"):
        kwargs[optimizer.implementation] = True
    if optimizer.implementation == "for_loop":
        kwargs["foreach"] = False
    if optimizer.main_parameters:
        kwargs["main_parameters"] = True
    return {"optimizer": optimizer.name, "optimizer_kwargs": kwargs}


def sparse_arguments(optimizer: SparseOptimizer) -> dict[str, Any]:
    """The fields `sparse_optimizer` and `sparse_optimizer_kwargs` of a BuiltModel."""
    return {"sparse_optimizer": optimizer.name, "sparse_optimizer_kwargs": {"fused": optimizer.fused}}


def sparse_parameters(module: nn.Module) -> dict[str, Tensor]:
    """Parameters whose gradient is sparse, by name."""
    return {
        f"{path}.weight" if path else "weight": part.weight
        for path, part in module.named_modules()
        if isinstance(part, nn.EmbeddingBag | nn.Embedding) and part.sparse
    }


def make_optimizers(built: BuiltModel) -> list[TorchOptimizer]:
    """The optimizers of a step: one for dense gradients, one for sparse ones, as far as there are such parameters."""
    sparse = sparse_parameters(built.module)
    hidden = {id(parameter) for parameter in sparse.values()}
    dense = [p for p in built.module.parameters() if id(p) not in hidden and p.requires_grad]
    made: list[TorchOptimizer] = []
    if built.optimizer_kwargs.get("main_parameters"):
        raise GraphError("optimizer.main_parameters: predicted only, not run; leave it out to train here")
    if dense:
        made.append(_DENSE[built.optimizer](dense, **built.optimizer_kwargs))
    if sparse and built.sparse_optimizer not in _SPARSE:
        raise GraphError(
            f"sparse_optimizer {built.sparse_optimizer}: predicted only, not run; use {', '.join(_SPARSE)} here"
        )
    if sparse:
        made.append(_SPARSE[built.sparse_optimizer](list(sparse.values()), lr=LEARNING_RATE))
    return made


_DENSE: dict[str, Any] = {"sgd": SGD, "adagrad": Adagrad, "adam": Adam, "adamw": AdamW}
_SPARSE: dict[str, Any] = {"sgd": SGD, "adagrad": Adagrad, "rowwise_adagrad": RowwiseAdagrad, "adam": SparseAdam}
