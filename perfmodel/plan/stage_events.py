"""Writes the events of the ranks of one pipeline stage: the schedule's passes, what stages send, reductions, the optimizer."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from perfmodel.graph import Op, Phase, TensorSpec
from perfmodel.plan.buckets import assign_buckets
from perfmodel.plan.events import Collective, Event, Stream, link_events, op_event
from perfmodel.plan.host_states import gradient_storages
from perfmodel.plan.offload import optimizer_on_host, to_device
from perfmodel.plan.optimizer_parts import optimizer_of
from perfmodel.plan.passes import Pass, Passes, buckets_of, reduced_over
from perfmodel.plan.runs import NO_INSTANCE, EventRuns, Segment
from perfmodel.plan.schedule import Step
from perfmodel.plan.segments import Program, segment
from perfmodel.plan.sharded_states import shard_optimizer
from perfmodel.plan.spread import REPLICAS, Chunk, Spread
from perfmodel.plan.stages import Stage

CLASS_STRIDE = 1 << 28  # instance numbers of one stage's own collectives
BETWEEN = 1 << 40  # instance numbers of what stages send each other start here
FLAT_GRADIENTS = (1 << 41) - 1  # storage of gradients that are reduced all at once
_OTHER_SIDE: dict[Stream, Stream] = {
    "send_next": "send_prev", "send_prev": "send_next", "recv_prev": "recv_next", "recv_next": "recv_prev",
}  # fmt: skip
FLAT_PARAMETERS = 1 << 49  # storages of updated parameters that come from the host


class StageWriter:
    """Writes the events of one rank class; `rank` is its first."""

    def __init__(self, spread: Spread, stage: int, rank: int) -> None:
        self.spread, self.stage, self.rank = spread, stage, rank
        self.plan, self.mesh = spread.plan, spread.mesh
        self.chunks = spread.chunks(stage)
        self.program = Program(first_instance=stage * CLASS_STRIDE)
        self.spans: list[tuple[int, int]] = []  # of each step: index of its first event, and of the first after it
        self.transfers: dict[tuple[int, int], tuple[tuple[int, int], tuple[tuple[int, int], ...]]] = {}
        self.received: dict[tuple[str, int, int], int] = {}  # in a V: event by kind, micro-batch and cut
        self.incoming: dict[int, deque[tuple[Step, int]]] = {}
        self.groups = spread.groups(stage, rank)
        self.passes = Passes(plan=spread.plan, groups=self.groups, n_stages=spread.n_stages, experts=spread.experts)

    def events(self) -> EventRuns:
        """All of an iteration: the schedule's passes, gradient reductions, the optimizer."""
        steps = self.spread.steps(self.stage)
        runs: dict[tuple[int, Pass], Segment] = {}
        for step, one in zip(steps, _passes(steps, self.plan.sum_group), strict=True):
            run = runs.get((step.chunk, one))
            if run is None:
                run = runs[step.chunk, one] = self.passes.of(self.chunks[step.chunk], one)
            self._run(step, run)
        self._shared_gradients()
        if self.plan.data_parallel.reduce == "after_backward":
            self._reduce_all()
        for chunk in self.chunks:
            self.program.extend(self._optimizer(chunk))
            if self.mesh.size(*REPLICAS) > 1 and self.plan.data_parallel.shard in ("optimizer", "gradients"):
                self._gather_parameters(chunk)
        return self.program.events()

    def _run(self, step: Step, run: Segment) -> None:
        """A pass between what it receives and what it sends on; gradients of weights stay where they are."""
        virtual = self.spread.virtual(self.stage, step.chunk)
        begin = self.program.n_events
        received = None
        if step.kind == "forward" and self._is_cut(virtual - 1):
            received = self._receive("recv_prev", virtual - 1, step)
        elif step.kind == "backward" and self._is_cut(virtual):
            received = self._receive("recv_next", virtual, step)
        self.program.extend(run, after=received)
        if self.plan.pipeline.host_sync:
            self.program.add(op_event(_PASS_END), after_compute=False)
        if step.kind == "forward" and self._is_cut(virtual):
            self._transfer(self._side("send_next", virtual), virtual, step)
        elif step.kind == "backward" and self._is_cut(virtual - 1):
            self._transfer(self._side("send_prev", virtual - 1), virtual - 1, step)
        self.spans.append((begin, self.program.n_events))

    def _is_cut(self, boundary: int) -> bool:
        """Whether what crosses from virtual stage `boundary` to the next goes from rank to rank."""
        last = len(self.spread.stages) - 1
        return 0 <= boundary < last and self.spread.stage_of(boundary) != self.spread.stage_of(boundary + 1)

    def _side(self, stream: Stream, boundary: int) -> Stream:
        """The stream to or from the other rank: with a V the neighbour on the other side is next on the way up."""
        if not self.spread.is_v or boundary < self.spread.n_stages:
            return stream
        return _OTHER_SIDE[stream]

    def _receive(self, stream: Stream, boundary: int, step: Step) -> int:
        """What a pass waits for. In a V a neighbour sends from both chunks, and what it sent before comes before."""
        if not self.spread.is_v:
            return self._transfer(stream, boundary, step)
        peer = self.spread.stage_of(boundary if step.kind == "forward" else boundary + 1)
        wanted = (step.kind, step.micro, boundary)
        while wanted not in self.received:
            sent, sent_boundary = self._incoming(peer).popleft()
            side = self._side("recv_prev" if sent.kind == "forward" else "recv_next", sent_boundary)
            self.received[sent.kind, sent.micro, sent_boundary] = self._transfer(side, sent_boundary, sent)
        return self.received[wanted]

    def _incoming(self, peer: int) -> deque[tuple[Step, int]]:
        """What a stage sends to this one and has not been received: step and cut, in the order in which it is sent."""
        if peer not in self.incoming:
            found = ((s, self.spread.virtual(peer, s.chunk)) for s in self.spread.steps(peer) if s.kind != "weight")
            cuts = ((s, virtual if s.kind == "forward" else virtual - 1) for s, virtual in found)
            self.incoming[peer] = deque(
                (s, cut)
                for s, cut in cuts
                if self._is_cut(cut) and self.spread.stage_of(cut + (s.kind == "forward")) == self.stage
            )
        return self.incoming[peer]

    def _transfer(self, stream: Stream, boundary: int, step: Step) -> int:
        """The rank's side of what crosses the cut after virtual stage `boundary`, for one micro-batch."""
        part = self.spread.stages[boundary]
        forward = step.kind == "forward"
        ends = (self.spread.stage_of(boundary), self.spread.stage_of(boundary + 1))
        if not forward:
            part, ends = self.spread.stages[boundary + 1], ends[::-1]
        pair, siblings = self._pairs(ends)
        whole = part.forward_bytes if forward else part.backward_bytes
        parts = self._parts()
        collective = Collective(
            op="send_recv",
            bytes=-(-whole // parts),
            ranks=pair,
            dtype=part.dtype,
            instance=BETWEEN + ((step.micro * len(self.spread.stages) + boundary) * 2 + forward),
            purpose="activations" if forward else "gradients of activations",
            siblings=siblings,
        )
        waits = self.plan.pipeline.host_sync and stream.startswith("recv")
        event = Event(
            stream=stream, phase="forward" if forward else "backward", collective=collective, host_waits=waits
        )
        index = self.program.add(event, after_compute=stream.startswith("send"))
        return self._gathered(index, event, whole) if parts > 1 and stream.startswith("recv") else index

    def _parts(self) -> int:
        """Into how many parts the tensor-parallel ranks divide what crosses a cut and all of them have."""
        divides = self.plan.pipeline.scatter_gather and not self.plan.tensor_parallel.sequence
        return self.mesh.size("tp") if divides else 1

    def _gathered(self, index: int, received: Event, whole: int) -> int:
        """What a rank received in part comes together from all of its tensor-parallel group."""
        if received.collective is None:
            raise RuntimeError("only what was received is gathered")
        gather = Collective(
            op="all_gather",
            bytes=whole,
            ranks=self.groups.of["tp"],
            dtype=received.collective.dtype,
            instance=self.program.number(),
            purpose=received.collective.purpose,
            siblings=self.groups.siblings["tp"],
        )
        event = Event(stream="tensor", phase=received.phase, collective=gather, after=(index,))
        return self.program.add(event, after_compute=False)

    def _pairs(self, ends: tuple[int, int]) -> tuple[tuple[int, int], tuple[tuple[int, int], ...]]:
        """The pair of ranks at two stages that this rank is one of, and those of the others of its stage; found once."""
        if ends not in self.transfers:
            here = self.mesh.members("pp", self.stage)
            stride = self.mesh.stride("pp")
            first, second = ((end - self.stage) * stride for end in ends)
            others = tuple((r + first, r + second) for r in here if r != self.rank)
            self.transfers[ends] = ((self.rank + first, self.rank + second), others)
        return self.transfers[ends]

    def _gather_parameters(self, chunk: Chunk) -> None:
        """ZeRO 1 and 2: the updated parameters come together again, bucket by bucket."""
        ddp = self.plan.data_parallel
        if ddp.offload:
            self.program.extend(chunk.facts.derived(("fetched", self.groups.of["dp"]), partial(self._fetched, chunk)))
            return
        for group, buckets in buckets_of(chunk, ddp, self.spread.experts, self.groups):
            for bucket in buckets:
                self._blocking(
                    Collective(
                        op="all_gather",
                        bytes=bucket.bytes,
                        ranks=self.groups.of[group],
                        dtype=bucket.dtype,
                        instance=self.program.number(),
                        purpose="updated parameters",
                        siblings=self.groups.siblings[group],
                    ),
                    "optimizer",
                )

    def _fetched(self, chunk: Chunk) -> Segment:
        """The same of parameters that the host updated: each bucket's part is copied to the device before its all-gather."""
        ddp = self.plan.data_parallel
        events: list[Event] = []
        for group, parameters in reduced_over(chunk.graph.parameters, self.spread.experts, self.groups):
            for bucket in assign_buckets(parameters, ddp.first_bucket, ddp.bucket_cap):
                buffer = FLAT_PARAMETERS + len(events)
                collective = Collective(
                    op="all_gather",
                    bytes=bucket.bytes,
                    ranks=self.groups.of[group],
                    dtype=bucket.dtype,
                    instance=NO_INSTANCE,
                    purpose="updated parameters",
                    siblings=self.groups.siblings[group],
                )
                touched = frozenset({buffer})
                events.append(to_device(bucket.bytes, len(collective.ranks), bucket.dtype, buffer, "optimizer"))
                events.append(Event(stream="comm", phase="optimizer", collective=collective, writes=touched))
                events.append(op_event(_WAIT, touched, frozenset()))
        return Segment(link_events(events))

    def _shared_gradients(self) -> None:
        """Tied weights: the stages that have one sum its gradient."""
        for number, chunk in enumerate(self.chunks):
            virtual = self.spread.virtual(self.stage, number)
            for parameter in chunk.stage.shared:
                stages = sorted(
                    {self.spread.stage_of(v) for v, s in enumerate(self.spread.stages) if parameter.name in _names(s)}
                )
                if len(stages) > 1 and self.spread.stage_of(virtual) in stages:
                    ranks = tuple(self.mesh.neighbour(self.rank, "pp", s) for s in stages)
                    place = [p.name for p in self.spread.local.parameters].index(parameter.name)
                    collective = Collective(
                        op="all_reduce",
                        bytes=parameter.tensor.bytes,
                        ranks=ranks,
                        dtype=parameter.tensor.dtype,
                        instance=2 * BETWEEN + place,
                        purpose=f"gradient of tied {parameter.name}",
                    )
                    self._blocking(collective)

    def _reduce_all(self) -> None:
        """All gradients divided and reduced at once, by element type."""
        parameters = [p for c in self.chunks for p in c.graph.parameters if p.grad_op is not None]
        for group, reduced in reduced_over(parameters, self.spread.experts, self.groups):
            for dtype in dict.fromkeys(p.tensor.dtype for p in reduced):
                n_elems = sum(p.tensor.n_elems for p in reduced if p.tensor.dtype == dtype)
                flat = self.chunks[0].facts.derived(("flat", dtype, n_elems), partial(_division, dtype, n_elems))
                self.program.add(op_event(flat), after_compute=False)
                self._blocking(
                    Collective(
                        op="all_reduce",
                        bytes=flat.outputs[0].bytes,
                        ranks=self.groups.of[group],
                        dtype=dtype,
                        instance=self.program.number(),
                        purpose="gradients",
                        siblings=self.groups.siblings[group],
                    )
                )

    def _blocking(self, collective: Collective, phase: Phase = "backward") -> None:
        """A collective between what is on the compute stream now and what follows."""
        index = self.program.add(Event(stream="comm", phase=phase, collective=collective))
        self.program.add(replace(op_event(_WAIT), after=(index,)), after_compute=False)

    def _optimizer(self, chunk: Chunk) -> Segment:
        shards = (1, 1)
        if self.plan.data_parallel.shard != "nothing":
            shards = (self.spread.n_shards, self.spread.n_expert_shards)
        dtensor = self.plan.data_parallel.shard == "parameters" and self.plan.fsdp.version == 2

        def make() -> Segment:
            moved = gradient_storages(chunk.graph) if dtensor and chunk.graph.target == "cpu" else frozenset()
            parts = self._divided(chunk, shards)
            ops = [op for part, n in parts for op in _on_shard(part, n, dtensor=dtensor, moved=moved)]
            return segment(optimizer_on_host(ops, ddp.host_memory) if offload else ops, self.groups)

        ddp = self.plan.data_parallel
        offload = ddp.offload and shards[0] > 1
        return chunk.facts.derived(("optimizer", shards, dtensor, offload and ddp.host_memory), make)

    def _divided(self, chunk: Chunk, shards: tuple[int, int]) -> list[tuple[list[Op], int]]:
        """Optimizer ops and over how many ranks their states are divided: with experts apart, two optimizers."""
        if shards[0] == shards[1]:
            return [(list(chunk.facts.optimizer_ops), shards[0])]
        parts = []
        for wanted, n in zip((False, True), shards, strict=True):
            held = {p.tensor.storage for p in chunk.graph.parameters if (p.name in self.spread.experts) == wanted}
            parts.append((optimizer_of(chunk.graph, held), n))
        return parts


def _passes(steps: Sequence[Step], group: int | None) -> list[Pass]:
    """What each step of a schedule is, with gradients of `group` micro-batches summed before they leave a rank."""
    forwards: set[int] = set()  # chunks whose first forward pass was
    summed: dict[tuple[str, int], list[int]] = {}  # places of the passes of a chunk that make gradients
    found: list[Pass] = []
    for number, step in enumerate(steps):
        if step.kind == "forward":
            found.append(Pass(kind="forward", first=step.chunk not in forwards))
            forwards.add(step.chunk)
            continue
        found.append(Pass(kind=step.kind))
        summed.setdefault((step.kind, step.chunk), []).append(number)
    for places in summed.values():
        size = group or len(places)
        for begin in range(0, len(places), size):
            of = places[begin : begin + size]
            again = begin > 0
            for number in of:
                found[number] = replace(
                    found[number], first=number == of[0], last=number == of[-1], again=again and number == of[-1]
                )
    return found


def _on_shard(ops: list[Op], n_ranks: int, *, dtensor: bool, moved: frozenset[int]) -> list[Op]:
    return ops if n_ranks == 1 else shard_optimizer(ops, n_ranks, dtensor=dtensor, moved=moved)


def _names(stage: Stage) -> set[str]:
    return {p.name for p in stage.shared}


def _division(dtype: str, n_elems: int) -> Op:
    spec = TensorSpec(id=FLAT_GRADIENTS, shape=(n_elems,), dtype=dtype, strides=(1,), storage=FLAT_GRADIENTS)
    return Op(
        id=-1, name="aten.div_", overload="Scalar", inputs=(spec,), input_names=("self",), outputs=(spec,),
        attrs={"other": 1.0}, phase="backward",
    )  # fmt: skip


_FLAT = TensorSpec(id=FLAT_GRADIENTS, shape=(1,), dtype="float32", strides=(1,), storage=FLAT_GRADIENTS)
_WAIT = Op(id=-1, name="aten.view", inputs=(_FLAT,), input_names=("self",), outputs=(_FLAT,), phase="backward")
_PASS_END = replace(_WAIT, host_sync=True)
