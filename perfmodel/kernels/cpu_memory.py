"""Where an op's tensors lie on a CPU when it runs: how long ago each was touched, and whether its pages are new.

A training step is walked twice in dispatch order, so that the second walk meets the memory that the first one left (steady
state). For every tensor the *distance* is the number of bytes that other accesses touched since its last use; a cache of
least recently used lines holds what lies nearer than its size. Freed memory goes to the next tensor of the same size
(glibc's bins), which therefore finds it as warm as its last owner left it. Which bytes lie in new pages, that fault, is
told by a walk through the heap (`cpu_heap`), from the first step on, whose optimizer states lie on top of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from perfmodel.graph import Op, TensorSpec
from perfmodel.kernels.copy import touched_bytes
from perfmodel.kernels.cpu_heap import MAP_BYTES, SMALL_BYTES, Heap

FAR = float("inf")
# Small blocks of Python and of autograd lie between tensors and keep pages from being given back. Eight nets (two DLRMs, two
# MLPs, two transformers, two vision nets; none of them a live case) faulted on 0.11 to 1.6 times the bytes that a heap of
# tensors alone would, 0.55 times in sum (getrusage's minor faults of 10 steps, two processes each, 2026-11-29).
GIVEN_BACK_FRAC = 0.55
# The least and most of those eight, over their sum: with 8 draws, 7 of 9 further ones lie between, so a range of 78 %.
GIVEN_BACK_RANGE = (0.11 / GIVEN_BACK_FRAC, 1.6 / GIVEN_BACK_FRAC)
HEAP_STEPS = 4  # from the third on, the heaps of the live models repeat


@dataclass(frozen=True, slots=True, kw_only=True)
class Reach:
    """For one op: (bytes, distance in bytes) of each tensor it reads or writes, bytes in new pages, and the widest gap.

    `gap_bytes` is what the rest of the step touches between two runs of this op: the traffic that a table's rows must
    outlive to be found in the cache again; `same_rows` says that every run asks for the same rows of the table.
    """

    tensors: tuple[tuple[float, float], ...]
    fresh_bytes: float
    gap_bytes: float
    same_rows: bool = False


def cold(op: Op, *, fresh: bool = False) -> Reach:
    """Everything the op touches was used too long ago for any cache."""
    specs = [*_large(op.inputs), *_written(op)]
    new = sum(spec.bytes for spec in _written(op)) if fresh else 0
    return Reach(tensors=tuple((float(touched_bytes(s)), FAR) for s in specs), fresh_bytes=float(new), gap_bytes=FAR)


def warm(op: Op, *, fresh: bool = False) -> Reach:
    """The op runs again and again on the same tensors; with `fresh`, its outputs lie in new pages each time.

    An output is freed when the next one is there: two blocks take turns.
    """
    inputs = [float(touched_bytes(s)) for s in op.inputs]
    outputs = [float(s.bytes) for s in _written(op)]
    total = sum(inputs) + sum(outputs)
    new = sum(outputs) if fresh else 0.0
    near = [(size, total) for size in inputs]
    far = [] if fresh else [(size, total + sum(outputs)) for size in outputs]
    return Reach(tensors=(*near, *far), fresh_bytes=new, gap_bytes=0.0, same_rows=True)


def reaches(ops: Sequence[Op], touched: Sequence[float | None], *, keeps_pages: bool = False) -> list[Reach]:
    """The reach of every op of a step that repeats. `touched[i]` replaces the bytes of op i's first input (a table).

    Where the process `keeps_pages` (`cpu_heap.keeps_pages`), no page is new.
    """
    lives = lifetimes(ops)
    walk = _Walk(ops, lives, None if keeps_pages else new_bytes(ops, lives))
    for _ in range(2):
        found = walk.step(touched)
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Lifetimes:
    """Bytes of the storages born in a step, and per op index those that die after it (`len(ops)`: with the step)."""

    born: Mapping[int, int]
    dies: Mapping[int, Sequence[int]]


def lifetimes(ops: Sequence[Op]) -> Lifetimes:
    """Storages born in the step die after the op that touches them last; gradients of parameters with the step."""
    born: dict[int, int] = {}
    last: dict[int, int] = {}
    phase: dict[int, str] = {}
    seen: set[int] = set()
    for index, op in enumerate(ops):
        for spec in op.outputs:
            given = op.overload == "out"  # writes into a tensor that was there: a gradient bucket of DDP
            if not given and spec.storage not in seen and all(spec.storage != s.storage for s in op.inputs):
                born[spec.storage] = max(born.get(spec.storage, 0), spec.bytes)
                phase.setdefault(spec.storage, op.phase)
            last[spec.storage] = index
        for spec in op.inputs:
            seen.add(spec.storage)
            last[spec.storage] = index
    dies: dict[int, list[int]] = {}
    for storage in born:
        is_gradient = phase[storage] == "backward" and ops[last[storage]].phase == "optimizer"
        dies.setdefault(len(ops) if is_gradient else last[storage], []).append(storage)
    return Lifetimes(born=born, dies=dies)


def new_bytes(ops: Sequence[Op], lives: Lifetimes) -> dict[int, float]:
    """Per storage born in a later step of a training run, how many of its bytes lie in new pages."""
    heap, found = Heap(), dict[int, float]()
    for number in range(HEAP_STEPS):
        addresses: dict[int, int] = {}
        found = {}
        for index in range(len(ops) + 1):
            if number == 0 and index < len(ops) and ops[index].phase == "optimizer":
                _place_states(ops, index, lives, heap, addresses)
            for spec in _written(ops[index]) if index < len(ops) else ():
                size = lives.born.get(spec.storage, 0)
                if size >= SMALL_BYTES and spec.storage not in addresses:
                    addresses[spec.storage], fresh = heap.allocate(size)
                    found[spec.storage] = float(fresh)
            for storage in lives.dies.get(index, ()):
                if storage in addresses:
                    heap.free(addresses[storage], lives.born[storage])
    return found


def _place_states(ops: Sequence[Op], first: int, lives: Lifetimes, heap: Heap, addresses: dict[int, int]) -> None:
    """Allocates what the optimizer keeps for itself, when its first step starts."""
    if any(op.phase == "optimizer" for op in ops[:first]):
        return
    before = {spec.storage for op in ops[:first] for spec in (*op.inputs, *op.outputs)}
    for op in ops[first:]:
        for spec in op.inputs:
            is_state = spec.storage not in before and spec.storage not in lives.born
            if is_state and spec.bytes >= SMALL_BYTES and spec.storage not in addresses:
                addresses[spec.storage], _ = heap.allocate(spec.bytes)


def _large(specs: Sequence[TensorSpec]) -> list[TensorSpec]:
    return [spec for spec in specs if spec.n_elems > 1]


def _written(op: Op) -> list[TensorSpec]:
    """Outputs with memory of their own."""
    inputs = {spec.storage for spec in op.inputs}
    return [spec for spec in op.outputs if spec.storage not in inputs]


class _Walk:
    """One rank's memory while its ops run; `reaches` is the only user."""

    def __init__(self, ops: Sequence[Op], lives: Lifetimes, fresh: Mapping[int, float] | None) -> None:
        self.ops = ops
        self.clock_bytes = 0.0
        self.last_use: dict[int, float] = {}
        self.freed: dict[int, list[float]] = {}
        self.lives = lives
        self.fresh = fresh

    def step(self, touched: Sequence[float | None]) -> list[Reach]:
        """Walks all ops once."""
        alive: set[int] = set()
        found = [self._op(index, op, touched[index], alive) for index, op in enumerate(self.ops)]
        self._bury(len(self.ops))
        return found

    def _op(self, index: int, op: Op, table_bytes: float | None, alive: set[int]) -> Reach:
        start = self.clock_bytes
        tensors: list[tuple[float, float]] = []
        fresh = 0.0
        for position, spec in enumerate(op.inputs):
            size = float(touched_bytes(spec)) if table_bytes is None or position else table_bytes
            tensors.append((size, start - self.last_use.get(spec.storage, -FAR)))
        for spec in _written(op):
            if spec.storage in alive or spec.storage not in self.lives.born:
                tensors.append((float(spec.bytes), start - self.last_use.get(spec.storage, -FAR)))
                continue
            alive.add(spec.storage)
            blocks = self.freed.get(spec.bytes)
            before = start - blocks.pop() if blocks else FAR
            new = self._new(spec)
            fresh += new
            if new < spec.bytes:
                tensors.append((spec.bytes - new, before))
        used = sum(size for size, _ in tensors) + fresh
        gap = min((distance for _, distance in tensors[:1]), default=FAR)
        # An op's own tensors push each other out as well.
        reached = tuple((size, distance + used) for size, distance in tensors)
        self.clock_bytes = start + used
        for spec in (*op.inputs, *op.outputs):
            self.last_use[spec.storage] = self.clock_bytes
        self._bury(index)
        return Reach(tensors=reached, fresh_bytes=fresh, gap_bytes=gap)

    def _bury(self, index: int) -> None:
        """What dies after op `index` leaves its block to the next of its size."""
        for storage in self.lives.dies.get(index, ()):
            self.freed.setdefault(self.lives.born[storage], []).append(self.clock_bytes)
            self.last_use.pop(storage, None)

    def _new(self, spec: TensorSpec) -> float:
        """Bytes of a new tensor in new pages: all of a map of its own, part of what the walk through the heap says."""
        if self.fresh is None:
            return 0.0
        if spec.bytes > MAP_BYTES:
            return float(spec.bytes)
        return GIVEN_BACK_FRAC * min(self.fresh.get(spec.storage, 0.0), float(spec.bytes))


def level_bytes(reach: Reach, sizes: Mapping[str, float], sharpness: float) -> tuple[float, float]:
    """Bytes that come from the last-level cache and from memory; `sizes` are the `private` and `shared` cache bytes."""
    shared = memory = 0.0
    for size, distance in reach.tensors:
        beyond_private = beyond(distance, sizes["private"], sharpness)
        beyond_shared = beyond(distance, sizes["shared"], sharpness)
        memory += size * beyond_shared
        shared += size * (beyond_private - beyond_shared)
    return max(shared, 0.0), memory


def beyond(distance: float, cache_bytes: float, sharpness: float) -> float:
    """Share of a tensor last touched `distance` bytes ago that the cache has lost."""
    if distance == FAR:
        return 1.0
    ratio = float((distance / cache_bytes) ** sharpness)
    return ratio / (1.0 + ratio)
