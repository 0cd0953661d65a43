"""Pipeline stages: a graph cut by the paths of its modules.

The blocks of a model are the most frequent numbered modules (`transformer.h.3`). A stage has a run of blocks; what comes
before the first block is on the first stage, what comes after the last block, with the loss, on the last. What depends on no
parameter (positions, masks) is computed on every stage that reads it. What crosses a cut is sent from stage to stage.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from perfmodel.errors import InfeasiblePlanError
from perfmodel.graph import Graph, Op, Parameter, Storage
from perfmodel.plan.touches import BACKWARD, FORWARD, NO_STORAGE, BoolArray, IntArray, Touches

NO_STAGE = -1
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


def cut(
    graph: Graph, n_stages: int, blocks_per_stage: Sequence[int] = (), touches: Touches | None = None
) -> tuple[Stage, ...]:
    """Stages in order; blocks are spread evenly, or as `blocks_per_stage` says. `touches` are the graph's, where known.

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
    return _Cut(touches or Touches(graph), path, stage_of_block, n_stages).stages()


def numbered(graph: Graph) -> Graph:
    """A stage's graph with ops numbered by their places, as in a graph of its own."""
    place = {op.id: number for number, op in enumerate(graph.ops)}
    return replace(
        graph,
        ops=tuple(op if op.id == number else replace(op, id=number) for number, op in enumerate(graph.ops)),
        parameters=tuple(
            p if p.grad_op is None or place[p.grad_op] == p.grad_op else replace(p, grad_op=place[p.grad_op])
            for p in graph.parameters
        ),
    )


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

    def __init__(self, touches: Touches, path: str, stage_of_block: Sequence[int], n_stages: int) -> None:
        self.touches, self.graph = touches, touches.graph
        self.stage_of_block, self.n_stages = stage_of_block, n_stages
        self.block = re.compile(rf"{re.escape(path)}\.(\d+)(?:\.|$)")
        self.stage = self._assign()
        self.owners = self._owners()
        self.removed: BoolArray = np.zeros(len(self.graph.ops), dtype=bool)
        self.dropped = self._joined_gradients()

    def stages(self) -> tuple[Stage, ...]:
        """All stages in order."""
        copied = [self._needed(stage) for stage in range(self.n_stages)]
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

    def _assign(self) -> IntArray:
        """The stage of each op; -1 for inputs and the optimizer, which follow what they feed or update.

        An op outside the blocks runs where the op before it does; a phase after forward begins on the last stage; what comes
        after the blocks runs on the last stage in forward, on the first in backward.
        """
        touches, last = self.touches, self.n_stages - 1
        blocks = [self.block.match(module) for module in touches.modules]
        of_module = np.array(
            [self.stage_of_block[int(block[1])] if block else NO_STAGE for block in blocks], dtype=np.int64
        )
        numbers = np.flatnonzero(touches.in_step)
        phase, known = touches.phase[numbers], of_module[touches.module[numbers]]
        elsewhere = known == NO_STAGE
        inside = of_module[touches.module] != NO_STAGE
        begins = phase != np.concatenate([[FORWARD], phase[:-1]])
        known[elsewhere & begins] = last
        for which, stage in ((FORWARD, last), (BACKWARD, 0)):
            of_blocks = np.flatnonzero(inside & (touches.phase == which))
            if len(of_blocks):
                known[elsewhere & (phase == which) & (numbers > of_blocks[-1])] = stage
        if len(known) and known[0] == NO_STAGE:
            known[0] = 0
        found = np.full(len(self.graph.ops), NO_STAGE, dtype=np.int64)
        before = np.maximum.accumulate(np.where(known != NO_STAGE, np.arange(len(known)), 0))
        found[numbers] = known[before]
        return found

    def _owners(self) -> dict[str, tuple[int, ...]]:
        """Stages that compute with each parameter; those without any use stay on the first."""
        touches = self.touches
        of_parameters = np.array([p.tensor.storage for p in self.graph.parameters], dtype=np.int64)
        at = np.flatnonzero(touches.is_input & np.isin(touches.storage, of_parameters))
        stage = self.stage[touches.op[at]]
        pairs = np.unique(np.stack([touches.storage[at], stage])[:, stage >= 0], axis=1).T.tolist()
        using: dict[int, list[int]] = {}
        for storage, number in pairs:
            using.setdefault(storage, []).append(number)
        return {p.name: tuple(using.get(p.tensor.storage, (0,))) for p in self.graph.parameters}

    def _joined_gradients(self) -> dict[int, dict[int, int]]:
        """Gradients of shared parameters are summed across stages, not here: parameter id -> stage -> its own last op.

        The ops that add the parts up and what follows them are dropped (their ids map to nothing).
        """
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
                stages = {int(self.stage[i]) for i in self._writers(op, number)}
                if op.name in ("aten.add", "aten.add_") and len(stages) > 1:
                    self.removed[number] = True
                    wanted |= {spec.storage for spec in op.inputs}
                elif self._reads_only(op, wanted) and not parts:
                    self.removed[number] = True
                else:
                    parts.setdefault(int(self.stage[number]), number)
            joined[parameter.tensor.id] = parts
        return joined

    def _writers(self, op: Op, before: int) -> list[int]:
        """The latest op before `before` that made each input."""
        touches = self.touches
        end = int(touches.first_of[before])
        found = []
        for spec in op.inputs:
            at = np.flatnonzero(~touches.is_input[:end] & (touches.storage[:end] == spec.storage))
            found += touches.op[at[-1:]].tolist()
        return found

    def _reads_only(self, op: Op, storages: set[int]) -> bool:
        return all(spec.storage in storages for spec in op.inputs)

    def _needed(self, stage: int) -> list[int]:
        """Ops of other stages that depend on no parameter and that a stage reads: it computes them itself."""
        makers = self.touches.makers
        reader, storages = self.touches.read_free
        wanted = np.unique(storages[self.stage[reader] == stage]).tolist()
        found: set[int] = set()
        while wanted:
            storage = wanted.pop()
            for number in makers[storage]:
                if number not in found and self.stage[number] != stage:
                    found.add(number)
                    wanted += [s.storage for s in self.graph.ops[number].inputs if s.storage in makers]
        return sorted(found)

    def _crossings(self, copied: Sequence[Sequence[int]]) -> tuple[list[int], list[int], str]:
        """Bytes that each stage sends on in forward (to the next) and in backward (to the one before), and their type.

        What was made in forward goes on to the last stage that touches it, what was made in backward to the first.
        """
        touches = self.touches
        at = self._crossing_touches(copied)
        storage, stage = touches.storage[at], self.stage[touches.op[at]]
        order = np.argsort(storage, kind="stable")
        at, storage, stage = at[order], storage[order], stage[order]
        begins = np.flatnonzero(np.diff(storage, prepend=-1)) if len(at) else np.empty(0, dtype=np.int64)
        most = np.maximum.reduceat(stage, begins) if len(begins) else begins
        least = np.minimum.reduceat(stage, begins) if len(begins) else begins
        is_back, origin = touches.phase[touches.op[at[begins]]] == BACKWARD, stage[begins]
        forward, backward = [0] * self.n_stages, [0] * self.n_stages
        latest, dtype = -1, "float32"
        for i in np.flatnonzero(~is_back & (most > origin)).tolist():
            spec = touches.specs[at[begins[i]]]
            for boundary in range(int(origin[i]), int(most[i])):
                forward[boundary] += spec.bytes
            mine = slice(begins[i], begins[i + 1] if i + 1 < len(begins) else len(at))
            reached = int(at[mine][np.argmax(stage[mine])])  # the first touch on its last stage
            if reached > latest:
                latest, dtype = reached, spec.dtype
        for i in np.flatnonzero(is_back & (least < origin)).tolist():
            for boundary in range(int(least[i]) + 1, int(origin[i]) + 1):
                backward[boundary] += touches.specs[at[begins[i]]].bytes
        return forward, backward, dtype

    def _crossing_touches(self, copied: Sequence[Sequence[int]]) -> IntArray:
        """Touches of storages that are not held, by ops of stages, without those of what a stage computes itself."""
        touches = self.touches
        stage = self.stage[touches.op]
        kept: BoolArray = (stage >= 0) & ~self.removed[touches.op]
        listed = np.flatnonzero(touches.place != NO_STORAGE)
        kept[listed] &= ~touches.is_held[touches.place[listed]]
        for number, ops in enumerate(copied):
            if ops:
                local = [spec.storage for i in ops for spec in self.graph.ops[i].outputs]
                kept &= ~((stage == number) & np.isin(touches.storage, local))
        return np.flatnonzero(kept)

    def _stage_graph(self, stage: int, copied: Sequence[int]) -> Graph:
        parameters = [p for p in self.graph.parameters if stage in self.owners[p.name]]
        keep: BoolArray = np.logical_and(self.stage == stage, ~self.removed)
        keep[copied] = ~self.removed[copied]
        ops = [self.graph.ops[i] for i in np.flatnonzero(keep).tolist()]
        ours = {p.tensor.storage for p in parameters}
        optimizer, states = self.touches.optimizer.of(ours)
        return replace(
            self.graph,
            ops=(*ops, *optimizer),
            parameters=tuple(self._with_own_gradient(p, stage, keep) for p in parameters),
            storages=self._storages(keep, optimizer, [*ours, *states]),
        )

    def _with_own_gradient(self, parameter: Parameter, stage: int, keep: BoolArray) -> Parameter:
        """The parameter with the last op of the stage's own gradient."""
        number = parameter.grad_op
        if number is not None:
            number = self.dropped.get(parameter.tensor.id, {}).get(stage, number)
        if number is not None and not keep[number]:
            number = None
        return parameter if number == parameter.grad_op else replace(parameter, grad_op=number)

    def _storages(self, keep: BoolArray, optimizer: Sequence[Op], held: Sequence[int]) -> tuple[Storage, ...]:
        """Storages that a stage's ops touch, alive from first touch to last; what outlives the iteration still does.

        The stage has the ops that `keep` says, then those of its optimizer, and what is `held`.
        """
        touches, storages = self.touches, self.graph.storages
        mine = np.flatnonzero(keep[touches.op])
        number = (np.cumsum(keep) - 1)[touches.op[mine]]
        n_kept = int(keep.sum())
        later = [(touched, n_kept + i) for i, op in enumerate(optimizer) for touched in _storages_of(op)]
        more = np.array(later, dtype=np.int64).reshape(-1, 2)
        place = np.concatenate([touches.place[mine], touches.places(more[:, 0])])
        number = np.concatenate([number, more[:, 1]])[place != NO_STORAGE]
        place = place[place != NO_STORAGE]
        n_new, untouched = n_kept + len(optimizer), -1
        first, last = np.full((2, len(touches.ids)), untouched, dtype=np.int64)
        last[place] = number  # ascending: the latest stays
        first[place[::-1]] = number[::-1]
        at_hand = np.zeros(len(touches.ids), dtype=bool)
        known = touches.places(held)
        at_hand[known[known != NO_STORAGE]] = True
        first, last, at_hand = (column[touches.place_of] for column in (first, last, at_hand))
        lives = first != untouched
        wanted = at_hand | (lives & ~touches.is_parameter)
        born = np.where(touches.columns["born"] < 0, -1, np.where(lives, first, 0))
        dies = np.where(touches.columns["dies"] >= len(self.graph.ops), n_new, np.where(lives, last, n_new))
        at = np.flatnonzero(wanted)
        return tuple(
            [
                Storage(id=one.id, bytes=one.bytes, born=begin, dies=end, kind=one.kind)
                for one, begin, end in zip(
                    [storages[i] for i in at.tolist()], born[at].tolist(), dies[at].tolist(), strict=True
                )
            ]
        )


def _storages_of(op: Op) -> list[int]:
    return [spec.storage for specs in (op.inputs, op.outputs) for spec in specs]
