"""From a case to tensors, a callable and the op that extraction would record for the call."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from calibrate.cases.case import MAX_SETS, Case, TensorArg, tensor_args
from perfmodel.extract.modules import ModulePaths
from perfmodel.extract.record import Recorder
from perfmodel.graph import Op

INDEX_COPIES = 4  # a training run looks up other rows at every step
POOL_ELEMS = 1 << 20  # of random numbers: drawing all of a large tensor took half of a calibration
_DRAWS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "normal": lambda t: t.normal_(),
    "positive": lambda t: t.uniform_(0.5, 1.5),
    "unit": lambda t: t.uniform_(0.01, 0.99),
}
_FILLS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "ones": lambda t: t.fill_(1),
    "zeros": lambda t: t.zero_(),
    "sums": lambda t: t.fill_(6.0),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """A case ready to run: `call(*arguments[i], **kwargs)` for any i; `moved_bytes` is what one call touches."""

    call: Callable[..., Any]
    arguments: tuple[tuple[Any, ...], ...]
    kwargs: Mapping[str, Any]
    moved_bytes: int


def operator(case: Case) -> Callable[..., Any]:
    """The aten overload of the case."""
    packet = getattr(torch.ops.aten, case.op.removeprefix("aten."))
    found: Callable[..., Any] = getattr(packet, case.overload)
    return found


def prepare(case: Case, device: str, cache_bytes: int) -> Prepared:
    """Tensors with random values on `device`.

    A cold case gets as many sets of tensors as fill `cache_bytes`, so that each call meets tensors that left the caches.
    """
    torch.manual_seed(int(case.key[:8], 16))
    kwargs = _kwargs(case)
    first = _arguments(case, device, None)
    draws = any(arg.fill == "index" for arg in tensor_args(case.args)) or _has_sparse(case)
    copies = 1
    if case.family == "embedding":
        copies = INDEX_COPIES if case.state == "cold" else 1
    elif case.state == "cold":
        copies = min(max(2, math.ceil(cache_bytes / max(2 * case.bytes, 1))), MAX_SETS)
    elif draws:
        copies = INDEX_COPIES
    redrawn = draws or case.family == "embedding"
    shared = first if case.family == "embedding" else None
    sets = [first] + [_arguments(case, device, shared) if redrawn else _copied(first) for _ in range(copies - 1)]
    return Prepared(call=operator(case), arguments=tuple(sets), kwargs=kwargs, moved_bytes=2 * case.bytes)


def recorded_op(case: Case, prepared: Prepared, target: str) -> Op:
    """The op of the case, as extraction writes it, with what it notes on embedding ops. Runs the call once."""
    recorder = Recorder(ModulePaths(torch.nn.Identity()), "cpu" if target == "cpu" else "cuda", target)  # type: ignore[arg-type]  # the two targets
    recorder.phase = "forward"
    with torch.no_grad(), recorder:
        prepared.call(*prepared.arguments[0], **prepared.kwargs)
    wanted = [op for op in recorder.ops if op.name == case.op]
    return replace(wanted[0], id=0, attrs={**wanted[0].attrs, **case.notes})


def _has_sparse(case: Case) -> bool:
    return any(isinstance(value, Mapping) for value in case.args)


def _kwargs(case: Case) -> dict[str, Any]:
    found = dict(case.kwargs)
    if "dtype" in found:
        found["dtype"] = getattr(torch, found["dtype"])
    if found.get("memory_format") == "contiguous":
        found["memory_format"] = torch.contiguous_format
    return found


def _arguments(case: Case, device: str, shared: tuple[Any, ...] | None) -> tuple[Any, ...]:
    """One set of arguments; `shared` lends its first tensor (a table) instead of a second copy."""
    made = []
    for position, value in enumerate(case.args):
        lend = shared is not None and position == 0
        made.append(shared[0] if lend and shared is not None else _argument(value, device))
    return tuple(made)


def _copied(value: Any) -> Any:
    """The same values in other memory; copying is many times cheaper than drawing."""
    if isinstance(value, Tensor):
        return value.clone()
    if isinstance(value, tuple | list):
        return type(value)(_copied(part) for part in value)
    return value


def _argument(value: Any, device: str) -> Any:
    if isinstance(value, TensorArg):
        return tensor(value, device)
    if isinstance(value, Mapping):
        indices, values = (tensor(part, device) for part in value["sparse"])
        known = bool(value.get("coalesced")) or None
        return torch.sparse_coo_tensor(
            indices.unsqueeze(0), values, value["shape"], check_invariants=False, is_coalesced=known
        )
    if isinstance(value, list | tuple) and tensor_args(value):
        return [None if part is None else _argument(part, device) for part in value]
    if value in ("float32", "bfloat16", "float16"):
        return getattr(torch, value)
    return list(value) if isinstance(value, tuple) else value


def tensor(arg: TensorArg, device: str) -> Tensor:
    """One tensor with drawn values, its dimensions laid out in the order asked for."""
    if arg.fill in ("index", "rising", "offsets", "bags", "mask"):
        return _integers(arg, device)
    order = arg.order or tuple(range(len(arg.shape)))
    stored = torch.empty([arg.shape[dim] for dim in order], dtype=getattr(torch, arg.dtype), device=device)
    if arg.fill in _DRAWS:
        _repeat(arg.fill, stored)
    else:
        _FILLS[arg.fill](stored)
    return stored.permute([order.index(dim) for dim in range(len(order))]) if arg.order else stored


def _repeat(fill: str, target: Tensor) -> None:
    """Fills a tensor with the same POOL_ELEMS random numbers over and over: no operator's time tells them from others."""
    flat, pool = target.view(-1), _pool(fill, target.dtype, target.device.type)
    for start in range(0, flat.numel(), POOL_ELEMS):
        part = flat[start : start + POOL_ELEMS]
        part.copy_(pool[: part.numel()])


@functools.cache
def _pool(fill: str, dtype: torch.dtype, device: str) -> Tensor:
    return _DRAWS[fill](torch.empty(POOL_ELEMS, dtype=dtype, device=device))


def _integers(arg: TensorArg, device: str) -> Tensor:
    n = math.prod(arg.shape)
    if arg.fill == "mask":
        whole = torch.ones(arg.shape, dtype=torch.bool, device=device)
        return whole.tril_() if len(arg.shape) > 1 else whole
    if arg.fill == "index":
        drawn = zipf_indices(n, arg.high, arg.zipf) if arg.zipf else torch.randint(0, max(arg.high, 1), (n,))
    elif arg.fill == "rising":
        drawn = torch.randperm(arg.high)[:n].sort().values
    elif arg.fill == "offsets":
        drawn = torch.arange(n) * arg.high
    else:
        drawn = torch.div(torch.arange(n), arg.high, rounding_mode="floor")
    drawn = drawn.to(device)
    if not arg.order:
        return drawn.reshape(arg.shape)
    stored = drawn.reshape([arg.shape[dim] for dim in arg.order])
    return stored.permute([arg.order.index(dim) for dim in range(len(arg.order))])


def zipf_indices(n: int, rows: int, exponent: float) -> Tensor:
    """`n` row numbers, row of rank r drawn with probability ~ r^-exponent, ranks spread over the table at random.

    Ranks follow the inverse of the continuous distribution on [1, rows + 1), rounded down.
    """
    u = torch.rand(n, dtype=torch.float64)
    if abs(exponent - 1.0) < 1e-9:
        rank = torch.exp(u * math.log(rows + 1.0))
    else:
        power = 1.0 - exponent
        rank = (1.0 + u * ((rows + 1.0) ** power - 1.0)) ** (1.0 / power)
    rank = rank.long().clamp_(1, rows) - 1
    return (rank * _spread(rows)) % rows


def _spread(rows: int) -> int:
    """A multiplier without common divisor with `rows`, near the golden section: neighbours in rank lie far apart."""
    step = max(int(rows * 0.6180339887), 1)
    while math.gcd(step, rows) != 1:
        step += 1
    return step
