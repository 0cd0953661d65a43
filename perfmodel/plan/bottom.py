"""The dense features' MLP of a DLRM on one rank, for the global batch: its output travels with the pooled rows.

NVIDIA's hybrid-parallel DLRM does so (DeepLearningExamples, PyTorch/Recommendation/DLRM, dlrm/model/distributed.py; MLPerf
v0.7): the bottom MLP is one more thing a rank owns, beside tables. Its ops are those of the module `dense_arch`.
"""

from __future__ import annotations

from dataclasses import replace

from perfmodel.config import PlanSpec
from perfmodel.errors import InfeasiblePlanError
from perfmodel.graph import Graph, Op, TableAccess, TensorSpec
from perfmodel.plan.facts import GraphFacts
from perfmodel.plan.tables import TableOps, incoming, row_major

MODULE = "dense_arch"


def bottom_ops(graph: Graph) -> TableOps:
    """The bottom MLP as something a rank owns. Raises InfeasiblePlanError if the model has none.

    Its optimizer ops stay with every rank: one foreach op often updates it with other parameters, and they are small.
    """
    forward = [op for op in graph.ops if op.phase == "forward" and _inside(op)]
    if not forward:
        raise InfeasiblePlanError(f"plan puts the bottom MLP on one rank; the model has no module '{MODULE}'")
    backward = [op for op in graph.ops if op.phase == "backward" and _inside(op)]
    parameters = [p for p in graph.parameters if p.name.startswith(f"{MODULE}.")]
    weights = {p.tensor.storage for p in parameters}
    made = {spec.storage for op in (*forward, *backward) for spec in op.outputs}
    last = [spec for op in forward for spec in op.outputs if spec.shape[:1] == (graph.batch_size,)][-1]
    read = (spec for op in forward for spec in op.inputs)
    features = {spec.storage: spec for spec in read if spec.storage not in weights and spec.storage not in made}
    return TableOps(
        table=TableAccess(parameter=MODULE, rows=1, dim=sum(p.tensor.n_elems for p in parameters)),
        forward=tuple(op.id for op in forward),
        backward=tuple(op.id for op in backward),
        optimizer=(),
        inputs=tuple(features.values()),
        outputs=(last,),
        gradients=incoming(forward, backward, {spec.storage for op in backward for spec in op.outputs} | weights),
        own=frozenset(weights | made),
        batch=graph.batch_size,
    )


def with_bottom(
    facts: GraphFacts, plan: PlanSpec, n_ranks: int, found: tuple[dict[str, TableOps], dict[str, int]]
) -> tuple[dict[str, TableOps], dict[str, int]]:
    """Tables and owners with the bottom MLP among them, where the plan puts it on one rank."""
    rank = plan.embeddings.bottom_mlp
    if rank is None:
        return found
    if rank >= n_ranks:
        raise InfeasiblePlanError(f"plan puts the bottom MLP on rank {rank}; ranks are 0 to {n_ranks - 1}")
    ops = facts.derived("bottom", lambda: bottom_ops(facts.graph))
    return {**found[0], MODULE: ops}, {**found[1], MODULE: rank}


def scale_batch(op: Op, factor: int, batch: int, rename: dict[int, int]) -> Op:
    """The op for `factor` times the batch: the first axis of length `batch` grows, tensors without one keep their size."""

    def scale(spec: TensorSpec) -> TensorSpec:
        shape = list(spec.shape)
        if batch in shape:
            shape[shape.index(batch)] *= factor
        storage = rename.get(spec.storage, spec.storage)
        strides = _like(spec, tuple(shape))
        return replace(spec, shape=tuple(shape), strides=strides, storage=storage)

    return replace(op, inputs=tuple(map(scale, op.inputs)), outputs=tuple(map(scale, op.outputs)))


def _like(spec: TensorSpec, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Strides of the grown tensor in the order of the old one's: a transposed matrix stays transposed."""
    order = sorted(range(len(shape)), key=lambda axis: -spec.strides[axis])
    dense = row_major([shape[axis] for axis in order])
    return tuple(dense[order.index(axis)] for axis in range(len(shape)))


def _inside(op: Op) -> bool:
    return op.module == MODULE or op.module.startswith(f"{MODULE}.")
