"""The part of a backward pass that only parameters wait for: what zero-bubble schedules put off."""

from __future__ import annotations

from perfmodel.graph import Graph, Op


def weight_ops(graph: Graph) -> frozenset[int]:
    """Backward ops (ids) from which nothing but gradients of parameters of the op's own module follows.

    The product that gives a linear's weight gradient is one, the sum that gives its bias's too; a fused backward that
    gives the gradients of inputs and parameters at once (norms) is not.
    """
    gradients = {p.grad_op: p.name.rpartition(".")[0] for p in graph.parameters if p.grad_op is not None}
    readers: dict[int, list[Op]] = {}
    found: set[int] = set()
    again: set[int] = set()
    for op in reversed(graph.ops):
        if op.phase != "backward":
            continue
        following = [reader for spec in op.outputs for reader in readers.get(spec.storage, ())]
        leads_to_weights = bool(following) or op.id in gradients
        if leads_to_weights and all(reader.id in found and reader.module == op.module for reader in following):
            found.add(op.id)
            if op.recompute:
                again.add(op.id)
        for spec in op.inputs:
            readers.setdefault(spec.storage, []).append(op)
    return frozenset(found - again)
