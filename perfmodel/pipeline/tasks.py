"""What the tasks of a rank's program stand for, and the program with its description."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from perfmodel.db.device import Device
from perfmodel.estimate import Estimate, Source
from perfmodel.pipeline.pricebook import FloatArray, IntArray, Prices
from perfmodel.plan.events import RankClass
from perfmodel.sim.program import ArrayProgram
from perfmodel.sim.steady import CarryDep

Category = Literal["host", "sync", "kernel", "copy", "collective"]
CATEGORIES: tuple[Category, ...] = ("host", "sync", "kernel", "copy", "collective")
HOST_FAMILY = "host"


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskInfo:
    """What a task of a program stands for: the index of its event, what it is, and its price."""

    event: int
    category: Category
    family: str
    estimate: Estimate


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Tasks:
    """What the tasks of a program stand for, by column: see `TaskInfo`.

    `category` indexes CATEGORIES, `family` indexes `names`; `ideal_s` is the time at datasheet peak rates,
    `memory_frac` how much of that memory takes (of kernels on a GPU; else 0).
    """

    event: IntArray
    category: IntArray
    family: IntArray
    source: IntArray
    time_s: FloatArray
    low_s: FloatArray
    high_s: FloatArray
    ideal_s: FloatArray
    memory_frac: FloatArray
    names: Sequence[str]

    def __len__(self) -> int:
        return len(self.event)

    def __getitem__(self, task: int) -> TaskInfo:
        return TaskInfo(
            event=int(self.event[task]),
            category=CATEGORIES[self.category[task]],
            family=self.names[self.family[task]],
            estimate=Estimate(
                time_s=float(self.time_s[task]),
                low_s=float(self.low_s[task]),
                high_s=float(self.high_s[task]),
                source=Source(int(self.source[task])),
            ),
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LoweredClass:
    """The program of one rank class, with `tasks[i]` describing its task i and what waits across iterations."""

    rank_class: RankClass
    device: Device
    prices: Prices
    program: ArrayProgram
    tasks: Tasks
    carry: tuple[CarryDep, ...] = ()
