"""Cases of ops along rows: reductions, norms, softmax, copies with a change of layout, gathers."""

from __future__ import annotations

from functools import partial

from calibrate.cases.case import Case, Generator, Sizes, TensorArg

LARGEST_ELEMS = 8e6


def _rows(draw: Sizes, *, columns: tuple[int, int] = (16, 8192), largest: float = LARGEST_ELEMS) -> tuple[int, int]:
    width = draw.log(*columns)
    return draw.log(1, max(largest * draw.limits.bytes / width, 2)), width


def column_sum(draw: Sizes) -> Case:
    """A bias gradient: a sum over rows that keeps columns."""
    shape = _rows(draw, columns=(1, 8192))
    args = (TensorArg(shape=shape), [0], True)
    return Case(family="reduction", op="aten.sum", overload="dim_IntList", args=args, state=draw.pick(["warm", "cold"]))


def row_mean(op: str, draw: Sizes) -> Case:
    """A reduction of each row."""
    args = (TensorArg(shape=_rows(draw)), [1], True)
    overload = "dim_IntList" if op == "aten.sum" else "dim"
    return Case(family="reduction", op=op, overload=overload, args=args, state=draw.pick(["warm", "cold"]))


def full(op: str, draw: Sizes) -> Case:
    """A reduction to one value."""
    return Case(
        family="reduction",
        op=op,
        args=(TensorArg(shape=(draw.log(16, LARGEST_ELEMS * draw.limits.bytes),)),),
        state=draw.pick(["warm"]),
    )


def image_mean(draw: Sizes) -> Case:
    """Global average pooling."""
    side = draw.pick([1, 2, 4, 7, 8])
    args = (TensorArg(shape=(draw.log(1, 64), draw.log(16, 2048), side, side)), [-1, -2], True)
    return Case(family="reduction", op="aten.mean", overload="dim", args=args, state="warm")


def layer_norm(draw: Sizes) -> Case:
    """Forward over the last dimension."""
    rows, width = _rows(draw, columns=(16, 4096))
    vector = TensorArg(shape=(width,))
    args = (TensorArg(shape=(rows, width)), [width], vector, vector, 1e-5)
    return Case(family="norm", op="aten.native_layer_norm", args=args, state=draw.pick(["warm", "cold"]))


def layer_norm_backward(draw: Sizes) -> Case:
    """All three gradients."""
    rows, width = _rows(draw, columns=(16, 4096))
    full_shape, vector = TensorArg(shape=(rows, width)), TensorArg(shape=(width,))
    stat = TensorArg(shape=(rows, 1), fill="positive")
    args = (full_shape, full_shape, [width], stat, stat, vector, vector, [True, True, True])
    return Case(family="norm", op="aten.native_layer_norm_backward", args=args, state=draw.pick(["warm", "cold"]))


def _image(draw: Sizes, largest: float = 4e6) -> TensorArg:
    while True:
        batch, channels = draw.log(1, 64 * draw.limits.length), draw.log(16, 1024, step=16)
        side = draw.pick([1, 2, 4, 7, 8, 14, 16, 28, 32, 56, 64, 112])
        if 64 <= batch * channels * side * side <= largest * draw.limits.bytes:
            break
    order = (0, 2, 3, 1) if draw.chance(0.3) else ()
    return TensorArg(shape=(batch, channels, side, side), order=order)


def batch_norm(draw: Sizes) -> Case:
    """Training forward, running statistics updated."""
    image = _image(draw)
    vector = TensorArg(shape=(image.shape[1],), fill="positive")
    args = (image, vector, vector, vector, vector, True, 0.1, 1e-5)
    return Case(family="norm", op="aten.native_batch_norm", args=args, state=draw.pick(["warm", "cold"]))


def batch_norm_backward(draw: Sizes) -> Case:
    """All three gradients."""
    image = _image(draw)
    vector = TensorArg(shape=(image.shape[1],), fill="positive")
    args = (image, image, vector, vector, vector, vector, vector, True, 1e-5, [True, True, True])
    return Case(family="norm", op="aten.native_batch_norm_backward", args=args, state=draw.pick(["warm", "cold"]))


def softmax(op: str, draw: Sizes) -> Case:
    """Over the last dimension: attention scores and vocabularies."""
    columns = (16, 1024) if "log" not in op else (16, 32768)
    rows, width = _rows(draw, columns=columns, largest=4e6)
    args = (TensorArg(shape=(rows, width)), -1, False)
    if op == "aten._safe_softmax":
        args = (TensorArg(shape=(rows, width)), -1)  # type: ignore[assignment]  # one argument less
    return Case(family="softmax", op=op, args=args, state=draw.pick(["warm", "cold"]))


def softmax_backward(op: str, draw: Sizes) -> Case:
    """Gradient of the input."""
    columns = (16, 1024) if "log" not in op else (16, 32768)
    shape = TensorArg(shape=_rows(draw, columns=columns, largest=4e6))
    return Case(family="softmax", op=op, args=(shape, shape, -1, "float32"), state=draw.pick(["warm", "cold"]))


def nll(draw: Sizes) -> Case:
    """Negative log likelihood of targets, mean."""
    rows, width = _rows(draw, columns=(16, 32768), largest=4e6)
    target = TensorArg(shape=(rows,), dtype="int64", fill="index", high=width)
    args = (TensorArg(shape=(rows, width)), target, None, 1, -100)
    return Case(family="loss", op="aten.nll_loss_forward", args=args, state="warm")


def nll_backward(draw: Sizes) -> Case:
    """Its gradient: zeros and one value a row."""
    rows, width = _rows(draw, columns=(16, 32768), largest=4e6)
    target = TensorArg(shape=(rows,), dtype="int64", fill="index", high=width)
    one = TensorArg(shape=(), fill="ones")
    args = (one, TensorArg(shape=(rows, width)), target, None, 1, -100, one)
    return Case(family="loss", op="aten.nll_loss_backward", args=args, state=draw.pick(["warm", "cold"]))


def clone(draw: Sizes) -> Case:
    """A contiguous copy of [batch, length, heads, dim] seen as [batch, heads, length, dim], or of a transposed matrix."""
    if draw.chance(0.6):
        batch, length, heads = draw.log(1, 32), draw.log(4, 512 * draw.limits.length), draw.pick([1, 2, 4, 8, 12])
        dim = draw.pick([16, 32, 64, 128])
        if batch * length * heads * dim > LARGEST_ELEMS * draw.limits.bytes:
            batch = 1
        order = draw.pick([(0, 2, 1, 3), (0, 2, 1, 3), (0, 1, 3, 2)])
        arg = TensorArg(shape=(batch, heads, length, dim), order=order)
    else:
        arg = TensorArg(shape=_rows(draw), order=draw.pick([(0, 1), (1, 0)]))
    state = draw.pick(["warm", "cold"])
    return Case(family="copy", op="aten.clone", args=(arg,), kwargs={"memory_format": "contiguous"}, state=state)


def copy_(draw: Sizes) -> Case:
    """A copy into an existing tensor of the same layout."""
    arg = TensorArg(shape=_rows(draw))
    return Case(family="copy", op="aten.copy_", args=(arg, arg), state=draw.pick(["warm", "cold"]))


def cat(draw: Sizes) -> Case:
    """Matrices side by side (features of tables) or three equal parts (query, key, value)."""
    n_parts, rows = draw.pick([2, 3, 4, 9, 27]), draw.log(4, 8192 * draw.limits.length)
    width = draw.log(8, max(min(512.0, LARGEST_ELEMS * draw.limits.bytes / n_parts / rows), 9))
    parts = [TensorArg(shape=(rows, width)) for _ in range(n_parts)]
    return Case(family="copy", op="aten.cat", args=(parts, 1), state=draw.pick(["warm", "cold"]))


def pick_pairs(draw: Sizes) -> Case:
    """Elements of a batch of small squares at constant positions: DLRM's interaction."""
    batch, side = draw.log(16, 8192), draw.pick([4, 8, 9, 16, 27])
    n = side * (side - 1) // 2
    index = TensorArg(shape=(n,), dtype="int64", fill="index", high=side)
    args = (TensorArg(shape=(batch, side, side)), [None, index, index])
    return Case(family="index", op="aten.index", overload="Tensor", args=args, state="warm")


def put_pairs(draw: Sizes) -> Case:
    """Its gradient, accumulated into zeros."""
    batch, side = draw.log(16, 8192), draw.pick([4, 8, 9, 16, 27])
    n = side * (side - 1) // 2
    index = TensorArg(shape=(n,), dtype="int64", fill="index", high=side)
    target, values = TensorArg(shape=(batch, side, side)), TensorArg(shape=(batch, n))
    args = (target, [None, index, index], values, True)
    return Case(family="index", op="aten.index_put", args=args, state="warm")


def max_pool(draw: Sizes) -> Case:
    """The stem's 3 x 3 pooling with stride 2."""
    half = draw.log(4, 56)
    image = TensorArg(shape=(draw.log(1, 32), draw.pick([16, 32, 64]), 2 * half, 2 * half), order=_order(draw))
    args = (image, [3, 3], [2, 2], [1, 1])
    state = draw.pick(["warm", "cold"])
    return Case(family="pool", op="aten.max_pool2d_with_indices", args=args, state=state)


def max_pool_backward(draw: Sizes) -> Case:
    """Its gradient."""
    batch, channels, half = draw.log(1, 32), draw.pick([16, 32, 64]), draw.log(4, 56)
    out = (batch, channels, half, half)
    order = _order(draw)
    index = TensorArg(shape=out, dtype="int64", fill="index", high=4 * half * half, order=order)
    image = TensorArg(shape=(batch, channels, 2 * half, 2 * half), order=order)
    args = (TensorArg(shape=out, order=order), image, [3, 3], [2, 2], [1, 1], [1, 1], False, index)
    state = draw.pick(["warm", "cold"])
    return Case(family="pool", op="aten.max_pool2d_with_indices_backward", args=args, state=state)


def _order(draw: Sizes) -> tuple[int, ...]:
    return (0, 2, 3, 1) if draw.chance(0.25) else ()


def upsample(draw: Sizes) -> Case:
    """Each pixel becomes a square of four."""
    image = _image(draw, 1e6)
    side = 2 * image.shape[2]
    args = (TensorArg(shape=image.shape), [side, side], 2.0, 2.0)
    return Case(family="pool", op="aten.upsample_nearest2d", args=args, state=draw.pick(["warm", "cold"]))


def upsample_backward(draw: Sizes) -> Case:
    """The sums of those squares."""
    image = _image(draw, 1e6)
    batch, channels, side, _ = image.shape
    grad = TensorArg(shape=(batch, channels, 2 * side, 2 * side))
    args = (grad, [2 * side, 2 * side], list(image.shape), 2.0, 2.0)
    state = draw.pick(["warm", "cold"])
    return Case(family="pool", op="aten.upsample_nearest2d_backward", args=args, state=state)


def _grouped(draw: Sizes) -> tuple[TensorArg, int, tuple[int, int, int]]:
    image = TensorArg(shape=_image(draw).shape)
    batch, channels, side, _ = image.shape
    return image, draw.pick([2, 4, 8, 16]), (batch, channels, side * side)


def group_norm(draw: Sizes) -> Case:
    """Forward over groups of channels."""
    image, groups, sizes = _grouped(draw)
    vector = TensorArg(shape=(image.shape[1],))
    args = (image, vector, vector, *sizes, groups, 1e-5)
    return Case(family="norm", op="aten.native_group_norm", args=args, state=draw.pick(["warm", "cold"]))


def group_norm_backward(draw: Sizes) -> Case:
    """All three gradients."""
    image, groups, sizes = _grouped(draw)
    stat = TensorArg(shape=(sizes[0], groups), fill="positive")
    vector = TensorArg(shape=(sizes[1],))
    args = (image, image, stat, stat, vector, *sizes, groups, [True, True, True])
    return Case(family="norm", op="aten.native_group_norm_backward", args=args, state=draw.pick(["warm", "cold"]))


REDUCTION: dict[str, tuple[Generator, int]] = {
    "column_sum": (column_sum, 130),
    "row_mean": (partial(row_mean, "aten.mean"), 50),
    "row_sum": (partial(row_mean, "aten.sum"), 50),
    "sum": (partial(full, "aten.sum"), 20),
    "mean": (partial(full, "aten.mean"), 20),
    "image_mean": (image_mean, 30),
}
NORM: dict[str, tuple[Generator, int]] = {
    "layer_norm": (layer_norm, 70),
    "layer_norm_backward": (layer_norm_backward, 80),
    "batch_norm": (batch_norm, 80),
    "batch_norm_backward": (batch_norm_backward, 120),
    "group_norm": (group_norm, 50),
    "group_norm_backward": (group_norm_backward, 50),
}
SOFTMAX: dict[str, tuple[Generator, int]] = {
    "softmax": (partial(softmax, "aten._softmax"), 56),
    "safe_softmax": (partial(softmax, "aten._safe_softmax"), 56),
    "log_softmax": (partial(softmax, "aten._log_softmax"), 56),
    "softmax_backward": (partial(softmax_backward, "aten._softmax_backward_data"), 60),
    "log_softmax_backward": (partial(softmax_backward, "aten._log_softmax_backward_data"), 60),
}
LOSS: dict[str, tuple[Generator, int]] = {"nll": (nll, 36), "nll_backward": (nll_backward, 36)}
COPY: dict[str, tuple[Generator, int]] = {"clone": (clone, 100), "copy_": (copy_, 24), "cat": (cat, 90)}
INDEX: dict[str, tuple[Generator, int]] = {"pick_pairs": (pick_pairs, 24), "put_pairs": (put_pairs, 24)}
POOL: dict[str, tuple[Generator, int]] = {
    "max_pool": (max_pool, 80),
    "max_pool_backward": (max_pool_backward, 80),
    "upsample": (upsample, 40),
    "upsample_backward": (upsample_backward, 40),
}
