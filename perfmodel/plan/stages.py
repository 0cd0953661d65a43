"""Pipeline stages: a graph cut by the paths of its modules.

The blocks of a model are the most frequent numbered modules (`transformer.h.3`). A stage has a run of blocks; what comes
before the first block is on the first stage, what comes after the last block, with the loss, on the last. What depends on no
parameter (positions, masks) is computed on every stage that reads it. What crosses a cut is sent from stage to stage.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from perfmodel.errors import InfeasiblePlanError
from perfmodel.graph import Graph, Op, Parameter, Storage, TensorSpec
from perfmodel.plan.optimizer_parts import OptimizerParts

_NUMBERED = re.compile(r"(.*?)\.(\d+)(?:\.|$)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """One stage.

    Attributes:
        graph: its ops, parameters and storages. Ops keep the ids that they have in the graph that was cut.
        forward_bytes, backward_bytes: what it sends on after forward and after backward for one micro-batch.
        dtype: element type of what it sends.
        shared: its parameters that another stage has too (tied embeddings).
        has_blocks: False of a first or last stage that has the embedding or the head alone.
    """

    graph: Graph
    forward_bytes: int
    backward_bytes: int
    dtype: str
    shared: tuple[Parameter, ...]
    has_blocks: bool = True


def cut(graph: Graph, n_stages: int, blocks_per_stage: Sequence[int] = ()) -> tuple[Stage, ...]:
    """Stages in order; blocks are spread evenly, or as `blocks_per_stage` says.

    Raises InfeasiblePlanError if the model has no numbered blocks or too few.
    """
    path, n_blocks = find_blocks(graph)
    if blocks_per_stage and (len(blocks_per_stage) != n_stages or sum(blocks_per_stage) != n_blocks):
        raise InfeasiblePlanError(
            f"pipeline.blocks: found {len(blocks_per_stage)} stages with {sum(blocks_per_stage)} blocks in all, allowed "
            f"{n_stages} stages with the {n_blocks} blocks of {path}"
        )
    if n_blocks < n_stages and not blocks_per_stage:
        raise InfeasiblePlanError(
            f"pipeline: {n_stages} stages, but {path} has {n_blocks} blocks; allowed at most those, or two more whose first "
            "and last have none (pipeline.blocks)"
        )
    counts = list(blocks_per_stage) or [
        (i + 1) * n_blocks // n_stages - i * n_blocks // n_stages for i in range(n_stages)
    ]  # fmt: skip
    stage_of_block = [stage for stage, count in enumerate(counts) for _ in range(count)]
    return _Cut(graph, path, stage_of_block, n_stages).stages()


def find_blocks(graph: Graph) -> tuple[str, int]:
    """Path of the module that holds the blocks, and their number. Raises InfeasiblePlanError if there is none."""
    seen: Counter[str] = Counter()
    largest: dict[str, int] = {}
    for module, count in Counter(op.module for op in graph.ops).items():
        found = _NUMBERED.match(module)
        if found:
            path, number = found[1], int(found[2])
            seen[path] += count
            largest[path] = max(largest.get(path, 0), number)
    if not seen:
        raise InfeasiblePlanError(
            f"pipeline: {graph.model} has no numbered blocks (such as layers.0, layers.1) to cut between"
        )
    path = seen.most_common(1)[0][0]
    return path, largest[path] + 1


class _Cut:
    """Assigns ops to stages and builds their graphs; `cut` is the only user."""

    def __init__(self, graph: Graph, path: str, stage_of_block: Sequence[int], n_stages: int) -> None:
        self.graph, self.stage_of_block, self.n_stages = graph, stage_of_block, n_stages
        self.block = re.compile(rf"{re.escape(path)}\.(\d+)(?:\.|$)")
        self.kinds = {storage.id: storage.kind for storage in graph.storages}
        self.held = {s for s, kind in self.kinds.items() if kind in ("parameter", "buffer", "optimizer_state")}
        self.stage = self._assign()
        self.owners = self._owners()
        self.dropped = self._joined_gradients()
        self.optimizer = OptimizerParts(graph)

    def stages(self) -> tuple[Stage, ...]:
        """All stages in order."""
        copied = self._copied()
        forward, backward, dtype = self._crossings(copied)
        found = []
        for stage in range(self.n_stages):
            graph = self._stage_graph(stage, copied[stage])
            shared = tuple(p for p in graph.parameters if len(self.owners[p.name]) > 1)
            found.append(
                Stage(
                    graph=graph,
                    forward_bytes=forward[stage],
                    backward_bytes=backward[stage],
                    dtype=dtype,
                    shared=shared,
                    has_blocks=stage in self.stage_of_block,
                )
            )
        return tuple(found)

    def _assign(self) -> list[int]:
        """The stage of each op; -1 for inputs and the optimizer, which follow what they feed or update."""
        blocks = {module: self.block.match(module) for module in {op.module for op in self.graph.ops}}
        stage_of = {m: self.stage_of_block[int(block[1])] for m, block in blocks.items() if block}
        end_of = {
            op.phase: number for number, op in enumerate(self.graph.ops) if op.module in stage_of
        }  # the last op of a block by phase
        last = self.n_stages - 1
        found: list[int] = []
        current, phase = 0, "forward"
        for number, op in enumerate(self.graph.ops):
            if op.phase in ("input", "optimizer"):
                found.append(-1)
                continue
            if op.phase != phase:
                phase, current = op.phase, last
            if op.module in stage_of:
                current = stage_of[op.module]
            elif op.phase == "forward" and number > end_of.get("forward", number):
                current = last
            elif op.phase == "backward" and number > end_of.get("backward", number):
                current = 0
            found.append(current)
        return found

    def _owners(self) -> dict[str, tuple[int, ...]]:
        """Stages that compute with each parameter; those without any use stay on the first."""
        using: dict[int, set[int]] = {}
        for op, stage in zip(self.graph.ops, self.stage, strict=True):
            for spec in op.inputs if stage >= 0 else ():
                using.setdefault(spec.storage, set()).add(stage)
        return {p.name: tuple(sorted(using.get(p.tensor.storage, {0}))) for p in self.graph.parameters}

    def _joined_gradients(self) -> dict[int, dict[int, int]]:
        """Gradients of shared parameters are summed across stages, not here: parameter id -> stage -> its own last op.

        The ops that add the parts up and what follows them are dropped (their ids map to nothing).
        """
        self.removed: set[int] = set()
        joined: dict[int, dict[int, int]] = {}
        for parameter in self.graph.parameters:
            if len(self.owners[parameter.name]) < 2 or parameter.grad_op is None:
                continue
            parts: dict[int, int] = {}
            wanted = {self.graph.ops[parameter.grad_op].outputs[0].storage}
            for number in range(parameter.grad_op, -1, -1):
                op = self.graph.ops[number]
                if op.phase != "backward" or not any(spec.storage in wanted for spec in op.outputs):
                    continue
                stages = {self.stage[i] for i in self._writers(op, number)}
                if op.name in ("aten.add", "aten.add_") and len(stages) > 1:
                    self.removed.add(number)
                    wanted |= {spec.storage for spec in op.inputs}
                elif self._reads_only(op, wanted) and not parts:
                    self.removed.add(number)
                else:
                    parts.setdefault(self.stage[number], number)
            joined[parameter.tensor.id] = parts
        return joined

    def _writers(self, op: Op, before: int) -> list[int]:
        """The latest op before `before` that made each input."""
        found = []
        for spec in op.inputs:
            for number in range(before - 1, -1, -1):
                if any(out.storage == spec.storage for out in self.graph.ops[number].outputs):
                    found.append(number)
                    break
        return found

    def _reads_only(self, op: Op, storages: set[int]) -> bool:
        return all(spec.storage in storages for spec in op.inputs)

    def _copied(self) -> list[set[int]]:
        """For each stage, ops of other stages that depend on no parameter and that it reads: it computes them itself."""
        free: dict[int, int] = {}  # storage -> op that made it, without parameters
        tainted: set[int] = {p.tensor.storage for p in self.graph.parameters}
        for number, op in enumerate(self.graph.ops):
            if op.phase not in ("forward", "loss", "input"):
                continue
            reads = {spec.storage for spec in op.inputs}
            for spec in op.outputs:
                if reads & tainted:
                    tainted.add(spec.storage)
                else:
                    free.setdefault(spec.storage, number)
        makers: dict[int, list[int]] = {}
        for number, op in enumerate(self.graph.ops):
            if op.phase in ("forward", "loss", "input"):
                for spec in op.outputs:
                    if spec.storage in free and spec.storage not in tainted:
                        makers.setdefault(spec.storage, []).append(number)
        return [self._needed(stage, makers) for stage in range(self.n_stages)]

    def _needed(self, stage: int, makers: Mapping[int, Sequence[int]]) -> set[int]:
        wanted = [
            spec.storage
            for op, of in zip(self.graph.ops, self.stage, strict=True)
            if of == stage
            for spec in op.inputs
            if spec.storage in makers
        ]
        found: set[int] = set()
        while wanted:
            storage = wanted.pop()
            for number in makers[storage]:
                if number not in found and self.stage[number] != stage:
                    found.add(number)
                    wanted += [s.storage for s in self.graph.ops[number].inputs if s.storage in makers]
        return found

    def _crossings(self, copied: Sequence[set[int]]) -> tuple[list[int], list[int], str]:
        """Bytes that each stage sends on in forward (to the next) and in backward (to the one before)."""
        made: dict[int, tuple[int, str, TensorSpec]] = {}
        forward, backward = [0] * self.n_stages, [0] * self.n_stages
        reach: dict[tuple[int, str], int] = {}
        dtype = "float32"
        local = [
            {spec.storage for i in numbers for spec in self.graph.ops[i].outputs} for numbers in copied
        ]  # fmt: skip
        for number, (op, stage) in enumerate(zip(self.graph.ops, self.stage, strict=True)):
            if stage < 0 or number in self.removed:
                continue
            for spec in (*op.inputs, *op.outputs):
                if spec.storage in self.held or spec.storage in local[stage]:
                    continue
                if spec.storage not in made:
                    made[spec.storage] = (stage, "backward" if op.phase == "backward" else "forward", spec)
                    continue
                origin, way, first = made[spec.storage]
                low, high = reach.get((spec.storage, "to"), origin), stage
                if way == "forward" and high > low:
                    for boundary in range(low, high):
                        forward[boundary] += first.bytes
                    reach[spec.storage, "to"] = high
                    dtype = first.dtype
                elif way == "backward" and high < low:
                    for boundary in range(high + 1, low + 1):
                        backward[boundary] += first.bytes
                    reach[spec.storage, "to"] = high
        return forward, backward, dtype

    def _stage_graph(self, stage: int, copied: set[int]) -> Graph:
        parameters = [p for p in self.graph.parameters if stage in self.owners[p.name]]
        keep = [
            number
            for number, of in enumerate(self.stage)
            if (of == stage or number in copied) and number not in self.removed
        ]
        ops = [self.graph.ops[i] for i in keep]
        ours = {p.tensor.storage for p in parameters}
        optimizer, states = self.optimizer.of(ours)
        kept = set(keep)
        return replace(
            self.graph,
            ops=(*ops, *optimizer),
            parameters=tuple(self._with_own_gradient(p, stage, kept) for p in parameters),
            storages=_storages(self.graph, (*ops, *optimizer), ours | states),
        )

    def _with_own_gradient(self, parameter: Parameter, stage: int, kept: set[int]) -> Parameter:
        """The parameter with the last op of the stage's own gradient."""
        number = parameter.grad_op
        if number is not None:
            number = self.dropped.get(parameter.tensor.id, {}).get(stage, number)
        if number not in kept:
            number = None
        return parameter if number == parameter.grad_op else replace(parameter, grad_op=number)


def _storages(graph: Graph, ops: Sequence[Op], held: set[int]) -> tuple[Storage, ...]:
    """Storages that these ops touch, alive from their first touch to their last; what outlives the iteration still does."""
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    for number, op in enumerate(ops):
        for spec in (*op.inputs, *op.outputs):
            storage = spec.storage
            if storage not in first:
                first[storage] = number
            last[storage] = number
    n_old, n_new = len(graph.ops), len(ops)
    found = []
    for one in graph.storages:
        number = one.id
        if number not in held and (one.kind == "parameter" or number not in first):
            continue
        found.append(
            Storage(
                id=number,
                bytes=one.bytes,
                born=-1 if one.born < 0 else first.get(number, 0),
                dies=n_new if one.dies >= n_old else last.get(number, n_new),
                kind=one.kind,
            )
        )
    return tuple(found)
