"""The optimizers of a step, as torch.optim runs them on the target device."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from perfmodel.errors import GraphError, suggest
from perfmodel.extract.main_parameters import MainParameters

# Learning rates change no time; torch's SGD and Adagrad share this one as a default.
_LEARNING_RATE = 0.01
Maker = Callable[..., torch.optim.Optimizer]
_DENSE: Mapping[str, Maker] = {
    "sgd": torch.optim.SGD,
    "adagrad": torch.optim.Adagrad,
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
}


def dense_optimizer(
    name: str, parameters: Sequence[nn.Parameter], options: Mapping[str, Any], target: Literal["cuda", "cpu"]
) -> torch.optim.Optimizer:
    """The dense optimizer with its state in place, in the implementation that torch picks on the target.

    torch takes the foreach implementation on CUDA and a loop over parameters on the CPU unless told otherwise
    (torch/optim/optimizer.py, `_default_to_fused_or_foreach`).
    """
    made = chosen(name, _DENSE, "optimizer")
    options = {"lr": _LEARNING_RATE, **options}
    through_mains = options.pop("main_parameters", False)
    if target == "cuda" and not options.get("fused") and options.get("foreach") is None:
        options["foreach"] = True

    def make(of: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
        return _with_state(made([{"params": list(of)}], **options))

    return MainParameters(parameters, make) if through_mains else make(parameters)


def state_tensors(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Tensors that live from step to step (moments, sums, step counters)."""
    return [value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor)]


def host_counters(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Step counters that torch keeps in host memory: all but those of fused and capturable optimizers."""
    group = optimizer.param_groups[0]
    if group.get("fused") or group.get("capturable"):
        return []
    return [state["step"] for state in optimizer.state.values() if isinstance(state.get("step"), Tensor)]


def chosen(name: str, table: Mapping[str, Maker], key: str) -> Maker:
    """The entry called `name`; GraphError with the allowed names if there is none."""
    try:
        return table[name]
    except KeyError:
        raise GraphError(f"{key}: found {name!r}, allowed {', '.join(table)}{suggest(name, table)}") from None


def _with_state(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Runs one step without gradients' effect, so that the recorded step is not the first one.

    Gradients are zero and the learning rate is 0 for this step, which leaves real parameters as they are.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    gradients = [p.grad for p in parameters]
    rates = [group["lr"] for group in optimizer.param_groups]
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    optimizer.step()
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    return optimizer
