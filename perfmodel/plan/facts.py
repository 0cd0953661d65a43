"""What plans ask of a graph again and again, found once: its events, its tables, its storages as arrays."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Mapping
from functools import cached_property
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from perfmodel.config.plan import PlanSpec
from perfmodel.graph import PHASES, Graph, Op, Phase
from perfmodel.plan.events import Event, MemoryUse, op_event
from perfmodel.plan.tables import TableOps, find_table_ops

MAX_GRAPHS = 16  # graphs remembered; an autotuner alternates between a few batch sizes
KINDS = ("parameter", "buffer", "input", "gradient", "optimizer_state", "activation")  # of graph.Storage

IntArray = NDArray[np.int64]
T = TypeVar("T")


class GraphFacts:
    """Derived from one graph when first asked for, and kept. Get it from `facts_of`."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        # What compiled code makes of a rank's part, once it is split, given the storages that are used beside it; the same
        # model with a part of its batch; and the graph that another plan would spread, with a part of the batch.
        self.compiler: Callable[[Graph, Collection[int]], Graph] | None = None
        self.smaller: Callable[[int], Graph] | None = None
        self.executed: Callable[[PlanSpec, int], Graph] | None = None
        self._events: dict[Hashable, Event] = {}
        self._memory: dict[Hashable, MemoryUse] = {}
        self._derived: dict[Hashable, Any] = {}

    @cached_property
    def tables(self) -> dict[str, TableOps]:
        """Ops of each embedding table by parameter name."""
        return find_table_ops(self.graph)

    @cached_property
    def op_events(self) -> tuple[Event, ...]:
        """The event of each op, by op id."""
        return tuple(op_event(op) for op in self.graph.ops)

    @cached_property
    def phase_events(self) -> Mapping[Phase, tuple[tuple[int, Event], ...]]:
        """(op id, event) of the ops of each phase, in graph order."""
        found: dict[Phase, list[tuple[int, Event]]] = {phase: [] for phase in PHASES}
        for number, event in enumerate(self.op_events):
            found[event.phase].append((number, event))
        return {phase: tuple(rows) for phase, rows in found.items()}

    @cached_property
    def optimizer_start(self) -> int:
        """Place of the optimizer's first op (the number of ops if there is none)."""
        return next((i for i, op in enumerate(self.graph.ops) if op.phase == "optimizer"), len(self.graph.ops))

    @cached_property
    def optimizer_ops(self) -> tuple[Op, ...]:
        """The optimizer's ops, in order."""
        return tuple([op for op in self.graph.ops[self.optimizer_start :] if op.phase == "optimizer"])

    @cached_property
    def parameters_bytes(self) -> int:
        """Bytes of all parameters."""
        return sum([p.tensor.bytes for p in self.graph.parameters])

    @cached_property
    def trained_bytes(self) -> int:
        """Bytes of the parameters that have gradients."""
        return sum([p.tensor.bytes for p in self.graph.parameters if p.grad_op is not None])

    @cached_property
    def step_events(self) -> tuple[tuple[int, Event], ...]:
        """(op id, event) of forward, loss and backward, in graph order."""
        return tuple(
            (number, event)
            for number, event in enumerate(self.op_events)
            if event.phase in ("forward", "loss", "backward")
        )

    @cached_property
    def table_row_bytes(self) -> dict[str, int]:
        """Bytes of one row of each table with its optimizer state, by parameter name."""
        state_bytes = {s.id: s.bytes for s in self.graph.storages if s.kind == "optimizer_state"}
        rows: dict[str, int] = {}
        for name, found in self.tables.items():
            updating = (*found.backward, *found.optimizer)  # a fused update is an op of the backward pass
            touched = {spec.storage for i in updating for spec in self.graph.ops[i].inputs} & found.own
            state = sum(state_bytes.get(storage, 0) for storage in touched)
            rows[name] = found.table.dim * found.table.itemsize_bytes + -(-state // found.table.rows)
        return rows

    @cached_property
    def storages(self) -> Mapping[str, IntArray]:
        """Columns of `Graph.storages`: `id`, `bytes`, `born`, `dies` and `kind` (index into KINDS)."""
        rows = [(s.id, s.bytes, s.born, s.dies, KINDS.index(s.kind)) for s in self.graph.storages]
        columns = np.array(rows, dtype=np.int64).reshape(-1, 5).T
        return dict(zip(("id", "bytes", "born", "dies", "kind"), columns, strict=True))

    def event(self, key: Hashable, make: Callable[[], Event]) -> Event:
        """The event under a key, made when first asked for: the same object every time, so that it is priced once."""
        if key not in self._events:
            self._events[key] = make()
        return self._events[key]

    def derived(self, key: Hashable, make: Callable[[], T]) -> T:
        """What follows from the graph under a key (another graph, its stages), made when first asked for."""
        if key not in self._derived:
            self._derived[key] = make()
        found: T = self._derived[key]
        return found

    def dense_memory(self, key: Hashable, find: Callable[[], MemoryUse]) -> MemoryUse:
        """What `find` says of a rank under a key (its tables, its micro-batches), asked once."""
        if key not in self._memory:
            self._memory[key] = find()
        return self._memory[key]


_KNOWN: dict[int, GraphFacts] = {}  # by identity; each entry holds its graph, so that no identity is reused


def facts_of(graph: Graph) -> GraphFacts:
    """The facts of a graph: made once, the same object while the graph is among the last `MAX_GRAPHS` asked for."""
    known = _KNOWN.get(id(graph))
    if known is None:
        while len(_KNOWN) >= MAX_GRAPHS:
            _KNOWN.pop(next(iter(_KNOWN)), None)
        known = _KNOWN[id(graph)] = GraphFacts(graph)
    return known
