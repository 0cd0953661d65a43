"""Columns of the tasks of all rank classes, one behind the other as the simulator numbers them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from perfmodel.pipeline.pricebook import IntArray
from perfmodel.pipeline.tasks import LoweredClass


def joined(classes: Sequence[LoweredClass], column: str) -> NDArray[Any]:
    """A column of `Tasks` of all classes."""
    if len(classes) == 1:
        only: NDArray[Any] = getattr(classes[0].tasks, column)
        return only
    return np.concatenate([getattr(lowered.tasks, column) for lowered in classes])


def by_name(classes: Sequence[LoweredClass], column: str, number: Callable[[str], int]) -> IntArray:
    """What `number` says of the name that a column of each task stands for; classes may number names differently."""
    tables: dict[int, IntArray] = {}
    parts = []
    for lowered in classes:
        names = lowered.tasks.names
        if id(names) not in tables:
            tables[id(names)] = np.array([number(name) for name in names], dtype=np.int64)
        parts.append(tables[id(names)][getattr(lowered.tasks, column)])
    return np.concatenate(parts)


def sizes(classes: Sequence[LoweredClass]) -> list[int]:
    """Tasks of each class."""
    return [len(lowered.tasks) for lowered in classes]
