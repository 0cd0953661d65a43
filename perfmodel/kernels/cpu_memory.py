"""Where an op's tensors lie on a CPU when it runs: how long ago each was touched, and whether its pages are new.

A training step is walked twice in dispatch order, so that the second walk meets the memory that the first one left (steady
state). For every tensor the *distance* is the number of bytes that other accesses touched since its last use; a cache of
least recently used lines holds what lies nearer than its size. Freed memory goes to the next tensor of the same size
(glibc's bins), which therefore finds it as warm as its last owner left it. A tensor above MAP_BYTES is mapped anew each
time (mallopt(3): the dynamic M_MMAP_THRESHOLD grows to 32 MiB on 64-bit systems and stops there): its pages fault.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from perfmodel.graph import Op, TensorSpec
from perfmodel.kernels.copy import touched_bytes
from perfmodel.units import MEBI

MAP_BYTES = 32 * MEBI
FAR = float("inf")


@dataclass(frozen=True, slots=True, kw_only=True)
class Reach:
    """For one op: (bytes, distance in bytes) of each tensor it reads or writes, bytes in new pages, and the widest gap.

    `gap_bytes` is what the rest of the step touches between two runs of this op: the traffic that a table's rows must
    outlive to be found in the cache again.
    """

    tensors: tuple[tuple[float, float], ...]
    fresh_bytes: float
    gap_bytes: float


def cold(op: Op, *, fresh: bool = False) -> Reach:
    """Everything the op touches was used too long ago for any cache."""
    specs = [*_large(op.inputs), *_written(op)]
    new = sum(spec.bytes for spec in _written(op)) if fresh else 0
    return Reach(tensors=tuple((float(touched_bytes(s)), FAR) for s in specs), fresh_bytes=float(new), gap_bytes=FAR)


def warm(op: Op, *, fresh: bool = False) -> Reach:
    """The op runs again and again on the same tensors; with `fresh`, its outputs lie in new pages each time."""
    inputs = [float(touched_bytes(s)) for s in op.inputs]
    outputs = [float(s.bytes) for s in _written(op)]
    total = sum(inputs) + sum(outputs)
    new = sum(outputs) if fresh else 0.0
    old = inputs if fresh else inputs + outputs
    return Reach(tensors=tuple((size, total) for size in old), fresh_bytes=new, gap_bytes=0.0)


def reaches(ops: Sequence[Op], touched: Sequence[float | None]) -> list[Reach]:
    """The reach of every op of a step that repeats. `touched[i]` replaces the bytes of op i's first input (a table)."""
    walk = _Walk(ops)
    for _ in range(2):
        found = walk.step(touched)
    return found


def _large(specs: Sequence[TensorSpec]) -> list[TensorSpec]:
    return [spec for spec in specs if spec.n_elems > 1]


def _written(op: Op) -> list[TensorSpec]:
    """Outputs with memory of their own."""
    inputs = {spec.storage for spec in op.inputs}
    return [spec for spec in op.outputs if spec.storage not in inputs]


class _Walk:
    """One rank's memory while its ops run; `reaches` is the only user."""

    def __init__(self, ops: Sequence[Op]) -> None:
        self.ops = ops
        self.clock_bytes = 0.0
        self.last_use: dict[int, float] = {}
        self.freed: dict[int, list[float]] = {}
        self.dies: dict[int, list[tuple[int, int]]] = {}
        self._lifetimes()

    def _lifetimes(self) -> None:
        """Storages born in the step die after the op that touches them last."""
        born: dict[int, int] = {}
        last: dict[int, int] = {}
        seen: set[int] = set()
        for index, op in enumerate(self.ops):
            for spec in op.outputs:
                if spec.storage not in seen and all(spec.storage != s.storage for s in op.inputs):
                    born[spec.storage] = max(born.get(spec.storage, 0), spec.bytes)
                last[spec.storage] = index
            for spec in op.inputs:
                seen.add(spec.storage)
                last[spec.storage] = index
        self.born = born
        for storage, size in born.items():
            self.dies.setdefault(last[storage], []).append((storage, size))

    def step(self, touched: Sequence[float | None]) -> list[Reach]:
        """Walks all ops once."""
        alive: set[int] = set()
        return [self._op(index, op, touched[index], alive) for index, op in enumerate(self.ops)]

    def _op(self, index: int, op: Op, table_bytes: float | None, alive: set[int]) -> Reach:
        start = self.clock_bytes
        tensors: list[tuple[float, float]] = []
        fresh = 0.0
        for position, spec in enumerate(op.inputs):
            size = float(touched_bytes(spec)) if table_bytes is None or position else table_bytes
            tensors.append((size, start - self.last_use.get(spec.storage, -FAR)))
        for spec in _written(op):
            if spec.storage in alive or spec.storage not in self.born:
                tensors.append((float(spec.bytes), start - self.last_use.get(spec.storage, -FAR)))
                continue
            alive.add(spec.storage)
            if spec.bytes > MAP_BYTES:
                fresh += spec.bytes
                continue
            blocks = self.freed.get(spec.bytes)
            tensors.append((float(spec.bytes), start - blocks.pop() if blocks else FAR))
        used = sum(size for size, _ in tensors) + fresh
        gap = min((distance for _, distance in tensors[:1]), default=FAR)
        # An op's own tensors push each other out as well.
        reached = tuple((size, distance + used) for size, distance in tensors)
        self.clock_bytes = start + used
        for spec in (*op.inputs, *op.outputs):
            self.last_use[spec.storage] = self.clock_bytes
        for storage, size in self.dies.get(index, ()):
            self.freed.setdefault(size, []).append(self.clock_bytes)
            self.last_use.pop(storage, None)
        return Reach(tensors=reached, fresh_bytes=fresh, gap_bytes=gap)


def level_bytes(reach: Reach, sizes: Mapping[str, float], sharpness: float) -> tuple[float, float]:
    """Bytes that come from the last-level cache and from memory; `sizes` are the `private` and `shared` cache bytes."""
    shared = memory = 0.0
    for size, distance in reach.tensors:
        beyond_private = _beyond(distance, sizes["private"], sharpness)
        beyond_shared = _beyond(distance, sizes["shared"], sharpness)
        memory += size * beyond_shared
        shared += size * (beyond_private - beyond_shared)
    return max(shared, 0.0), memory


def _beyond(distance: float, cache_bytes: float, sharpness: float) -> float:
    """Share of a tensor last touched `distance` bytes ago that the cache has lost."""
    if distance == FAR:
        return 1.0
    ratio = float((distance / cache_bytes) ** sharpness)
    return ratio / (1.0 + ratio)
