"""Which op touches which storage, as arrays: what cutting a graph into stages asks of it, however often it is cut."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from perfmodel.graph import PHASES, Graph, TensorSpec
from perfmodel.plan.optimizer_parts import OptimizerParts

IntArray = NDArray[np.int64]
BoolArray = NDArray[np.bool_]
NO_STORAGE = -1  # of a tensor whose storage the graph does not list
FORWARD, LOSS, BACKWARD = (PHASES.index(name) for name in ("forward", "loss", "backward"))
_HELD = ("parameter", "buffer", "optimizer_state")
_APART = (PHASES.index("input"), PHASES.index("optimizer"))  # phases that follow what they feed or update


class Touches:
    """Tensors of a graph's ops, op by op, an op's inputs before its outputs.

    Attributes:
        specs: the tensors.
        op, storage, is_input: of each tensor the op, its storage's id, and whether the op reads it.
        ids: the graph's storages, each once, ascending; `is_held`: it holds a parameter, a buffer or a state.
        place: of each tensor, where its storage stands in `ids` (NO_STORAGE: nowhere).
        place_of, columns, is_parameter: of each of the graph's storages its place in `ids`, `born` and `dies`, and its kind.
        phase, module: of each op its phase (index into PHASES) and its module (index into `modules`).
        in_step: ops that are neither inputs nor the optimizer's.
    """

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        n_inputs = np.array([len(op.inputs) for op in graph.ops], dtype=np.int64)
        n_all = n_inputs + np.array([len(op.outputs) for op in graph.ops], dtype=np.int64)
        self.specs: list[TensorSpec] = [spec for op in graph.ops for specs in (op.inputs, op.outputs) for spec in specs]
        self.op: IntArray = np.repeat(np.arange(len(graph.ops)), n_all)
        self.storage: IntArray = np.array([spec.storage for spec in self.specs], dtype=np.int64)
        self.first_of: IntArray = np.cumsum(n_all) - n_all
        self.is_input: BoolArray = np.arange(len(self.specs)) - self.first_of[self.op] < n_inputs[self.op]
        numbers = {name: number for number, name in enumerate(PHASES)}
        self.phase: IntArray = np.array([numbers[op.phase] for op in graph.ops], dtype=np.int64)
        self.in_step: BoolArray = ~np.isin(self.phase, _APART)
        modules: dict[str, int] = {}
        self.module: IntArray = np.array(
            [modules.setdefault(op.module, len(modules)) for op in graph.ops], dtype=np.int64
        )
        self.modules = tuple(modules)
        listed = np.array([storage.id for storage in graph.storages], dtype=np.int64)
        self.ids, self.place_of = np.unique(listed, return_inverse=True)
        self.place: IntArray = self.places(self.storage)
        self.columns: Mapping[str, IntArray] = {
            name: np.array([getattr(s, name) for s in graph.storages], dtype=np.int64) for name in ("born", "dies")
        }
        self.is_parameter: BoolArray = np.array([s.kind == "parameter" for s in graph.storages], dtype=bool)
        self.is_held: BoolArray = np.zeros(len(self.ids), dtype=bool)
        self.is_held[self.place_of] = [s.kind in _HELD for s in graph.storages]

    def places(self, storages: Sequence[int] | IntArray) -> IntArray:
        """Where storages stand in `ids` (NO_STORAGE: nowhere)."""
        wanted = np.asarray(storages, dtype=np.int64)
        at = np.searchsorted(self.ids, wanted)
        there = at < len(self.ids)
        there[there] = self.ids[at[there]] == wanted[there]
        return np.where(there, at, NO_STORAGE)

    @cached_property
    def optimizer(self) -> OptimizerParts:
        """The graph's optimizer by parameter."""
        return OptimizerParts(self.graph)

    @cached_property
    def makers(self) -> Mapping[int, Sequence[int]]:
        """Ops that make each storage which depends on no parameter, in forward, loss or the inputs."""
        ops = self.graph.ops
        early = [number for number, op in enumerate(ops) if op.phase in ("forward", "loss", "input")]
        free: set[int] = set()
        tainted: set[int] = {p.tensor.storage for p in self.graph.parameters}
        for number in early:
            reads = [spec.storage for spec in ops[number].inputs]
            (free if tainted.isdisjoint(reads) else tainted).update([spec.storage for spec in ops[number].outputs])
        found: dict[int, list[int]] = {}
        for number in early:
            for spec in ops[number].outputs:
                if spec.storage in free and spec.storage not in tainted:
                    found.setdefault(spec.storage, []).append(number)
        return found

    @cached_property
    def read_free(self) -> tuple[IntArray, IntArray]:
        """(op, storage) of what ops read of `makers`."""
        made = np.array(sorted(self.makers), dtype=np.int64)
        at = np.flatnonzero(self.is_input & np.isin(self.storage, made))
        return self.op[at], self.storage[at]
