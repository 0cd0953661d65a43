"""Models that name a device: tensors they make or move land where the step is traced."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from perfmodel.extract import _torch


class OneDevice(_torch.FunctionMode):
    """Replaces every CUDA device in a call from Python by the traced one; `.cuda()` becomes a move to it."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self._device = torch.device(device)

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is torch.Tensor.cuda:
            return args[0].to(self._device)
        given = {name: self._mapped(value) for name, value in (kwargs or {}).items()}
        return func(*(self._mapped(value) for value in args), **given)

    def _mapped(self, value: Any) -> Any:
        named = isinstance(value, str) and (value == "cuda" or value.startswith("cuda:"))
        return self._device if named or (isinstance(value, torch.device) and value.type == "cuda") else value
