"""Copies of inputs that stand in line with the kernels: `.to(device)` issues them on the current stream, the compute stream.

Programs keep them on the copy stream, so that they are told from kernels wherever time is counted, and give them the place
that the compute stream would: a copy waits for the last kernel issued before it, and the first kernel issued after it waits
for it. That is the order of one stream, over the end of the iteration as well. Copies behind each other are in order anyway.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from perfmodel.config.training import InputCopies
from perfmodel.graph import INPUT_COPIES, TO_DEVICE, Graph, Op
from perfmodel.pipeline.layout import input_copies
from perfmodel.pipeline.lowering import Lowering
from perfmodel.pipeline.pricebook import IntArray, Prices
from perfmodel.plan.facts import facts_of
from perfmodel.sim.program import COMPUTE

BoolArray = NDArray[np.bool_]


def fed_by(graph: Graph, copies: InputCopies | None) -> Graph:
    """The graph whose inputs reach the device in such a way (None: in its own); made once."""
    if copies is None:
        return graph
    return facts_of(graph).derived(("fed by", copies), lambda: _fed_by(graph, copies))


def _fed_by(graph: Graph, copies: InputCopies) -> Graph:
    others = {name for attributes in INPUT_COPIES.values() for name in attributes}

    def fed(op: Op) -> Op:
        if op.phase != "input" or op.name != TO_DEVICE:
            return op
        kept = {name: value for name, value in op.attrs.items() if name not in others}
        return replace(op, attrs={**kept, **INPUT_COPIES[copies]})

    return replace(graph, ops=tuple(map(fed, graph.ops)))


def fed_ahead(graph: Graph) -> bool:
    """Whether some input is copied during the step before."""
    return facts_of(graph).derived("fed ahead", lambda: any(op.attrs.get("ahead") for op in graph.ops))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class InLine:
    """What keeps copies and kernels in one line.

    Attributes:
        task, on: task waits for `on`, which stands before it in the same sequence of events.
        opens: the first device task of each sequence that has such copies, and whether it is one.
        closes: the last of the same sequences, and whether it is one.
    """

    task: IntArray
    on: IntArray
    opens: tuple[tuple[int, bool], ...]
    closes: tuple[tuple[int, bool], ...]

    def over(self) -> list[tuple[int, int]]:
        """(task, the task of the iteration before that it waits for)."""
        ends = zip(self.opens, self.closes, strict=True)
        return [(first, last) for (first, copies), (last, copied) in ends if copies != copied]


def in_line(lowering: Lowering, prices: Prices) -> InLine:
    """Copies of inputs among the kernels of the compute stream, by class.

    Those have a stream of their own where inputs are prefetched, and where sharded tables are fed a batch ahead.
    """
    copies = _standing_in_line(lowering, prices)
    has_copies = np.zeros(len(lowering.first_event) - 1, dtype=bool)
    has_copies[lowering.class_of[copies]] = True
    line = copies | ((lowering.stream_of == COMPUTE) & has_copies[lowering.class_of])
    events = np.flatnonzero(line & (lowering.last_task >= 0))
    copy, cls = copies[events], lowering.class_of[events]
    first, last = lowering.device_task[lowering.first_kernel[events]], lowering.last_task[events]
    changes = np.flatnonzero((copy[1:] != copy[:-1]) & (cls[1:] == cls[:-1]))
    begins = np.flatnonzero(np.diff(cls, prepend=-1))
    ends = np.append(begins[1:], len(events))[: len(begins)] - 1
    return InLine(
        task=first[changes + 1],
        on=last[changes],
        opens=tuple(zip(first[begins].tolist(), copy[begins].tolist(), strict=True)),
        closes=tuple(zip(last[ends].tolist(), copy[ends].tolist(), strict=True)),
    )


def _standing_in_line(lowering: Lowering, prices: Prices) -> BoolArray:
    """Which events copy inputs on the current stream."""
    if lowering.device.kind == "cpu":
        return np.zeros(lowering.columns.size, dtype=bool)
    found = input_copies(prices) & ~input_copies(prices, ahead=True) & (lowering.last_task >= 0)
    if not found.any():
        return found
    for task, _ in lowering.ahead():
        found &= lowering.class_of != lowering.class_of[lowering.event[task]]
    return found
