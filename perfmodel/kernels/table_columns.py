"""Many batched lookups at once: the features of `table_batch`'s lookup and update kernels as columns of sums over tables.

What a table adds to the sums (`part_terms`) does not depend on the tables beside it, so it is found once however many
groups of tables it is in. Sums are added in the order of the tables, as `forward_calls` and `backward_calls` add them: the
columns hold the same numbers to the last bit. For pooled tables in device memory whose optimizer runs in the backward.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from perfmodel.kernels.embedding import CACHE_MIB, POOL, UPDATE, Lookups
from perfmodel.kernels.index import INDEX_BYTES
from perfmodel.kernels.table_batch import STATE_ITEMSIZE_BYTES, TableBatch

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

N_HITS = len(CACHE_MIB)
LOOKUPS, BAGS, WEIGHTS, OUT, GATHERED, UNIQUE, UPDATED, SOURCES = range(8)
FIRST_HIT = 8  # then a column for each of CACHE_MIB, for the rows looked up and for the gradient rows of an update
N_TERMS = FIRST_HIT + 2 * N_HITS


def part_terms(tables: TableBatch) -> Floats:
    """What one table (the only one of the batch) adds to the sums of its group [N_TERMS]."""
    table, one = tables.tables[0], tables.lookups()[0]
    gradient_row = table.dim * tables.output_itemsize_bytes
    source = Lookups(rows=max(int(one.n_bags), 1), n_lookups=one.n_lookups, n_bags=one.unique, row_bytes=gradient_row)
    gathered, sources = one.n_lookups * one.sector_bytes, source.n_lookups * source.sector_bytes
    found = np.zeros(N_TERMS)
    found[LOOKUPS], found[BAGS] = one.n_lookups, one.n_bags
    found[WEIGHTS] = one.n_lookups if table.weighted else 0.0
    found[OUT], found[GATHERED], found[SOURCES] = tables.out_elems(), gathered, sources
    found[UNIQUE] = one.unique
    found[UPDATED] = one.unique * (one.row_bytes + tables.state_bytes(table))
    found[FIRST_HIT : FIRST_HIT + N_HITS] = one.hit_rates() * gathered
    found[FIRST_HIT + N_HITS :] = source.hit_rates() * sources
    return found


def group_sums(terms: Floats, group: Ints, n_groups: int) -> Floats:
    """Sums [N_TERMS, n_groups] of rows of terms by group, each added up in the order of the rows."""
    return np.array([np.bincount(group, weights=column, minlength=n_groups) for column in terms.T])


def lookup_columns(sums: Floats, itemsize_bytes: int = 4) -> Mapping[str, Floats]:
    """Features of the lookup kernel of each group."""
    small = sums[LOOKUPS] * INDEX_BYTES + sums[BAGS] * INDEX_BYTES + sums[WEIGHTS] * STATE_ITEMSIZE_BYTES
    hits = sums[FIRST_HIT : FIRST_HIT + N_HITS]
    found = _columns(POOL, sums[LOOKUPS], sums[BAGS], (sums[GATHERED], hits))
    return {**found, "stream_bytes": small + sums[OUT] * itemsize_bytes, "elems": sums[OUT]}


def update_columns(sums: Floats) -> Mapping[str, Floats]:
    """Features of the update kernel of each group."""
    found = _columns(UPDATE, sums[LOOKUPS], sums[UNIQUE], (sums[SOURCES], sums[FIRST_HIT + N_HITS :]))
    return {**found, "stream_bytes": 2 * sums[LOOKUPS] * INDEX_BYTES, "rmw_bytes": 2.0 * sums[UPDATED]}


def _columns(stage: int, lookups: Floats, bags: Floats, gathered: tuple[Floats, Floats]) -> dict[str, Floats]:
    """`embedding.call_features` of every group."""
    n_bytes, hits = gathered
    nothing = np.zeros_like(lookups)
    shares = hits / np.maximum(n_bytes, 1.0)
    return {
        "stage": nothing + stage,
        "lookups": lookups,
        "bags": np.maximum(bags, 1.0),
        "pooling": lookups / np.maximum(bags, 1.0),
        "row_bytes": n_bytes / np.maximum(lookups, 1.0),
        "row_bytes_total": n_bytes,
        "rmw_bytes": nothing,
        "link_bytes": nothing,
        "elems": nothing,
        "vectorised": nothing + 1.0,
        "in_host": nothing,
        "serial_steps": nothing,
        "storage_s": nothing,
        **{f"hit_{mib}": share for mib, share in zip(CACHE_MIB, shares, strict=True)},
    }
