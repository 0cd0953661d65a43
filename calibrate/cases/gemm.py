"""Cases of matrix products: sizes of linear layers in forward (NT), input gradient (NN) and weight gradient (TN), and bmm."""

from __future__ import annotations

from calibrate.cases.case import Case, Generator, Sizes, TensorArg

MAX_FLOPS = 6e9  # about 30 ms on two cores
MAX_BYTES = 130e6


def _matrix(rows: int, columns: int, *, transposed: bool, batch: int = 0) -> TensorArg:
    lead = (batch,) if batch else ()
    if not transposed:
        return TensorArg(shape=(*lead, rows, columns))
    order = (0, 2, 1) if batch else (1, 0)
    return TensorArg(shape=(*lead, rows, columns), order=order)


def _width(draw: Sizes) -> int:
    """Features of a layer: mostly multiples of 8, now and then a vocabulary, an odd count or a single output."""
    style = draw.random.random()
    if style < 0.06:
        return 1
    if style < 0.14:
        return draw.log(2, 600)
    if style < 0.24:
        return draw.log(2000, 32768 * draw.limits.length, step=8)
    return draw.log(16, 4096 * draw.limits.length, step=8)


def _layer(draw: Sizes) -> tuple[int, int, int]:
    """Rows of a batch, inputs and outputs of a linear layer."""
    while True:
        rows, inputs, outputs = draw.log(8, 8192 * draw.limits.length), _width(draw), _width(draw)
        moved = 4 * (rows * inputs + rows * outputs + inputs * outputs)
        if 2 * rows * inputs * outputs <= MAX_FLOPS * draw.limits.flops and moved <= MAX_BYTES * draw.limits.bytes:
            return rows, inputs, outputs


def mm(draw: Sizes) -> Case:
    """A linear layer's forward without bias, its input gradient or its weight gradient."""
    rows, inputs, outputs = _layer(draw)
    kind = draw.pick(["forward", "input", "weight"])
    if kind == "forward":
        args = (_matrix(rows, inputs, transposed=False), _matrix(inputs, outputs, transposed=True))
    elif kind == "input":
        args = (_matrix(rows, outputs, transposed=False), _matrix(outputs, inputs, transposed=False))
    else:
        args = (_matrix(outputs, rows, transposed=True), _matrix(rows, inputs, transposed=False))
    return Case(family="gemm", op="aten.mm", args=args, state=draw.pick(["warm", "cold"]))


def addmm(draw: Sizes) -> Case:
    """A linear layer's forward with bias; GPT-2 stores its weights the other way round."""
    rows, inputs, outputs = _layer(draw)
    weight = _matrix(inputs, outputs, transposed=draw.chance(0.75))
    args = (TensorArg(shape=(outputs,)), _matrix(rows, inputs, transposed=False), weight)
    return Case(family="gemm", op="aten.addmm", args=args, state=draw.pick(["warm", "cold"]))


def bmm(draw: Sizes) -> Case:
    """A batched product: scores and contexts of attention heads (one side is a head's size), pairs of features."""
    while True:
        batch, length, dim = (
            draw.log(2, 4096),
            draw.log(4, 512 * draw.limits.length),
            draw.pick([16, 32, 32, 64, 64, 128]),
        )
        kind = draw.pick(["scores", "context", "pairs"])
        flops, moved = 2 * batch * length * length * dim, 4 * batch * length * (length + 2 * dim)
        if flops <= MAX_FLOPS * draw.limits.flops / 2 and moved <= MAX_BYTES * draw.limits.bytes:
            break
    if kind == "scores":
        sides = (
            _matrix(length, dim, transposed=False, batch=batch),
            _matrix(dim, length, transposed=True, batch=batch),
        )
    else:
        first = _matrix(length, length, transposed=draw.chance(0.4), batch=batch)
        sides = (first, _matrix(length, dim, transposed=False, batch=batch))
    if kind == "pairs":
        sides = (_matrix(dim, length, transposed=True, batch=batch), sides[0])
    return Case(family="gemm", op="aten.bmm", args=sides, state=draw.pick(["warm", "cold"]))


GENERATORS: dict[str, tuple[Generator, int]] = {"mm": (mm, 520), "addmm": (addmm, 230), "bmm": (bmm, 300)}
