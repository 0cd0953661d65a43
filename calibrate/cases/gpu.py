"""What a plan becomes on a GPU: half of its cases in 16 bit, CUDA's own attention, and the optimizers that run there.

CUDA's operators take their sizes from the CPU's cases. Cards before Ampere have neither bf16 tensor cores nor flash
attention: their cases are in fp16, and their fused attention is the memory-efficient kernel.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from calibrate.cases.case import MAX_SETS, Case, Generator, Limits, Sizes, TensorArg
from perfmodel.db.device import Device
from perfmodel.units import GIGA, MEGA

BOTH_TYPES = frozenset({"gemm", "elementwise", "norm", "softmax", "conv", "reduction"})
AMPERE = 8.0  # compute capability: bf16 tensor cores and flash attention (CUDA C++ Programming Guide; FlashAttention-2)
CPU_FLOPS, CPU_BYTES = 6 * GIGA, 150 * MEGA  # of the largest calls in the plan for a CPU (`gemm`, `pointwise`)
LONGEST_FP32_S = 10e-3  # of a product at the peak of the FP32 cores: tens of GFLOP to a TFLOP, as layers of models have
LONGEST_MOVE_S = 1e-3  # of a pointwise call at the datasheet bandwidth
ROOM_FACTOR = 2  # times the L2 cache: what is met again after as much other traffic comes from memory
MAX_BYTES, MAX_LENGTH = 8.0, 4.0  # tensors of hundreds of MB, 32,768 tokens a batch, layers of 16,384 features
# Layer norm's means and deviations; batch norm's and its parameters, as under autocast. Group norm's have the input's type.
STATISTICS_STAY = frozenset(
    {"aten.native_layer_norm_backward", "aten.native_batch_norm", "aten.native_batch_norm_backward"}
)
_CPU_FLASH = "aten._scaled_dot_product_flash_attention_for_cpu"


def limits_of(device: Device) -> Limits:
    """How far a plan goes on the device: as long as its calls stay in milliseconds."""
    return Limits(
        flops=max(LONGEST_FP32_S * device.peak_flops_per_s["fp32"] / CPU_FLOPS, 1.0),
        bytes=min(max(LONGEST_MOVE_S * device.memory_bytes_per_s / CPU_BYTES, 1.0), MAX_BYTES),
        length=MAX_LENGTH,
    )


def on_gpu(case: Case, device: Device) -> Case:
    """The case as `device` runs it."""
    return replace(_typed(case, device), state="cold" if _leaves_cache(case, device) else "warm")


def _leaves_cache(case: Case, device: Device) -> bool:
    """True for a cold case whose sets of tensors are more than the L2 cache can hold, even when there can be no more sets.

    A GPU has no pages to fault, so that `fresh` outputs are warm; indices of a table are fresh draws in both states.
    """
    fills = 2 * case.bytes * MAX_SETS >= ROOM_FACTOR * device.l2_bytes
    return case.state == "cold" and case.family != "embedding" and fills


def _typed(case: Case, device: Device) -> Case:
    new = float(device.compute_capability) >= AMPERE
    half = "bfloat16" if new else "float16"
    if case.op == _CPU_FLASH:
        return _flash(case, half) if new else _efficient(case, half)
    if case.op.startswith(_CPU_FLASH):
        return _flash_backward(case, half) if new else _efficient_backward(case, half)
    if case.family in BOTH_TYPES and int(case.key[0], 16) % 2:
        return replace(case, args=tuple(_half_of(case.op, part, half) for part in case.args))
    return case


def _half_of(op: str, value: Any, half: str) -> Any:
    """As `_half`, but for the statistics of norms (drawn `positive`), which CUDA's kernels keep in 32 bit."""
    kept = op in STATISTICS_STAY and isinstance(value, TensorArg) and value.fill == "positive"
    return value if kept else _half(value, half)


def _flash(case: Case, half: str) -> Case:
    query, key, value, dropout, causal = (_half(part, half) for part in case.args)
    op = "aten._scaled_dot_product_flash_attention"
    return replace(case, op=op, args=(query, key, value, dropout, causal, False))


def _efficient(case: Case, half: str) -> Case:
    query, key, value, dropout, causal = (_half(part, half) for part in case.args)
    op = "aten._scaled_dot_product_efficient_attention"
    return replace(case, op=op, args=(query, key, value, None, True, dropout, causal))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Backward:
    """Tensors of a fused attention's backward: gradient, query, key, value and output in 16 bit, and CUDA's statistic."""

    tensors: tuple[TensorArg, ...]
    statistic: TensorArg
    seed: TensorArg
    dropout: float
    causal: bool


def _backward_of(case: Case, half: str) -> _Backward:
    *tensors, statistic, dropout, causal = case.args
    return _Backward(
        tensors=tuple(_half(part, half) for part in tensors),
        statistic=replace(statistic, order=()),
        seed=TensorArg(shape=(), dtype="int64", fill="zeros"),
        dropout=dropout,
        causal=causal,
    )


def _flash_backward(case: Case, half: str) -> Case:
    b = _backward_of(case, half)
    length = b.tensors[1].shape[2]
    # No sequences of several lengths: both lists of their starts are absent.
    args = (*b.tensors, b.statistic, None, None, length, length, b.dropout, b.causal, b.seed, b.seed)
    return replace(case, op="aten._scaled_dot_product_flash_attention_backward", args=args)


def _efficient_backward(case: Case, half: str) -> Case:
    b = _backward_of(case, half)
    grad, query, key, value, out = b.tensors
    mask = [True, True, True, False]
    args = (grad, query, key, value, None, out, b.statistic, b.seed, b.seed, b.dropout, mask, b.causal)
    return replace(case, op="aten._scaled_dot_product_efficient_attention_backward", args=args)


def _half(value: Any, half: str) -> Any:
    """The argument with 32-bit numbers in 16 bit."""
    if isinstance(value, TensorArg):
        return replace(value, dtype=half) if value.dtype == "float32" else value
    if isinstance(value, tuple | list):
        return type(value)(_half(part, half) for part in value)
    return half if value == "float32" else value


@dataclass(frozen=True, slots=True, kw_only=True)
class Foreach:
    """A generator of one call on lists of tensors, as the optimizers of a GPU make them: a network's parameters."""

    op: str
    overload: str
    n_lists: int
    extra: tuple[Any, ...] = ()

    def __call__(self, draw: Sizes) -> Case:
        """One case: up to 40 tensors of a few shapes."""
        shapes = _parameters(draw)
        lists = [[TensorArg(shape=shape, fill="positive") for shape in shapes] for _ in range(self.n_lists)]
        state = draw.pick(["warm", "cold"])
        return Case(family="optimizer", op=self.op, overload=self.overload, args=(*lists, *self.extra), state=state)


def _parameters(draw: Sizes) -> list[tuple[int, ...]]:
    """Shapes of the parameters of some layers: a matrix and a vector each."""
    layers, width = draw.log(1, 20), draw.log(16, 1024 * draw.limits.length, step=8)
    deep = draw.log(16, 1024 * draw.limits.length, step=8)
    room = 3e6 * draw.limits.bytes  # elements of all parameters
    layers = max(min(layers, int(room / (width * deep))), 1)
    return [shape for _ in range(layers) for shape in ((width, deep), (width,))]


def fused_adamw(draw: Sizes) -> Case:
    """AdamW's step in one kernel: parameters, gradients, both moments and the step counters."""
    shapes = _parameters(draw)
    lists = [[TensorArg(shape=shape, fill="positive") for shape in shapes] for _ in range(4)]
    steps = [TensorArg(shape=(), fill="ones") for _ in shapes]
    kwargs = {
        "lr": 1e-3, "beta1": 0.9, "beta2": 0.999, "weight_decay": 0.01, "eps": 1e-8, "amsgrad": False, "maximize": False,
    }  # fmt: skip
    args = (*lists, [], steps)
    return Case(
        family="optimizer", op="aten._fused_adamw_", args=args, kwargs=kwargs, state=draw.pick(["warm", "cold"])
    )


def _foreach(op: str, overload: str, n_lists: int, *extra: Any) -> tuple[Generator, int]:
    return Foreach(op=f"aten._foreach_{op}", overload=overload, n_lists=n_lists, extra=extra), 16


MORE: Mapping[str, Mapping[str, tuple[Generator, int]]] = {
    "optimizer": {
        "foreach_add_": _foreach("add_", "List", 2),
        "foreach_mul_": _foreach("mul_", "Scalar", 1, 1.0),
        "foreach_lerp_": _foreach("lerp_", "Scalar", 2, 0.1),
        "foreach_sqrt": _foreach("sqrt", "default", 1),
        "foreach_addcmul_": _foreach("addcmul_", "Scalar", 3, 1e-6),
        "foreach_addcdiv_": _foreach("addcdiv_", "Scalar", 3, 1e-6),
        "fused_adamw": (fused_adamw, 24),
    }
}
