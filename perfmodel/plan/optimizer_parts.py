"""Which part of an optimizer's ops updates which parameters."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
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
        self.lists = [
            _Lists(op, parts) if is_multi_tensor(op) else None for op, parts in zip(self.ops, self.parts, strict=True)
        ]
        self.known = {self.sets.root(p.tensor.storage) for p in graph.parameters}

    def of(self, ours: set[int]) -> tuple[list[Op], set[int]]:
        """The ops with the tensors of the parameters in storages `ours` alone, and the storages they touch."""
        mine = {self.sets.root(storage) for storage in ours}
        usual: dict[int, list[int]] = {}  # places kept of lists of parameters, by the length of the lists
        for lists in self.lists:
            if lists is not None and lists.length not in usual and not self.known.isdisjoint(lists.of_root):
                usual[lists.length] = lists.kept(mine)
        found: list[Op] = []
        for op, parts, lists in zip(self.ops, self.parts, self.lists, strict=True):
            if lists is None:
                own = op if not parts[0] or not mine.isdisjoint(parts[0]) else None
            else:
                own = lists.part(
                    lists.kept(mine) if lists.of_root else usual.get(lists.length, list(range(lists.length)))
                )
            if own is not None:
                found.append(own)
        return found, {spec.storage for op in found for specs in (op.inputs, op.outputs) for spec in specs}


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


class _Lists:
    """An op on lists of tensors, to be cut into the parts of some parameters.

    A list of numbers alone (step counts) has no roots and is cut as the lists of its length are.
    """

    def __init__(self, op: Op, places: Sequence[set[int]]) -> None:
        self.op, self.length = op, len(places)
        self.of_root: dict[int, list[int]] = {}
        for place, roots in enumerate(places):
            for root in roots:
                self.of_root.setdefault(root, []).append(place)
        counts, seen = Counter(op.input_names), Counter[str]()
        self.always: list[int] = []  # inputs that are no lists
        self.inputs: list[list[int]] = [[] for _ in places]
        for number, name in enumerate(op.input_names):
            if counts[name] == self.length:
                self.inputs[seen[name]].append(number)
                seen[name] += 1
            else:
                self.always.append(number)

    def kept(self, mine: set[int]) -> list[int]:
        """Places of what belongs to the sets with these representatives."""
        return sorted({place for root in mine for place in self.of_root.get(root, ())})

    def part(self, places: Sequence[int]) -> Op | None:
        """The op with these places of its lists alone; None without any."""
        if not places:
            return None
        op = self.op
        inputs = sorted([*self.always, *(number for place in places for number in self.inputs[place])])
        outputs = sorted([number for place in places for number in range(place, len(op.outputs), self.length)])
        return replace(
            op,
            inputs=tuple([op.inputs[i] for i in inputs]),
            input_names=tuple([op.input_names[i] for i in inputs]),
            outputs=tuple([op.outputs[i] for i in outputs]),
        )
