"""The model as it is traced: a copy on tensors without storage, or the real one."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Literal, Protocol, cast

import torch
from torch import Tensor, nn

from perfmodel.errors import GraphError
from perfmodel.graph import TableAccess


class Built(Protocol):
    """What `trace` needs to know of a model; `perfmodel.models.BuiltModel` is one."""

    @property
    def name(self) -> str: ...  # noqa: D102 -- the protocol's fields are those of BuiltModel, described there
    @property
    def module(self) -> nn.Module: ...  # noqa: D102
    @property
    def args(self) -> tuple[Any, ...]: ...  # noqa: D102
    @property
    def kwargs(self) -> Mapping[str, Any]: ...  # noqa: D102
    @property
    def loss(self) -> Callable[[Any], Tensor]: ...  # noqa: D102
    @property
    def targets(self) -> tuple[Tensor, ...]: ...  # noqa: D102
    @property
    def optimizer(self) -> str: ...  # noqa: D102
    @property
    def optimizer_kwargs(self) -> Mapping[str, Any]: ...  # noqa: D102
    @property
    def sparse_optimizer(self) -> str: ...  # noqa: D102
    @property
    def sparse_optimizer_kwargs(self) -> Mapping[str, Any]: ...  # noqa: D102
    @property
    def precision(self) -> str: ...  # noqa: D102
    @property
    def batch_size(self) -> int: ...  # noqa: D102
    @property
    def tables(self) -> tuple[TableAccess, ...]: ...  # noqa: D102
    @property
    def realize(self) -> Callable[[int], Any] | None: ...  # noqa: D102
    @property
    def synchronizes(self) -> bool: ...  # noqa: D102
    @property
    def copies_inputs(self) -> bool: ...  # noqa: D102
    @property
    def input_copies(self) -> str: ...  # noqa: D102
    @property
    def captures_optimizer(self) -> bool: ...  # noqa: D102
    @property
    def notes(self) -> tuple[str, ...]: ...  # noqa: D102


def twin_of(built: Built, values: Literal["meta", "real"]) -> Built:
    """The model on `meta`, or with real values on the CPU. The given model's parameters are never written."""
    if values == "meta":
        return _on_meta(built)
    if any(tensor.is_meta for tensor in _state(built.module)):
        if built.realize is None:
            raise GraphError(f"{built.name}: --values real needs a model with values, found parameters on meta")
        return cast(Built, built.realize(0))
    return cast(Built, replace(cast(Any, built), module=_copy(built.module, {})))


def tensors_in(value: Any) -> list[Tensor]:
    """Tensors in nested tuples, lists and mappings, in order."""
    if isinstance(value, Tensor):
        return [value]
    items = value.values() if isinstance(value, Mapping) else value if isinstance(value, tuple | list) else ()
    return [tensor for item in items for tensor in tensors_in(item)]


def _on_meta(built: Built) -> Built:
    inputs = tensors_in((built.args, built.kwargs))
    if all(tensor.is_meta for tensor in (*_state(built.module), *inputs)):
        return built
    memo: dict[int, Any] = {id(tensor): _shell(tensor) for tensor in _state(built.module)}
    module = _copy(built.module, memo)
    seen: dict[int, Tensor] = {}
    args, kwargs = (_mapped(part, seen) for part in (built.args, dict(built.kwargs)))
    return cast(Built, replace(cast(Any, built), module=module, args=args, kwargs=kwargs))


def _state(module: nn.Module) -> list[Tensor]:
    return [*module.parameters(), *module.buffers()]


def _shell(tensor: Tensor) -> Tensor:
    """The same tensor without its values."""
    empty = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(empty, requires_grad=tensor.requires_grad)
    return empty.requires_grad_(tensor.requires_grad)


def _copy(module: nn.Module, memo: dict[int, Any]) -> nn.Module:
    try:
        return copy.deepcopy(module, memo)
    except (TypeError, RuntimeError) as error:
        raise GraphError(
            f"cannot copy the module ({type(error).__name__}: {error}); build it under torch.device('meta')"
        ) from error


def _mapped(value: Any, seen: dict[int, Tensor]) -> Any:
    """The same nesting with every tensor replaced by its shell; one tensor used twice stays one."""
    if isinstance(value, Tensor):
        return seen.setdefault(id(value), _shell(value))
    if isinstance(value, Mapping):
        return {key: _mapped(item, seen) for key, item in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_mapped(item, seen) for item in value))
    if isinstance(value, tuple | list):
        return type(value)(_mapped(item, seen) for item in value)
    return value
