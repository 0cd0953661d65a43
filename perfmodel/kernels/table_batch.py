"""Batched embedding tables with a fused optimizer, as FBGEMM's table-batched operators run them, in device or host memory.

`forward_calls` and `backward_calls` take tables (or shards of them) and a batch, for callers without a graph; the ops
`perfmodel.batched_embedding` and `perfmodel.batched_embedding_backward` carry the same in attributes:
`tables` (a list of mappings with the fields of TableAccess), `batch`, `optimizer`, `placement`, `cache_load_factor`, `pooled`.

A lookup behind a cache may be given in parts: `part` is `lookup` or `prefetch` (of missing rows) instead of `all`. With
`dense` the backward sums gradients into a whole table, which `perfmodel.dense_table_update` then updates row by row.
`perfmodel.permute_sparse_features` puts indices that came from other ranks in the order of the tables (`n_lookups`, `n_bags`;
`bucketed`: they were sorted by the rank that holds their rows before they were sent).

Placement: `hbm` (device memory), `uvm` (host memory, rows cross the link whenever L2 lacks them), `uvm_caching` (host memory
behind a row cache of `cache_load_factor` of the rows in device memory: missing rows are fetched before the lookup and as
many are written back), `key_value` (the same with rows on an SSD that reads and writes `storage_bytes_per_s`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from perfmodel.estimate import Work
from perfmodel.graph import Op, TableAccess
from perfmodel.kernels.elementwise import PIPE
from perfmodel.kernels.embedding import (
    FAMILY,
    GATHER,
    POOL,
    SORT_VALUE_BYTES,
    UPDATE,
    Lookups,
    call_features,
    lookups_of,
    radix_sort,
    segments,
)
from perfmodel.kernels.index import INDEX_BYTES
from perfmodel.kernels.registry import KernelCall, kernel_rule

Calls = tuple[KernelCall, ...]
Placement = Literal["hbm", "uvm", "uvm_caching", "key_value"]
Part = Literal["all", "lookup", "prefetch"]
CACHED = ("uvm_caching", "key_value")

# Bytes of optimizer state per row, as multiples of the row in fp32 and bytes of its own (FBGEMM, OptimType).
STATE: Mapping[str, tuple[int, int]] = {
    "sgd": (0, 0),
    "adagrad": (1, 0),
    "rowwise_adagrad": (0, 4),
    "adam": (2, 0),
    "partial_rowwise_adam": (1, 4),
    "lamb": (2, 0),
}
# FLOPs of the update of one element, from the update formulas (a square root or division is one).
UPDATE_FLOPS: Mapping[str, int] = {
    "sgd": 2, "adagrad": 6, "rowwise_adagrad": 4, "adam": 14, "partial_rowwise_adam": 10, "lamb": 18,
}  # fmt: skip
STATE_ITEMSIZE_BYTES = 4
LENGTH_BYTES = 4  # TorchRec's bag lengths are int32


@dataclass(frozen=True, slots=True, kw_only=True)
class TableBatch:
    """Tables that one operator looks up for `batch` samples, and how.

    `warm_batches`: batches that a row cache has served before; infinite in steady state.
    """

    tables: tuple[TableAccess, ...]
    batch: int
    placement: Placement = "hbm"
    cache_load_factor: float = 0.2  # FBGEMM's default
    optimizer: str = "sgd"
    pooled: bool = True
    output_itemsize_bytes: int = 4
    warm_batches: float = float("inf")
    part: Part = "all"
    dense: bool = False
    storage_bytes_per_s: float = float("inf")

    def lookups(self) -> tuple[Lookups, ...]:
        """Lookups of each table."""
        return tuple(lookups_of(table, self.batch) for table in self.tables)

    def out_elems(self) -> float:
        """Elements of the output: one row per bag, or per lookup if nothing is pooled."""
        bags = [self.batch if self.pooled else self.batch * table.pooling_factor for table in self.tables]
        return float(sum(n * table.dim for n, table in zip(bags, self.tables, strict=True)))

    def state_bytes(self, table: TableAccess) -> int:
        """Bytes of optimizer state of one row."""
        per_elem, own = STATE[self.optimizer]
        return per_elem * table.dim * STATE_ITEMSIZE_BYTES + own


def forward_calls(tables: TableBatch) -> Calls:
    """A check of the indices and one lookup kernel over all tables; behind a row cache also the transfer of missing rows."""
    found = tables.lookups()
    n = sum(one.n_lookups for one in found)
    if n < 1:
        return ()
    out_bytes = tables.out_elems() * tables.output_itemsize_bytes
    weights = [one.n_lookups for one, table in zip(found, tables.tables, strict=True) if table.weighted]
    small = n * INDEX_BYTES + sum(one.n_bags for one in found) * INDEX_BYTES + sum(weights) * STATE_ITEMSIZE_BYTES
    gathered = sum(one.n_lookups * one.row_bytes for one in found)
    flops = sum(one.n_lookups * table.dim for one, table in zip(found, tables.tables, strict=True)) * tables.pooled
    work = Work(flops=round(flops), read_bytes=round(gathered + small), write_bytes=round(out_bytes))
    stage = POOL if tables.pooled else GATHER
    features = call_features(found, stage, stream_bytes=small + out_bytes, elems=tables.out_elems())
    features["vectorised"] = 1.0
    if tables.placement == "uvm":
        features["in_host"] = 1.0
    lookup = KernelCall(family=FAMILY, work=work, dtype="float32", pipe=PIPE, features=features)
    if tables.part == "prefetch":
        return _prefetch(tables, found)
    return (*check_calls(n), *(_prefetch(tables, found) if tables.part == "all" else ()), lookup)


def _prefetch(tables: TableBatch, found: Sequence[Lookups]) -> Calls:
    """Behind a row cache: distinct rows of the batch (a sort), then missing rows in and evicted rows out over the link."""
    if tables.placement not in CACHED:
        return ()
    n = sum(one.n_lookups for one in found)
    rows_total = sum(one.rows for one in found)
    moved, unique = 0.0, 0.0
    for one in found:
        missing = one.misses(tables.cache_load_factor * one.rows, tables.warm_batches * one.n_lookups)
        moved += missing * one.row_bytes
        unique += one.unique
    if moved < 1.0:
        return (*radix_sort(n, rows_total), *segments(n))
    work = Work(read_bytes=round(moved), write_bytes=round(moved))
    features = call_features((), GATHER, stream_bytes=2.0 * moved, elems=0.0)
    features |= {"link_bytes": moved, "lookups": unique, "vectorised": 1.0}
    if tables.placement == "key_value":  # missing rows are read from the drive, evicted ones written to it
        features["storage_s"] = 2.0 * moved / tables.storage_bytes_per_s
    return (
        *radix_sort(n, rows_total),
        *segments(n),
        KernelCall(family=FAMILY, work=work, dtype="float32", pipe=PIPE, features=features),
    )


def backward_calls(tables: TableBatch) -> Calls:
    """Linear row numbers, a sort by them, run boundaries, long runs set apart, then sums of gradients and updates.

    The kernels are those of FBGEMM's exact optimizers (the profile of a TorchRec DLRM step on 8 V100 lists them): runs of
    more lookups than a warp should walk through have a kernel of their own, which has nothing to do here but to start.
    """
    found = tables.lookups()
    n = sum(one.n_lookups for one in found)
    if n < 1:
        return ()
    if tables.dense:
        return _dense_gradient(tables, found)
    read, rmw, flops, sources = 0.0, 0.0, 0.0, []
    for one, table in zip(found, tables.tables, strict=True):
        gradient_row = table.dim * tables.output_itemsize_bytes
        unique = one.unique
        read += one.n_lookups * gradient_row
        rmw += unique * (one.row_bytes + tables.state_bytes(table))
        flops += one.n_lookups * table.dim + unique * table.dim * UPDATE_FLOPS[tables.optimizer]
        bags = one.n_bags if tables.pooled else one.n_lookups
        sources.append(Lookups(rows=max(int(bags), 1), n_lookups=one.n_lookups, n_bags=unique, row_bytes=gradient_row))
    small = 2 * n * INDEX_BYTES
    work = Work(flops=round(flops), read_bytes=round(read + rmw + small), write_bytes=round(rmw))
    features = call_features(sources, UPDATE, stream_bytes=small, elems=0.0)
    features |= {"rmw_bytes": 2.0 * rmw, "unique": sum(one.unique for one in found), "vectorised": 1.0}
    if tables.placement == "uvm":
        features["in_host"] = 1.0
    update = KernelCall(family=FAMILY, work=work, dtype="float32", pipe=PIPE, features=features)
    return (*sort_calls(n, sum(one.rows for one in found)), *run_calls(sum(one.unique for one in found)), update)


def check_calls(n: float) -> Calls:
    """bounds_check_indices_kernel over `n` indices."""
    return (_index_kernel(n, read_bytes=INDEX_BYTES, write_bytes=0),)


def sort_calls(n: float, rows: int) -> Calls:
    """Of a backward with `n` lookups in tables of so many `rows`: linear row numbers, their sort, run boundaries."""
    linearise = _index_kernel(n, read_bytes=INDEX_BYTES, write_bytes=INDEX_BYTES + SORT_VALUE_BYTES)
    return (linearise, *radix_sort(n, rows), *segments(n))


def run_calls(unique: float) -> Calls:
    """Of a backward with so many distinct rows: long runs are found, and summed by a kernel of their own."""
    find_long = _index_kernel(unique, read_bytes=SORT_VALUE_BYTES, write_bytes=0)
    return (find_long, _index_kernel(1.0, read_bytes=INDEX_BYTES, write_bytes=INDEX_BYTES))


def _dense_gradient(tables: TableBatch, found: Sequence[Lookups]) -> Calls:
    """Zeros in a gradient as large as the tables, then the sums of the sparse case written into it."""
    sparse = backward_calls(replace(tables, dense=False, optimizer="sgd"))
    size = sum(one.rows * table.dim for one, table in zip(found, tables.tables, strict=True)) * STATE_ITEMSIZE_BYTES
    zeros = KernelCall(family="fill", work=Work(write_bytes=size), dtype="float32", pipe=PIPE)
    return (zeros, *sparse)


def dense_update_calls(tables: TableBatch) -> Calls:
    """A dense optimizer step: every row, gradient and state is read, every row and state written, in one pass."""
    elems = sum(table.rows * table.dim for table in tables.tables)
    rows = sum(table.rows * table.dim * table.itemsize_bytes for table in tables.tables)
    state = sum(table.rows * tables.state_bytes(table) for table in tables.tables)
    work = Work(
        flops=elems * UPDATE_FLOPS[tables.optimizer],
        read_bytes=rows + elems * STATE_ITEMSIZE_BYTES + state,
        write_bytes=rows + state,
    )
    features = {
        "n_elems": float(elems),
        "n_streams": work.bytes / max(elems * STATE_ITEMSIZE_BYTES, 1),
        "footprint_bytes": float(rows + elems * STATE_ITEMSIZE_BYTES + state),
        "vectorised": 1.0,
        "itemsize_bytes": float(STATE_ITEMSIZE_BYTES),
        "op_kind": 0.0,
    }
    return (KernelCall(family="elementwise", work=work, dtype="float32", pipe=PIPE, features=features),)


def _index_kernel(n: float, *, read_bytes: int, write_bytes: int) -> KernelCall:
    """A pass over `n` indices."""
    work = Work(read_bytes=round(n * read_bytes), write_bytes=round(n * write_bytes))
    return KernelCall(family="scan", work=work, dtype="int64")


def table_lookup_work(table: TableAccess, batch: int, *, backward: bool = False, optimizer: str = "sgd") -> Work:
    """FLOPs and bytes of looking up one table for `batch` samples, or of its backward with a fused update.

    Args:
        table: rows, dim, pooling factor and index distribution (a shard is a table of its own).
        batch: samples of one iteration that look up this table.
        backward: the gradient and update kernels instead of the forward kernel.
        optimizer: a key of STATE.
    """
    tables = TableBatch(tables=(table,), batch=batch, optimizer=optimizer)
    calls = backward_calls(tables) if backward else forward_calls(tables)
    return sum((call.work for call in calls), Work())


def _table(fields: Mapping[str, Any], index: int) -> TableAccess:
    pairs = tuple((float(count), float(accesses)) for count, accesses in fields.get("histogram") or ())
    known = {**fields, "parameter": fields.get("parameter", f"table{index}"), "histogram": pairs}
    return TableAccess(**known)


_GIVEN = (
    "placement", "cache_load_factor", "optimizer", "pooled", "dense", "part", "storage_bytes_per_s"
)  # fmt: skip


def _batch_of(op: Op) -> TableBatch:
    attrs = op.attrs
    tables = tuple(_table(fields, i) for i, fields in enumerate(attrs["tables"]))
    given = {name: attrs[name] for name in _GIVEN if name in attrs}
    if given.get("part") not in ("lookup", "prefetch"):
        given.pop("part", None)
    return replace(TableBatch(tables=tables, batch=int(attrs["batch"])), **given)


@kernel_rule("perfmodel.batched_embedding")
def batched_embedding(op: Op) -> Calls:
    """See the module and `forward_calls`."""
    return forward_calls(_batch_of(op))


@kernel_rule("perfmodel.batched_embedding_backward")
def batched_embedding_backward(op: Op) -> Calls:
    """See the module and `backward_calls`."""
    return backward_calls(_batch_of(op))


@kernel_rule("perfmodel.dense_table_update")
def dense_table_update(op: Op) -> Calls:
    """See `dense_update_calls`."""
    return dense_update_calls(_batch_of(op))


@kernel_rule("perfmodel.permute_sparse_features")
def permute_sparse_features(op: Op) -> Calls:
    """Lengths put in order, two prefix sums over them, indices put in order (fbgemm_gpu's permute_2D_sparse_data).

    Bucketed indices were counted by bucket, summed up and moved before they were sent (block_bucketize_sparse_features).
    """
    n, bags = float(op.attrs["n_lookups"]), float(op.attrs["n_bags"])
    if n < 1:
        return ()
    lengths = _index_kernel(bags, read_bytes=LENGTH_BYTES, write_bytes=LENGTH_BYTES)
    sums = _index_kernel(bags, read_bytes=LENGTH_BYTES, write_bytes=INDEX_BYTES)
    indices = _index_kernel(n, read_bytes=INDEX_BYTES, write_bytes=INDEX_BYTES)
    calls = (lengths, sums, sums, indices)
    return (lengths, sums, indices, *calls) if op.attrs.get("bucketed") else calls
