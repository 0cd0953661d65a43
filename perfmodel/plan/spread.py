"""What all ranks of a mesh share: the local graph of one of them, cut into stages, and the groups along each dimension."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial

import numpy as np
from numpy.typing import NDArray

from perfmodel.config.plan import PlanSpec
from perfmodel.errors import InfeasiblePlanError
from perfmodel.graph import Graph
from perfmodel.plan.context_parallel import context_parallel
from perfmodel.plan.events import Event
from perfmodel.plan.expert_parallel import expert_parallel, expert_parameters, is_expert_parallel
from perfmodel.plan.facts import GraphFacts, facts_of
from perfmodel.plan.mesh import Mesh
from perfmodel.plan.schedule import Step, schedule
from perfmodel.plan.segments import Groups
from perfmodel.plan.sharded_states import Unit, units_of
from perfmodel.plan.stages import Stage, cut, numbered
from perfmodel.plan.tensor_parallel import tensor_parallel
from perfmodel.plan.touches import Touches
from perfmodel.plan.v_schedule import rank_of, virtual_of

Group = tuple[int, ...]
MAX_GROUPS = 512  # of rank classes, remembered
MAX_SCHEDULES = 1024  # of stages, remembered

# Mesh dimensions along which ranks hold the same dense parameters, whose gradients they reduce, and the same experts.
REPLICAS = ("dp", "ep", "cp")
EXPERT_REPLICAS = ("dp", "cp")


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """A run of blocks on one rank, its facts, and the events of its ops by their ids (of the optimizer: the whole one's)."""

    stage: Stage
    facts: GraphFacts
    events: Sequence[Event]

    @property
    def graph(self) -> Graph:
        """The ops, parameters and storages of the run."""
        return self.stage.graph


_schedule = lru_cache(maxsize=MAX_SCHEDULES)(schedule)


class Spread:
    """What all ranks share: the local graph, cut into stages."""

    def __init__(self, graph: Graph, plan: PlanSpec, mesh: Mesh) -> None:
        self.plan, self.mesh = plan, mesh
        self.n_stages, self.n_chunks = mesh.size("pp"), plan.pipeline.n_chunks
        self.is_v = plan.pipeline.schedule == "zero_bubble_v"
        tp, cp, ep = mesh.size("tp"), mesh.size("cp"), mesh.size("ep")
        # What follows from a graph keeps its own facts with it: an autotuner that tries many meshes finds them again.
        routed = facts_of(graph)
        if is_expert_parallel(plan.expert_parallel, ep):
            routed = routed.derived(
                ("ep", ep, plan.expert_parallel),
                lambda: GraphFacts(expert_parallel(graph, plan.expert_parallel, ep)),
            )
        whole = routed.derived(("cp", cp), lambda: GraphFacts(context_parallel(routed.graph, cp)))
        facts = whole.derived(
            ("tp", tp, plan.tensor_parallel), lambda: GraphFacts(tensor_parallel(whole.graph, plan.tensor_parallel, tp))
        )
        self.local, self.compiler = facts.graph, facts_of(graph).compiler
        n_cuts = self.n_stages * self.n_chunks
        self.parts: tuple[Chunk, ...] = facts.derived(
            ("stages", n_cuts, plan.pipeline.blocks), partial(self._parts, facts, n_cuts)
        )
        self.stages = tuple(part.stage for part in self.parts)
        self._check_ends()
        self.n_shards = self._shards()
        self.n_expert_shards = self.n_shards if ep == 1 else mesh.size(*EXPERT_REPLICAS)
        self.experts: frozenset[str] = frozenset()  # names of the parameters that are a part of the experts
        if ep > 1:
            found = expert_parameters(graph, plan.expert_parallel.experts)
            self.experts = frozenset(p.name for stacks in found.values() for p in stacks)

    def _parts(self, facts: GraphFacts, n_cuts: int) -> tuple[Chunk, ...]:
        if n_cuts > 1:
            touches = facts.derived("touches", partial(Touches, self.local))
            stages = cut(self.local, n_cuts, self.plan.pipeline.blocks, touches)
        else:
            stages = (Stage(graph=self.local, forward_bytes=0, backward_bytes=0, dtype="float32", shared=()),)
        if self.compiler is None:
            return tuple(Chunk(stage=part, facts=GraphFacts(part.graph), events=facts.op_events) for part in stages)
        return tuple(self._compiled(part, stages) for part in stages)

    def _compiled(self, part: Stage, stages: Sequence[Stage]) -> Chunk:
        """A part as compiled code runs it: no kernel goes over a cut, and what crosses one is stored."""
        if self.compiler is None:
            raise RuntimeError("only a graph with a compiler is compiled")
        elsewhere = frozenset[int]().union(*(_touched(other.graph) for other in stages if other is not part))
        compiled = GraphFacts(self.compiler(numbered(part.graph), elsewhere))
        return Chunk(stage=replace(part, graph=compiled.graph), facts=compiled, events=compiled.op_events)

    def _check_ends(self) -> None:
        tied = sorted({parameter.name for stage in self.stages for parameter in stage.shared})
        if self.is_v and tied:
            raise InfeasiblePlanError(
                f"pipeline.schedule: found zero_bubble_v with {tied[0]} on the first and the last part, allowed with a head "
                "of its own: the authors' Megatron-LM has no V with tied embeddings (untie_embeddings_and_output_weights)"
            )

    def _shards(self) -> int:
        """Ranks over which states are divided, where they are."""
        n_replicas = self.mesh.size(*REPLICAS)
        if self.plan.data_parallel.offload and n_replicas == 1:
            raise InfeasiblePlanError(
                "data_parallel.offload: found true with one replica, allowed with 2 or more: what lies in the host's memory "
                "is what replicas divide"
            )
        n_shards = self.plan.fsdp.ranks or n_replicas
        if n_replicas % n_shards:
            raise InfeasiblePlanError(
                f"fsdp.ranks: found {n_shards} with {n_replicas} replicas, allowed a divisor of them"
            )
        if self.plan.fsdp.ranks is not None and self.mesh.size("ep") > 1:
            raise InfeasiblePlanError(
                f"fsdp.ranks: found {n_shards} with mesh.ep {self.mesh.size('ep')}, allowed without: states of experts are "
                "divided over all ranks that hold the same ones"
            )
        return n_shards

    def chunks(self, stage: int) -> list[Chunk]:
        """The chunks of a rank at a stage, in the order of the model."""
        return [self.parts[self.virtual(stage, chunk)] for chunk in range(self.n_chunks)]

    def virtual(self, stage: int, chunk: int) -> int:
        """Which part of the model, in its order, a rank's chunk is."""
        if self.is_v:
            return virtual_of(stage, chunk, self.n_stages)
        return stage + chunk * self.n_stages

    def stage_of(self, virtual: int) -> int:
        """The stage whose ranks have a part of the model."""
        if self.is_v:
            return rank_of(virtual, self.n_stages)
        return virtual % self.n_stages

    def steps(self, stage: int) -> tuple[Step, ...]:
        """What a rank at a stage runs, in order."""
        pipeline, n_micro = self.plan.pipeline, self.plan.n_micro
        return _schedule(pipeline.schedule, stage, self.n_stages, n_micro, self.n_chunks, pipeline.group_size)

    def units(self, stage: int) -> list[Unit]:
        """The FSDP units of a stage's chunks."""
        return [unit for chunk in self.chunks(stage) for unit in units_in(chunk, self.plan.fsdp.wrap, self.experts)]

    def groups(self, stage: int, rank: int) -> Groups:
        """The groups of a rank at a stage, and those of the other ranks of its stage.

        `tp`: its tensor-parallel group; `cp`: its ring; `ep`: the ranks that share out the experts; `dp`: the ranks with the
        same parameters; `experts`: of those, the ones with the same experts; `shard` and `copies`: the ones between which
        states are divided, and the ones that hold the same part of them.
        """
        return _groups(tuple(self.mesh.sizes.items()), self.n_shards, stage, rank)


@lru_cache(maxsize=MAX_GROUPS)
def _groups(sizes: tuple[tuple[str, int], ...], n_shards: int, stage: int, rank: int) -> Groups:
    """`Spread.groups` on a mesh of these sizes; plans of an autotuner ask for the same ones again and again."""
    mesh = Mesh(sizes=dict(sizes))
    members = np.array(mesh.members("pp", stage))
    replicas = mesh.partition(members, *REPLICAS)
    # Ranks that states are divided between lie side by side in the group of replicas.
    blocks = replicas.reshape(len(replicas), -1, n_shards)
    rows = {
        "tp": mesh.partition(members, "tp"),
        "cp": mesh.partition(members, "cp"),
        "ep": mesh.partition(members, "ep"),
        "dp": replicas,
        "experts": mesh.partition(members, *EXPERT_REPLICAS),
        "shard": _by_first(blocks.reshape(-1, n_shards)),
        "copies": _by_first(blocks.transpose(0, 2, 1).reshape(-1, blocks.shape[1])),
    }
    found = {name: _own_and_others(groups, rank) for name, groups in rows.items()}
    return Groups(
        of={name: own for name, (own, _) in found.items()},
        siblings={name: others for name, (_, others) in found.items()},
    )


def _by_first(rows: NDArray[np.int64]) -> NDArray[np.int64]:
    return rows[np.argsort(rows[:, 0])]


def _own_and_others(rows: NDArray[np.int64], rank: int) -> tuple[Group, tuple[Group, ...]]:
    """The group of a rank, and the others."""
    groups = [tuple(row) for row in rows.tolist()]
    own = groups.pop(int(np.flatnonzero((rows == rank).any(axis=1))[0]))
    return own, tuple(groups)


def _touched(graph: Graph) -> set[int]:
    return {spec.storage for op in graph.ops for spec in (*op.inputs, *op.outputs)}


def units_in(chunk: Chunk, wrap: tuple[str, ...], experts: frozenset[str] = frozenset()) -> tuple[Unit, ...]:
    """The FSDP units of a chunk, found once; the parameters of `experts` are units of their own."""
    return chunk.facts.derived(
        ("units", wrap, experts), partial(units_of, chunk.graph, wrap, experts, divides=chunk.stage.has_blocks)
    )
