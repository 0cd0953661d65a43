"""Plans on a device mesh: tensor, pipeline and data parallel together. One rank class a pipeline stage (and device model)."""

from __future__ import annotations

from collections.abc import Sequence

from perfmodel.config.plan import PlanSpec
from perfmodel.errors import InfeasiblePlanError
from perfmodel.graph import Graph
from perfmodel.plan.events import Placement, RankClass
from perfmodel.plan.memory import check_memory
from perfmodel.plan.mesh import mesh_of
from perfmodel.plan.spread import Spread
from perfmodel.plan.stage_events import StageWriter
from perfmodel.plan.stage_memory import stage_holding, stage_memory


def place_mesh(graph: Graph, plan: PlanSpec, devices: Sequence[str], memory_bytes: Sequence[int]) -> Placement:
    """Spreads a graph over a mesh; `devices[r]` and `memory_bytes[r]` say what rank r runs on.

    Raises InfeasiblePlanError.
    """
    mesh = mesh_of(plan.mesh, len(devices))
    if graph.tables and any(t.parameter for t in graph.tables) and plan.embeddings.strategy != "data_parallel":
        raise InfeasiblePlanError(
            "mesh: table-wise embeddings go with data parallelism alone; use embeddings=data_parallel or drop tp and pp"
        )
    spread = Spread(graph, plan, mesh)
    classes = []
    for stage in range(mesh.size("pp")):
        members = mesh.members("pp", stage)
        for device in dict.fromkeys(devices[r] for r in members):
            ranks = tuple(r for r in members if devices[r] == device)
            memory = stage_memory(spread, stage)
            check_memory(ranks[0], memory, memory_bytes[ranks[0]])
            writer = StageWriter(spread, stage, ranks[0])
            classes.append(
                RankClass(
                    ranks=ranks,
                    device=device,
                    events=writer.events(),
                    memory=memory,
                    holding=stage_holding(spread, stage),
                    spans=writer.spans,
                )
            )
    return Placement(
        classes=tuple(classes),
        n_ranks=mesh.n_ranks,
        notes=graph.notes,
        n_replicas=mesh.size("dp", "ep"),
        n_micro=plan.n_micro,
    )


def mesh_fits(graph: Graph, plan: PlanSpec, devices: Sequence[str], memory_bytes: Sequence[int]) -> bool:
    """Whether every rank has the memory that a plan needs, as `place_mesh` finds it.

    Raises InfeasiblePlanError if the model does not divide so.
    """
    mesh = mesh_of(plan.mesh, len(devices))
    spread = Spread(graph, plan, mesh)
    return all(
        stage_memory(spread, stage).total_bytes <= min(memory_bytes[r] for r in mesh.members("pp", stage))
        for stage in range(mesh.size("pp"))
    )
