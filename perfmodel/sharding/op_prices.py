"""Kernel times of batched table operators on one device, found for many groups of tables at once.

An operator's kernels come in the order of the rules of `kernels.table_batch`. Sorts and scans depend on a few whole numbers
and are remembered by them; lookups and updates of pooled tables in device memory are priced in columns; any other kind of
operator by its rule, once for each group of tables.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from perfmodel.db.device import Device
from perfmodel.graph import Op
from perfmodel.kernels import KernelCall, price_calls
from perfmodel.kernels.embedding_law import has_rows, rows_time_s
from perfmodel.kernels.index import RADIX_BITS
from perfmodel.kernels.table_batch import (
    TableBatch,
    backward_calls,
    check_calls,
    dense_update_calls,
    forward_calls,
    permute_sparse_features,
    run_calls,
    sort_calls,
)
from perfmodel.kernels.table_columns import Floats, group_sums, lookup_columns, update_columns

Calls = Callable[[], Sequence[KernelCall]]
MAX_REMEMBERED = 200_000


def sort_passes(rows: int) -> int:
    """Passes of a radix sort of row numbers below `rows`."""
    return max(1, math.ceil(math.log2(max(rows, 2)) / RADIX_BITS))


@dataclass(frozen=True, slots=True, eq=False)
class Group:
    """Tables of one batched lookup: rows of terms, lookups, rows of the tables and distinct rows."""

    terms: tuple[Floats, ...]
    lookups: float
    rows: int
    unique: float

    @property
    def n_passes(self) -> int:
        """Passes of the sort of its row numbers."""
        return sort_passes(self.rows)


class OpPrices:
    """Kernel times (ps) on one device, remembered."""

    def __init__(self, device: Device, ps_per_s: float) -> None:
        self.device, self._ps_per_s = device, ps_per_s
        self._known: dict[object, list[int]] = {}
        self._asked: dict[object, Calls] = {}
        self.in_columns = has_rows(device)  # whether this device has what groups are priced by

    def permute(self, n_lookups: float, n_bags: int, *, bucketed: bool) -> object:
        """The key of `perfmodel.permute_sparse_features`."""
        attrs = {"n_lookups": n_lookups, "n_bags": n_bags, "bucketed": bucketed}
        op = "perfmodel.permute_sparse_features"
        return self._ask(
            ("permute", n_lookups, n_bags, bucketed), lambda: permute_sparse_features(Op(id=-1, name=op, attrs=attrs))
        )

    def batch(self, kind: str, tables: TableBatch) -> object:
        """The key of an operator by its rule: `forward`, `backward` or `update` (of a dense optimizer)."""
        rule = {"forward": forward_calls, "backward": backward_calls, "update": dense_update_calls}[kind]
        return self._ask((kind, tables), lambda: rule(tables))

    def fixed(self, group: Group) -> tuple[object, object, object]:
        """Keys of a group's check of indices, of its sort and of its runs."""
        n = int(group.lookups)
        return (
            self._ask(("check", round(group.lookups * 8)), lambda: check_calls(group.lookups)),
            self._ask(("sort", n, group.lookups, group.n_passes), lambda: sort_calls(group.lookups, group.rows)),
            self._ask(("runs", round(group.unique * 4)), lambda: run_calls(group.unique)),
        )

    def price(self) -> None:
        """Prices everything asked for and not known."""
        if len(self._known) > MAX_REMEMBERED:
            self._known = {}
        calls = {key: tuple(make()) for key, make in self._asked.items() if key not in self._known}
        self._asked = {}
        flat = [call for members in calls.values() for call in members]
        times = np.array([estimate.time_s for estimate in price_calls(flat, self.device)]) if flat else np.zeros(0)
        at = 0
        for key, members in calls.items():
            self._known[key] = self.whole_ps(times[at : at + len(members)]).tolist()
            at += len(members)

    def whole_ps(self, time_s: Floats) -> NDArray[np.int64]:
        """Seconds as the simulator's clock counts them."""
        return np.rint(time_s * self._ps_per_s).astype(np.int64)

    def of(self, key: object) -> list[int]:
        """Times (ps) of the kernels under a key that was priced."""
        return self._known[key]

    def n_kernels(self, key: object) -> int:
        """Kernels under a key that was asked for."""
        return len(self._known[key]) if key in self._known else len(self._asked[key]())

    def groups(self, groups: Sequence[Group]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Times (ps) of the lookup and of the update kernel of each group."""
        found = self._times(groups)
        if found is None:
            raise RuntimeError(f"{self.device.name} has no fit of batched lookups")
        return self.whole_ps(found[0]), self.whole_ps(found[1])

    def _times(self, groups: Sequence[Group]) -> tuple[Floats, Floats] | None:
        terms = [row for group in groups for row in group.terms]
        number = np.repeat(np.arange(len(groups)), [len(group.terms) for group in groups])
        if not terms:
            return np.zeros(0), np.zeros(0)
        sums = group_sums(np.array(terms), number, len(groups))
        lookup, update = (rows_time_s(make(sums), self.device) for make in (lookup_columns, update_columns))
        return None if lookup is None or update is None else (lookup, update)

    def _ask(self, key: object, make: Calls) -> object:
        if key not in self._known:
            self._asked[key] = make
        return key
