"""What plans that bucket gradients differently have in common: everything but DDP's events, placed and linked once."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

from perfmodel.config.plan import DataParallel, PlanSpec
from perfmodel.graph import Graph, Op
from perfmodel.plan.buckets import Bucket, Gradient, fill_buckets
from perfmodel.plan.columns import IntArray, JoinedColumns
from perfmodel.plan.ddp_events import BucketEvents
from perfmodel.plan.events import Event, MemoryUse, RankClass
from perfmodel.plan.splices import SplicedEvents, Splices

MAX_FRAMES = 16
# Keys of `data_parallel` that say how gradients are bucketed, and what names a plan.
_OF_BUCKETS = {"bucket_cap", "first_bucket", "gradient_as_bucket_view", "compression", "static_graph"}
_APART: dict[str, Any] = {"name": True, "data_parallel": _OF_BUCKETS}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FramedClass:
    """A rank class without DDP's events: `after_op` and `end` say where those go (see `BucketEvents.slots`)."""

    ranks: tuple[int, ...]
    device: str
    events: Sequence[Event]
    after_op: IntArray
    end: int
    memory: MemoryUse
    tables: tuple[str, ...]

    def memory_with(self, buckets: Sequence[Bucket], ddp: DataParallel) -> MemoryUse:
        """The class's memory with its buckets, which stay all the time; gradients that are views of them lie there."""
        n_bytes = sum(bucket.bytes for bucket in buckets)
        if ddp.gradient_as_bucket_view:
            n_bytes = max(n_bytes - self.memory.gradients_bytes, 0)
        return replace(self.memory, communication_bytes=self.memory.communication_bytes + n_bytes)

    def rank_class(self, events: Sequence[Event], memory: MemoryUse) -> RankClass:
        """The class with all its events."""
        return RankClass(ranks=self.ranks, device=self.device, events=events, memory=memory, tables=self.tables)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Frame:
    """A placement without DDP's events.

    `columns` are of the events of all classes; `gradients` are those that DDP reduces (none on a lone rank), `copies` their
    copies by the parameter's identity. `notes` raises InfeasiblePlanError where DDP cannot reduce a gradient.
    """

    graph: Graph
    classes: tuple[FramedClass, ...]
    columns: JoinedColumns
    n_ranks: int
    gradients: tuple[Gradient, ...]
    copies: Mapping[int, tuple[Op, Op]]
    first_instance: int
    notes: Callable[[], tuple[str, ...]]

    def buckets(self, ddp: DataParallel) -> tuple[Bucket, ...]:
        """Gradients in buckets."""
        return fill_buckets(self.gradients, ddp.first_bucket, ddp.bucket_cap)

    def rank_classes(
        self, added: BucketEvents | None, memory: Sequence[MemoryUse], *, flat: bool
    ) -> tuple[RankClass, ...]:
        """All classes with DDP's events and so much memory; `flat`: their events as plain tuples."""
        events: list[Sequence[Event]] = [framed.events for framed in self.classes]
        if added is not None:
            slots = [added.slots(framed.after_op, framed.end) for framed in self.classes]
            splices = Splices(self.columns, added, slots)
            events = [SplicedEvents(base, splices, number) for number, base in enumerate(events)]
        parts = zip(self.classes, events, memory, strict=True)
        return tuple(framed.rank_class(tuple(own) if flat else own, held) for framed, own, held in parts)

    def added(self, buckets: Sequence[Bucket], ddp: DataParallel) -> BucketEvents | None:
        """DDP's events; None if there are none."""
        if not buckets:
            return None
        return BucketEvents(buckets, self.copies, tuple(range(self.n_ranks)), self.first_instance, ddp)


class Frames:
    """The last `MAX_FRAMES` frames by graph, plan and ranks."""

    def __init__(self) -> None:
        self._known: dict[Hashable, Frame] = {}

    def of(self, graph: Graph, plan: PlanSpec, ranks: Sequence[Hashable], make: Callable[[], Frame]) -> Frame:
        """The frame of a plan, made once however gradients are bucketed."""
        on = tuple((rank, len(list(same))) for rank, same in groupby(ranks))
        key = (id(graph), plan.model_dump_json(exclude=_APART), on)
        known = self._known.get(key)
        if known is None:
            known = make()
            if len(self._known) >= MAX_FRAMES:
                self._known = {}
            self._known[key] = known
        return known
