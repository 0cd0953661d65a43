"""The device mesh: named dimensions, which rank stands where, and the groups along each dimension."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from perfmodel.errors import InfeasiblePlanError

MAX_GROUPINGS = 1024  # ways to divide ranks into groups that are remembered; an autotuner asks for the same ones again


@dataclass(frozen=True, slots=True, kw_only=True)
class Mesh:
    """Sizes of the dimensions in rank order: the last one varies fastest from rank to rank."""

    sizes: Mapping[str, int]

    @property
    def n_ranks(self) -> int:
        """Ranks of the mesh."""
        return math.prod(self.sizes.values())

    def size(self, *dims: str) -> int:
        """Ranks along a dimension, or along several together."""
        return math.prod(self.sizes.get(dim, 1) for dim in dims)

    def stride(self, dim: str) -> int:
        """How far apart in rank neighbours along a dimension are."""
        names = [*self.sizes]
        inner = names[names.index(dim) + 1 :] if dim in self.sizes else names
        return math.prod(self.sizes[name] for name in inner)

    def coordinate(self, rank: int, dim: str) -> int:
        """Where a rank stands along a dimension."""
        return rank // self.stride(dim) % self.size(dim)

    def neighbour(self, rank: int, dim: str, index: int) -> int:
        """The rank at `index` of a dimension, otherwise where `rank` stands."""
        return rank + (index - self.coordinate(rank, dim)) * self.stride(dim)

    def group(self, rank: int, *dims: str) -> tuple[int, ...]:
        """The ranks that differ from `rank` in these dimensions alone, with it, ascending."""
        return _groups(tuple(self.sizes.items()), frozenset(dims))[rank]

    def members(self, dim: str, index: int) -> tuple[int, ...]:
        """All ranks at `index` of a dimension, ascending."""
        stride = self.stride(dim)
        block = stride * self.size(dim)
        firsts = range(index * stride, self.n_ranks, block)
        return tuple(rank for first in firsts for rank in range(first, first + stride))


@lru_cache(maxsize=MAX_GROUPINGS)
def _groups(sizes: tuple[tuple[str, int], ...], dims: frozenset[str]) -> tuple[tuple[int, ...], ...]:
    """By rank, the ranks that differ from it in these dimensions alone, ascending; the same object for all of a group."""
    shape = [size for _, size in sizes]
    inside = [axis for axis, (name, _) in enumerate(sizes) if name in dims]
    outside = [axis for axis in range(len(shape)) if axis not in inside]
    n_members = math.prod(shape[axis] for axis in inside)
    rows = np.arange(math.prod(shape)).reshape(shape).transpose(outside + inside).reshape(-1, n_members)
    found: list[tuple[int, ...]] = [()] * rows.size
    for row in map(tuple, rows.tolist()):
        for rank in row:
            found[rank] = row
    return tuple(found)


def mesh_of(sizes: Mapping[str, int], n_ranks: int) -> Mesh:
    """The mesh that a plan names on `n_ranks` ranks; what is left over is data-parallel.

    Raises InfeasiblePlanError if the sizes do not multiply to the ranks.
    """
    named = math.prod(sizes.values())
    if n_ranks % named or ("dp" in sizes and named != n_ranks):
        shape = " x ".join(f"{dim} {size}" for dim, size in sizes.items())
        raise InfeasiblePlanError(f"mesh {shape} has {named} ranks, the machine {n_ranks}; allowed a divisor of it")
    if "dp" in sizes:
        return Mesh(sizes=dict(sizes))
    order = [*sizes]
    order.insert(next((i for i, dim in enumerate(order) if dim in ("ep", "cp", "tp")), len(order)), "dp")
    return Mesh(sizes={dim: sizes.get(dim, n_ranks // named) for dim in order})
