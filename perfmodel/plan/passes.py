"""Forward and backward of one micro-batch through one chunk, with the data-parallel communication that falls into them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from perfmodel.config.plan import PlanSpec
from perfmodel.graph import Op
from perfmodel.plan.buckets import assign_buckets
from perfmodel.plan.ddp import accumulate, bucket_insertions, copy_back
from perfmodel.plan.events import CollectiveOp, Event, link_events
from perfmodel.plan.runs import Segment
from perfmodel.plan.segments import START, Groups, ops_of, segment
from perfmodel.plan.sharded_states import (
    backward_gathers,
    forward_gathers,
    gradient_scatters,
    wait_for_gradients,
    waited_for,
)
from perfmodel.plan.spread import Chunk, units_in
from perfmodel.plan.weight_gradients import weight_ops


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """What is run: `backward` is all of it, or with a zero-bubble schedule the part that `weight` leaves.

    `first` and `last`: of the micro-batches of the iteration.
    """

    kind: str
    first: bool = False
    last: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Passes:
    """Makes the passes of a rank class; each is made once for a chunk and the same groups."""

    plan: PlanSpec
    groups: Groups
    n_stages: int

    @property
    def _shard(self) -> str:
        return self.plan.data_parallel.shard if len(self.groups.of["dp"]) > 1 else "nothing"

    def of(self, chunk: Chunk, what: Pass) -> Segment:
        """A pass, linked."""
        plan = self.plan
        groups = tuple(self.groups.of.items())  # its siblings follow from them and the mesh
        key = ("pass", what, groups, plan.data_parallel, plan.fsdp, plan.pipeline.schedule, self.n_stages > 1)
        return chunk.facts.derived(key, partial(self._make, chunk, what))

    def _make(self, chunk: Chunk, what: Pass) -> Segment:
        if what.kind == "forward":
            return self._forward(chunk)
        ops = self._ops(chunk, what)
        inserted: dict[int, list[Event]] = {}
        if not what.first and not self._scatters_always:
            _join(inserted, accumulate(chunk.graph.parameters), {op.id for op in ops})
        if self._shard == "parameters":
            return self._sharded_backward(chunk, ops, inserted, what)
        ends = what.kind == "weight" or self.plan.pipeline.schedule != "zero_bubble"
        if not self._reduces(what) or not ends:
            return segment(ops, self.groups, inserted)
        return self._bucketed(chunk, ops, inserted)

    @property
    def _scatters_always(self) -> bool:
        """Gradients leave a rank in every micro-batch: FSDP and ZeRO 2 without pipeline stages."""
        return self._shard == "parameters" and self.n_stages == 1

    def _reduces(self, what: Pass) -> bool:
        if len(self.groups.of["dp"]) == 1 or self.plan.data_parallel.reduce != "buckets":
            return False
        return what.last or self._shard == "gradients"

    def _ops(self, chunk: Chunk, what: Pass) -> list[Op]:
        ops = ops_of(chunk.graph, "backward")
        if self.plan.pipeline.schedule != "zero_bubble":
            return ops
        weights = chunk.facts.derived("weight ops", partial(weight_ops, chunk.graph))
        return [op for op in ops if (op.id in weights) == (what.kind == "weight")]

    def _forward(self, chunk: Chunk) -> Segment:
        ops = ops_of(chunk.graph, "input", "forward", "loss")
        if self._shard != "parameters":
            return segment(ops, self.groups)
        units = units_in(chunk, self.plan.fsdp.wrap)
        before = forward_gathers(units, self.groups, self.plan.fsdp)
        blocking = chunk.graph.target == "cpu"
        return segment(ops, self.groups, before=waited_for(before) if blocking else before)

    def _sharded_backward(
        self, chunk: Chunk, ops: Sequence[Op], inserted: dict[int, list[Event]], what: Pass
    ) -> Segment:
        """Backward with parameters gathered unit by unit; pipelines scatter the sums of all micro-batches' gradients."""
        units = units_in(chunk, self.plan.fsdp.wrap)
        before, after = backward_gathers(units, self.groups, self.plan.fsdp)
        blocking = chunk.graph.target == "cpu"
        present = {op.id for op in ops}
        _join(inserted, after, present)
        scatters = self._scatters_always or what.last
        if scatters:
            _join(inserted, gradient_scatters(units, self.groups, self.plan.fsdp), present)
        if blocking:
            before, inserted = waited_for(before), waited_for(inserted)
        run = segment(ops, self.groups, inserted, before)
        return Segment(link_events((*run, wait_for_gradients(units)))) if scatters else run

    def _bucketed(self, chunk: Chunk, ops: Sequence[Op], inserted: dict[int, list[Event]]) -> Segment:
        ddp = self.plan.data_parallel
        buckets = assign_buckets(chunk.graph.parameters, ddp.first_bucket, ddp.bucket_cap)
        present = {op.id for op in ops}
        before: dict[int, list[Event]] = {}
        for op, events in bucket_insertions(buckets, self.groups.of["dp"], -1, ddp.compression).items():
            at = inserted if op in present else before  # complete since an earlier part of this backward
            at.setdefault(op if op in present else START, []).extend(self._unnumbered(events))
        run = segment(ops, self.groups, inserted, before)
        as_views = ddp.gradient_as_bucket_view or self._shard != "nothing"
        return Segment(link_events((*run, *copy_back(buckets, as_views=as_views))))

    def _unnumbered(self, events: Sequence[Event]) -> list[Event]:
        """Collectives of a segment get their numbers where it is replayed; gradients divided over ranks are scattered."""
        op: CollectiveOp = "all_reduce" if self._shard == "nothing" else "reduce_scatter"
        return [
            event
            if event.collective is None
            else replace(
                event, collective=replace(event.collective, op=op, instance=-1, siblings=self.groups.siblings["dp"])
            )
            for event in events
        ]


def _join(into: dict[int, list[Event]], more: Mapping[int, Sequence[Event]], present: set[int]) -> None:
    """Adds insertions after ops that are `present`."""
    for op, events in more.items():
        if op in present:
            into.setdefault(op, []).extend(events)
