"""Which part of an optimizer's ops updates which parameters."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

from perfmodel.graph import Graph, Op
from perfmodel.plan.tables import is_multi_tensor


def optimizer_of(graph: Graph, storages: set[int]) -> list[Op]:
    """The optimizer's ops with the tensors of the parameters in these storages alone."""
    return OptimizerParts(graph).of(storages)[0]


class OptimizerParts:
    """Optimizer ops of a graph, and what in them belongs to one parameter.

    What stands at one place of the lists of an op belongs to one parameter; so does what an op on single tensors touches.
    `parts[i]` has, for each place of op i, the representatives of the storages there.
    """

    def __init__(self, graph: Graph) -> None:
        self.ops = [op for op in graph.ops if op.phase == "optimizer"]
        self.sets = _Sets()
        places = [_places(op) if is_multi_tensor(op) else [_large(op)] for op in self.ops]
        for place in places:
            for storages in place:
                self.sets.join(storages)
        self.parts = [[{self.sets.root(s) for s in storages} for storages in place] for place in places]
        self.known = {self.sets.root(p.tensor.storage) for p in graph.parameters}

    def of(self, ours: set[int]) -> tuple[list[Op], set[int]]:
        """The ops with the tensors of the parameters in storages `ours` alone, and the storages they touch."""
        mine = {self.sets.root(storage) for storage in ours}
        masks: dict[int, list[bool]] = {}
        for op, parts in zip(self.ops, self.parts, strict=True):
            if is_multi_tensor(op) and any(not self.known.isdisjoint(roots) for roots in parts):
                masks.setdefault(len(parts), [not mine.isdisjoint(roots) for roots in parts])
        found = (_own(op, parts, mine, masks) for op, parts in zip(self.ops, self.parts, strict=True))
        kept = [op for op in found if op is not None]
        return kept, {spec.storage for op in kept for spec in (*op.inputs, *op.outputs)}


class _Sets:
    """Disjoint sets of storages."""

    def __init__(self) -> None:
        self._parent: dict[int, int] = {}

    def root(self, item: int) -> int:
        """The representative of an item's set."""
        while (parent := self._parent.get(item, item)) != item:
            item = parent
        return item

    def join(self, items: Sequence[int]) -> None:
        """Puts items into one set."""
        for item in items[1:]:
            first, second = self.root(items[0]), self.root(item)
            if first != second:
                self._parent[second] = first


def _large(op: Op) -> list[int]:
    return [spec.storage for spec in (*op.inputs, *op.outputs) if spec.n_elems > 1]


def _places(op: Op) -> list[list[int]]:
    """Storages at each place of the lists of an op, those of numbers left out."""
    counts = Counter(op.input_names)
    length = max(counts.values())
    found: list[list[int]] = [[] for _ in range(length)]
    seen: Counter[str] = Counter()
    for spec, name in zip(op.inputs, op.input_names, strict=True):
        if counts[name] == length and spec.n_elems > 1:
            found[seen[name]].append(spec.storage)
        seen[name] += 1
    for index, spec in enumerate(op.outputs):
        if len(op.outputs) % length == 0 and spec.n_elems > 1:
            found[index % length].append(spec.storage)
    return found


def _own(op: Op, places: Sequence[set[int]], mine: set[int], masks: Mapping[int, Sequence[bool]]) -> Op | None:
    """The op with what belongs to `mine`; a list of numbers alone (step counts) is cut like the lists of its length."""
    if not is_multi_tensor(op):
        return op if not places[0] or not mine.isdisjoint(places[0]) else None
    keep = [not mine.isdisjoint(roots) for roots in places]
    if not any(places):
        keep = list(masks.get(len(places), [True] * len(places)))
    if not any(keep):
        return None
    counts = Counter(op.input_names)
    seen: Counter[str] = Counter()
    inputs = []
    for spec, name in zip(op.inputs, op.input_names, strict=True):
        if counts[name] != len(places) or keep[seen[name]]:
            inputs.append((spec, name))
        seen[name] += 1
    return replace(
        op,
        inputs=tuple(spec for spec, _ in inputs),
        input_names=tuple(name for _, name in inputs),
        outputs=tuple(spec for i, spec in enumerate(op.outputs) if keep[i % len(places)]),
    )
