"""A separable cost of parts, for the search: what a part adds to its rank's kernels and exchanges.

Kernels cost what they cost in a batch with many others: the law's time for the part less its time for next to nothing.
Exchanges cost their bytes at the rate of a large exchange of that kind on this machine. Launches, latencies, waits and overlap
are left to the simulator.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from perfmodel.collectives import CollectiveCall, estimate_collective
from perfmodel.config.plan import EmbeddingPlan
from perfmodel.db.device import Device
from perfmodel.graph import TableAccess
from perfmodel.kernels import price_calls
from perfmodel.kernels.table_batch import TableBatch, backward_calls, dense_update_calls, forward_calls
from perfmodel.plan.dist import INDEX_BYTES, LENGTH_BYTES, TRAVEL_BYTES
from perfmodel.plan.sharded import PLACEMENT
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
        """The times of each part (s). Parts that differ in their rank alone are priced once."""
        keys = [(s.access, s.placement.kernel, s.placement.cache_load_factor, s.placement.sharding) for s in shards]
        unique = {key: shard for key, shard in zip(keys, shards, strict=True)}
        kernels = dict(zip(unique, self._kernel_s(list(unique.values())), strict=True))
        return [replace(self._exchange_s(s), lookup_s=kernels[k][0], update_s=kernels[k][1]) for k, s in zip(keys, shards, strict=True)]

    def _kernel_s(self, shards: Sequence[TableShard]) -> list[tuple[float, float]]:
        calls, owner = [], []
        for number, shard in enumerate(shards):
            for sign, batch in ((1.0, self._batch(shard)), (-1.0, _next_to_nothing(self._batch(shard)))):
                for backward, found in ((0, forward_calls(batch)), (1, backward_calls(batch))):
                    calls += found
                    owner += [(number, backward, sign)] * len(found)
                if batch.dense:
                    update = dense_update_calls(batch)
                    calls += update
                    owner += [(number, 1, sign)] * len(update)
        total = np.zeros((len(shards), 2))
        for (number, backward, sign), estimate in zip(owner, price_calls(calls, self.device), strict=True):
            total[number, backward] += sign * estimate.time_s
        return [(max(float(row[0]), 0.0), max(float(row[1]), 0.0)) for row in total]

    def _batch(self, shard: TableShard) -> TableBatch:
        copied = shard.placement.sharding == "data_parallel"
        return TableBatch(
            tables=(shard.access,),
            batch=self.problem.batch * (1 if copied else self.problem.n_ranks),
            placement=PLACEMENT.get(shard.placement.kernel, "hbm"),  # type: ignore[arg-type] -- its values are placements
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
            self._rates[op, ranks] = estimate_collective(call, self.topology).time_s / PROBE_BYTES if len(ranks) > 1 else 0.0
        return self._rates[op, ranks]


def _next_to_nothing(batch: TableBatch) -> TableBatch:
    """One lookup of a table of one row: what a batched operator costs without the part."""
    least = TableAccess(parameter="", rows=1, dim=4, pooling_factor=1.0, itemsize_bytes=4)
    return replace(batch, tables=(least,), batch=1)
