"""Which part of a tensor a rank holds: one factor of one dimension, followed through views.

A tensor's elements lie in row-major logical order. A split factor has `outer` elements of its own dimension before it, so
its place in that order survives every reshape: (batch, tokens, 3 x width) -> (batch, tokens, heads, head) moves a split of
the last dimension to the heads, and merging (batch, heads) leaves it inside the merged dimension.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal

from perfmodel.graph import TensorSpec, is_row_major

MAX_LAYOUTS = 4096  # remembered
PACKED = 3  # query, key and value in one weight

Kind = Literal["weight", "sequence", "expert"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """A split of dimension `dim`: of its factor of `full` elements, `local` are here.

    `outer` elements of the same dimension lie outside the factor; `kind` tells a split that came with a weight from one of
    the tokens (sequence parallelism) and from rows that went to their experts. `local`
    times the group may exceed `full` where a vocabulary is padded.
    """

    dim: int
    full: int
    local: int
    outer: int = 1
    kind: Kind = "weight"

    def prefix(self, shape: Sequence[int]) -> int:
        """Elements of the logical order outside the factor."""
        return math.prod(shape[: self.dim]) * self.outer

    def at(self, dim: int) -> Shard:
        """The same split in another dimension."""
        return _moved(self, dim, self.outer)


@lru_cache(maxsize=MAX_LAYOUTS)
def _moved(shard: Shard, dim: int, outer: int) -> Shard:
    """The split in another place; equal ones are one object, for a graph has few and asks thousands of times."""
    return replace(shard, dim=dim, outer=outer)


def local_size(shard: Shard, size: int) -> int:
    """Elements of the split dimension, `size` in the whole tensor, that are held here."""
    return -(-size * shard.local // shard.full)


def local_shape(shape: Sequence[int], shard: Shard) -> tuple[int, ...]:
    """The held part's shape."""
    return (*shape[: shard.dim], local_size(shard, shape[shard.dim]), *shape[shard.dim + 1 :])


def local_spec(spec: TensorSpec, shard: Shard | None) -> TensorSpec:
    """The held part of a tensor. Strides that span the split factor shrink with it."""
    if shard is None:
        return spec
    shape, strides = _local_layout(spec.shape, spec.strides, shard)
    return TensorSpec(id=spec.id, shape=shape, dtype=spec.dtype, strides=strides, storage=spec.storage)


@lru_cache(maxsize=MAX_LAYOUTS)
def _local_layout(
    shape: tuple[int, ...], strides: tuple[int, ...], shard: Shard
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shape and strides of the held part."""
    local = local_shape(shape, shard)
    if is_row_major(shape, strides):
        return local, row_major(local)
    span = strides[shard.dim] * max(shape[shard.dim] // shard.outer, 1)
    shrunk = tuple(
        -(-stride * shard.local // shard.full) if i != shard.dim and stride >= span else stride
        for i, stride in enumerate(strides)
    )
    return local, shrunk


def row_major(shape: Sequence[int]) -> tuple[int, ...]:
    """Strides of a dense tensor."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def reshaped(shard: Shard, before: Sequence[int], after: Sequence[int]) -> Shard | None:
    """The split of a reshaped tensor, or None if no dimension of the new shape can hold it.

    A dimension of `PACKED` or fewer passes the split to the one inside it: weights that pack query, key and value are stored
    interleaved by head where they are split.
    """
    prefix = shard.prefix(before)
    outside, dim = 1, 0
    for index, size in enumerate(after):
        if outside <= prefix:
            dim = index
        if outside * size > prefix and size > 1:
            break
        outside *= size
    outside = math.prod(after[:dim])
    if prefix % outside:
        return None
    found = _moved(shard, dim, prefix // outside)
    while not _divides(found, after):
        if found.dim + 1 >= len(after) or after[found.dim] // found.outer > PACKED:
            return None
        found = replace(found, dim=found.dim + 1, outer=1)
    return found


def _divides(shard: Shard, shape: Sequence[int]) -> bool:
    inner, rest = divmod(shape[shard.dim], shard.outer)
    if rest or inner <= 1:
        return False
    return inner * shard.local % shard.full == 0 or inner == shard.full
