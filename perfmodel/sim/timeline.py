"""Timeline: when each task of each rank class was ready, started and ended, on an integer picosecond clock."""

from __future__ import annotations

from dataclasses import dataclass

from perfmodel.sim.compile import Compiled
from perfmodel.sim.program import IntArray


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Timeline:
    """A simulated iteration.

    Attributes:
        compiled: the programs; arrays below are indexed by its global task index.
        duration_ps: the durations used.
        release_ps: earliest start of each task: 0, or what earlier iterations left (`simulate_steady`).
        ready_ps: when its stream and deps let each task start; of a collective's member, when it began to wait.
        start_ps, end_ps: when it ran. A collective's members share both.
        begin_ps: where the iteration begins: 0, or the end of the iteration before.
        steady: the same iteration runs before and after this one, shifted by whole makespans.
        stretched: overlapping kernels slowed each other, so a task may take longer than its duration.
    """

    compiled: Compiled
    duration_ps: IntArray
    release_ps: IntArray
    ready_ps: IntArray
    start_ps: IntArray
    end_ps: IntArray
    begin_ps: int = 0
    steady: bool = False
    stretched: bool = False

    @property
    def finish_ps(self) -> int:
        """When the last task ended."""
        return int(self.end_ps.max()) if len(self.end_ps) else self.begin_ps

    @property
    def makespan_ps(self) -> int:
        """From the beginning of the iteration to the end of its last task."""
        return self.finish_ps - self.begin_ps

    def starts(self, cls: int) -> IntArray:
        """Start of each task of a class (ps), in program order."""
        return self.start_ps[self.compiled.tasks_of(cls)]

    def ends(self, cls: int) -> IntArray:
        """End of each task of a class (ps), in program order."""
        return self.end_ps[self.compiled.tasks_of(cls)]

    def readies(self, cls: int) -> IntArray:
        """Readiness of each task of a class (ps), in program order."""
        return self.ready_ps[self.compiled.tasks_of(cls)]

    def waits(self, cls: int) -> IntArray:
        """How long each task of a class waited for the other members of its collective (ps)."""
        return self.starts(cls) - self.readies(cls)
