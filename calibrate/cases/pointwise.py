"""Cases of pointwise ops, optimizer loops, random numbers, fills and losses: one size, a few forms."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

from calibrate.cases.case import Case, Generator, Sizes, State, TensorArg

LARGEST_ELEMS = 12e6
HEAVY_ELEMS = 3e6  # of ops that take several nanoseconds an element


def _size(draw: Sizes, largest: float) -> tuple[int, ...]:
    n = draw.even(16, largest)
    if n > 4096 and draw.chance(0.5):
        columns = draw.pick([32, 64, 128, 256, 512, 768, 1024])
        return (max(n // columns, 1), columns)
    return (n,)


def _state(draw: Sizes, *, fresh: bool) -> State:
    found: State = draw.pick(["warm", "cold", "cold"] if fresh else ["warm", "cold"])
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class SameShape:
    """A generator of calls on `n_tensors` tensors of one shape, then plain arguments."""

    op: str
    overload: str
    n_tensors: int
    extra: tuple[Any, ...]
    fill: str
    family: str
    fresh: bool

    def __call__(self, draw: Sizes) -> Case:
        """One case."""
        shape = _size(draw, LARGEST_ELEMS * draw.limits.bytes)
        tensors = tuple(TensorArg(shape=shape, fill=self.fill) for _ in range(self.n_tensors))
        state = _state(draw, fresh=self.fresh)
        return Case(family=self.family, op=self.op, overload=self.overload, args=(*tensors, *self.extra), state=state)


def add_row(op: str, draw: Sizes) -> Case:
    """A matrix and a row: broadcast over rows."""
    columns = draw.log(8, 2048)
    rows = draw.log(4, max(LARGEST_ELEMS * draw.limits.bytes / 2 / columns, 5))
    args = (TensorArg(shape=(rows, columns)), TensorArg(shape=(columns,)))
    return Case(family="elementwise", op=op, overload="Tensor", args=args, state=_state(draw, fresh=False))


def scalar_divisor(draw: Sizes) -> Case:
    """A tensor divided by a tensor of one element, in place."""
    shape = _size(draw, LARGEST_ELEMS * draw.limits.bytes)
    args = (TensorArg(shape=shape), TensorArg(shape=(), fill="ones"))
    return Case(family="elementwise", op="aten.div_", overload="Tensor", args=args, state=_state(draw, fresh=False))


def where(draw: Sizes) -> Case:
    """A mask of a square, broadcast over batch and heads, selects scores or a scalar."""
    length, batch, heads = draw.log(8, 512), draw.log(1, 16), draw.pick([1, 2, 4, 8, 12])
    if length * length * batch * heads > HEAVY_ELEMS * draw.limits.bytes:
        batch = 1
    mask = TensorArg(shape=(1, 1, length, length), dtype="bool", fill="mask")
    args = (mask, TensorArg(shape=(batch, heads, length, length)), TensorArg(shape=(), fill="ones"))
    return Case(family="elementwise", op="aten.where", overload="self", args=args, state=_state(draw, fresh=False))


def cast(source: str, target: str, draw: Sizes) -> Case:
    """A change of type."""
    arg = TensorArg(
        shape=_size(draw, LARGEST_ELEMS * draw.limits.bytes),
        dtype=source,
        fill="mask" if source == "bool" else "normal",
    )
    return Case(
        family="copy", op="aten._to_copy", args=(arg,), kwargs={"dtype": target}, state=_state(draw, fresh=False)
    )


def like(op: str, draw: Sizes) -> Case:
    """A new tensor filled with a value."""
    arg = TensorArg(shape=_size(draw, LARGEST_ELEMS * draw.limits.bytes))
    return Case(family="copy", op=op, args=(arg,), state=_state(draw, fresh=True))


def new_zeros(draw: Sizes) -> Case:
    """Zeros of a shape of their own."""
    shape = _size(draw, LARGEST_ELEMS * draw.limits.bytes)
    return Case(
        family="copy", op="aten.new_zeros", args=(TensorArg(shape=(4,)), list(shape)), state=_state(draw, fresh=True)
    )


def loss(op: str, extra: tuple[Any, ...], *, backward: bool, draw: Sizes) -> Case:
    """A mean loss of predictions and targets in (0, 1)."""
    shape = (draw.log(16, 1e6 * draw.limits.bytes),)
    pair = (TensorArg(shape=shape, fill="unit"), TensorArg(shape=shape, fill="unit"))
    args = (TensorArg(shape=(), fill="ones"), *pair, *extra) if backward else (*pair, *extra)
    return Case(family="loss", op=op, args=args, state="warm")


def _plain(op: str, n_tensors: int, *extra: Any, family: str = "elementwise", **options: Any) -> SameShape:
    """Options: overload, fill, fresh."""
    return SameShape(
        op=op,
        n_tensors=n_tensors,
        extra=extra,
        family=family,
        overload=options.get("overload", "default"),
        fill=options.get("fill", "normal"),
        fresh=options.get("fresh", False),
    )


FORWARD: dict[str, tuple[Generator, int]] = {
    "relu": (_plain("aten.relu", 1, fresh=True), 30),
    "relu_": (_plain("aten.relu_", 1), 20),
    "threshold_backward": (_plain("aten.threshold_backward", 2, 0), 24),
    "add": (_plain("aten.add", 2, overload="Tensor", fresh=True), 40),
    "add_row": (partial(add_row, "aten.add"), 40),
    "mul": (_plain("aten.mul", 2, overload="Tensor"), 30),
    "mul_row": (partial(add_row, "aten.mul"), 36),
    "mul_scalar": (_plain("aten.mul", 1, 0.5, overload="Tensor"), 16),
    "add_scalar": (_plain("aten.add", 1, 1.0, overload="Tensor"), 12),
    "sub": (_plain("aten.sub", 2, overload="Tensor"), 16),
    "div": (_plain("aten.div", 2, overload="Tensor", fill="positive"), 20),
    "div_": (scalar_divisor, 16),
    "pow": (_plain("aten.pow", 1, 3.0, overload="Tensor_Scalar"), 24),
    "square": (_plain("aten.pow", 1, 2, overload="Tensor_Scalar"), 16),
    "tanh": (_plain("aten.tanh", 1), 24),
    "tanh_backward": (_plain("aten.tanh_backward", 2), 24),
    "sigmoid": (_plain("aten.sigmoid", 1), 20),
    "sigmoid_backward": (_plain("aten.sigmoid_backward", 2), 16),
    "gelu": (_plain("aten.gelu", 1), 24),
    "gelu_backward": (_plain("aten.gelu_backward", 2), 24),
    "silu": (_plain("aten.silu", 1), 16),
    "silu_backward": (_plain("aten.silu_backward", 2), 16),
    "exp": (_plain("aten.exp", 1), 14),
    "rsqrt": (_plain("aten.rsqrt", 1, fill="positive"), 14),
    "neg": (_plain("aten.neg", 1), 14),
    "where": (where, 24),
}
OPTIMIZER: dict[str, tuple[Generator, int]] = {
    "add_": (_plain("aten.add_", 2, overload="Tensor", family="optimizer"), 36),
    "mul_": (_plain("aten.mul_", 1, 1.0, overload="Tensor", family="optimizer"), 24),
    "lerp_": (_plain("aten.lerp_", 2, 0.1, overload="Scalar", family="optimizer"), 24),
    "sqrt": (_plain("aten.sqrt", 1, fill="positive", family="optimizer"), 24),
    "addcmul_": (_plain("aten.addcmul_", 3, family="optimizer"), 30),
    "addcdiv_": (_plain("aten.addcdiv_", 3, fill="positive", family="optimizer"), 30),
    "div_scalar": (_plain("aten.div", 1, 3.0, overload="Tensor", family="optimizer"), 20),
}
RANDOM: dict[str, tuple[Generator, int]] = {
    "bernoulli_": (_plain("aten.bernoulli_", 1, 0.9, overload="float", family="random"), 30),
    "normal_": (_plain("aten.normal_", 1, family="random"), 12),
}
FILL: dict[str, tuple[Generator, int]] = {
    "ones_like": (partial(like, "aten.ones_like"), 20),
    "zeros_like": (partial(like, "aten.zeros_like"), 20),
    "new_zeros": (new_zeros, 20),
    "zero_": (_plain("aten.zero_", 1, family="copy"), 16),
    "cast_down": (partial(cast, "float32", "bfloat16"), 16),
    "cast_up": (partial(cast, "bfloat16", "float32"), 16),
    "cast_mask": (partial(cast, "bool", "float32"), 10),
}
LOSS: dict[str, tuple[Generator, int]] = {
    "bce_logits": (
        lambda draw: loss("aten.binary_cross_entropy_with_logits", (), backward=False, draw=draw),
        16,
    ),
    "bce": (lambda draw: loss("aten.binary_cross_entropy", (), backward=False, draw=draw), 12),
    "bce_backward": (lambda draw: loss("aten.binary_cross_entropy_backward", (), backward=True, draw=draw), 12),
    "mse": (lambda draw: loss("aten.mse_loss", (), backward=False, draw=draw), 12),
    "mse_backward": (lambda draw: loss("aten.mse_loss_backward", (1,), backward=True, draw=draw), 12),
}
