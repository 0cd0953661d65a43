"""Every private torch name that extraction needs, in one place, so that a torch release that moves one breaks one file."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn.modules import module as _module
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = [
    "DispatchMode",
    "accumulates_gradient",
    "argument_names",
    "backward_node_number",
    "inside_autograd_kernel",
    "module_hooks",
    "mutated_names",
    "next_node_number",
    "on_gradient_ready",
    "operator_name",
    "overload_name",
    "run_backward",
    "sparse_parts",
    "sparse_tensor",
    "storage_key",
]

_KEY = torch._C.DispatchKey
# AccumulateGrad nodes are numbered so that they run before all others; the number says nothing about a module.
_ACCUMULATE_GRAD_NUMBER = 2**64 - 1


def operator_name(func: Any) -> str:
    """`aten.mm` for the overload object of `aten::mm`."""
    name: str = func._schema.name
    return name.replace("::", ".")


def overload_name(func: Any) -> str:
    """`default`, `Tensor`, ..."""
    name: str = func._overloadname
    return name


def argument_names(func: Any) -> tuple[str, ...]:
    """Names of the operator's arguments in schema order."""
    return tuple(argument.name for argument in func._schema.arguments)


def mutated_names(func: Any) -> frozenset[str]:
    """Names of the arguments that the operator writes to."""
    return frozenset(a.name for a in func._schema.arguments if a.alias_info is not None and a.alias_info.is_write)


def next_node_number() -> int:
    """The sequence number that autograd gives the next node made on this thread."""
    number: int = torch._C._autograd._get_sequence_nr()
    return number


def backward_node_number() -> int | None:
    """Sequence number of the autograd node that runs now; None outside of backward and while gradients accumulate."""
    node: Any = torch._C._current_autograd_node()
    if node is None:
        return None
    number: int = node._sequence_nr()
    return None if number == _ACCUMULATE_GRAD_NUMBER else number


def inside_autograd_kernel() -> bool:
    """True below autograd's kernels, where every real operator call is seen.

    False for the `detach` that torch reports to a dispatch mode when autograd packs or unpacks a saved tensor: outside
    of a dispatch mode that is a plain copy of the tensor object and no operator.
    """
    excluded: bool = torch._C._dispatch_tls_is_dispatch_key_excluded(_KEY.ADInplaceOrView)
    return excluded


def storage_key(storage: torch.UntypedStorage) -> int:
    """Address of the storage object: unique among storages that are alive."""
    key: int = storage._cdata
    return key


def sparse_parts(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Indices and values of a sparse COO tensor, coalesced or not."""
    return tensor._indices(), tensor._values()


def sparse_tensor(indices: torch.Tensor, values: torch.Tensor, like: torch.Tensor, *, coalesced: bool) -> torch.Tensor:
    """A sparse COO tensor that keeps the given indices and values, shaped as `like`."""
    made: torch.Tensor = torch.ops.aten._sparse_coo_tensor_unsafe(
        indices, values, like.shape, dtype=values.dtype, device=values.device, is_coalesced=coalesced
    )
    return made


def accumulates_gradient() -> bool:
    """True while autograd adds a gradient to a parameter."""
    node: Any = torch._C._current_autograd_node()
    return node is not None and node._sequence_nr() == _ACCUMULATE_GRAD_NUMBER


class DispatchMode(TorchDispatchMode):
    """torch's dispatch mode with a typed constructor; subclasses define `__torch_dispatch__`."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call] # torch annotates nothing here


@contextmanager
def module_hooks(before: Any, after: Any) -> Iterator[None]:
    """Calls `before(module, args)` and `after(module, args, output)` round every module call, errors included."""
    handles = (
        _module.register_module_forward_pre_hook(before),
        _module.register_module_forward_hook(after, always_call=True),
    )
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def run_backward(loss: torch.Tensor) -> None:
    """`loss.backward()`, typed."""
    torch.autograd.backward((loss,))


def on_gradient_ready(parameter: torch.nn.Parameter, hook: Callable[[torch.Tensor], None]) -> Any:
    """Calls `hook` each time a gradient has been added to the parameter; returns the handle."""
    register: Any = parameter.register_post_accumulate_grad_hook
    return register(hook)
