"""Softmax of half inputs in fp32 as CUDA runs it: the kernel reads half and writes float, without a cast before it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from perfmodel.extract import _torch
from perfmodel.extract.rewrites.routing import Route, active, arguments, declined, route


def _softmax(operator: str, kernel: str) -> Route:
    """`half_to_float` for float16 (not bfloat16) inputs with dtype float32 (SoftMax.cpp); autocast asks for it."""

    def call(*args: Any, **kwargs: Any) -> Any:
        given = arguments(("self", "dim", "dtype"), args, kwargs)
        values: Tensor = given["self"]
        if values.dtype != torch.float16 or given.get("dtype") != torch.float32 or active().values == "real":
            return declined(operator, *args, **kwargs)
        active().used.add("softmax")
        return _torch.overload(kernel)(values, given["dim"], True)

    return call


route("cuda", "softmax.int")(_softmax("softmax.int", "_softmax"))
route("cuda", "log_softmax.int")(_softmax("log_softmax.int", "_log_softmax"))
