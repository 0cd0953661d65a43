"""Pointwise arithmetic: one kernel that reads every operand once and writes the result once.

Features of the family `elementwise`:

- `n_elems`: elements of the iteration space (of the largest tensor written).
- `n_streams`: tensors of that size that move (operands read and results written); a scalar or a short operand is none.
- `footprint_bytes`: bytes of distinct memory touched; less than what moves where a result overwrites an operand.
- `vectorised`: 1 if all moving tensors have one element size and lie in one dense order, so that PyTorch's kernel loads
  16 bytes at a time (ATen/native/cuda/CUDALoops.cuh, `vectorized_elementwise_kernel`); 0 for its strided kernel.
- `itemsize_bytes`: bytes of an element of the widest operand. `op_kind`: 0 arithmetic, 1 with transcendentals,
  2 a kernel of vLLM.

FLOPs an element are those of the formula on real numbers; a division, square root, exponential or error function is one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from perfmodel.estimate import Work
from perfmodel.graph import Op, TensorSpec
from perfmodel.kernels.copy import touched_bytes
from perfmodel.kernels.registry import KernelCall, kernel_rule

Calls = tuple[KernelCall, ...]

FAMILY = "elementwise"
SERVING = 2  # op_kind of a kernel of vLLM
PIPE = "fp32"  # 16-bit operands are computed in fp32 (ATen opmath_t), never on tensor cores

# FLOPs an element of ops on one, two or three tensors or numbers, by name without `aten.`; each also in place (`_`).
ARITHMETIC_FLOPS: Mapping[str, int] = {
    "abs": 1, "absolute": 1, "add": 1, "addcdiv": 3, "addcmul": 3, "bitwise_and": 1, "bitwise_left_shift": 1,
    "bitwise_not": 1, "bitwise_or": 1, "bitwise_right_shift": 1, "bitwise_xor": 1, "ceil": 1, "clamp": 2, "clamp_max": 1,
    "clamp_min": 1, "clip": 2, "complex": 0, "conj_physical": 1, "copysign": 1, "deg2rad": 1, "div": 1, "divide": 1,
    "eq": 1, "fix": 1, "floor": 1, "floor_divide": 2, "fmax": 1, "fmin": 1, "fmod": 2, "frac": 2, "gcd": 1, "ge": 1,
    "greater": 1, "greater_equal": 1, "gt": 1, "hardshrink": 2, "hardsigmoid": 4, "hardswish": 5, "hardtanh": 2,
    "heaviside": 2, "isclose": 4, "isfinite": 1, "isinf": 1, "isnan": 1, "isneginf": 1, "isposinf": 1, "lcm": 1, "ldexp": 1,
    "le": 1, "leaky_relu": 2, "lerp": 3, "less": 1, "less_equal": 1, "logical_and": 1, "logical_not": 1, "logical_or": 1,
    "logical_xor": 1, "lt": 1, "masked_fill": 1, "maximum": 1, "minimum": 1, "mul": 1, "multiply": 1, "nan_to_num": 1,
    "ne": 1, "neg": 1, "negative": 1, "nextafter": 1, "not_equal": 1, "positive": 0, "rad2deg": 1, "reciprocal": 1,
    "relu": 1, "relu6": 2, "remainder": 3, "round": 1, "rsub": 1, "sgn": 1, "sign": 1, "signbit": 1, "softshrink": 2,
    "sqrt": 1, "square": 1, "sub": 1, "subtract": 1, "threshold": 1, "true_divide": 1, "trunc": 1, "where": 1,
    "_prelu_kernel": 2, "isreal": 1, "__and__": 1, "__or__": 1, "__xor__": 1, "__lshift__": 1, "__rshift__": 1,
    "__iand__": 1, "__ior__": 1, "__ixor__": 1, "__ilshift__": 1, "__irshift__": 1, "_conj_physical": 1, "_neg_view_copy": 1,
    "_add_relu": 2,
}  # fmt: skip
TRANSCENDENTAL_FLOPS: Mapping[str, int] = {
    "acos": 1, "acosh": 1, "angle": 1, "asin": 1, "asinh": 1, "atan": 1, "atan2": 1, "atanh": 1, "celu": 4, "cos": 1,
    "cosh": 1, "digamma": 1, "elu": 4, "erf": 1, "erfc": 1, "erfinv": 1, "exp": 1, "exp2": 1, "expm1": 1, "float_power": 1,
    "gelu": 5, "hypot": 4, "i0": 1, "igamma": 1, "igammac": 1, "lgamma": 1, "log": 1, "log10": 1, "log1p": 1, "log2": 1,
    "logaddexp": 5, "logaddexp2": 5, "logit": 3, "mish": 5, "mvlgamma": 1, "polar": 4, "polygamma": 1, "pow": 1, "rsqrt": 1,
    "selu": 4, "sigmoid": 4, "silu": 5, "sin": 1, "sinc": 3, "sinh": 1, "softplus": 4, "special_entr": 2, "special_erfcx": 1,
    "special_expit": 4, "special_log1p": 1, "special_ndtri": 1, "special_xlog1py": 3, "special_xlogy": 2, "tan": 1,
    "tanh": 1, "xlogy": 2,
}  # fmt: skip
# Backward of pointwise ops, from torch/csrc/autograd and ATen/native/BinaryOps formulas.
BACKWARD_FLOPS: Mapping[str, tuple[int, int]] = {  # FLOPs an element, op_kind
    "elu_backward": (4, 1), "gelu_backward": (12, 1), "hardshrink_backward": (2, 0), "hardsigmoid_backward": (3, 0),
    "hardswish_backward": (6, 0), "hardtanh_backward": (2, 0), "infinitely_differentiable_gelu_backward": (12, 1),
    "leaky_relu_backward": (2, 0), "log_sigmoid_backward": (5, 1), "logit_backward": (4, 0), "mish_backward": (10, 1),
    "rrelu_with_noise_backward": (1, 0), "sigmoid_backward": (3, 0), "silu_backward": (8, 1), "softplus_backward": (5, 1),
    "softshrink_backward": (2, 0), "tanh_backward": (3, 0), "threshold_backward": (1, 0),
    "_prelu_kernel_backward": (3, 0), "log_sigmoid_forward": (5, 1), "rrelu_with_noise": (2, 0),
}  # fmt: skip
# Real FLOPs of one complex operation: (a + bi)(c + di) is 4 multiplies and 2 adds; a quotient adds |c + di|^2 (3) and 2
# divisions to that product; everything else works on the two parts alike.
COMPLEX_FLOPS: Mapping[str, int] = {"mul": 6, "multiply": 6, "square": 6, "div": 11, "true_divide": 11, "reciprocal": 6}
COMPLEX_PARTS = 2


def is_complex(spec: TensorSpec) -> bool:
    """True for complex element types."""
    return spec.dtype.startswith("complex")


def distinct(specs: Sequence[TensorSpec]) -> tuple[TensorSpec, ...]:
    """The tensors that are read: one that is passed twice (x * x) counts once.

    Two dense tensors of one storage, shape and strides are the same tensor; two strided ones may be different slices of it
    (the halves of a gated projection), and count twice.
    """
    seen: dict[object, TensorSpec] = {}
    for position, spec in enumerate(specs):
        layout = (spec.storage, spec.shape, spec.strides)
        seen.setdefault(layout if spec.is_contiguous else (position, layout), spec)
    return tuple(seen.values())


def dense_order(spec: TensorSpec) -> tuple[int, ...] | None:
    """Strides of the dimensions longer than 1 if the tensor fills its memory without gaps or overlap, else None."""
    expected = 1
    for stride, size in sorted((st, si) for si, st in zip(spec.shape, spec.strides, strict=True) if si > 1):
        if stride != expected:
            return None
        expected *= size
    return tuple(stride for size, stride in zip(spec.shape, spec.strides, strict=True) if size > 1)


def is_vectorised(specs: Sequence[TensorSpec]) -> bool:
    """True if the tensors have one element size and one dense order (see the module). Numbers do not matter."""
    orders = {(spec.itemsize_bytes, spec.shape, dense_order(spec)) for spec in specs if spec.n_elems > 1}
    return len(orders) <= 1 and all(order is not None for _, _, order in orders)


def pointwise_calls(
    read: Sequence[TensorSpec], written: Sequence[TensorSpec], flops_per_elem: int, *, op_kind: int
) -> Calls:
    """One kernel over the elements of `written`; () if there are none."""
    n_elems = max((spec.n_elems for spec in written), default=0)
    if n_elems == 0:
        return ()
    operands = distinct(read)
    moving = [spec for spec in (*operands, *written) if touched_bytes(spec) * 2 > n_elems * spec.itemsize_bytes]
    work = Work(
        flops=flops_per_elem * n_elems,
        read_bytes=sum(touched_bytes(spec) for spec in operands),
        write_bytes=sum(touched_bytes(spec) for spec in written),
    )
    features = {
        "n_elems": float(n_elems),
        "footprint_bytes": float(sum(touched_bytes(spec) for spec in distinct((*operands, *written)))),
        "n_streams": float(max(len(moving), 1)),
        "vectorised": float(is_vectorised((*operands, *written))),
        "itemsize_bytes": float(max(spec.itemsize_bytes for spec in (*moving, *written))),
        "op_kind": float(op_kind),
    }
    return (KernelCall(family=FAMILY, work=work, dtype=written[0].dtype, pipe=PIPE, features=features),)


def _base(op: Op) -> str:
    """The op's name in the tables: without namespace and, for an in-place op, without the last underscore."""
    name = op.name.removeprefix("aten.")
    return name.removesuffix("_") if not name.endswith("__") else name


def _in_both_forms(names: Mapping[str, object]) -> tuple[str, ...]:
    plain = [f"aten.{name}" for name in names]
    return (*plain, *(f"{name}_" for name in plain if not name.endswith("__")))


def flops_per_elem(op: Op) -> int:
    """FLOPs for each element of the result: complex operands and a scale factor `alpha` included."""
    name = _base(op)
    flops = ARITHMETIC_FLOPS.get(name, TRANSCENDENTAL_FLOPS.get(name, 1))
    scaled = name in {"add", "sub", "rsub", "subtract"} and op.attrs.get("alpha", 1) not in (None, 1)
    flops += scaled
    if any(is_complex(spec) for spec in op.inputs):
        return COMPLEX_FLOPS.get(name, COMPLEX_PARTS * flops)
    return flops


@kernel_rule(*_in_both_forms(ARITHMETIC_FLOPS), *_in_both_forms(TRANSCENDENTAL_FLOPS))
def pointwise(op: Op) -> Calls:
    """Reads each distinct operand once (in place, `self` too) and writes the result once; a broadcast reads less."""
    written = op.outputs or op.inputs[:1]
    kind = int(_base(op) in TRANSCENDENTAL_FLOPS)
    return pointwise_calls(op.inputs, written, flops_per_elem(op), op_kind=kind)


@kernel_rule(*(f"aten.{name}" for name in BACKWARD_FLOPS))
def pointwise_backward(op: Op) -> Calls:
    """Reads the gradient and what forward saved, writes the input's gradient."""
    flops, kind = BACKWARD_FLOPS[_base(op)]
    return pointwise_calls(op.inputs, op.outputs, flops, op_kind=kind)


@kernel_rule("aten.glu")
def glu(op: Op) -> Calls:
    """One half of the input times the sigmoid of the other: 5 FLOPs an element written."""
    return pointwise_calls(op.inputs, op.outputs, 5, op_kind=1)


@kernel_rule("aten.glu_backward")
def glu_backward(op: Op) -> Calls:
    """Reads the gradient and both halves and writes the gradients of both: 5 FLOPs for the value, 4 for the gate."""
    halves = op.outputs[0].n_elems // 2
    return tuple(
        KernelCall(
            family=call.family,
            work=Work(flops=9 * halves, read_bytes=call.work.read_bytes, write_bytes=call.work.write_bytes),
            dtype=call.dtype,
            pipe=call.pipe,
            features=call.features,
        )
        for call in pointwise_calls(op.inputs, op.outputs, 0, op_kind=1)
    )


@kernel_rule("perfmodel.fused_pointwise")
def fused_pointwise(op: Op) -> Calls:
    """A chain of pointwise ops in one kernel, as a compiler or a hand-written kernel runs it.

    `attrs["flops_per_elem"]` counts the chain's FLOPs for each element written (default 1).
    """
    return pointwise_calls(op.inputs, op.outputs, int(op.attrs.get("flops_per_elem", 1)), op_kind=1)


@kernel_rule("vllm.silu_and_mul", "vllm.gelu_new", "vllm.gelu_and_mul")
def serving_activation(op: Op) -> Calls:
    """An activation of the serving engine vLLM: a block a row, one element a thread (its csrc/activation_kernels.cu)."""
    return pointwise_calls(op.inputs, op.outputs, 6, op_kind=SERVING)
