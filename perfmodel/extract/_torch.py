"""Every private torch name that extraction needs, in one place, so that a torch release that moves one breaks one file."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn.modules import module as _module
from torch.optim import optimizer as optimizer_module
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = [
    "CASTS",
    "ROUTES",
    "DispatchMode",
    "Interception",
    "accumulates_gradient",
    "argument_names",
    "backward_node_number",
    "composite",
    "inside_autograd_kernel",
    "module_hooks",
    "mutated_names",
    "next_node_number",
    "on_gradient_ready",
    "operator_name",
    "operators_with_kernel",
    "overload",
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


def dense_parts(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The tensors that hold a tensor's memory: itself, or the indices and values of a sparse one."""
    return sparse_parts(tensor) if tensor.is_sparse else (tensor,)


def sparse_tensor(indices: torch.Tensor, values: torch.Tensor, like: torch.Tensor, *, coalesced: bool) -> torch.Tensor:
    """A sparse COO tensor that keeps the given indices and values, shaped as `like`."""
    made: torch.Tensor = torch.ops.aten._sparse_coo_tensor_unsafe(
        indices, values, like.shape, dtype=values.dtype, device=values.device, is_coalesced=coalesced
    )
    return made


def inside_backward_node() -> bool:
    """True while an autograd node runs; False for the gradient of the loss itself, which is made before any."""
    node: Any = torch._C._current_autograd_node()
    return node is not None


def backward_node_name() -> str:
    """`AddmmBackward0`: the autograd node that runs now, or an empty string."""
    node: Any = torch._C._current_autograd_node()
    return "" if node is None else str(node.name())


# References to a tensor that only its caller holds, as seen from `__torch_dispatch__`, and to its storage.
_TENSOR_HELD_ONCE, _STORAGE_HELD_ONCE = 4, 2


def is_held_once(tensor: torch.Tensor) -> bool:
    """True if nobody but the caller of this operator holds the tensor or its storage, and it has no gaps."""
    undeclared: Any = tensor
    if tensor.layout != torch.strided or undeclared._use_count() != _TENSOR_HELD_ONCE:
        return False
    storage = tensor.untyped_storage()
    dense: bool = torch._prims_common.is_non_overlapping_and_dense_or_false(tensor)
    return dense and torch._C._storage_Use_Count(storage._cdata) == _STORAGE_HELD_ONCE


def accumulates_gradient() -> bool:
    """True while autograd adds a gradient to a parameter."""
    node: Any = torch._C._current_autograd_node()
    return node is not None and node._sequence_nr() == _ACCUMULATE_GRAD_NUMBER


class FunctionMode(TorchFunctionMode):
    """torch's function mode with a typed constructor; subclasses define `__torch_function__`."""


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


def overload(operator: str) -> Any:
    """The overload object of `conv2d` or `softmax.int`."""
    name, _, which = operator.partition(".")
    return getattr(getattr(torch.ops.aten, name), which or "default")


def composite(operator: str, *args: Any, **kwargs: Any) -> Any:
    """Runs an operator's device-independent kernel, which calls other operators."""
    return overload(operator)._op_dk(_KEY.CompositeImplicitAutograd, *args, **kwargs)


def is_composite(operator: str) -> bool:
    """True if the operator only calls other operators, on every device."""
    return torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{operator}", "CompositeImplicitAutograd")


def operators_with_kernel(key: str) -> frozenset[str]:
    """Every aten operator (`conv2d`, `softmax.int`) that has a kernel for a dispatch key of this torch build."""
    names = (name for name in torch._C._dispatch_get_all_op_names() if name.startswith("aten::"))
    return frozenset(
        name.removeprefix("aten::") for name in names if torch._C._dispatch_has_kernel_for_dispatch_key(name, key)
    )


class Interception:
    """Python functions in front of operators, under an autocast dispatch key of a backend without kernels."""

    def __init__(self, backend: str, key: str) -> None:
        self._backend = backend
        self._key = key
        self._libraries: list[torch.library.Library] = []

    def install(self, functions: Mapping[str, Callable[..., Any]]) -> None:
        """Registers the functions, once a process."""
        if self._libraries:
            return
        library: Any = torch.library.Library
        rest = library("_", "IMPL", self._key)
        rest.fallback(torch.library.fallthrough_kernel, self._key)
        aten = library("aten", "IMPL", self._key)
        for operator, function in functions.items():
            aten.impl(operator, function, self._key)
        self._libraries += [rest, aten]

    @contextmanager
    def on(self) -> Iterator[None]:
        """Operators go through the functions, on this thread."""
        torch.set_autocast_enabled(self._backend, True)
        try:
            with torch._C._IncludeDispatchKeyGuard(getattr(_KEY, self._key)):
                yield
        finally:
            torch.set_autocast_enabled(self._backend, False)

    @contextmanager
    def off(self) -> Iterator[None]:
        """Operators inside do not go through the functions."""
        with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(getattr(_KEY, self._key))):
            yield


# The HPU key comes before the IPU key, so casts happen before a route sees its arguments, as on the real device.
CASTS = Interception("hpu", "AutocastHPU")
ROUTES = Interception("ipu", "AutocastIPU")


def is_view(tensor: torch.Tensor) -> bool:
    """True if autograd made the tensor as a view of another."""
    return tensor._is_view()


def argument(function: Any, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """The argument of that schema name, or None if the call leaves it out."""
    if name in kwargs:
        return kwargs[name]
    names = argument_names(function)
    position = names.index(name)
    return args[position] if position < len(args) else None


def call_with(function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Calls an overload whose keyword arguments may also stand among the positional ones."""
    names = argument_names(function)
    kept = {name: value for name, value in kwargs.items() if name not in names[: len(args)]}
    positional = [kwargs.get(name, value) for name, value in zip(names, args, strict=False)]
    return function(*positional, **kept)


@contextmanager
def autocast_regions(devices: set[str], enter: Callable[..., None], leave: Callable[[], None]) -> Iterator[None]:
    """Inside, `torch.autocast(device)` for one of `devices` calls `enter(enabled=, dtype=)` and `leave()` instead."""
    region: Any = torch.amp.autocast_mode.autocast
    saved = (region.__init__, region.__enter__, region.__exit__)

    def init(
        self: Any, device_type: str, dtype: Any = None, enabled: bool = True, cache_enabled: bool | None = None
    ) -> None:
        if device_type not in devices:
            saved[0](self, device_type, dtype, enabled, cache_enabled)
            return
        self.device, self._enabled, self.fast_dtype, self._perfmodel = device_type, enabled, dtype, True

    def begin(self: Any) -> Any:
        if not hasattr(self, "_perfmodel"):
            return saved[1](self)
        enter(enabled=self._enabled, dtype=self.fast_dtype)
        return self

    def end(self: Any, *error: Any) -> Any:
        return leave() if hasattr(self, "_perfmodel") else saved[2](self, *error)

    region.__init__, region.__enter__, region.__exit__ = init, begin, end
    try:
        yield
    finally:
        region.__init__, region.__enter__, region.__exit__ = saved


def unscale(gradients: list[torch.Tensor], found: torch.Tensor, inverse: torch.Tensor) -> None:
    """The kernel that divides gradients by the loss scale and notes infinities."""
    torch._amp_foreach_non_finite_check_and_unscale_(gradients, found, inverse)


def unchecked_sparse() -> Any:
    """Sparse tensors inside are made without checking their indices, and without torch's warning that it does not."""
    check: Any = torch.sparse.check_sparse_tensor_invariants
    return check(enable=False)


@contextmanager
def fused_optimizers_on_meta() -> Iterator[None]:
    """Lets torch's fused optimizers take tensors without storage, as they take CUDA's."""
    user: Any = optimizer_module
    saved = user._get_fused_kernels_supported_devices
    user._get_fused_kernels_supported_devices = lambda: [*saved(), "meta"]
    try:
        yield
    finally:
        user._get_fused_kernels_supported_devices = saved


def memory_format(tensor: torch.Tensor) -> torch.memory_format:
    """The layout that kernels take from a tensor's strides: contiguous or channels last."""
    found: torch.memory_format = torch._prims_common.suggest_memory_format(tensor)
    return found
