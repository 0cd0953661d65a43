"""What tables of one kind of sharding exchange: indices to the ranks that hold parts, looked-up rows back, gradients again.

As TorchRec's sharding modules do (torchrec/distributed/sharding/{tw,cw,rw,twrw,grid}_sharding.py):

    whole tables and columns   rows by all-to-all                                  gradients by the reverse one
    rows over all ranks        partial sums by reduce-scatter                      gradients by all-gather
    rows over a domain         partial sums by reduce-scatter in the domain,       gradients the same way back
                               then all-to-all between ranks of equal place in theirs
    unpooled rows              each looked-up row by all-to-all                    gradients by the reverse one

Every rank has `batch` samples of its own, so what a part receives and gives is the same for all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from perfmodel.config.plan import EmbeddingPlan
from perfmodel.graph import TableAccess
from perfmodel.plan.shards import TableShard

Kind = Literal["table_wise", "column_wise", "row_wise", "domain_row_wise", "sequence"]
Matrix = tuple[tuple[int, ...], ...]
Distinct = Callable[[TableAccess, int], float]  # expected distinct rows among the lookups of so many samples

KINDS: tuple[Kind, ...] = ("table_wise", "column_wise", "row_wise", "domain_row_wise", "sequence")
INDEX_BYTES = 8  # indices are int64
LENGTH_BYTES = 4  # TorchRec's lengths are int32
WEIGHT_BYTES = 4  # per-sample weights travel in fp32
TRAVEL_BYTES = {"own": None, "fp16": 2, "bf16": 2, "fp8": 1, "int8": 1}  # bytes of an element on the way


@dataclass(frozen=True, slots=True, kw_only=True)
class Dist:
    """Parts of tables that one sharding module holds, on all ranks, and how their data travels.

    `pooled` tables give one row a sample, others one a lookup. `row_bytes` and `gradient_bytes` are bytes of an element on
    the way. `distinct`, where indices travel once each, counts them.
    """

    kind: Kind
    shards: tuple[TableShard, ...]
    n_ranks: int
    batch: int
    own: bool = False
    row_bytes: int = 4
    gradient_bytes: int = 4
    distinct: Distinct | None = None

    @property
    def tables(self) -> tuple[str, ...]:
        """Names of the tables, once each."""
        return tuple(dict.fromkeys(shard.name for shard in self.shards))

    def of_rank(self, rank: int) -> list[TableShard]:
        """The parts on one rank."""
        return [shard for shard in self.shards if shard.rank == rank]

    def lookups(self, shard: TableShard) -> float:
        """Indices that one rank's batch sends to a part."""
        if self.distinct is not None:
            return self.distinct(shard.access, self.batch)
        return self.batch * shard.access.pooling_factor

    def index_bytes(self) -> Matrix:
        """Bytes of indices (and weights) from each rank to each."""
        return self._to_holders(lambda s: self.lookups(s) * (INDEX_BYTES + (WEIGHT_BYTES if s.access.weighted else 0)))

    def length_bytes(self) -> Matrix:
        """Bytes of bag lengths from each rank to each."""
        return self._to_holders(lambda s: self.batch * LENGTH_BYTES)

    def rows_bytes(self, itemsize_bytes: int) -> Matrix:
        """Bytes of looked-up rows from each rank to each, where they travel by all-to-all alone."""
        to = self._to_holders(lambda s: self._out_elems(s) * itemsize_bytes)
        return tuple(zip(*to, strict=True))

    def cross_bytes(self, itemsize_bytes: int) -> Matrix:
        """Bytes of pooled rows from each rank to each after the reduce-scatter in their domain."""
        sent = [[0] * self.n_ranks for _ in range(self.n_ranks)]
        for domain in self.domains():
            width = self.domain_width(domain)
            for place, rank in enumerate(domain):
                for target in range(place, self.n_ranks, len(domain)):
                    sent[rank][target] += round(width * self.batch * itemsize_bytes)
        return tuple(map(tuple, sent))

    def domains(self) -> tuple[tuple[int, ...], ...]:
        """Groups of ranks over which rows of a table (or of a column part of it) are spread, in order."""
        found: dict[tuple[int, ...], None] = {}
        for group in self._row_groups().values():
            found.setdefault(tuple(sorted(group)))
        return tuple(found)

    def domain_width(self, domain: Sequence[int]) -> int:
        """Columns that a domain sums up: of all tables whose rows are spread over it."""
        width = 0
        for key, group in self._row_groups().items():
            if tuple(sorted(group)) == tuple(domain):
                width += key[2]
        return width

    def reduced_elems(self, domain: Sequence[int] | None = None) -> int:
        """Elements that every rank of a domain (all ranks if None) puts into the reduce-scatter."""
        width = (
            self.domain_width(domain)
            if domain is not None
            else sum({s.name: s.access.dim for s in self.shards}.values())
        )
        return width * self.batch * self.n_ranks

    def _row_groups(self) -> dict[tuple[str, int, int], list[int]]:
        """Ranks by (table, column offset, width)."""
        found: dict[tuple[str, int, int], list[int]] = {}
        for shard in self.shards:
            found.setdefault((shard.name, shard.column_offset, shard.access.dim), []).append(shard.rank)
        return found

    def _out_elems(self, shard: TableShard) -> float:
        rows = self.lookups(shard) if self.kind == "sequence" else self.batch
        return rows * shard.access.dim

    def _to_holders(self, size: Callable[[TableShard], float]) -> Matrix:
        total = [0.0] * self.n_ranks
        for shard in self.shards:
            total[shard.rank] += size(shard)
        return (tuple(round(value) for value in total),) * self.n_ranks


def kind_of(shard: TableShard, n_ranks: int, *, pooled: bool) -> Kind:
    """The sharding module that a part belongs to."""
    placement = shard.placement
    if not pooled:
        return "sequence"
    if placement.sharding == "row_wise" and len(placement.ranks or range(n_ranks)) == n_ranks:
        return "row_wise"
    if placement.sharding in ("row_wise", "table_row_wise", "grid"):
        return "domain_row_wise"
    return "table_wise" if placement.sharding == "table_wise" else "column_wise"


def dists_of(
    shards: Sequence[TableShard],
    plan: EmbeddingPlan,
    size: tuple[int, int],
    unpooled: frozenset[str] = frozenset(),
    distinct: Distinct | None = None,
) -> tuple[Dist, ...]:
    """The sharding modules of a plan's parts (data-parallel ones left out); `size` is (ranks, samples of each)."""
    n_ranks, batch = size
    groups: dict[tuple[Kind, bool], list[TableShard]] = {}
    for shard in shards:
        if shard.placement.sharding != "data_parallel":
            key = (kind_of(shard, n_ranks, pooled=shard.name not in unpooled), shard.placement.kernel == "own")
            groups.setdefault(key, []).append(shard)
    row_bytes = TRAVEL_BYTES[plan.row_precision]
    gradient_bytes = TRAVEL_BYTES[plan.gradient_precision] or row_bytes
    return tuple(
        Dist(
            kind=kind,
            shards=tuple(members),
            n_ranks=n_ranks,
            batch=batch,
            own=own,
            row_bytes=row_bytes or 4,
            gradient_bytes=gradient_bytes or 4,
            distinct=distinct if plan.dedup and kind == "sequence" else None,
        )
        for (kind, own), members in sorted(groups.items(), key=lambda item: (KINDS.index(item[0][0]), item[0][1]))
    )
