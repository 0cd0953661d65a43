"""Activation checkpointing of an extracted graph: what forward does not keep is computed again in backward.

`full` runs every block again from its input (Chen et al. 2016, arXiv:1604.06174; `torch.utils.checkpoint` around each block),
`selective` the core of attention alone, from query, key and value to its output (Korthikanti et al. 2022, arXiv:2205.05198,
section 5). As torch does, a region begins again when backward first reads something that it did not keep, and stops at the
last op whose result backward reads. `activation` keeps the outputs of linears and computes what stands between those of a
feed-forward layer again, its result too, which the last linear keeps otherwise (Llama's backward of 2023, arXiv:2302.13971,
section 2.4; Megatron-Core's CheckpointWithoutOutput of `moe_act`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from perfmodel.errors import InfeasiblePlanError
from perfmodel.graph import Graph, Op, Storage, TensorSpec
from perfmodel.plan.facts import facts_of
from perfmodel.plan.stages import find_blocks

Recompute = Literal["full", "selective", "activation"]

AGAIN = 1 << 52  # tensors and storages made again: their first id plus this; beyond every other id of a plan
_CORE = ("softmax", "attention")  # in the names of operators that only attention has
_ACTIVATION = ("gelu", "silu", "relu", "swiglu", "tanh")  # and of those of feed-forward layers


def recomputed(graph: Graph, how: Recompute | None) -> Graph:
    """The graph with activations recomputed; itself where a plan says nothing. Found once for a graph.

    Raises InfeasiblePlanError where the model has no blocks or no attention, or recomputes by itself already.
    """
    if how is None:
        return graph
    return facts_of(graph).derived(("recompute", how), lambda: _recomputed(graph, how))


def _recomputed(graph: Graph, how: Recompute) -> Graph:
    if any(storage.id >= AGAIN for storage in graph.storages):
        return graph  # a plan has recomputed it before
    if any(op.recompute for op in graph.ops):
        if how == "full":
            return graph  # the model's own checkpointing is of whole blocks
        raise InfeasiblePlanError(
            f"recompute: found {how} with a model that recomputes whole blocks by itself, allowed full or "
            "gradient_checkpointing: false in the model file"
        )
    blocks = _blocks(graph)
    if how == "full":
        return _Again(graph, list(blocks.values())).graph()
    find = _core if how == "selective" else _between_linears
    return _Again(graph, [find(graph, run, path) for path, run in blocks.items()], discards=find != _core).graph()


def _blocks(graph: Graph) -> dict[str, list[int]]:
    """Forward ops of each block, by its path."""
    path, _ = find_blocks(graph)
    pattern = re.compile(rf"{re.escape(path)}\.\d+(?=\.|$)")
    found: dict[str, list[int]] = {}
    for op in graph.ops:
        block = pattern.match(op.module) if op.phase == "forward" else None
        if block:
            found.setdefault(block[0], []).append(op.id)
    return found


def _core(graph: Graph, run: Sequence[int], path: str) -> list[int]:
    """Ops between query, key and value and the output of a block's attention."""
    marks = [graph.ops[i] for i in run if any(word in graph.ops[i].name for word in _CORE)]
    if not marks:
        raise InfeasiblePlanError(
            f"recompute: found selective, but {path} has no softmax or fused attention to recompute"
        )
    owner = marks[0].module
    weighted = {p.name.rpartition(".")[0] for p in graph.parameters}
    while owner in weighted and "." in owner:
        owner = owner.rpartition(".")[0]
    linears = [i for i in run if graph.ops[i].module in weighted and _within(graph.ops[i].module, owner)]
    first = max((i for i in linears if i < marks[0].id), default=-1)
    last = min((i for i in linears if i > marks[0].id), default=len(graph.ops))
    return [i for i in run if first < i < last and _within(graph.ops[i].module, owner)]


def _between_linears(graph: Graph, run: Sequence[int], path: str) -> list[int]:
    """Ops between the linears of a block's feed-forward layer: its activation function, what follows up to the last linear."""
    mark = next((graph.ops[i] for i in run if any(word in graph.ops[i].name for word in _ACTIVATION)), None)
    if mark is None:
        raise InfeasiblePlanError(
            f"recompute: found activation, but {path} has no GELU, SiLU, ReLU or tanh to recompute"
        )
    weighted = {p.name.rpartition(".")[0] for p in graph.parameters}
    owner = mark.module
    while True:
        linears = [i for i in run if graph.ops[i].module in weighted and _within(graph.ops[i].module, owner)]
        if any(i < mark.id for i in linears) and any(i > mark.id for i in linears):
            break
        if owner == path or "." not in owner:
            raise InfeasiblePlanError(
                f"recompute: found activation, but {mark.name} of {path} does not stand between linears"
            )
        owner = owner.rpartition(".")[0]
    inside = (i for i in run if min(linears) < i < max(linears) and _within(graph.ops[i].module, owner))
    found = [i for i in inside if graph.ops[i].module not in weighted]
    made = {spec.storage for i in found for spec in graph.ops[i].outputs}
    seen = (i for i in run if i > found[-1] and made.issuperset(s.storage for s in graph.ops[i].outputs))
    return [*found, *seen]  # with views of what they make, in which the last linear reads it


def _within(module: str, owner: str) -> bool:
    return module == owner or module.startswith(f"{owner}.")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Region:
    """Ops run again before op `at`, the storages they make, and those of them that forward does not keep for backward."""

    at: int
    ops: tuple[int, ...]
    made: frozenset[int]
    dropped: frozenset[int]


class _Again:
    """Builds the graph with regions run again; `recomputed` is the only user.

    `discards`: what leaves a region is not kept by what reads it in forward, but made again too.
    """

    def __init__(self, graph: Graph, runs: Sequence[Sequence[int]], *, discards: bool = False) -> None:
        self.source, self.discards = graph, discards
        self.kinds = {s.id: s.kind for s in graph.storages}
        self.readers: dict[int, list[int]] = {}
        for op in graph.ops:
            for spec in op.inputs:
                self.readers.setdefault(spec.storage, []).append(op.id)
        self.regions = [region for run in runs if (region := self._region(run)) is not None]
        self.dropped = frozenset().union(*(region.dropped for region in self.regions))

    def graph(self) -> Graph:
        """All ops with those of each region before its place; lifetimes and places of gradients move along."""
        before = {region.at: region for region in self.regions}
        ops: list[Op] = []
        place: list[int] = []
        for op in self.source.ops:
            if op.id in before:
                ops += self._again(before[op.id])
            place.append(len(ops))
            ops.append(self._reading(op) if op.phase == "backward" else op)
        return replace(
            self.source,
            ops=tuple(op if op.id == i else replace(op, id=i) for i, op in enumerate(ops)),
            parameters=tuple(
                replace(p, grad_op=None if p.grad_op is None else place[p.grad_op]) for p in self.source.parameters
            ),
            storages=tuple(self._storages(ops, place)),
        )

    def _region(self, run: Sequence[int]) -> _Region | None:
        inside = set(run)
        made = {
            spec.storage
            for i in run
            for spec in self.source.ops[i].outputs
            if self.kinds.get(spec.storage) == "activation" and self._first_writer_is_in(spec.storage, inside)
        }
        ops = self.source.ops
        dropped, first = set(), len(ops)
        for storage in made:
            outside = [i for i in self.readers.get(storage, ()) if i not in inside]
            readers = [i for i in outside if ops[i].phase == "backward"]
            if not self.discards and len(readers) < len(outside):
                continue  # what leaves the region is the input of something else, which keeps it
            if readers:
                dropped.add(storage)
                first = min(first, *readers)
        if not dropped:
            return None
        last = max(n for n, i in enumerate(run) if any(s.storage in dropped for s in ops[i].outputs))
        while ops[first - 1].phase == "backward" and ops[first - 1].module == ops[first].module:
            first -= 1  # a node of autograd unpacks all that it saved before its first kernel
        return _Region(at=first, ops=tuple(run[: last + 1]), made=frozenset(made), dropped=frozenset(dropped))

    def _first_writer_is_in(self, storage: int, inside: set[int]) -> bool:
        writers = facts_of(self.source).derived("producers", self.source.producers)
        return writers.get(storage) in inside

    def _again(self, region: _Region) -> Iterator[Op]:
        for i in region.ops:
            op = self.source.ops[i]
            yield replace(
                op,
                inputs=tuple(_new(spec, region.made) for spec in op.inputs),
                outputs=tuple(_new(spec, region.made) for spec in op.outputs),
                phase="backward",
                recompute=True,
            )

    def _reading(self, op: Op) -> Op:
        """A backward op, which reads what was made again."""
        inputs = tuple(_new(spec, self.dropped) for spec in op.inputs)
        outputs = tuple(_new(spec, self.dropped) for spec in op.outputs)
        return op if inputs == op.inputs and outputs == op.outputs else replace(op, inputs=inputs, outputs=outputs)

    def _storages(self, ops: Sequence[Op], place: Sequence[int]) -> Iterator[Storage]:
        first, last = _touches(ops)
        n_old, n_new = len(self.source.ops), len(ops)
        for storage in self.source.storages:
            born = place[storage.born] if storage.born >= 0 else storage.born
            dies = n_new if storage.dies >= n_old else place[storage.dies] if storage.dies >= 0 else storage.dies
            if storage.id + AGAIN in first:
                again = storage.id + AGAIN
                end = max(dies if storage.id in self.dropped else 0, last[again])
                yield replace(storage, id=again, born=first[again], dies=end)
            if storage.id in self.dropped:
                dies = last.get(storage.id, born)
            elif storage.kind == "activation":
                dies = max(dies, last.get(storage.id, born))
            yield replace(storage, born=born, dies=dies)


def _new(spec: TensorSpec, made: frozenset[int]) -> TensorSpec:
    """A tensor as it is made again, where its storage is."""
    return replace(spec, id=spec.id + AGAIN, storage=spec.storage + AGAIN) if spec.storage in made else spec


def _touches(ops: Sequence[Op]) -> tuple[Mapping[int, int], Mapping[int, int]]:
    """First and last op that reads or writes each storage."""
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    for number, op in enumerate(ops):
        for spec in (*op.inputs, *op.outputs):
            first.setdefault(spec.storage, number)
            last[spec.storage] = number
    return first, last
