"""Models that name a device: tensors they make or move land where the step is traced."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from perfmodel.extract import _torch

# What hands a tensor's values to Python: on a GPU the host waits for a copy (pageable memory: cudaMemcpy returns when done).
_READ_BY_HOST = (torch.Tensor.cpu, torch.Tensor.tolist, torch.Tensor.numpy)


class OneDevice(_torch.FunctionMode):
    """Replaces every CUDA device in a call from Python by the traced one; `.cuda()` becomes a move to it.

    `waits` is told where a GPU's host would wait because a tensor is moved to it; with real values nothing dispatches there.
    """

    def __init__(self, device: str, waits: Callable[[], None]) -> None:
        super().__init__()
        self._device = torch.device(device)
        self._waits = waits

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is torch.Tensor.cuda:
            return args[0].to(self._device)
        if func in _READ_BY_HOST or (func is torch.Tensor.to and _names_host(args[1:], kwargs or {})):
            self._waits()
        given = {name: self._mapped(value) for name, value in (kwargs or {}).items()}
        return func(*(self._mapped(value) for value in args), **given)

    def _mapped(self, value: Any) -> Any:
        named = isinstance(value, str) and (value == "cuda" or value.startswith("cuda:"))
        return self._device if named or (isinstance(value, torch.device) and value.type == "cuda") else value


def _names_host(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether the arguments of `Tensor.to` name the CPU, and a copy that is waited for."""
    named = [value for value in (*args[:1], kwargs.get("device")) if isinstance(value, str | torch.device)]
    return any(torch.device(value).type == "cpu" for value in named) and not kwargs.get("non_blocking", False)
