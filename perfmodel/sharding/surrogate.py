"""A separable cost of parts, for the search: what a part adds to its rank's kernels and exchanges.

Kernels cost what they cost in a batch with many others: the law's time for the part less its time for next to nothing.
Exchanges cost their bytes at the rate of a large exchange of that kind on this machine. Launches, latencies, waits and overlap
are left to the simulator.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import cast

import numpy as np

from perfmodel.collectives import CollectiveCall, estimate_collective
from perfmodel.config.plan import EmbeddingPlan
from perfmodel.db.device import Device
from perfmodel.graph import TableAccess
from perfmodel.kernels import KernelCall, price_calls
from perfmodel.kernels.table_batch import Placement, TableBatch, backward_calls, dense_update_calls, forward_calls
from perfmodel.plan.dist import INDEX_BYTES, LENGTH_BYTES, TRAVEL_BYTES
from perfmodel.plan.sharded_ops import PLACEMENT
from perfmodel.plan.shards import TableShard
from perfmodel.sharding.cost import ShardTimes
from perfmodel.sharding.problem import Problem
from perfmodel.topology import Topology
from perfmodel.units import MEBI

PROBE_BYTES = 64 * MEBI  # large enough for bandwidth, small enough to be met


class Surrogate:
    """Prices parts on a machine whose ranks are `device`s; a `ShardCost`.

    Args:
        problem: batch and ranks.
        plan: what travels in which type.
        device: what every rank runs on.
        topology: the machine.
        optimizer: of the tables.
    """

    def __init__(
        self, problem: Problem, plan: EmbeddingPlan, device: Device, topology: Topology, optimizer: str
    ) -> None:
        self.problem, self.plan, self.device, self.topology, self.optimizer = problem, plan, device, topology, optimizer
        self._rates: dict[tuple[str, tuple[int, ...]], float] = {}

    def shard_times(self, shards: Sequence[TableShard]) -> list[ShardTimes]:
        """The times of each part (s). Of a placement's row parts one is priced, the rest by their share."""
        keys = [_kind(shard, len(shard.placement.ranks)) for shard in shards]
        first: dict[tuple[object, ...], TableShard] = {}
        for key, shard in zip(keys, shards, strict=True):
            first.setdefault(key, shard)
        kernels = self._kernel_s(list(first.values()))
        priced = {
            key: replace(self._exchange_s(shard), lookup_s=times[0], update_s=times[1])
            for (key, shard), times in zip(first.items(), kernels, strict=True)
        }
        scaled: dict[tuple[tuple[object, ...], float], ShardTimes] = {}
        found = []
        for key, shard in zip(keys, shards, strict=True):
            ratio = shard.share_frac / first[key].share_frac
            if (key, ratio) not in scaled:
                one = priced[key]
                scaled[key, ratio] = replace(
                    one, lookup_s=one.lookup_s * ratio, update_s=one.update_s * ratio, input_s=one.input_s * ratio
                )
            found.append(scaled[key, ratio])
        return found

    def _kernel_s(self, shards: Sequence[TableShard]) -> list[tuple[float, float]]:
        """Forward and backward of each part (s), less what an operator costs in any case."""
        batches = [self._batch(shard) for shard in shards]
        empty = {_empty_key(batch): _next_to_nothing(batch) for batch in batches}
        calls: list[KernelCall] = []
        owner: list[int] = []
        for number, batch in enumerate((*batches, *empty.values())):
            for backward, found in ((0, forward_calls(batch)), (1, _backward(batch))):
                calls += found
                owner += [2 * number + backward] * len(found)
        times = [estimate.time_s for estimate in price_calls(calls, self.device)]
        total = np.bincount(owner, weights=times, minlength=2 * (len(batches) + len(empty))).reshape(-1, 2)
        least = dict(zip(empty, total[len(batches) :], strict=True))
        marginal = [np.maximum(row - least[_empty_key(b)], 0.0) for row, b in zip(total, batches, strict=False)]
        return [(float(row[0]), float(row[1])) for row in marginal]

    def _batch(self, shard: TableShard) -> TableBatch:
        copied = shard.placement.sharding == "data_parallel"
        return TableBatch(
            tables=(shard.access,),
            batch=self.problem.batch * (1 if copied else self.problem.n_ranks),
            placement=cast(Placement, PLACEMENT.get(shard.placement.kernel, "hbm")),
            cache_load_factor=shard.placement.cache_load_factor,
            optimizer=self.optimizer,
            dense=shard.placement.kernel == "dense",
            storage_bytes_per_s=self.plan.ssd,
        )

    def _exchange_s(self, shard: TableShard) -> ShardTimes:
        n, batch, where = self.problem.n_ranks, self.problem.batch, shard.placement
        if n == 1:
            return ShardTimes()
        everyone = tuple(range(n))
        if where.sharding == "data_parallel":
            n_bytes = shard.access.rows * shard.access.dim * 4
            return ShardTimes(gradient_s=n_bytes * self._rate("all_reduce", everyone))
        indices = n * batch * (shard.access.pooling_factor * INDEX_BYTES + LENGTH_BYTES)
        row_bytes = TRAVEL_BYTES[self.plan.row_precision] or 4
        back_bytes = TRAVEL_BYTES[self.plan.gradient_precision] or row_bytes
        elems = n * batch * shard.access.dim
        swap = self._rate("all_to_all", everyone)
        input_s = indices * swap if self.plan.index_exchange and self.plan.pipeline == "none" else 0.0
        ranks = tuple(sorted(set(where.ranks))) or everyone
        if where.sharding not in ("row_wise", "table_row_wise", "grid"):
            return ShardTimes(input_s=input_s, output_s=elems * row_bytes * swap, gradient_s=elems * back_bytes * swap)
        if where.sharding == "grid":  # the domain of this part alone
            size = len(where.ranks) // len(where.widths)
            ranks = where.ranks[shard.part // size * size :][:size]
        cross = swap / len(ranks) if len(ranks) < n else 0.0
        return ShardTimes(
            input_s=input_s,
            output_s=elems * row_bytes * (self._rate("reduce_scatter", ranks) + cross),
            gradient_s=elems * back_bytes * (self._rate("all_gather", ranks) + cross),
        )

    def _rate(self, op: str, ranks: tuple[int, ...]) -> float:
        """Seconds a byte of a large collective."""
        if (op, ranks) not in self._rates:
            call = CollectiveCall(op=op, bytes=PROBE_BYTES, ranks=ranks)
            self._rates[op, ranks] = (
                estimate_collective(call, self.topology).time_s / PROBE_BYTES if len(ranks) > 1 else 0.0
            )
        return self._rates[op, ranks]


def _kind(shard: TableShard, n_parts: int) -> tuple[object, ...]:
    """Equal for parts that cost the same a lookup."""
    where = shard.placement
    return (
        shard.name, where.sharding, where.kernel, where.cache_load_factor, shard.access.dim, shard.access.itemsize_bytes,
        n_parts,
    )  # fmt: skip


def _backward(batch: TableBatch) -> tuple[KernelCall, ...]:
    return (*backward_calls(batch), *(dense_update_calls(batch) if batch.dense else ()))


def _empty_key(batch: TableBatch) -> tuple[str, bool]:
    return batch.placement, batch.dense


def _next_to_nothing(batch: TableBatch) -> TableBatch:
    """One lookup of a table of one row: what a batched operator costs without the part."""
    least = TableAccess(parameter="", rows=1, dim=4, pooling_factor=1.0, itemsize_bytes=4)
    return replace(batch, tables=(least,), batch=1)
