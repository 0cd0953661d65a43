"""The dispatch mode that writes down every operator call of a training step."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Literal

import torch

from perfmodel.extract import _torch, sparse
from perfmodel.extract.in_place import without_mode
from perfmodel.extract.lifetimes import StorageLog
from perfmodel.extract.modules import ModulePaths
from perfmodel.extract.stand_ins import corrected, optimizer_stand_in, stand_in
from perfmodel.graph import TO_DEVICE, Op, Phase, TensorSpec

# Operators of the profiler's bookkeeping: no device runs anything for them.
_BOOKKEEPING = ("profiler.",)
# The host waits for the device: a value or a size that only the device knows (c10 and ATen/native/cuda: each of these
# ends in a cudaStreamSynchronize).
SYNCHRONIZE = "perfmodel.synchronize"  # torch.cuda.synchronize, which dispatches nothing
HOST_SYNCS = frozenset(
    {
        SYNCHRONIZE,
        "aten._local_scalar_dense",
        "aten.equal",
        "aten.is_nonzero",
        "aten.item",
        "aten.masked_select",
        "aten.nonzero",
        "aten._unique",
        "aten._unique2",
        "aten.unique_consecutive",
        "aten.unique_dim",
        "aten._coalesce",
    }
)
# A mask as an index becomes `nonzero` inside these (ATen/native/IndexingUtils.h, expandTensors), which nothing dispatches.
_INDEXED = frozenset({"aten.index", "aten.index_put", "aten.index_put_", "aten._index_put_impl_"})
Target = Literal["cuda", "cpu"]
_PLACEMENT = frozenset({"device", "layout", "pin_memory", "non_blocking", "generator"})


@dataclass(frozen=True, slots=True, kw_only=True)
class _Signature:
    name: str
    overload: str
    arguments: tuple[str, ...]
    mutated: frozenset[str]
    ignored: bool


@cache
def _signature(func: Any) -> _Signature:
    name = _torch.operator_name(func)
    return _Signature(
        name=name,
        overload=_torch.overload_name(func),
        arguments=_torch.argument_names(func),
        mutated=_torch.mutated_names(func),
        ignored=name.startswith(_BOOKKEEPING),
    )


_STEAL = _Signature(
    name="aten._sparse_coo_tensor_unsafe", overload="default", arguments=(), mutated=frozenset(), ignored=False
)


@dataclass(slots=True)
class _Call:
    """The arguments of one call, sorted into tensors and the rest."""

    inputs: list[TensorSpec] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    attrs: dict[str, Any] = field(default_factory=dict)


class Recorder(_torch.DispatchMode):  # type: ignore[no-untyped-call] # torch leaves __init_subclass__ untyped
    """Records ops while active. `phase` is set by the driver; `device` is where the step's tensors live.

    Work on host memory (the step counters of torch's optimizers) is run without being recorded if the target is CUDA.
    """

    def __init__(self, paths: ModulePaths, device: str, target: Target) -> None:
        super().__init__()
        self.phase: Phase = "input"
        self.ops: list[Op] = []
        self.storages = StorageLog()
        self.paths = paths
        self._device = device
        self._target = target
        self._paused = False
        self._on_host: set[int] = set()
        self._moved: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._specs: dict[tuple[Any, ...], TensorSpec] = {}

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        signature = _signature(func)
        if (
            self._paused
            or signature.ignored
            or _is_bookkeeping_detach(signature.name)
            or self._is_host_work((args, kwargs))
        ):
            return func(*args, **kwargs)
        if self._device == "meta":
            args, kwargs = self._on_device(args), self._on_device(dict(kwargs))
        instead = without_mode(signature.name, args, kwargs) if self.phase == "backward" else None
        if instead is not None:
            func, args, kwargs = instead
            signature = _signature(func)
        call = self._arguments(signature, args, kwargs)
        if sparse.is_stolen_gradient(signature.name, args):
            signature, result = _STEAL, sparse.stolen(args[0])
        else:
            result = self._run(signature.name, func, args, kwargs)
        if signature.name == "aten._to_copy" and _crosses_to_host(result, self._device):
            return result
        self._append(signature, call, result)
        return result

    def _run(self, name: str, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """The operator's result; without storage, from what stands in for it where torch falls short."""
        if self._device != "meta":
            return func(*args, **kwargs)
        instead = stand_in(name, args)
        if instead is None and self.phase == "optimizer":
            instead = optimizer_stand_in(name, args)
        return corrected(name, args, (instead or func)(*args, **kwargs), self._target)

    def spec(self, tensor: torch.Tensor) -> TensorSpec:
        """Metadata of a dense tensor. Equal views of one storage get one id."""
        storage = self.storages.number(tensor)
        key = (storage, tensor.dtype, tuple(tensor.shape), tensor.stride(), tensor.storage_offset())
        known = self._specs.get(key)
        if known is None:
            known = self._specs[key] = TensorSpec(
                id=len(self._specs),
                shape=key[2],
                dtype=str(tensor.dtype).removeprefix("torch."),
                strides=key[3],
                storage=storage,
            )
        return known

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Operators inside run without being recorded."""
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before

    def emit(
        self,
        name: str,
        *,
        inputs: Sequence[torch.Tensor] = (),
        names: Sequence[str] = (),
        outputs: Sequence[torch.Tensor] = (),
        attrs: Mapping[str, Any] | None = None,
    ) -> None:
        """Records an op that no dispatcher call stands for, with the current phase and module."""
        if self._paused:
            return
        call = _Call(inputs=[self.spec(t) for t in inputs], names=list(names), attrs=dict(attrs or {}))
        signature = _Signature(name=name, overload="default", arguments=(), mutated=frozenset(), ignored=False)
        self._append(signature, call, tuple(outputs))

    def _append(self, signature: _Signature, call: _Call, result: Any) -> None:
        in_backward = self.phase == "backward"
        again = self.paths.depth > 0 or (torch.is_grad_enabled() and _torch.inside_backward_node())
        recompute = in_backward and again
        outputs = tuple(self.spec(part) for _, part in _tensors("", result))
        if not outputs:
            outputs = tuple(s for s, n in zip(call.inputs, call.names, strict=True) if n in signature.mutated)
        op = Op(
            id=len(self.ops),
            name=signature.name,
            overload=signature.overload,
            inputs=tuple(call.inputs),
            input_names=tuple(call.names),
            outputs=outputs,
            attrs=call.attrs,
            module=self._module(recompute=recompute, in_backward=in_backward),
            phase=self.phase,
            recompute=recompute,
            host_sync=signature.name in HOST_SYNCS or _has_mask(signature.name, call),
            stream="copy" if signature.name == TO_DEVICE else "compute",
        )
        self.ops.append(op)
        self.storages.n_ops = len(self.ops)

    def _module(self, *, recompute: bool, in_backward: bool) -> str:
        if self.phase in ("input", "optimizer"):
            return ""
        return self.paths.of_backward() if in_backward and not recompute else self.paths.of_forward()

    def _arguments(self, signature: _Signature, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> _Call:
        call = _Call()
        for name, value in (*zip(signature.arguments, args, strict=False), *kwargs.items()):
            tensors = tuple(_tensors(name, value))
            for tensor_name, tensor in tensors:
                call.inputs.append(self.spec(tensor))
                call.names.append(tensor_name)
            if not tensors and name not in _PLACEMENT:
                call.attrs[name] = _plain(value)
        return call

    def _on_device(self, value: Any) -> Any:
        """The arguments with constants that the model left on the CPU as if they had been moved to the device.

        Scalars stay: torch takes them from the host on every device.
        """
        if isinstance(value, torch.Tensor):
            if value.is_meta or value.dim() == 0 or value.layout != torch.strided:
                return value
            if id(value) not in self._moved:
                with self.paused():
                    shell = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
                self.storages.number(shell, kind="buffer", born=-1)
                self._moved[id(value)] = (value, shell)
            return self._moved[id(value)][1]
        if isinstance(value, dict):
            return {key: self._on_device(item) for key, item in value.items()}
        if isinstance(value, tuple | list):
            return type(value)(self._on_device(item) for item in value)
        return value

    def keep_on_host(self, tensors: Iterable[torch.Tensor]) -> None:
        """Says that these scalars lie in host memory, whatever their device is here."""
        self._on_host.update(id(tensor) for tensor in tensors)

    def _is_host_work(self, value: Any) -> bool:
        """True for work on host memory only, on a target whose device has its own.

        On the CPU as a target such work is the device's too, so it counts.
        """
        if self._target == "cpu":
            return False
        tensors = [tensor for _, tensor in _tensors("", value)]
        if not tensors or any(tensor.device.type != "cpu" for tensor in tensors):
            return False
        if self._device != "cpu":
            return True
        return any(id(t) in self._on_host for t in tensors) and all(t.dim() == 0 for t in tensors)


def _is_bookkeeping_detach(name: str) -> bool:
    return name == "aten.detach" and not _torch.inside_autograd_kernel()


def _crosses_to_host(result: Any, device: str) -> bool:
    return isinstance(result, torch.Tensor) and result.device.type != device


def _has_mask(name: str, call: _Call) -> bool:
    given = zip(call.inputs, call.names, strict=True)
    return name in _INDEXED and any(
        spec.dtype in ("bool", "uint8") for spec, argument in given if argument == "indices"
    )


def _tensors(name: str, value: Any) -> Iterable[tuple[str, torch.Tensor]]:
    """Tensors in an argument, named after it; a sparse one is its indices and its values."""
    if isinstance(value, torch.Tensor):
        if value.layout == torch.sparse_coo:
            indices, values = _torch.sparse_parts(value)
            yield f"{name}.indices", indices
            yield f"{name}.values", values
        else:
            yield name, value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _tensors(name, item)
    elif isinstance(value, tuple | list):
        for item in value:
            yield from _tensors(name, item)


def _plain(value: Any) -> Any:
    """An argument as JSON can hold it: numbers, text, booleans, None, lists."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, tuple | list):
        return [_plain(item) for item in value]
    if isinstance(value, complex):
        return [value.real, value.imag]
    return str(value).removeprefix("torch.")
