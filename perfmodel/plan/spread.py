"""What all ranks of a mesh share: the local graph of one of them, cut into stages, and the groups along each dimension."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from perfmodel.config.plan import PlanSpec
from perfmodel.errors import InfeasiblePlanError
from perfmodel.graph import Graph
from perfmodel.plan.context_parallel import context_parallel
from perfmodel.plan.facts import GraphFacts, facts_of
from perfmodel.plan.mesh import Mesh
from perfmodel.plan.schedule import Step, schedule
from perfmodel.plan.segments import Groups
from perfmodel.plan.sharded_states import Unit, units_of
from perfmodel.plan.stages import Stage, cut
from perfmodel.plan.tensor_parallel import tensor_parallel

Group = tuple[int, ...]

# Mesh dimensions along which ranks hold the same dense parameters, whose gradients they reduce.
REPLICAS = ("dp", "cp")


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """A run of blocks on one rank, and its facts."""

    stage: Stage
    facts: GraphFacts

    @property
    def graph(self) -> Graph:
        """The ops, parameters and storages of the run."""
        return self.stage.graph


class Spread:
    """What all ranks share: the local graph, cut into stages."""

    def __init__(self, graph: Graph, plan: PlanSpec, mesh: Mesh) -> None:
        self.plan, self.mesh = plan, mesh
        self.n_stages, self.n_chunks = mesh.size("pp"), plan.pipeline.chunks
        tp, cp = mesh.size("tp"), mesh.size("cp")
        # What follows from a graph keeps its own facts with it: an autotuner that tries many meshes finds them again.
        whole = facts_of(graph).derived(("cp", cp), lambda: GraphFacts(context_parallel(graph, cp)))
        facts = whole.derived(
            ("tp", tp, plan.tensor_parallel), lambda: GraphFacts(tensor_parallel(whole.graph, plan.tensor_parallel, tp))
        )
        self.local = facts.graph
        n_cuts = self.n_stages * self.n_chunks
        self.parts: tuple[Chunk, ...] = facts.derived(
            ("stages", n_cuts, plan.pipeline.blocks), partial(self._parts, n_cuts)
        )
        self.stages = tuple(part.stage for part in self.parts)
        self.n_shards = self._shards()

    def _parts(self, n_cuts: int) -> tuple[Chunk, ...]:
        if n_cuts > 1:
            return tuple(_chunk(part) for part in cut(self.local, n_cuts, self.plan.pipeline.blocks))
        return (_chunk(Stage(graph=self.local, forward_bytes=0, backward_bytes=0, dtype="float32", shared=())),)

    def _shards(self) -> int:
        """Ranks over which states are divided, where they are."""
        n_replicas = self.mesh.size(*REPLICAS)
        n_shards = self.plan.fsdp.ranks or n_replicas
        if n_replicas % n_shards:
            raise InfeasiblePlanError(
                f"fsdp.ranks: found {n_shards} with {n_replicas} replicas, allowed a divisor of them"
            )
        return n_shards

    def chunks(self, stage: int) -> list[Chunk]:
        """The chunks of a rank at a stage, in the order of the model."""
        return [self.parts[stage + c * self.n_stages] for c in range(self.n_chunks)]

    def steps(self, stage: int) -> tuple[Step, ...]:
        """What a rank at a stage runs, in order."""
        return schedule(self.plan.pipeline.schedule, stage, self.n_stages, self.plan.n_micro, self.n_chunks)

    def units(self, stage: int) -> list[Unit]:
        """The FSDP units of a stage's chunks."""
        return [unit for chunk in self.chunks(stage) for unit in units_in(chunk, self.plan.fsdp.wrap)]

    def groups(self, stage: int, rank: int) -> Groups:
        """The groups of a rank at a stage, and those of the other ranks of its stage.

        `tp`: its tensor-parallel group; `cp`: its ring; `dp`: the ranks with the same parameters; `shard` and
        `copies`: of those, the ones between which states are divided, and the ones that hold the same part of them.
        """
        along: dict[str, Callable[[int], Group]] = {
            "tp": partial(self._along, ("tp",)),
            "cp": partial(self._along, ("cp",)),
            "dp": partial(self._along, REPLICAS),
            "shard": self._shard_group,
            "copies": self._copies,
        }
        members = self.mesh.members("pp", stage)
        of = {name: find(rank) for name, find in along.items()}
        return Groups(of=of, siblings={name: _others(of[name], find, members) for name, find in along.items()})

    def _along(self, dims: tuple[str, ...], rank: int) -> Group:
        return self.mesh.group(rank, *dims)

    def _shard_group(self, rank: int) -> Group:
        replicas = self.mesh.group(rank, *REPLICAS)
        first = replicas.index(rank) // self.n_shards * self.n_shards
        return replicas[first : first + self.n_shards]

    def _copies(self, rank: int) -> Group:
        replicas = self.mesh.group(rank, *REPLICAS)
        return replicas[replicas.index(rank) % self.n_shards :: self.n_shards]


def _others(own: Group, find: Callable[[int], Group], members: Group) -> tuple[Group, ...]:
    """The groups of the members that are not in `own`, each once."""
    seen, found = set(own), []
    for rank in members:
        if rank not in seen:
            group = find(rank)
            seen.update(group)
            found.append(group)
    return tuple(found)


def _chunk(stage: Stage) -> Chunk:
    return Chunk(stage=stage, facts=GraphFacts(stage.graph))


def units_in(chunk: Chunk, wrap: tuple[str, ...]) -> tuple[Unit, ...]:
    """The FSDP units of a chunk, found once."""
    return chunk.facts.derived(("units", wrap), partial(units_of, chunk.graph, wrap))
