"""What the CPU's law reads of an op: one kernel call an op, for a CPU runs an operator as one whole call.

Features:

- `work`: FLOPs of a product, convolution or attention; else the larger of input and output elements; looked-up elements of
  an embedding.
- `m`, `n`, `k`, `batch`, `trans_a`, `trans_b`: of products (others: columns, rows, 1).
- `columns`, `rows`: last dimension of the largest tensor, and the product of the others.
- `shared_bytes`, `memory_bytes`, `fresh_bytes`: bytes that come from the last-level cache, from memory, and in new pages
  (see `cpu_memory`).
- `in_bytes`, `out_bytes`, `n_tensors`, `strided` (an input's innermost dimension is not the output's), `broadcast`.
- `tails`: rows that do not end with a whole vector; `narrow`: elements of rows shorter than one, which take a scalar loop.
- `parts`: pieces that threads can share, where it is rows; 0 where it is not known.
- `lanes_n`, `lanes_k`: of products and convolutions, how many times more lanes than columns (channels) their vectors have.
- `far_rows`: rows of a table that come from memory; `distinct`: rows that a batch names at least once.
- `flushed`: 1 for a call on a table that was measured right after other memory was swept through the caches: its code and
  the page tables had to come back as well. Of a step, the share of the caches that was swept (`cpu_law.flushed`).
- `kind`, `taps`, `stride`: of convolutions; `causal`, `head_dim`: of attention; `lookups`, `pooling`: of embeddings.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from perfmodel.estimate import Work
from perfmodel.graph import Op, TensorSpec
from perfmodel.kernels.copy import innermost, touched_bytes
from perfmodel.kernels.cpu_memory import Reach, beyond, level_bytes
from perfmodel.kernels.embedding import Lookups
from perfmodel.kernels.locality import expected_unique, popularity
from perfmodel.kernels.pricing import SPARSE_ARGUMENT, calls_of
from perfmodel.kernels.registry import KernelCall
from perfmodel.units import MEBI

LINE_BYTES = 64
LANES = 16  # fp32 numbers in a 512-bit vector
# Zen 4: 1 MiB of private L2 a core (AMD EPYC 9004 Series Architecture Overview, 58015-1.3).
PRIVATE_BYTES = 1 * MEBI
# Size at which half of a working set is lost to the last-level cache, as a share of it, and how sharply it is lost:
# `mul_` of one tensor reads and writes 340 GB/s up to 16 MiB, 139 at 24, 104 at 32, 68 at 48 and 53 from 80 MiB on
# (2 threads, torch 2.13, measured 2026-11-29).
SHARED_FRAC = 1.06
SHARPNESS = 2.9
TABLE_OPS = frozenset({"aten._embedding_bag", "aten._embedding_bag_forward_only", "aten.embedding"})
TABLE_GRADIENTS = frozenset({
    "aten._embedding_bag_backward", "aten._embedding_bag_dense_backward", "aten._embedding_bag_sparse_backward",
    "aten.embedding_dense_backward",
})  # fmt: skip


# `embedding_dense_backward` gives each thread at least this many rows of the table, and has threads only above this many
# lookups (ATen/native/Embedding.cpp).
TABLE_GRAIN = 1000
_BAG_BACKWARD = frozenset({"_embedding_bag_backward"})
# Operators that share a loop with one that is measured.
_SAME_LOOP: Mapping[str, str] = {
    "mm": "product", "addmm": "product", "baddbmm": "bmm", "_index_put_impl_": "index_put", "index_put_": "index_put",
    "_embedding_bag_forward_only": "_embedding_bag", "zeros": "new_zeros", "native_batch_norm_legit": "native_batch_norm",
    "sqrt_": "sqrt", "sub_": "add_", "copy": "copy_",
}  # fmt: skip
_SQUARE = 2  # `pow` multiplies once
_IMAGES = frozenset({
    "native_batch_norm", "native_batch_norm_backward", "max_pool2d_with_indices", "max_pool2d_with_indices_backward",
    "convolution", "convolution_backward",
})  # fmt: skip
_CONVOLUTIONS = frozenset({"convolution", "convolution_backward"})
_FLAT = frozenset({"elementwise", "optimizer", "copy", "fill", "random", "loss"})
_BROADCAST = frozenset({"add", "mul", "sub", "div"})
_REDUCTIONS = frozenset({"sum", "mean"})
# Families whose rows are shared out among threads (`parallel_for` over the outer size in ATen/native/cpu).
_BY_ROWS = frozenset({"softmax", "norm", "loss"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    """How a table is read: what extraction noted on its lookups."""

    zipf_exponent: float = 0.0
    histogram: tuple[tuple[float, float], ...] = ()


def op_key(op: Op) -> str:
    """Segment of the op: its operator, and the form that makes it another loop.

    `_sparse`: an argument is a sparse tensor. `_row`: an input is broadcast. `_last`: channels are contiguous. Products of
    two matrices are one segment, with or without a vector added; their layout is a feature.
    """
    name = op.name.removeprefix("aten.").replace(".", "_")
    if any(argument.endswith(SPARSE_ARGUMENT) for argument in op.input_names):
        return f"{name}_sparse"
    if name in _BAG_BACKWARD:
        return f"{name}_sparse" if op.attrs.get("sparse") else f"{name}_dense"
    if name == "pow" and op.attrs.get("exponent") == _SQUARE:
        return "square"
    if name in _SAME_LOOP:
        return _product_key(op) if _SAME_LOOP[name] == "product" else _SAME_LOOP[name]
    if name in _REDUCTIONS and op.inputs and op.outputs:
        return f"{name}_{_reduced(op)}"
    if name in _CONVOLUTIONS and int(op.attrs.get("groups") or 1) > 1:
        return f"{name}_grouped"
    largest = max((*op.inputs, *op.outputs), key=lambda spec: spec.n_elems, default=None)
    if name in _IMAGES and largest is not None and _channels_last(largest):
        return f"{name}_last"
    out = op.outputs[0].n_elems if op.outputs else 0
    is_row = name in _BROADCAST and any(1 < spec.n_elems < out for spec in op.inputs)
    return f"{name}_row" if is_row else name


def _product_key(op: Op) -> str:
    """A product with one row or one column is a product of a matrix and a vector: another library call."""
    out = op.outputs[0] if op.outputs else None
    return "product_vector" if out is not None and 1 in out.shape[-2:] else "product"


def _reduced(op: Op) -> str:
    """What a reduction sums over: `all` elements, elements that lie together (`last`) or apart (`first`)."""
    source, out = op.inputs[0], op.outputs[0]
    if out.n_elems <= 1:
        return "all"
    dims = [int(dim) % max(len(source.shape), 1) for dim in _dims(op)]
    return "last" if any(source.strides[dim] == 1 for dim in dims if source.shape[dim] > 1) else "first"


def _dims(op: Op) -> Sequence[int]:
    found = op.attrs.get("dim")
    if isinstance(found, int):
        return (found,)
    return tuple(found) if found else tuple(range(len(op.inputs[0].shape)))


def _channels_last(spec: TensorSpec) -> bool:
    return len(spec.shape) == 4 and spec.shape[1] > 1 and spec.strides[1] == 1 and math.prod(spec.shape[2:]) > 1


def accesses(ops: Sequence[Op]) -> dict[int, Access]:
    """Per storage of a table, and of the indices into it: how its rows are drawn."""
    found: dict[int, Access] = {}
    for op in ops:
        if op.name in TABLE_OPS:
            pairs = tuple((float(a), float(b)) for a, b in op.attrs.get("histogram") or ())
            exponent = float(op.attrs.get("zipf_exponent") or 0.0)
            access = Access(zipf_exponent=exponent, histogram=pairs)
            found |= {op.inputs[0].storage: access, op.inputs[1].storage: access}
    return found


def table_lookups(op: Op, known: Mapping[int, Access]) -> Lookups | None:
    """The lookups of an op that reads or updates rows of a table (its first input); None for every other op."""
    if op.name in TABLE_OPS:
        n_lookups = float(op.inputs[1].n_elems)
    elif op_key(op) in ("add__sparse", "sparse_mask_sparse"):
        n_lookups = float(op.inputs[1].shape[-1])
    else:
        return None
    table = op.inputs[0]
    access = known.get(table.storage) or _noted(op)
    return Lookups(
        rows=table.shape[0],
        n_lookups=n_lookups,
        n_bags=op.outputs[0].shape[0] if op.outputs else 1,
        row_bytes=table.shape[-1] * table.itemsize_bytes,
        zipf_exponent=access.zipf_exponent,
        histogram=access.histogram,
    )


def _noted(op: Op) -> Access:
    return Access(
        zipf_exponent=float(op.attrs.get("zipf_exponent") or 0.0),
        histogram=tuple((float(a), float(b)) for a, b in op.attrs.get("histogram") or ()),
    )


def gradient_rows(op: Op, known: Mapping[int, Access]) -> float:
    """Distinct rows of a table that the gradient of its lookups names; 0 for every other op."""
    rows = op.attrs.get("num_weights") or (op.outputs[0].shape[0] if op.outputs else 0)
    if op.name not in TABLE_GRADIENTS or not rows:
        return 0.0
    access = known.get(op.inputs[1].storage) or _noted(op)
    n_lookups = float(op.inputs[1].n_elems)
    return expected_unique(popularity(int(rows), access.zipf_exponent, access.histogram), n_lookups)


def rows_bytes(lookups: Lookups) -> float:
    """Bytes of the distinct rows a batch touches, in whole cache lines."""
    return lookups.unique * _line_bytes(lookups)


def _line_bytes(lookups: Lookups) -> float:
    return math.ceil(lookups.row_bytes / LINE_BYTES) * LINE_BYTES


def cpu_call(
    op: Op, reach: Reach, lookups: Lookups | None, shared_bytes: float, known: Mapping[int, Access] | None = None
) -> KernelCall:
    """The op as the law reads it; `shared_bytes` is the size of the last-level cache, `known` how tables are read."""
    sizes = {"private": float(PRIVATE_BYTES), "shared": SHARED_FRAC * shared_bytes}
    calls = calls_of(op)
    flops = sum(call.work.flops for call in calls)
    features = _sizes(op)
    from_shared, from_memory = level_bytes(reach, sizes, SHARPNESS)
    features |= {"shared_bytes": from_shared, "memory_bytes": from_memory, "fresh_bytes": reach.fresh_bytes}
    first = calls[0].features if calls else {}
    family = calls[0].family if calls else "unmodelled"
    if family in _FLAT and _is_flat(op):
        features |= {"columns": features["out_elems"], "rows": 1.0}
    features |= _vectors(features)
    if family in _BY_ROWS and not _is_image(op):
        features["parts"] = features["rows"]
    if family in ("gemm", "conv", "attention"):
        features |= _product(family, first, op.attrs)
        features["work"] = float(flops)
        features["kernels"] = float(len(calls))
    if lookups is not None:
        features |= _table(lookups, reach, sizes)
    elif op.name in TABLE_GRADIENTS:
        features |= _table_gradient(op, gradient_rows(op, known or {}), sizes["shared"])
    moved = Work(flops=flops, read_bytes=int(features["in_bytes"]), write_bytes=int(features["out_bytes"]))
    dtype = op.inputs[0].dtype if op.inputs else "float32"
    return KernelCall(family=family, work=moved, dtype=dtype, pipe="fp32", features=features)


def _table_gradient(op: Op, distinct: float, cache_bytes: float) -> dict[str, float]:
    """Rows of a gradient added into a table's, one lookup after another; the table's zeros are among the bytes written."""
    n_lookups, dim = float(op.inputs[1].n_elems), float(op.inputs[0].shape[-1])
    found = {
        "lookups": n_lookups,
        "pooling": n_lookups / max(op.inputs[0].shape[0], 1),
        "columns": dim,
        "rows": n_lookups,
        "work": n_lookups * dim,
        "tails": 0.0,
        "narrow": 0.0,
        "distinct": distinct,
    }
    if not op.attrs.get("sparse") and op.outputs:
        found["far_rows"] = distinct * beyond(float(op.outputs[0].bytes), cache_bytes, SHARPNESS)
    if op.name == "aten.embedding_dense_backward":
        many = n_lookups > TABLE_GRAIN and op.outputs
        found["parts"] = float(math.ceil(op.outputs[0].shape[0] / TABLE_GRAIN)) if many else 1.0
    return found


def _sizes(op: Op) -> dict[str, float]:
    largest = max((*op.inputs, *op.outputs), key=lambda spec: spec.n_elems, default=None)
    columns = float(_columns(largest, image=op.name.removeprefix("aten.") in _IMAGES)) if largest is not None else 1.0
    elems = float(largest.n_elems) if largest is not None else 1.0
    out = op.outputs[0] if op.outputs else (op.inputs[0] if op.inputs else None)
    out_elems = float(out.n_elems) if out is not None else 1.0
    touched = max((touched_bytes(s) / s.itemsize_bytes for s in op.inputs), default=0.0)
    return {
        "work": max(touched, out_elems, 1.0),
        "columns": columns,
        "rows": elems / max(columns, 1.0),
        "in_bytes": float(sum(touched_bytes(s) for s in op.inputs)),
        "out_bytes": float(sum(s.bytes for s in op.outputs)),
        "out_elems": out_elems,
        "n_tensors": float(len([s for s in op.inputs if s.n_elems > 1])),
        "strided": float(out is not None and any(_is_strided(s, out) for s in op.inputs)),
        "broadcast": float(any(1 < s.n_elems < out_elems for s in op.inputs)),
    }


def _vectors(features: Mapping[str, float]) -> dict[str, float]:
    """How badly rows fit into vectors."""
    columns, rows = features["columns"], features["rows"]
    return {
        "tails": rows if columns % LANES and columns > LANES else 0.0,
        "narrow": features["work"] if columns < LANES else 0.0,
    }


def _lanes(n: float) -> float:
    return math.ceil(n / LANES) * LANES / max(n, 1.0)


def _is_image(op: Op) -> bool:
    return op.name.removeprefix("aten.") in _IMAGES or "group_norm" in op.name


def _is_flat(op: Op) -> bool:
    """True if the loop runs over all elements as one row: tensors of one size in one order, and scalars."""
    sizes = {spec.n_elems for spec in (*op.inputs, *op.outputs) if spec.n_elems > 1}
    layouts = {spec.strides for spec in (*op.inputs, *op.outputs) if spec.n_elems > 1}
    return len(sizes) <= 1 and len(layouts) <= 1


def _columns(spec: TensorSpec, *, image: bool) -> int:
    """Elements of a row: the last dimension; of an image, what lies together of one channel or pixel."""
    if image and len(spec.shape) == 4:
        return spec.shape[1] if _channels_last(spec) else spec.shape[2] * spec.shape[3]
    return spec.shape[-1] if spec.shape else 1


def _is_strided(spec: TensorSpec, out: TensorSpec) -> bool:
    if spec.n_elems <= 1 or len(spec.shape) != len(out.shape):
        return False
    return innermost(spec) != innermost(out)


def _product(family: str, first: Mapping[str, float], attrs: Mapping[str, Any]) -> dict[str, float]:
    if family == "gemm":
        names = ("m", "n", "k", "batch", "trans_a", "trans_b", "bias")
        lanes = {"lanes_n": _lanes(first["n"]), "lanes_k": _lanes(first["k"])}
        return {name: first[name] for name in names} | lanes | {"rows": first["batch"]}
    if family == "attention":
        return {
            "m": first["q_len"],
            "n": first["kv_len"],
            "k": first["head_dim"],
            "batch": first["batch"] * first["heads"],
            "causal": first["causal"],
        }
    mask = attrs.get("output_mask") or ()
    taps = first["taps_h"] * first["taps_w"]
    return {
        "m": first["batch"] * first["out_h"] * first["out_w"],
        "n": first["c_out"],
        "k": first["c_in"] * taps / first["groups"],
        "batch": first["batch"],
        "taps": taps,
        "stride": first["stride_h"],
        "kind": float(sum(bool(part) for part in mask[:2])),
        "channels_last": first["channels_last"],
        "side": first["out_w"],
        "lanes_n": _lanes(first["c_out"] / first["groups"]),
        "lanes_k": _lanes(first["c_in"] / first["groups"]),
    }


def _table(lookups: Lookups, reach: Reach, sizes: Mapping[str, float]) -> dict[str, float]:
    """Rows of the table by where they come from: kept from earlier steps, or used before within the batch.

    A row stays in the cache if fewer bytes than the cache holds were touched since; the step's other traffic counts.
    """
    line = _line_bytes(lookups)
    total = lookups.n_lookups * line
    other = reach.gap_bytes if math.isfinite(reach.gap_bytes) else sizes["shared"]
    kept_rows = max(sizes["shared"] - other, 0.0) / line
    if reach.same_rows:
        missing = max(lookups.unique - kept_rows, 0.0)
    else:
        missing = lookups.misses(kept_rows, math.inf) if kept_rows >= 1 else lookups.unique
    distinct = lookups.unique * line
    again = max(total - distinct, 0.0)
    lost_again = again * (1.0 - min(sizes["shared"] / max(distinct, 1.0), 1.0))
    from_memory = missing * line + lost_again
    from_private = again * min(sizes["private"] / max(distinct, 1.0), 1.0)
    rest = reach.tensors[1:]
    stream = Reach(tensors=rest, fresh_bytes=0.0, gap_bytes=0.0)
    shared, memory = level_bytes(stream, sizes, SHARPNESS)
    return {
        "work": lookups.n_lookups * lookups.row_bytes / 4.0,
        "lookups": lookups.n_lookups,
        "distinct": lookups.unique,
        "pooling": lookups.n_lookups / max(lookups.n_bags, 1.0),
        "columns": lookups.row_bytes / 4.0,
        "rows": lookups.n_lookups,
        "memory_bytes": from_memory + memory,
        "far_rows": from_memory / line,
        "shared_bytes": max(total - from_memory - from_private, 0.0) + shared,
        "in_bytes": total,
    }
