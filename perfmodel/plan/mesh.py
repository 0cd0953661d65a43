"""The device mesh: named dimensions, which rank stands where, and the groups along each dimension."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from perfmodel.errors import InfeasiblePlanError


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
        inside = [dim for dim in self.sizes if dim in dims]
        first = rank - sum(self.coordinate(rank, dim) * self.stride(dim) for dim in inside)
        found = np.array([first])
        for dim in inside:
            found = (found[:, np.newaxis] + np.arange(self.size(dim)) * self.stride(dim)).reshape(-1)
        return tuple(found.tolist())

    def partition(self, members: NDArray[np.int64], *dims: str) -> NDArray[np.int64]:
        """All ranks at some places of the other dimensions, divided into their groups along `dims`: [groups, ranks].

        `members` are those ranks, ascending. Groups are ascending, and so are their first ranks.
        """
        inside = [dim for dim in self.sizes if dim in dims]
        within = sum((members // self.stride(dim) % self.size(dim) * self.stride(dim) for dim in inside), 0 * members)
        rows: NDArray[np.int64] = members[np.argsort(members - within, kind="stable")]
        return rows.reshape(-1, self.size(*inside))

    def members(self, dim: str, index: int) -> tuple[int, ...]:
        """All ranks at `index` of a dimension, ascending."""
        stride = self.stride(dim)
        block = stride * self.size(dim)
        firsts = range(index * stride, self.n_ranks, block)
        return tuple(rank for first in firsts for rank in range(first, first + stride))


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
