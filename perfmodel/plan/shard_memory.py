"""Memory of a rank's parts of tables, by what holds it and where: device, host, SSD."""

from __future__ import annotations

from perfmodel.plan.dist import INDEX_BYTES, LENGTH_BYTES, Dist
from perfmodel.plan.events import MemoryUse
from perfmodel.plan.sharded_ops import ShardedTables
from perfmodel.plan.shards import TableShard

CACHE_ROW_STATE_BYTES = 16  # FBGEMM's cache keeps the row's number and when it was last used, 8 bytes each
# Batches whose indices are on the device at once: TorchRec's TrainPipelineSparseDist has the next one's, the prefetching
# pipeline the one after that too.
BATCHES_HELD = {"none": 1, "sparse_dist": 2, "prefetch": 3}


def shard_memory(sharded: ShardedTables, rank: int) -> MemoryUse:
    """What the parts of tables on a rank add to its dense model: rows, state, caches, buffers of the exchanges."""
    parameters = optimizer = gradients = host = ssd = 0
    for shard in (*(s for dist in sharded.dists for s in dist.of_rank(rank)), *sharded.copies(rank)):
        state = state_bytes(sharded, shard)
        rows = shard.weight_bytes
        cache = cache_bytes(shard)
        kernel = shard.placement.kernel
        if kernel == "uvm":
            host += rows + state
        elif kernel == "uvm_caching":
            host += rows + state
            parameters += cache
        elif kernel == "key_value":
            ssd += rows + state
            parameters += cache
        else:
            parameters += rows
            optimizer += state
            gradients += shard.access.rows * shard.access.dim * 4 if kernel == "dense" else 0
    return MemoryUse(
        parameters_bytes=parameters,
        optimizer_bytes=optimizer,
        gradients_bytes=gradients,
        communication_bytes=sum(_buffers(sharded, dist, rank) for dist in sharded.dists),
        host_bytes=host,
        ssd_bytes=ssd,
    )


def state_bytes(sharded: ShardedTables, shard: TableShard) -> int:
    """Optimizer state of a part: an element's share where each has state, a row's where rows have it."""
    table = sharded.tables[shard.name].table
    per_row = sharded.facts.table_row_bytes[shard.name] - table.dim * table.itemsize_bytes
    if per_row >= table.dim:
        per_row = per_row * shard.access.dim // table.dim
    return shard.access.rows * per_row


def cache_bytes(shard: TableShard) -> int:
    """Device memory of a part's row cache; 0 without one."""
    if shard.placement.kernel not in ("uvm_caching", "key_value"):
        return 0
    cached = round(shard.placement.cache_load_factor * shard.access.rows)
    return cached * (shard.access.dim * shard.access.itemsize_bytes + CACHE_ROW_STATE_BYTES)


def _buffers(sharded: ShardedTables, dist: Dist, rank: int) -> int:
    """Indices of the batches held, looked-up rows of the global batch and their gradients."""
    held = dist.of_rank(rank)
    n_held = BATCHES_HELD[sharded.plan.pipeline]
    total = 0
    for shard in held:
        lookups = dist.lookups(shard) * dist.n_ranks
        bags = dist.batch * dist.n_ranks
        rows = lookups if dist.kind == "sequence" else bags
        total += n_held * round(lookups * INDEX_BYTES + bags * LENGTH_BYTES) + 2 * round(rows * shard.access.dim * 4)
    return total
