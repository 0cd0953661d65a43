"""Embedding lookups and their gradients: kernels and work of `nn.Embedding` and `nn.EmbeddingBag`.

Batched tables with fused updates (TorchRec on FBGEMM) are in `table_batch`. Work counts every row that is gathered, however
often; which of them a device finds in its L2 cache is the law's business (`embedding_law`). Features of the family
`embedding`:

- `stage`: GATHER (one row to one output row), POOL (rows of a bag summed), ACCUMULATE (gradient rows of sorted lookups
  summed per distinct row) or UPDATE (the same, and an optimizer step on each distinct row).
- `lookups`: rows gathered. `bags`: output rows. `pooling`: lookups per bag. `row_bytes`: mean bytes of a row read.
- `row_bytes_total`: bytes of all gathered rows in whole 32-byte sectors; `stream_bytes`: bytes that move in order.
- `unique`: expected distinct rows. `hit_<k>`: share of the gathered bytes that a cache of k MiB would serve from reuse
  within the batch (k in CACHE_MIB).
- `rmw_bytes`: bytes of distinct rows that are read, changed and written back, both ways.
- `link_bytes`: bytes that cross the host link (tables in host memory), one way.
- `storage_s`: what an SSD needs to read and write rows (0 without one).
- `elems`: elements written by a gather. `serial_steps`: steps of a kernel that walks through the lookups in order.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from perfmodel.estimate import Work
from perfmodel.graph import Op, TableAccess, TensorSpec
from perfmodel.kernels.copy import moved, total_bytes
from perfmodel.kernels.elementwise import PIPE
from perfmodel.kernels.index import INDEX_BYTES, RADIX_BITS, SECTOR_BYTES
from perfmodel.kernels.locality import Popularity, batch_hit_curve, expected_unique, popularity, unique_misses
from perfmodel.kernels.registry import KernelCall, kernel_rule
from perfmodel.units import MEBI

Calls = tuple[KernelCall, ...]

FAMILY = "embedding"
GATHER, POOL, ACCUMULATE, UPDATE = 0, 1, 2, 3
SERIAL_LOOKUPS = (
    3072  # up to this many, nn.Embedding's gradient is one kernel without a sort (ATen/native/cuda/Embedding.cu)
)
LOOKUPS_PER_STEP = 32  # which takes the lookups of one warp at a time, in order
CACHE_MIB = (1, 2, 4, 8, 16, 32, 64, 128, 256)  # L2 caches of GPUs lie between 2 MiB (P4) and 126 MiB (B200)

SORT_VALUE_BYTES = 4  # FBGEMM sorts 64-bit linear row numbers with 32-bit positions


@dataclass(frozen=True, slots=True, kw_only=True)
class Lookups:
    """The lookups of one batch in one table: sizes and how its rows are reused."""

    rows: int
    n_lookups: float
    n_bags: float
    row_bytes: int
    zipf_exponent: float = 0.0
    histogram: tuple[tuple[float, float], ...] = ()

    @property
    def unique(self) -> float:
        """Expected distinct rows."""
        return _unique(self)

    @property
    def sector_bytes(self) -> int:
        """Bytes of one row in whole sectors."""
        return math.ceil(self.row_bytes / SECTOR_BYTES) * SECTOR_BYTES

    def hit_rates(self) -> NDArray[np.float64]:
        """Shares of lookups that caches of CACHE_MIB would serve from reuse within the batch."""
        return _hit_rates(self)

    def misses(self, cache_rows: float, warm_lookups: float) -> float:
        """Distinct rows that a row cache which served `warm_lookups` lookups lacks; see `unique_misses`."""
        return unique_misses(self.popularity, self.n_lookups, cache_rows, warm_lookups)

    @property
    def popularity(self) -> Popularity:
        """Classes of equally likely rows."""
        return popularity(self.rows, self.zipf_exponent, self.histogram)


@lru_cache(maxsize=65536)
def _unique(table: Lookups) -> float:
    return expected_unique(table.popularity, table.n_lookups)


@lru_cache(maxsize=65536)
def _hit_rates(table: Lookups) -> NDArray[np.float64]:
    cache_rows = [mib * MEBI / table.sector_bytes for mib in CACHE_MIB]
    return batch_hit_curve(table.popularity, table.n_lookups, cache_rows)


@lru_cache(maxsize=65536)
def lookups_of(table: TableAccess, batch: int) -> Lookups:
    """The lookups of `batch` samples in `table`."""
    return Lookups(
        rows=table.rows,
        n_lookups=batch * table.pooling_factor,
        n_bags=batch,
        row_bytes=table.dim * table.itemsize_bytes,
        zipf_exponent=table.zipf_exponent,
        histogram=table.histogram,
    )


def distinct_rows(table: TableAccess, batch: int) -> float:
    """Expected distinct rows that `batch` samples look up in `table`."""
    return lookups_of(table, batch).unique


def call_features(tables: Sequence[Lookups], stage: int, *, stream_bytes: float, elems: float) -> dict[str, float]:
    """The family's features for one kernel over `tables`, which it works off one after the other."""
    n_lookups = sum(table.n_lookups for table in tables)
    n_bags = sum(table.n_bags for table in tables)
    gathered = [table.n_lookups * table.sector_bytes for table in tables]
    total = max(sum(gathered), 1.0)
    features = {
        "stage": float(stage),
        "lookups": float(n_lookups),
        "bags": float(max(n_bags, 1.0)),
        "pooling": n_lookups / max(n_bags, 1.0),
        "row_bytes": sum(gathered) / max(n_lookups, 1.0),
        "row_bytes_total": float(sum(gathered)),
        "stream_bytes": float(stream_bytes),
        "unique": sum(table.unique for table in tables),
        "rmw_bytes": 0.0,
        "link_bytes": 0.0,
        "elems": float(elems),
    }
    hits = sum(
        (table.hit_rates() * n_bytes for table, n_bytes in zip(tables, gathered, strict=True)), np.zeros(len(CACHE_MIB))
    )
    return features | {f"hit_{mib}": float(share) for mib, share in zip(CACHE_MIB, hits / total, strict=True)}


def _reuse(op: Op) -> tuple[float, tuple[tuple[float, float], ...]]:
    """Zipf exponent and histogram that extraction noted on the op."""
    pairs = tuple((float(count), float(accesses)) for count, accesses in op.attrs.get("histogram") or ())
    return float(op.attrs.get("zipf_exponent") or 0.0), pairs


def _lookups(op: Op, *, rows: int, n_lookups: float, n_bags: float, row_bytes: int) -> Lookups:
    exponent, pairs = _reuse(op)
    return Lookups(
        rows=rows, n_lookups=n_lookups, n_bags=n_bags, row_bytes=row_bytes, zipf_exponent=exponent, histogram=pairs
    )


def _call(table: Lookups, stage: int, work: Work, *, dtype: str, stream_bytes: float, elems: float) -> KernelCall:
    features = call_features([table], stage, stream_bytes=stream_bytes, elems=elems)
    return KernelCall(family=FAMILY, work=work, dtype=dtype, pipe=PIPE, features=features)


@kernel_rule("aten.embedding")
def embedding(op: Op) -> Calls:
    """One gather: an index and a row are read, a row is written, for each lookup."""
    weight, indices = op.arg("weight") or op.inputs[0], op.arg("indices") or op.inputs[1]
    out = op.outputs[0]
    if out.n_elems == 0:
        return ()
    return (gather_call(op, weight, indices, out.bytes, out.n_elems),)


def gather_call(
    op: Op, weight: TensorSpec, indices: TensorSpec, written_bytes: int, n_elems: int, stage: int = GATHER
) -> KernelCall:
    """One kernel that reads a row of `weight` for each index and writes `n_elems` elements of `written_bytes` in order.

    `stage` GATHER is PyTorch's index_select, whose rate is bound by its index arithmetic; POOL a kernel that moves rows by
    whole warps, as batched lookups do.
    """
    n = indices.n_elems
    row_bytes = weight.shape[-1] * weight.itemsize_bytes
    table = _lookups(op, rows=weight.shape[0], n_lookups=n, n_bags=n, row_bytes=row_bytes)
    work = Work(read_bytes=n * row_bytes + indices.bytes, write_bytes=written_bytes)
    return _call(table, stage, work, dtype=weight.dtype, stream_bytes=indices.bytes + written_bytes, elems=n_elems)


@kernel_rule("aten._embedding_bag", "aten._embedding_bag_forward_only", "aten.embedding_bag")
def embedding_bag(op: Op) -> Calls:
    """One kernel: rows of each bag are read and summed; bag sizes and (for backward) each lookup's bag are written.

    A weight per sample adds a multiply; the same sum serves `mean`, and `max` compares instead.
    """
    weight, indices, offsets = op.inputs[0], op.inputs[1], op.inputs[2]
    out = op.outputs[0]
    n, dim = indices.n_elems, weight.shape[-1]
    if out.n_elems == 0:
        return ()
    weights = op.arg("per_sample_weights")
    row_bytes = dim * weight.itemsize_bytes
    small_read = indices.bytes + offsets.bytes + (weights.bytes if weights is not None else 0)
    written = total_bytes(op.outputs)
    work = Work(
        flops=n * dim * (2 if weights is not None else 1),
        read_bytes=n * row_bytes + small_read,
        write_bytes=written,
    )
    table = _lookups(op, rows=weight.shape[0], n_lookups=n, n_bags=out.shape[0], row_bytes=row_bytes)
    return (_call(table, POOL, work, dtype=weight.dtype, stream_bytes=small_read + written, elems=out.n_elems),)


def radix_sort(n: float, key_range: float) -> Calls:
    """A radix sort of `n` pairs (64-bit keys below `key_range`, 32-bit values): a histogram, and a pass per 8 bits used."""
    if n < 1:
        return ()
    n_pairs = int(n)
    n_passes = max(1, math.ceil(math.log2(max(key_range, 2)) / RADIX_BITS))
    pair_bytes = INDEX_BYTES + SORT_VALUE_BYTES
    histogram = Work(read_bytes=n_pairs * INDEX_BYTES)
    one = Work(read_bytes=n_pairs * pair_bytes, write_bytes=n_pairs * pair_bytes)
    sweep = tuple(KernelCall(family="sort", work=one, dtype="int64") for _ in range(n_passes))
    return (KernelCall(family="sort", work=histogram, dtype="int64"), *sweep)


def segments(n: float) -> Calls:
    """Where runs of equal sorted indices begin: run lengths, their prefix sum and a compaction over `n` indices."""
    n_bytes = int(n) * INDEX_BYTES
    one = KernelCall(family="scan", work=Work(read_bytes=n_bytes, write_bytes=n_bytes // 2), dtype="int64")
    return (one, one)


def _sum_into_rows(op: Op, gradient: TensorSpec, indices: TensorSpec, *, pooled: bool) -> Calls:
    """Dense gradient: zeros in the whole table, then sorted indices and one sum per distinct row.

    Few lookups of single rows are not sorted: every block walks through all of them, for its share of the columns.
    """
    target = op.outputs[0]
    n, dim = indices.n_elems, target.shape[-1]
    zeros = moved("fill", 0, target)
    if n == 0:
        return zeros
    row_bytes = dim * gradient.itemsize_bytes
    n_bags = gradient.n_elems // max(dim, 1) if pooled else n
    table = _lookups(op, rows=target.shape[0], n_lookups=n, n_bags=n_bags, row_bytes=row_bytes)
    unique = round(table.unique)
    work = Work(
        flops=n * dim, read_bytes=n * (row_bytes + 2 * INDEX_BYTES), write_bytes=unique * dim * target.itemsize_bytes
    )
    # Gradient rows are what is gathered here: of each bag once per lookup.
    source = Lookups(rows=max(int(n_bags), 1), n_lookups=n, n_bags=n, row_bytes=row_bytes)
    features = call_features([source], ACCUMULATE, stream_bytes=work.write_bytes + 2 * n * INDEX_BYTES, elems=n * dim)
    features["unique"] = float(unique)
    summed = KernelCall(family=FAMILY, work=work, dtype=gradient.dtype, pipe=PIPE, features=features)
    if n <= SERIAL_LOOKUPS and not pooled:
        features["serial_steps"] = float(math.ceil(n / LOOKUPS_PER_STEP))
        return (*zeros, summed)
    return (*zeros, *radix_sort(n, target.shape[0]), *segments(n), summed)


@kernel_rule("aten.embedding_dense_backward")
def embedding_dense_backward(op: Op) -> Calls:
    """Zeros, a sort of the indices, run boundaries, and a sum per distinct row (ATen/native/cuda/Embedding.cu)."""
    gradient, indices = op.arg("grad_output") or op.inputs[0], op.arg("indices") or op.inputs[1]
    return _sum_into_rows(op, gradient, indices, pooled=False)


@kernel_rule("aten._embedding_bag_dense_backward")
def embedding_bag_dense_backward(op: Op) -> Calls:
    """As for a single lookup; each lookup reads the gradient of its bag (ATen/native/cuda/EmbeddingBag.cu)."""
    return _sum_into_rows(op, op.inputs[0], op.inputs[1], pooled=True)


@kernel_rule("aten._embedding_bag_sparse_backward", "aten.embedding_sparse_backward")
def embedding_bag_sparse_backward(op: Op) -> Calls:
    """The values of a sparse gradient: for each lookup the gradient row of its bag."""
    gradient, indices = op.inputs[0], op.inputs[1]
    n, dim = indices.n_elems, gradient.shape[-1]
    if n == 0:
        return ()
    row_bytes = dim * gradient.itemsize_bytes
    work = Work(read_bytes=n * (row_bytes + INDEX_BYTES), write_bytes=n * row_bytes)
    bags = max(gradient.n_elems // max(dim, 1), 1)
    source = Lookups(rows=bags, n_lookups=n, n_bags=n, row_bytes=row_bytes)
    return (
        _call(source, GATHER, work, dtype=gradient.dtype, stream_bytes=n * (row_bytes + INDEX_BYTES), elems=n * dim),
    )


@kernel_rule("aten._embedding_bag_per_sample_weights_backward")
def per_sample_weights_backward(op: Op) -> Calls:
    """A dot product of the looked-up row and its bag's gradient for each lookup."""
    weight, indices = op.inputs[1], op.inputs[2]
    n, dim = indices.n_elems, weight.shape[-1]
    if n == 0:
        return ()
    row_bytes = dim * weight.itemsize_bytes
    table = _lookups(op, rows=weight.shape[0], n_lookups=n, n_bags=n, row_bytes=row_bytes)
    stream = n * (row_bytes + 2 * INDEX_BYTES) + total_bytes(op.outputs)
    work = Work(
        flops=2 * n * dim, read_bytes=n * (2 * row_bytes + 2 * INDEX_BYTES), write_bytes=total_bytes(op.outputs)
    )
    return (_call(table, POOL, work, dtype=weight.dtype, stream_bytes=stream, elems=n),)
