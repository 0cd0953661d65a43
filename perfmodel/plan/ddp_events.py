"""DDP's events of one step as columns: where copies, all-reduces and copies back stand, and what they wait for.

The same events as `ddp.bucket_insertions` and `ddp.copy_back` make, linked as `events.link_events` would link them: buckets
have storages of their own, so nothing else waits for them or is waited for. An all-reduce waits for the last copy into its
bucket (compressed: for the division); a copy out of it, for the all-reduce (compressed: for the cast back, which itself waits
for the cast and the all-reduce).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain

import numpy as np

from perfmodel.config.plan import DataParallel
from perfmodel.graph import Op, Parameter
from perfmodel.plan.buckets import Bucket
from perfmodel.plan.columns import EventColumns, IntArray, OpRun
from perfmodel.plan.ddp import bucket_wait, copy_in, copy_out, reduction
from perfmodel.plan.events import Event
from perfmodel.plan.splices import Added

COMPRESSED = 4  # events of a compressed reduction: cast, division, all-reduce, cast back; else the all-reduce alone


class BucketEvents(Added):
    """Copies into buckets, reductions and copies back of one step; the same on all ranks.

    Args:
        buckets: in launch order.
        copies: the copies of each gradient into its bucket and back, by the parameter's identity.
        ranks, first_instance, ddp: who reduces, the number of the first collective, and how.
    """

    def __init__(
        self,
        buckets: Sequence[Bucket],
        copies: Mapping[int, tuple[Op, Op]],
        ranks: tuple[int, ...],
        first_instance: int,
        ddp: DataParallel,
    ) -> None:
        self._as_views = ddp.gradient_as_bucket_view
        self._parameters: list[Parameter] = [p for bucket in buckets for p in bucket.parameters]
        self._sizes = np.array([len(bucket.parameters) for bucket in buckets], dtype=np.int64)
        reductions = [
            reduction(bucket, number, ranks, first_instance + number, ddp.compression)
            for number, bucket in enumerate(buckets)
        ]
        self._reducing = list(chain.from_iterable(reductions))
        self._lengths = np.array([len(events) for events in reductions], dtype=np.int64)
        ready = np.repeat([bucket.ready_op for bucket in buckets], self._lengths)
        op = np.concatenate([[p.grad_op for p in self._parameters], ready]).astype(np.int64)
        self._order = np.argsort(op, kind="stable")
        self._op = op[self._order]
        self.columns = self._columns(copies)

    def slots(self, after_op: IntArray, end: int) -> IntArray:
        """How many of a rank's other events stand before each.

        `after_op[i]` stand before what follows op i, `end` before what follows the step.
        """
        inside = after_op[self._op]
        return np.concatenate([inside, np.full(self.columns.size - len(inside), end, dtype=np.int64)])

    def event(self, number: int) -> Event:
        """One of them; `after` is left to the columns."""
        n_in, n_inside = len(self._parameters), len(self._order)
        if number >= n_inside:
            last = number - n_inside
            return bucket_wait(last) if self._as_views else copy_out(self._parameters[last], self._bucket_of(last))
        item = int(self._order[number])
        return copy_in(self._parameters[item], self._bucket_of(item)) if item < n_in else self._reducing[item - n_in]

    def _bucket_of(self, parameter: int) -> int:
        return int(np.searchsorted(np.cumsum(self._sizes), parameter, side="right"))

    def _columns(self, copies: Mapping[int, tuple[Op, Op]]) -> EventColumns:
        pairs = [copies[id(p)] for p in self._parameters]
        items = [*(into for into, _ in pairs), *(event.op for event in self._reducing)]
        inside = [items[i] for i in self._order.tolist()]
        waits = [bucket_wait(number).op for number in range(len(self._sizes))] if self._as_views else []
        ops = [*inside, *(waits if self._as_views else (back for _, back in pairs))]
        is_op = np.array([op is not None for op in ops], dtype=bool)
        at = np.flatnonzero(~is_op)
        n_in = len(pairs)
        collectives = [self._reducing[i - n_in] for i in self._order[at].tolist()]
        waiter, source = self._waits(len(ops))
        return EventColumns(
            size=len(ops),
            op_at=np.flatnonzero(is_op),
            ops=OpRun(op for op in ops if op is not None),
            collective_at=at,
            collectives=collectives,
            instance=np.array([e.collective.instance for e in collectives if e.collective], dtype=np.int64),
            waiter=waiter,
            source=source,
        )

    def _waits(self, size: int) -> tuple[IntArray, IntArray]:
        """Who waits for whom, by place, in the order of those that wait."""
        n_in, n_inside = len(self._parameters), len(self._order)
        place = np.empty(n_inside, dtype=np.int64)
        place[self._order] = np.arange(n_inside)
        last_copy = np.maximum.reduceat(place[:n_in], np.cumsum(self._sizes) - self._sizes)
        end = n_in + np.cumsum(self._lengths)
        narrow = self._lengths == COMPRESSED
        reduce = place[np.where(narrow, end - 2, end - 1)]
        division, cast, back = place[end[narrow] - 3], place[end[narrow] - 4], place[end[narrow] - 1]
        before = last_copy.copy()
        before[narrow] = division
        done = place[end - 1]
        leaving = np.arange(n_inside, size)
        waiter = np.concatenate([reduce, back, back, leaving])
        source = np.concatenate(
            [before, cast, reduce[narrow], done if self._as_views else np.repeat(done, self._sizes)]
        )
        order = np.lexsort((source, waiter))
        return waiter[order], source[order]
