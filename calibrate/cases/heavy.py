"""Cases of embedding lookups (uniform and skewed indices), convolutions and fused attention."""

from __future__ import annotations

from functools import partial

from calibrate.cases.case import Case, Generator, Sizes, TensorArg

MAX_TABLE_BYTES = 200e6
MAX_LOOKED_UP_ELEMS = 8e6
MAX_CONV_FLOPS = 5e9
MAX_CONV_ELEMS = 120e6  # more than any case of the plan for a CPU has
LARGEST_IMAGE_ELEMS = 4e6
MAX_SCORES = 2e7  # pairs of a query and a key


def _table(draw: Sizes) -> tuple[int, int, int, int, float]:
    while True:
        rows, dim = draw.log(500, 2e6 * draw.limits.length), draw.pick([8, 16, 32, 64, 128])
        if rows * dim * 4 <= MAX_TABLE_BYTES * draw.limits.bytes:
            break
    pooling, batch = draw.log(1, 40), draw.log(16, 4096 * draw.limits.length)
    if pooling * batch * dim > MAX_LOOKED_UP_ELEMS * draw.limits.bytes:
        pooling = 1
    return rows, dim, pooling, batch, draw.pick([0.0, 0.0, 0.8, 1.05, 1.3])


def embedding_bag(draw: Sizes) -> Case:
    """Sums of rows; the table is as warm as the batches of a training run leave it: other indices at every call."""
    rows, dim, pooling, batch, zipf = _table(draw)
    indices = TensorArg(shape=(batch * pooling,), dtype="int64", fill="index", high=rows, zipf=zipf)
    offsets = TensorArg(shape=(batch,), dtype="int64", fill="offsets", high=pooling)
    args = (TensorArg(shape=(rows, dim)), indices, offsets, False, 0, True)
    notes = {"zipf_exponent": zipf, "pooling_factor": pooling}
    return Case(family="embedding", op="aten._embedding_bag", args=args, notes=notes, state=draw.pick(["warm", "cold"]))


def embedding(draw: Sizes) -> Case:
    """One row a lookup."""
    rows, dim, _, batch, zipf = _table(draw)
    indices = TensorArg(shape=(batch,), dtype="int64", fill="index", high=rows, zipf=zipf)
    args = (TensorArg(shape=(rows, draw.pick([dim, 256, 512]) if rows < 50000 else dim)), indices)
    state = draw.pick(["warm", "cold"])
    return Case(family="embedding", op="aten.embedding", args=args, notes={"zipf_exponent": zipf}, state=state)


def embedding_dense_backward(draw: Sizes) -> Case:
    """A dense gradient of the whole table."""
    rows, dim, lookups = draw.log(200, 60000), draw.pick([64, 128, 256, 512]), draw.log(16, 4096 * draw.limits.length)
    indices = TensorArg(shape=(lookups,), dtype="int64", fill="index", high=rows)
    args = (TensorArg(shape=(lookups, dim)), indices, rows, -1, False)
    return Case(family="embedding", op="aten.embedding_dense_backward", args=args, state=draw.pick(["warm", "cold"]))


def embedding_bag_backward(sparse: bool, draw: Sizes) -> Case:
    """The gradient of a bag's sum: rows of a sparse tensor, or a dense table."""
    rows, dim, pooling, batch, zipf = _table(draw)
    if not sparse:
        rows = min(rows, 100000)
    lookups = batch * pooling
    indices = TensorArg(shape=(lookups,), dtype="int64", fill="index", high=rows, zipf=zipf)
    offsets = TensorArg(shape=(batch,), dtype="int64", fill="offsets", high=pooling)
    offset2bag = TensorArg(shape=(lookups,), dtype="int64", fill="bags", high=pooling)
    sizes = TensorArg(shape=(batch,), dtype="int64", fill="zeros")
    args = (TensorArg(shape=(batch, dim)), indices, offsets, offset2bag, sizes, sizes, rows, False, 0, sparse, None)
    notes = {"zipf_exponent": zipf, "pooling_factor": pooling}
    state = draw.pick(["warm", "cold"])
    return Case(family="embedding", op="aten._embedding_bag_backward", args=args, notes=notes, state=state)


def sparse_add(draw: Sizes) -> Case:
    """SGD's update of a table with a sparse gradient."""
    rows, dim, pooling, batch, zipf = _table(draw)
    indices = TensorArg(shape=(batch * pooling,), dtype="int64", fill="index", high=rows, zipf=zipf)
    gradient = {"sparse": [indices, TensorArg(shape=(batch * pooling, dim))], "shape": [rows, dim]}
    notes = {"zipf_exponent": zipf, "pooling_factor": pooling}
    return Case(
        family="embedding",
        op="aten.add_",
        overload="Tensor",
        args=(TensorArg(shape=(rows, dim)), gradient),
        kwargs={"alpha": -0.001},
        notes=notes,
        state=draw.pick(["warm", "cold"]),
    )


def coalesce(draw: Sizes) -> Case:
    """Merges the rows of a sparse gradient that name the same row of the table."""
    rows, dim, pooling, batch, zipf = _table(draw)
    indices = TensorArg(shape=(batch * pooling,), dtype="int64", fill="index", high=rows, zipf=zipf)
    gradient = {"sparse": [indices, TensorArg(shape=(batch * pooling, dim))], "shape": [rows, dim]}
    notes = {"zipf_exponent": zipf, "pooling_factor": pooling}
    state = draw.pick(["warm", "cold"])
    return Case(family="embedding", op="aten._coalesce", args=(gradient,), notes=notes, state=state)


def sparse_mask(draw: Sizes) -> Case:
    """Rows of a dense state that a coalesced gradient names: Adagrad's sum of squares."""
    rows, dim, pooling, batch, _ = _table(draw)
    named = min(batch * pooling, rows)
    indices = TensorArg(shape=(named,), dtype="int64", fill="rising", high=rows)
    gradient = {"sparse": [indices, TensorArg(shape=(named, dim))], "shape": [rows, dim], "coalesced": True}
    args = (TensorArg(shape=(rows, dim)), gradient)
    return Case(family="embedding", op="aten.sparse_mask", args=args, state=draw.pick(["warm", "cold"]))


_CHANNELS = (16, 24, 32, 48, 64, 64, 96, 128, 128, 256, 256, 384, 512)


def _conv_sizes(draw: Sizes) -> tuple[TensorArg, TensorArg, int, int, tuple[int, ...]]:
    while True:
        batch, side = draw.log(1, 64 * draw.limits.length), draw.pick([4, 7, 8, 14, 16, 28, 32, 56, 64, 112])
        c_in, c_out = draw.pick([3, *_CHANNELS]), draw.pick([3, *_CHANNELS] if draw.chance(0.1) else _CHANNELS)
        taps, stride = draw.pick([1, 3, 3, 3, 7]), draw.pick([1, 1, 2])
        out = (side + 2 * (taps // 2) - taps) // stride + 1
        flops = 2 * batch * out * out * c_in * c_out * taps * taps
        elems = batch * (side * side * c_in + out * out * c_out)
        if 2e5 < flops < MAX_CONV_FLOPS * draw.limits.flops and elems <= MAX_CONV_ELEMS * draw.limits.bytes:
            break
    order = (0, 2, 3, 1) if draw.chance(0.25) else ()
    image = TensorArg(shape=(batch, c_in, side, side), order=order)
    weight = TensorArg(shape=(c_out, c_in, taps, taps), order=order)
    return image, weight, stride, taps // 2, (batch, c_out, out, out)


def convolution(draw: Sizes) -> Case:
    """Forward, now and then with a bias."""
    image, weight, stride, padding, _ = _conv_sizes(draw)
    bias = TensorArg(shape=(weight.shape[0],)) if draw.chance(0.3) else None
    args = (image, weight, bias, [stride] * 2, [padding] * 2, [1, 1], False, [0, 0], 1)
    return Case(family="conv", op="aten.convolution", args=args, state=draw.pick(["warm", "warm", "cold"]))


def convolution_backward(draw: Sizes) -> Case:
    """Weight gradient and mostly also the input's."""
    image, weight, stride, padding, out = _conv_sizes(draw)
    grad = TensorArg(shape=out, order=image.order)
    mask = [draw.chance(0.85), True, False]
    args = (grad, image, weight, [0], [stride] * 2, [padding] * 2, [1, 1], False, [0, 0], 1, mask)
    return Case(family="conv", op="aten.convolution_backward", args=args, state=draw.pick(["warm", "warm", "cold"]))


def _depthwise_sizes(draw: Sizes) -> tuple[TensorArg, TensorArg, int, int, tuple[int, ...]]:
    """One filter a channel."""
    batch, side, channels = (
        draw.log(1, 64 * draw.limits.length),
        draw.pick([7, 14, 28, 56, 112]),
        draw.log(16, 960, step=8),
    )
    if batch * channels * side * side > LARGEST_IMAGE_ELEMS * draw.limits.bytes:
        batch = 1
    taps, stride = draw.pick([3, 3, 5]), draw.pick([1, 1, 2])
    out = (side + 2 * (taps // 2) - taps) // stride + 1
    order = (0, 2, 3, 1) if draw.chance(0.25) else ()
    image = TensorArg(shape=(batch, channels, side, side), order=order)
    weight = TensorArg(shape=(channels, 1, taps, taps))
    return image, weight, stride, taps // 2, (batch, channels, out, out)


def depthwise(draw: Sizes) -> Case:
    """Forward of a convolution with as many groups as channels."""
    image, weight, stride, padding, _ = _depthwise_sizes(draw)
    args = (image, weight, None, [stride] * 2, [padding] * 2, [1, 1], False, [0, 0], weight.shape[0])
    return Case(family="conv", op="aten.convolution", args=args, state=draw.pick(["warm", "cold"]))


def depthwise_backward(draw: Sizes) -> Case:
    """Gradients of its input and its weight."""
    image, weight, stride, padding, out = _depthwise_sizes(draw)
    grad = TensorArg(shape=out, order=image.order)
    mask = [True, True, False]
    args = (grad, image, weight, [0], [stride] * 2, [padding] * 2, [1, 1], False, [0, 0], weight.shape[0], mask)
    return Case(family="conv", op="aten.convolution_backward", args=args, state=draw.pick(["warm", "cold"]))


def _heads(draw: Sizes) -> tuple[TensorArg, bool]:
    while True:
        batch, heads = draw.log(1, 32), draw.pick([1, 2, 4, 8, 12])
        length, dim = draw.log(16, 1024 * draw.limits.length), draw.pick([16, 32, 64, 128])
        if batch * heads * length * max(length, dim) <= MAX_SCORES * draw.limits.flops:
            break
    return TensorArg(shape=(batch, heads, length, dim), order=(0, 2, 1, 3)), draw.chance(0.5)


def attention(draw: Sizes) -> Case:
    """Fused attention of the CPU, forward."""
    heads, causal = _heads(draw)
    args = (heads, heads, heads, 0.0, causal)
    op = "aten._scaled_dot_product_flash_attention_for_cpu"
    return Case(family="attention", op=op, args=args, state=draw.pick(["warm", "cold"]))


def attention_backward(draw: Sizes) -> Case:
    """All three gradients."""
    heads, causal = _heads(draw)
    batch, n_heads, length, _ = heads.shape
    statistic = TensorArg(shape=(batch, n_heads, length), fill="sums", order=(0, 2, 1))
    args = (heads, heads, heads, heads, heads, statistic, 0.0, causal)
    op = "aten._scaled_dot_product_flash_attention_for_cpu_backward"
    return Case(family="attention", op=op, args=args, state=draw.pick(["warm", "cold"]))


EMBEDDING: dict[str, tuple[Generator, int]] = {
    "embedding_bag": (embedding_bag, 120),
    "embedding": (embedding, 50),
    "embedding_dense_backward": (embedding_dense_backward, 90),
    "embedding_bag_sparse_backward": (partial(embedding_bag_backward, True), 90),
    "embedding_bag_dense_backward": (partial(embedding_bag_backward, False), 90),
    "sparse_add": (sparse_add, 100),
    "coalesce": (coalesce, 60),
    "sparse_mask": (sparse_mask, 80),
}
CONV: dict[str, tuple[Generator, int]] = {
    "convolution": (convolution, 230),
    "convolution_backward": (convolution_backward, 260),
    "depthwise": (depthwise, 30),
    "depthwise_backward": (depthwise_backward, 30),
}
ATTENTION: dict[str, tuple[Generator, int]] = {
    "attention": (attention, 150),
    "attention_backward": (attention_backward, 180),
}
