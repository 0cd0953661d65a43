"""Optimizer steps over lists of tensors: `_foreach_*` and `_fused_*`, as PyTorch's multi_tensor_apply launches them.

A launch takes whole tensors in chunks of 65,536 elements until it has 320 chunks or its fill of tensors, so a step over many
small tensors is few launches and one over a large tensor is many. Per-tensor optimizers dispatch pointwise ops instead.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from perfmodel.estimate import Work
from perfmodel.graph import Op, TensorSpec
from perfmodel.kernels.copy import moved, total_bytes
from perfmodel.kernels.registry import KernelCall, kernel_rule

# ATen/native/cuda/MultiTensorApply.cuh: kChunkSize, depth_to_max_blocks, depth_to_max_tensors (by number of tensor lists).
CHUNK_ELEMS = 65_536
CHUNKS_PER_LAUNCH = 320
TENSORS_PER_LAUNCH: Mapping[int, int] = {1: 110, 2: 64, 3: 48, 4: 36, 5: 30}

Calls = tuple[KernelCall, ...]


def launches(sizes: Sequence[int], depth: int) -> list[list[int]]:
    """Elements of each tensor that each launch works on, for tensors of `sizes` elements in `depth` lists.

    >>> launches([10, 20], depth=2)
    [[10, 20]]
    >>> [sum(launch) for launch in launches([30_000_000], depth=1)]
    [20971520, 9028480]
    """
    limit = TENSORS_PER_LAUNCH[min(max(depth, 1), 5)]
    found: list[list[int]] = []
    current: list[int] = []
    n_chunks = 0
    for size in sizes:
        left = size
        while left > 0:
            if n_chunks == CHUNKS_PER_LAUNCH or len(current) == limit:
                found.append(current)
                current, n_chunks = [], 0
            taken = min(left, (CHUNKS_PER_LAUNCH - n_chunks) * CHUNK_ELEMS)
            current.append(taken)
            n_chunks += -(-taken // CHUNK_ELEMS)
            left -= taken
    return [*found, current] if current else found


def multi_tensor(first: Sequence[TensorSpec], *, read_bytes: int, write_bytes: int, flops: int, depth: int) -> Calls:
    """The launches over lists of tensors shaped like `first`; work is shared out by elements, exactly in total."""
    total = sum(spec.n_elems for spec in first)
    known: dict[tuple[Work, int], KernelCall] = {}  # equal launches share one call, which is then priced once
    calls, done = [], 0
    for group in launches([spec.n_elems for spec in first], depth):
        start, done = done, done + sum(group)
        work = Work(
            flops=_share(flops, start, done, total),
            read_bytes=_share(read_bytes, start, done, total),
            write_bytes=_share(write_bytes, start, done, total),
        )
        features = {"n_elems": float(done - start), "n_tensors": float(len(group))}
        call = KernelCall(family="optimizer", work=work, dtype=first[0].dtype, features=features)
        calls.append(known.setdefault((work, len(group)), call))
    return tuple(calls)


def _share(amount: int, start: int, stop: int, total: int) -> int:
    return amount * stop // total - amount * start // total


# FLOPs an element, from the update formulas of torch.optim (a division or square root counts as one).
_FOREACH_FLOPS: Mapping[str, int] = {
    "abs": 1,
    "add": 2,  # with alpha
    "addcdiv": 3,
    "addcmul": 3,
    "clamp_max": 1,
    "clamp_min": 1,
    "copy": 0,
    "div": 1,
    "exp": 1,
    "lerp": 3,
    "log": 1,
    "maximum": 1,
    "minimum": 1,
    "mul": 1,
    "neg": 1,
    "pow": 1,
    "reciprocal": 1,
    "rsqrt": 1,
    "sign": 1,
    "sqrt": 1,
    "sub": 2,
    "zero": 0,
}
_FOREACH_OPS = tuple(f"aten._foreach_{name}{suffix}" for name in _FOREACH_FLOPS for suffix in ("", "_"))


@kernel_rule(*_FOREACH_OPS)
def foreach(op: Op) -> Calls:
    """Every list is read once (not the target of a copy or zero) and one list is written: `self` in place, else a new one."""
    base = op.name.removeprefix("aten._foreach_")
    name, in_place = base.removesuffix("_"), base.endswith("_")
    own = op.args("self") or op.inputs
    others = [spec for spec, arg in zip(op.inputs, op.input_names, strict=True) if arg != "self"]
    read = total_bytes(others) + (0 if name in {"zero", "copy"} else total_bytes(own))
    written = own if in_place else (op.outputs or own)
    depth = max(1, len(op.inputs) // max(len(own), 1)) + (not in_place)
    n_elems = sum(spec.n_elems for spec in own)
    return multi_tensor(
        own, read_bytes=read, write_bytes=total_bytes(written), flops=_FOREACH_FLOPS[name] * n_elems, depth=depth
    )


@kernel_rule("aten._foreach_norm")
def foreach_norm(op: Op) -> Calls:
    """Partial norms of each chunk in one sweep of launches, then one kernel that adds the partial norms."""
    specs = op.args("self") or op.inputs
    n_elems = sum(spec.n_elems for spec in specs)
    n_chunks = sum(-(-spec.n_elems // CHUNK_ELEMS) for spec in specs)
    partial = n_chunks * specs[0].itemsize_bytes
    sweep = multi_tensor(specs, read_bytes=total_bytes(specs), write_bytes=partial, flops=2 * n_elems, depth=1)
    cleanup = Work(flops=n_chunks, read_bytes=partial, write_bytes=len(specs) * specs[0].itemsize_bytes)
    return (*sweep, KernelCall(family="optimizer", work=cleanup, dtype=specs[0].dtype))


@kernel_rule("aten._amp_foreach_non_finite_check_and_unscale_")
def unscale(op: Op) -> Calls:
    """Gradients are read, checked, multiplied by the inverse scale and written back."""
    specs = op.args("self")
    n_bytes = total_bytes(specs)
    n_elems = sum(spec.n_elems for spec in specs)
    return multi_tensor(specs, read_bytes=n_bytes, write_bytes=n_bytes, flops=2 * n_elems, depth=1)


@kernel_rule("aten._amp_update_scale_")
def update_scale(op: Op) -> Calls:
    """One thread updates the loss scale."""
    return moved("optimizer", total_bytes(op.inputs), op.inputs[:2])


# Per fused optimizer: FLOPs an element (ATen/native/cuda/fused_*_impl.cu, weight decay included) and the lists it writes.
_FUSED: Mapping[str, tuple[int, frozenset[str]]] = {
    "adam": (17, frozenset({"self", "exp_avgs", "exp_avg_sqs", "max_exp_avg_sqs"})),
    "adamw": (17, frozenset({"self", "exp_avgs", "exp_avg_sqs", "max_exp_avg_sqs"})),
    "sgd": (6, frozenset({"self", "momentum_buffer_list"})),
    "adagrad": (8, frozenset({"self", "state_sums"})),
}
# Lists of scalars (one step counter a tensor) are read by each block but are no per-element list.
_SCALAR_LISTS = frozenset({"state_steps", "grad_scale", "found_inf", "lr"})


@kernel_rule("aten._fused_adam_", "aten._fused_adamw_", "aten._fused_sgd_", "aten._fused_adagrad_")
def fused(op: Op) -> Calls:
    """Parameters, gradients and states are read, parameters and states written, in one sweep of launches."""
    flops, written_names = _FUSED[op.name.removeprefix("aten._fused_").removesuffix("_")]
    lists = _tensor_lists(op)
    own = lists.get("self", ())
    if not own:
        return ()
    read = sum(total_bytes(specs) for specs in lists.values())
    written = sum(total_bytes(specs) for name, specs in lists.items() if name in written_names)
    if "grad_scale" in op.input_names:
        written += total_bytes(lists.get("grads", ()))  # unscaled gradients are stored back
    n_elems = sum(spec.n_elems for spec in own)
    return multi_tensor(own, read_bytes=read, write_bytes=written, flops=flops * n_elems, depth=len(lists))


def _tensor_lists(op: Op) -> dict[str, tuple[TensorSpec, ...]]:
    names: Iterable[str] = dict.fromkeys(op.input_names)
    return {name: op.args(name) for name in names if name not in _SCALAR_LISTS}
