"""The part of a backward pass that only parameters wait for: what zero-bubble schedules put off."""

from __future__ import annotations

from perfmodel.graph import Graph


def weight_ops(graph: Graph) -> frozenset[int]:
    """Backward ops (ids) from which nothing but gradients of parameters of the op's own module follows.

    The product that gives a linear's weight gradient is one, the sum that gives its bias's too; a fused backward that
    gives the gradients of inputs and parameters at once (norms) is not.
    """
    gradients = {p.grad_op: p.name.rpartition(".")[0] for p in graph.parameters if p.grad_op is not None}
    readers: dict[int, list[int]] = {}
    found: set[int] = set()
    for op in reversed(graph.ops):
        if op.phase != "backward":
            continue
        following = [i for spec in op.outputs for i in readers.get(spec.storage, ())]
        leads_to_weights = bool(following) or op.id in gradients
        if leads_to_weights and all(i in found and graph.ops[i].module == op.module for i in following):
            found.add(op.id)
        for spec in op.inputs:
            readers.setdefault(spec.storage, []).append(op.id)
    return frozenset(i for i in found if not graph.ops[i].recompute)
