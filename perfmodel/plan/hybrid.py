"""Plans on a device mesh: tensor, pipeline and data parallel together. One rank class a pipeline stage (and device model)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

from perfmodel.config.plan import PlanSpec
from perfmodel.errors import InfeasiblePlanError
from perfmodel.graph import Graph, Op, Phase, TensorSpec
from perfmodel.plan.buckets import assign_buckets
from perfmodel.plan.ddp import accumulate, bucket_insertions, copy_back
from perfmodel.plan.events import (
    Collective,
    CollectiveOp,
    Event,
    MemoryUse,
    Placement,
    RankClass,
    Stream,
    link_events,
    op_event,
)
from perfmodel.plan.facts import GraphFacts, facts_of
from perfmodel.plan.memory import check_memory, dense_memory
from perfmodel.plan.mesh import Mesh, mesh_of
from perfmodel.plan.runs import EventRuns, Segment
from perfmodel.plan.schedule import Step, most_in_flight, schedule
from perfmodel.plan.segments import Groups, Program, ops_of, segment
from perfmodel.plan.sharded_states import (
    Unit,
    backward_gathers,
    forward_gathers,
    gradient_scatters,
    shard_optimizer,
    units_of,
    wait_for_gradients,
)
from perfmodel.plan.stages import Stage, cut
from perfmodel.plan.tensor_parallel import tensor_parallel

CLASS_STRIDE = 1 << 28  # instance numbers of one stage's own collectives
BETWEEN = 1 << 40  # instance numbers of what stages send each other start here
FLAT_GRADIENTS = (1 << 41) - 1  # storage of gradients that are reduced all at once


def place_mesh(graph: Graph, plan: PlanSpec, devices: Sequence[str], memory_bytes: Sequence[int]) -> Placement:
    """Spreads a graph over a mesh; `devices[r]` and `memory_bytes[r]` say what rank r runs on.

    Raises InfeasiblePlanError.
    """
    mesh = mesh_of(plan.mesh, len(devices))
    if graph.tables and any(t.parameter for t in graph.tables) and plan.embeddings.strategy != "data_parallel":
        raise InfeasiblePlanError(
            "mesh: table-wise embeddings go with data parallelism alone; use embeddings=data_parallel or drop tp and pp"
        )
    spread = _Spread(graph, plan, mesh)
    classes = []
    for stage in range(mesh.size("pp")):
        members = mesh.members("pp", stage)
        for device in dict.fromkeys(devices[r] for r in members):
            ranks = tuple(r for r in members if devices[r] == device)
            memory = spread.memory(stage)
            check_memory(ranks[0], memory, memory_bytes[ranks[0]])
            events = _Writer(spread, stage, ranks[0]).events()
            classes.append(RankClass(ranks=ranks, device=device, events=events, memory=memory))
    return Placement(
        classes=tuple(classes),
        n_ranks=mesh.n_ranks,
        notes=graph.notes,
        n_replicas=mesh.size("dp"),
        n_micro=plan.n_micro,
    )


def mesh_fits(graph: Graph, plan: PlanSpec, devices: Sequence[str], memory_bytes: Sequence[int]) -> bool:
    """Whether every rank has the memory that a plan needs. Raises InfeasiblePlanError if the model does not divide so."""
    mesh = mesh_of(plan.mesh, len(devices))
    spread = _Spread(graph, plan, mesh)
    return all(
        spread.memory(stage).total_bytes <= min(memory_bytes[r] for r in mesh.members("pp", stage))
        for stage in range(mesh.size("pp"))
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Chunk:
    """A run of blocks on one rank, and its facts."""

    stage: Stage
    facts: GraphFacts

    @property
    def graph(self) -> Graph:
        return self.stage.graph


class _Spread:
    """What all ranks share: the local graph, cut into stages."""

    def __init__(self, graph: Graph, plan: PlanSpec, mesh: Mesh) -> None:
        self.plan, self.mesh = plan, mesh
        self.n_stages, self.n_chunks = mesh.size("pp"), plan.pipeline.chunks
        tp = mesh.size("tp")
        # What follows from a graph keeps its own facts with it: an autotuner that tries many meshes finds them again.
        facts = facts_of(graph).derived(
            ("tp", tp, plan.tensor_parallel), lambda: GraphFacts(tensor_parallel(graph, plan.tensor_parallel, tp))
        )
        self.local = facts.graph
        n_cuts = self.n_stages * self.n_chunks
        self.parts: tuple[_Chunk, ...] = facts.derived(
            ("stages", n_cuts, plan.pipeline.blocks), partial(self._parts, n_cuts)
        )
        self.stages = tuple(part.stage for part in self.parts)

    def _parts(self, n_cuts: int) -> tuple[_Chunk, ...]:
        if n_cuts > 1:
            return tuple(_chunk(part) for part in cut(self.local, n_cuts, self.plan.pipeline.blocks))
        return (_chunk(Stage(graph=self.local, forward_bytes=0, backward_bytes=0, dtype="float32", shared=())),)

    def chunks(self, stage: int) -> list[_Chunk]:
        """The chunks of a rank at a stage, in the order of the model."""
        return [self.parts[stage + c * self.n_stages] for c in range(self.n_chunks)]

    def steps(self, stage: int) -> tuple[Step, ...]:
        """What a rank at a stage runs, in order."""
        return schedule(self.plan.pipeline.schedule, stage, self.n_stages, self.plan.n_micro, self.n_chunks)

    def memory(self, stage: int) -> MemoryUse:
        """Peak of a rank at a stage: its chunks at the peak of one micro-batch, and what the others in flight keep."""
        steps = self.steps(stage)
        total = MemoryUse()
        above = 0
        for number, chunk in enumerate(self.chunks(stage)):
            one = dense_memory(chunk.facts, frozenset(), self.plan.n_micro)
            kept = chunk.facts.derived("kept", partial(_kept_bytes, chunk.graph))
            in_flight = most_in_flight(steps, number)
            above = max(above, one.activations_bytes - kept)
            total = _sum(total, replace(one, activations_bytes=kept * in_flight))
        total = self._divided(total, stage)
        buckets = sum(p.tensor.bytes for c in self.chunks(stage) for p in c.graph.parameters)
        if self.plan.data_parallel.shard in ("gradients", "parameters"):
            buckets = min(buckets, 2 * self._largest_unit_bytes(stage))
        bucketed = self.mesh.size("dp") > 1 and not self.plan.data_parallel.gradient_as_bucket_view
        return replace(
            total,
            activations_bytes=total.activations_bytes + max(above, 0),
            communication_bytes=buckets if bucketed and self.plan.data_parallel.reduce == "buckets" else 0,
        )

    def _divided(self, total: MemoryUse, stage: int) -> MemoryUse:
        """With the shares that replicas keep of what is divided between them (each tensor by its first dimension)."""
        shard, n = self.plan.data_parallel.shard, self.mesh.size("dp")
        if shard == "nothing" or n == 1:
            return total
        total = replace(total, optimizer_bytes=-(-total.optimizer_bytes // n))
        if shard != "optimizer":
            total = replace(total, gradients_bytes=-(-total.gradients_bytes // n))
        if shard == "parameters":
            root = sum(u.bytes for c in self.chunks(stage) for u in _units(c) if u.is_root)
            total = replace(total, parameters_bytes=-(-total.parameters_bytes // n) + root)
        return total

    def _largest_unit_bytes(self, stage: int) -> int:
        """Of a gathered block; of a gradient bucket where parameters are whole."""
        if self.plan.data_parallel.shard == "gradients":
            return self.plan.data_parallel.bucket_cap
        return max(u.bytes for c in self.chunks(stage) for u in _units(c) if not u.is_root)


def _chunk(stage: Stage) -> _Chunk:
    return _Chunk(stage=stage, facts=GraphFacts(stage.graph))


def _units(chunk: _Chunk) -> tuple[Unit, ...]:
    return chunk.facts.derived("units", partial(units_of, chunk.graph))


def _sum(first: MemoryUse, second: MemoryUse) -> MemoryUse:
    return MemoryUse(
        parameters_bytes=first.parameters_bytes + second.parameters_bytes,
        gradients_bytes=first.gradients_bytes + second.gradients_bytes,
        optimizer_bytes=first.optimizer_bytes + second.optimizer_bytes,
        activations_bytes=first.activations_bytes + second.activations_bytes,
        buffers_bytes=first.buffers_bytes + second.buffers_bytes,
    )


def _kept_bytes(graph: Graph) -> int:
    """Bytes of activations and inputs that forward leaves for backward."""
    end = next((op.id for op in graph.ops if op.phase == "backward"), len(graph.ops))
    return sum(
        s.bytes for s in graph.storages if s.kind in ("activation", "input") and s.born < end <= s.dies
    )  # fmt: skip


class _Writer:
    """Writes the events of one rank class; `rank` is its first."""

    def __init__(self, spread: _Spread, stage: int, rank: int) -> None:
        self.spread, self.stage, self.rank = spread, stage, rank
        self.plan, self.mesh = spread.plan, spread.mesh
        self.chunks = spread.chunks(stage)
        self.program = Program(first_instance=stage * CLASS_STRIDE)
        self.transfers: dict[tuple[int, int], tuple[tuple[int, int], tuple[tuple[int, int], ...]]] = {}
        self.groups = Groups(
            of={dim: self.mesh.group(rank, dim) for dim in ("tp", "dp")},
            siblings={dim: self._siblings(dim) for dim in ("tp", "dp")},
        )

    def _siblings(self, dim: str) -> tuple[tuple[int, ...], ...]:
        first = (r for r in self.mesh.members("pp", self.stage) if self.mesh.coordinate(r, dim) == 0)
        groups = (self.mesh.group(r, dim) for r in first)
        return tuple(group for group in groups if self.rank not in group)

    def events(self) -> EventRuns:
        """All of an iteration: the schedule's passes, gradient reductions, the optimizer."""
        steps = self.spread.steps(self.stage)
        last_backward = {step.chunk: i for i, step in enumerate(steps) if step.kind == "backward"}
        n_backward = [0] * len(self.chunks)
        for number, step in enumerate(steps):
            if step.kind == "forward":
                self._forward(step)
                continue
            first = n_backward[step.chunk] == 0
            n_backward[step.chunk] += 1
            self._backward(step, first=first, last=last_backward[step.chunk] == number)
        self._shared_gradients()
        if self.plan.data_parallel.reduce == "after_backward":
            self._reduce_all()
        for chunk in self.chunks:
            self.program.extend(self._optimizer(chunk))
            if self.mesh.size("dp") > 1 and self.plan.data_parallel.shard in ("optimizer", "gradients"):
                self._gather_parameters(chunk)
        return self.program.events()

    def _forward(self, step: Step) -> None:
        chunk = self.chunks[step.chunk]
        virtual = self.stage + step.chunk * self.spread.n_stages
        received = None
        if virtual > 0:
            received = self._transfer("recv_prev", virtual - 1, step)
        self.program.extend(self._passes(chunk, "forward"), after=received)
        if virtual < len(self.spread.stages) - 1:
            self._transfer("send_next", virtual, step)

    def _backward(self, step: Step, *, first: bool, last: bool) -> None:
        chunk = self.chunks[step.chunk]
        virtual = self.stage + step.chunk * self.spread.n_stages
        received = None
        if virtual < len(self.spread.stages) - 1:
            received = self._transfer("recv_next", virtual, step)
        kind = ("backward", "first" if first else "later", "last" if last else "inner")
        self.program.extend(self._passes(chunk, *kind), after=received)
        if virtual > 0:
            self._transfer("send_prev", virtual - 1, step)

    def _transfer(self, stream: Stream, boundary: int, step: Step) -> int:
        """The rank's side of what crosses the cut after virtual stage `boundary`, for one micro-batch."""
        part = self.spread.stages[boundary]
        forward = step.kind == "forward"
        ends = (boundary % self.spread.n_stages, (boundary + 1) % self.spread.n_stages)
        if not forward:
            part, ends = self.spread.stages[boundary + 1], ends[::-1]
        pair, siblings = self._pairs(ends)
        collective = Collective(
            op="send_recv",
            bytes=part.forward_bytes if forward else part.backward_bytes,
            ranks=pair,
            dtype=part.dtype,
            instance=BETWEEN + ((step.micro * len(self.spread.stages) + boundary) * 2 + forward),
            purpose="activations" if forward else "gradients of activations",
            siblings=siblings,
        )
        event = Event(stream=stream, phase=step.kind, collective=collective)
        return self.program.add(event, after_compute=stream.startswith("send"))

    def _pairs(self, ends: tuple[int, int]) -> tuple[tuple[int, int], tuple[tuple[int, int], ...]]:
        """The pair of ranks at two stages that this rank is one of, and those of the others of its stage; found once."""
        if ends not in self.transfers:
            here = self.mesh.members("pp", self.stage)
            stride = self.mesh.stride("pp")
            first, second = ((end - self.stage) * stride for end in ends)
            others = tuple((r + first, r + second) for r in here if r != self.rank)
            self.transfers[ends] = ((self.rank + first, self.rank + second), others)
        return self.transfers[ends]

    def _passes(self, chunk: _Chunk, *kind: str) -> Segment:
        """Forward or backward of a chunk for one micro-batch, linked."""
        ddp = self.plan.data_parallel
        reduces = ddp.shard == "gradients" or (kind[-1] == "last" and ddp.reduce == "buckets")
        with_replicas = self.mesh.size("dp") > 1 and (ddp.shard == "parameters" or reduces)
        # What replicas do decides a pass only where they take part in it; the rest is shared by many plans.
        key = (kind, self.groups.of["dp"], ddp) if with_replicas else kind[:2]
        return chunk.facts.derived(("pass", self.groups.of["tp"], key), partial(self._make_pass, chunk, kind))

    def _make_pass(self, chunk: _Chunk, kind: tuple[str, ...]) -> Segment:
        shard = self.plan.data_parallel.shard if self.mesh.size("dp") > 1 else "nothing"
        if shard == "parameters":
            return self._sharded_pass(chunk, kind)
        if kind[0] == "forward":
            return segment(ops_of(chunk.graph, "input", "forward", "loss"), self.groups, events=chunk.facts.op_events)
        inserted: dict[int, list[Event]] = {}
        if kind[1] == "later":
            inserted = accumulate(chunk.graph.parameters)
        ops = ops_of(chunk.graph, "backward")
        ddp = self.plan.data_parallel
        reduces = kind[2] == "last" or shard == "gradients"
        if not reduces or self.mesh.size("dp") == 1 or ddp.reduce != "buckets":
            return segment(ops, self.groups, inserted, events=chunk.facts.op_events)
        buckets = assign_buckets(chunk.graph.parameters, ddp.first_bucket, ddp.bucket_cap)
        for op, events in bucket_insertions(buckets, self.groups.of["dp"], -1).items():
            inserted.setdefault(op, []).extend(self._unnumbered(events))
        run = segment(ops, self.groups, inserted, events=chunk.facts.op_events)
        as_views = ddp.gradient_as_bucket_view or shard != "nothing"
        return Segment(link_events((*run, *copy_back(buckets, as_views=as_views))))

    def _sharded_pass(self, chunk: _Chunk, kind: tuple[str, ...]) -> Segment:
        """Forward or backward with parameters gathered block by block, gradients scattered in every micro-batch."""
        units = _units(chunk)
        if kind[0] == "forward":
            ops = ops_of(chunk.graph, "input", "forward", "loss")
            gathers = forward_gathers(units, self.groups)
            return segment(ops, self.groups, before=gathers, events=chunk.facts.op_events)
        scattered = gradient_scatters(units, self.groups)
        gathers, ops = backward_gathers(units, self.groups), ops_of(chunk.graph, "backward")
        run = segment(ops, self.groups, scattered, gathers, events=chunk.facts.op_events)
        return Segment(link_events((*run, wait_for_gradients(units))))

    def _gather_parameters(self, chunk: _Chunk) -> None:
        """ZeRO 1 and 2: the updated parameters come together again, bucket by bucket."""
        ddp = self.plan.data_parallel
        for bucket in assign_buckets(chunk.graph.parameters, ddp.first_bucket, ddp.bucket_cap):
            self._blocking(
                Collective(
                    op="all_gather",
                    bytes=bucket.bytes,
                    ranks=self.groups.of["dp"],
                    dtype=bucket.dtype,
                    instance=self.program.number(),
                    purpose="updated parameters",
                    siblings=self.groups.siblings["dp"],
                ),
                "optimizer",
            )

    def _unnumbered(self, events: Sequence[Event]) -> list[Event]:
        """Collectives of a segment get their numbers where it is replayed; gradients divided over ranks are scattered."""
        op: CollectiveOp = "all_reduce" if self.plan.data_parallel.shard == "nothing" else "reduce_scatter"
        return [
            event
            if event.collective is None
            else replace(
                event, collective=replace(event.collective, op=op, instance=-1, siblings=self.groups.siblings["dp"])
            )
            for event in events
        ]

    def _shared_gradients(self) -> None:
        """Tied weights: the stages that have one sum its gradient."""
        for number, chunk in enumerate(self.chunks):
            virtual = self.stage + number * self.spread.n_stages
            for parameter in chunk.stage.shared:
                stages = sorted(
                    {v % self.spread.n_stages for v, s in enumerate(self.spread.stages) if parameter.name in _names(s)}
                )
                if len(stages) > 1 and virtual % self.spread.n_stages in stages:
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
        group = self.groups.of["dp"]
        parameters = [p for c in self.chunks for p in c.graph.parameters if p.grad_op is not None]
        for dtype in dict.fromkeys(p.tensor.dtype for p in parameters) if len(group) > 1 else ():
            n_elems = sum(p.tensor.n_elems for p in parameters if p.tensor.dtype == dtype)
            flat = self.chunks[0].facts.derived(("flat", dtype, n_elems), partial(_division, dtype, n_elems))
            self.program.add(op_event(flat), after_compute=False)
            self._blocking(
                Collective(
                    op="all_reduce",
                    bytes=flat.outputs[0].bytes,
                    ranks=group,
                    dtype=dtype,
                    instance=self.program.number(),
                    purpose="gradients",
                    siblings=self.groups.siblings["dp"],
                )
            )

    def _blocking(self, collective: Collective, phase: Phase = "backward") -> None:
        """A collective between what is on the compute stream now and what follows."""
        index = self.program.add(Event(stream="comm", phase=phase, collective=collective))
        self.program.add(replace(op_event(_WAIT), after=(index,)), after_compute=False)

    def _optimizer(self, chunk: _Chunk) -> Segment:
        n_ranks = 1 if self.plan.data_parallel.shard == "nothing" else self.mesh.size("dp")

        def make() -> Segment:
            ops = ops_of(chunk.graph, "optimizer")
            return segment(ops if n_ranks == 1 else shard_optimizer(ops, n_ranks), self.groups)

        return chunk.facts.derived(("optimizer", n_ranks), make)


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
