"""Forward and backward of one micro-batch through one chunk, with the data-parallel communication that falls into them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from perfmodel.config.plan import DataParallel, PlanSpec
from perfmodel.graph import Op, Parameter
from perfmodel.plan.buckets import Bucket, assign_buckets
from perfmodel.plan.ddp import accumulate, bucket_insertions, copy_back
from perfmodel.plan.events import CollectiveOp, Event
from perfmodel.plan.gradient_shards import (
    gradient_scatters,
    shards_added,
    shards_summed,
    sums_wide,
    wait_for_gradients,
)
from perfmodel.plan.host_states import HostStates
from perfmodel.plan.offload import arrived, fetched, returned
from perfmodel.plan.runs import Segment
from perfmodel.plan.schedule import PARTED
from perfmodel.plan.segments import START, Groups, Linked, ops_of
from perfmodel.plan.sharded_states import Unit, backward_gathers, forward_gathers
from perfmodel.plan.spread import Chunk, units_in
from perfmodel.plan.weight_gradients import weight_ops

MAX_PASSES = 64  # of a chunk, remembered; a sweep over sizes of buckets has thousands


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """What is run: `backward` is all of it, or with a zero-bubble schedule the part that `weight` leaves.

    `first` and `last`: of the micro-batches whose gradients are summed before they leave the rank (of a forward pass: of the
    iteration). `again`: some of the iteration have left it before, onto which they are added.
    """

    kind: str
    first: bool = False
    last: bool = False
    again: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Passes:
    """Makes the passes of a rank class; each is made once for a chunk and the same groups.

    `experts` are the names of the parameters that expert-parallel ranks share out.
    """

    plan: PlanSpec
    groups: Groups
    n_stages: int
    experts: frozenset[str] = frozenset()

    @property
    def _shard(self) -> str:
        return self.plan.data_parallel.shard if len(self.groups.of["dp"]) > 1 else "nothing"

    def of(self, chunk: Chunk, what: Pass) -> Segment:
        """A pass, linked. Plans in which it is the same share it."""
        made: dict[object, Segment] = chunk.facts.derived("passes", dict)
        key = (*self.groups.of.items(), *self._variant(what))  # siblings of groups follow from them and the mesh
        known = made.get(key)
        if known is None:
            known = self._make(chunk, what)
            if len(made) >= MAX_PASSES:
                made.clear()
            made[key] = known
        return known

    def _variant(self, what: Pass) -> tuple[object, ...]:
        """All of plan and pass that `_make` reads beside the groups, the rest left out."""
        ddp = self.plan.data_parallel
        offload = (ddp.offload, ddp.host_memory)
        fsdp = (self.plan.fsdp, self.n_stages > 1, offload) if self._shard == "parameters" else None
        if what.kind == "forward":
            return "forward", fsdp, self._gathers(what)
        split = self.plan.pipeline.schedule in PARTED
        reduced: object = None
        if fsdp is not None:
            reduced = what.last, what.last and what.again
        elif self._ends_in_buckets(what):
            whole = self._shard == "nothing"
            sizes = (ddp.first_bucket, ddp.bucket_cap, ddp.compression)
            reduced = (*sizes, whole, whole and ddp.gradient_as_bucket_view, offload, what.again)
        return what.kind, split, fsdp, self._accumulates(what), reduced

    def _make(self, chunk: Chunk, what: Pass) -> Segment:
        if what.kind == "forward":
            return self._forward(chunk, what)
        linked = self._linked(chunk, what.kind)
        inserted: dict[int, list[Event]] = {}
        if self._sums_wide:
            if not (what.first and what.last):
                _join(inserted, sums_wide(chunk.graph.parameters, first=what.first), linked)
        elif self._accumulates(what):
            _join(inserted, chunk.facts.derived("added up", partial(accumulate, chunk.graph.parameters)), linked)
        if self._shard == "parameters":
            return self._sharded_backward(chunk, linked, inserted, what)
        if self._ends_in_buckets(what):
            return self._bucketed(chunk, linked, inserted, what)
        return linked.between(inserted)

    def _linked(self, chunk: Chunk, kind: str) -> Linked:
        """The ops of a kind of pass alone, found once for a chunk and the same groups."""
        parted = self.plan.pipeline.schedule in PARTED
        groups = tuple(self.groups.of.items())

        def make() -> Linked:
            return Linked(self._ops(chunk, kind), self.groups, chunk.events)

        return chunk.facts.derived(("linked", groups, kind, parted and kind != "forward"), make)

    def _accumulates(self, what: Pass) -> bool:
        """Whether gradients are added to those of an earlier micro-batch."""
        return not what.first

    @property
    def _sums_wide(self) -> bool:
        """Whether FSDP sums gradients over micro-batches in fp32 before it scatters them."""
        return self._shard == "parameters" and self.plan.fsdp.reduce_dtype == "fp32"

    def _ends_in_buckets(self, what: Pass) -> bool:
        """Whether gradients leave the rank in buckets during this pass."""
        return self._reduces(what) and (what.kind == "weight" or self.plan.pipeline.schedule not in PARTED)

    def _reduces(self, what: Pass) -> bool:
        if len(self.groups.of["dp"]) == 1 or self.plan.data_parallel.reduce != "buckets":
            return False
        return what.last

    def _ops(self, chunk: Chunk, kind: str) -> list[Op]:
        if kind == "forward":
            return ops_of(chunk.graph, "input", "forward", "loss")
        ops = ops_of(chunk.graph, "backward")
        if self.plan.pipeline.schedule not in PARTED:
            return ops
        weights = chunk.facts.derived("weight ops", partial(weight_ops, chunk.graph))
        return [op for op in ops if (op.id in weights) == (kind == "weight")]

    def _gathers(self, what: Pass) -> bool:
        """Whether forward gathers parameters: units of a stage that are not freed after forward stay until the last backward.

        torch.distributed.pipelining keeps them (`set_reshard_after_backward`); Llama 3 was trained so (arXiv:2407.21783).
        """
        stay = self.n_stages > 1 and not self.plan.fsdp.reshard_after_forward
        return self._shard == "parameters" and (what.first or not stay)

    def _forward(self, chunk: Chunk, what: Pass) -> Segment:
        linked = self._linked(chunk, "forward")
        if not self._gathers(what):
            return linked.run
        units = units_in(chunk, self.plan.fsdp.wrap, self.experts)
        before = self._fetched(forward_gathers(units, self.groups, self.plan.fsdp))
        if chunk.graph.target == "cpu":
            before = self._on_host(chunk, units).forward(before)
        return linked.between({}, before)

    def _sharded_backward(self, chunk: Chunk, linked: Linked, inserted: dict[int, list[Event]], what: Pass) -> Segment:
        """Backward with parameters gathered unit by unit; pipelines scatter the sums of all micro-batches' gradients."""
        units = units_in(chunk, self.plan.fsdp.wrap, self.experts)
        before, after = map(self._fetched, backward_gathers(units, self.groups, self.plan.fsdp))
        _join(inserted, after, linked)
        if what.last:
            summed = self._sums_wide and not what.first
            packed = gradient_scatters(units, self.groups, self.plan.fsdp, summed=summed)
            if what.again and not self._offloads:
                packed = shards_added(packed, units, self.plan.fsdp.version)
            _join(inserted, self._returned(packed, what), linked)
        if chunk.graph.target == "cpu":
            before, inserted = self._on_host(chunk, units).backward(before, inserted)
        if not what.last:
            return linked.between(inserted, before)
        ends = (arrived(is_parameters=True),) if self._offloads else ()
        return linked.between(inserted, before, (wait_for_gradients(units), *ends))

    def _on_host(self, chunk: Chunk, units: Sequence[Unit]) -> HostStates:
        fsdp = self.plan.fsdp
        return HostStates(
            graph=chunk.graph,
            units=units,
            n_shards=len(self.groups.of["shard"]),
            is_flat=fsdp.version == 1,
            stays=not fsdp.reshard_after_forward,
        )

    @property
    def _offloads(self) -> bool:
        return self.plan.data_parallel.offload and self._shard != "nothing"

    def _fetched(self, gathers: dict[int, list[Event]]) -> dict[int, list[Event]]:
        """Gathers of parameters, from the host's memory where they lie there."""
        return fetched(gathers) if self._offloads else gathers

    def _returned(self, scatters: dict[int, list[Event]], what: Pass) -> dict[int, list[Event]]:
        """Scatters of gradients, into the host's memory where they are wanted there."""
        if not self._offloads:
            return scatters
        rate = self.plan.data_parallel.host_memory if what.again else 0.0
        return returned(scatters, adds_bytes_per_s=rate)

    def _bucketed(self, chunk: Chunk, linked: Linked, inserted: dict[int, list[Event]], what: Pass) -> Segment:
        ddp = self.plan.data_parallel
        before: dict[int, list[Event]] = {}
        ends: list[Event] = []
        n_buckets = 0
        for group, buckets in buckets_of(chunk, ddp, self.experts, self.groups):
            ranks = self.groups.of[group]
            filled = {
                op: self._unnumbered(events, group)
                for op, events in bucket_insertions(buckets, ranks, -1, ddp.compression, first=n_buckets).items()
            }
            if what.again and not self._offloads:
                filled = {op: shards_summed(events) for op, events in filled.items()}
            for op, events in self._returned(filled, what).items():
                at = inserted if op in linked.place else before  # complete since an earlier part of this backward
                at.setdefault(op if op in linked.place else START, []).extend(events)
            as_views = ddp.gradient_as_bucket_view or self._shard != "nothing"
            ends += copy_back(buckets, as_views=as_views, first=n_buckets)
            n_buckets += len(buckets)
        if self._offloads:
            ends.append(arrived(is_parameters=False))
        return linked.between(inserted, before, ends)

    def _unnumbered(self, events: Sequence[Event], group: str) -> list[Event]:
        """Collectives of a segment get their numbers where it is replayed; gradients divided over ranks are scattered."""
        op: CollectiveOp = "all_reduce" if self._shard == "nothing" else "reduce_scatter"
        return [
            event
            if event.collective is None
            else replace(
                event, collective=replace(event.collective, op=op, instance=-1, siblings=self.groups.siblings[group])
            )
            for event in events
        ]


def reduced_over(
    parameters: Sequence[Parameter], experts: frozenset[str], groups: Groups
) -> Iterator[tuple[str, list[Parameter]]]:
    """(group, parameters whose gradients it reduces): replicas reduce dense ones, those with equal experts these."""
    for group, wanted in (("dp", False), ("experts", True)):
        found = [p for p in parameters if (p.name in experts) == wanted]
        if found and len(groups.of[group]) > 1:
            yield group, found


def buckets_of(
    chunk: Chunk, plan: DataParallel, experts: frozenset[str], groups: Groups
) -> tuple[tuple[str, tuple[Bucket, ...]], ...]:
    """(group, buckets of what it reduces), found once."""
    sizes = plan.first_bucket, plan.bucket_cap

    def make() -> tuple[tuple[str, tuple[Bucket, ...]], ...]:
        found = reduced_over(chunk.graph.parameters, experts, groups)
        return tuple((group, assign_buckets(parameters, *sizes)) for group, parameters in found)

    reducing = tuple(len(groups.of[name]) > 1 for name in ("dp", "experts"))
    return chunk.facts.derived(("buckets", *sizes, experts, reducing), make)


def _join(into: dict[int, list[Event]], more: Mapping[int, Sequence[Event]], linked: Linked) -> None:
    """Adds insertions after ops that are there."""
    for op, events in more.items():
        if op in linked.place:
            into.setdefault(op, []).extend(events)
