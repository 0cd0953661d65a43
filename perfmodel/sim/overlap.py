"""Compute and communication that run on one rank at the same time slow each other: an event engine with rates.

While a rank has a communication task running, its compute kernels make progress at 1000 / compute_permille of their
pace; while any rank of a collective has a compute kernel running, the collective as a whole makes progress at
1000 / comm_permille of its own (the slowest member holds back the rest, as in a ring). A member that waits for the
others slows nothing. Rates change only at starts and ends, and work is counted in 1/permille ps, so everything is
whole numbers: a task ends at the first picosecond by which its work is done.

With slowdown, the simulator may answer a shorter task with a longer run: a collective that comes earlier can overlap,
and so slow, work that it did not touch before.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from perfmodel.errors import GraphError
from perfmodel.sim.compile import Compiled, compile_programs
from perfmodel.sim.program import ArrayProgram, IntArray, Program
from perfmodel.sim.timeline import Timeline

FULL_PACE = 1000  # permille
_END, _START = 0, 1  # events at one time: ends first, then starts, then by sequence number


@dataclass(frozen=True, slots=True, kw_only=True)
class OverlapModel:
    """How much longer a task takes while it overlaps the other kind, in permille of its own time (1000: no slowdown).

    Either may be one value for all tasks or one per global task index (a bandwidth-bound kernel suffers more than a
    compute-bound one); of a collective's members the largest counts.
    """

    compute_permille: int | IntArray = FULL_PACE
    comm_permille: int | IntArray = FULL_PACE


def simulate_overlapped(programs: Sequence[Program | ArrayProgram], model: OverlapModel) -> Timeline:
    """`simulate`, with compute and communication slowing each other. Raises GraphError as `simulate`."""
    return simulate_overlapped_compiled(compile_programs(programs), model)


def simulate_overlapped_compiled(
    compiled: Compiled, model: OverlapModel, duration_ps: IntArray | None = None
) -> Timeline:
    """`simulate_overlapped` without the conversion; `duration_ps` replaces the programs' own durations."""
    durations = compiled.duration_ps if duration_ps is None else np.asarray(duration_ps, dtype=np.int64)
    if durations.shape != (compiled.n_tasks,):
        raise GraphError(f"{durations.size} durations for {compiled.n_tasks} tasks")
    run = _Run(compiled, model, durations)
    run.go()
    return Timeline(
        compiled=compiled,
        duration_ps=durations,
        release_ps=np.zeros(compiled.n_tasks, dtype=np.int64),
        ready_ps=np.array(run.ready, dtype=np.int64),
        start_ps=np.array(run.start, dtype=np.int64),
        end_ps=np.array(run.end, dtype=np.int64),
        stretched=True,
    )


class _Run:
    """The state of one run. A unit is a lone task, or a collective, known by its first member."""

    def __init__(self, compiled: Compiled, model: OverlapModel, duration_ps: IntArray) -> None:
        n = compiled.n_tasks
        wiring = compiled.wiring
        self.members = [tuple(wiring.members(task)) for task in range(n)]
        self.unit = [together[0] for together in self.members]
        self.cls = np.repeat(np.arange(compiled.n_classes), np.diff(wiring.offsets)).tolist()
        self.kind = _kinds(compiled)
        self.work = duration_ps.tolist()
        self.permille = _permille(compiled, model, self.kind)
        self.followers = _followers(compiled)
        self.missing = _missing(compiled)
        self.ready = [0] * n
        self.start = [0] * n
        self.end = [0] * n
        self.running: list[dict[str, set[int]]] = [{"compute": set(), "comm": set()} for _ in range(compiled.n_classes)]
        self.left: dict[int, int] = {}  # work of each running unit, in 1/permille ps, at time `since`
        self.since: dict[int, int] = {}
        self.pace: dict[int, int] = {}
        self.heap: list[tuple[int, int, int, int, int]] = []  # time, kind, sequence, unit, version
        self.version: dict[int, int] = {}
        self.sequence = 0

    def go(self) -> None:
        """Runs all events in the order of (time, kind, sequence)."""
        for unit in dict.fromkeys(self.unit):
            if self.missing[unit] == 0:
                self._push(0, _START, unit)
        while self.heap:
            now, kind, _, unit, version = heapq.heappop(self.heap)
            if kind == _START:
                self._begin(unit, now)
            elif version == self.version[unit]:
                self._finish(unit, now)

    def _push(self, time: int, kind: int, unit: int) -> None:
        self.sequence += 1
        heapq.heappush(self.heap, (time, kind, self.sequence, unit, self.version.get(unit, 0)))

    def _begin(self, unit: int, now: int) -> None:
        together = self.members[unit]
        longest = max(self.work[m] for m in together)
        for m in together:
            self.start[m] = now
        self.left[unit] = longest * self.permille[unit]
        self.since[unit] = now
        if longest:
            self._enter(unit, now)
        self._set_pace(unit, now)

    def _finish(self, unit: int, now: int) -> None:
        for m in self.members[unit]:
            self.end[m] = now
        self._leave(unit, now)
        for m in self.members[unit]:
            for follower, lag in self.followers[m]:
                self._free(follower, now + lag)

    def _free(self, task: int, at: int) -> None:
        """One thing that `task` waited for will be done at `at`; starts its unit when nothing is left."""
        self.ready[task] = max(self.ready[task], at)
        unit = self.unit[task]
        self.missing[unit] -= 1
        if self.missing[unit] == 0:
            self._push(max(self.ready[m] for m in self.members[unit]), _START, unit)

    def _enter(self, unit: int, now: int) -> None:
        for m in self.members[unit]:
            kind = self.kind[m]
            if kind in ("compute", "comm"):
                running = self.running[self.cls[m]]
                running[kind].add(unit)
                if len(running[kind]) == 1:
                    self._repace("comm" if kind == "compute" else "compute", self.cls[m], now)

    def _leave(self, unit: int, now: int) -> None:
        for m in self.members[unit]:
            kind = self.kind[m]
            running = self.running[self.cls[m]]
            if kind in ("compute", "comm") and unit in running[kind]:
                running[kind].remove(unit)
                if not running[kind]:
                    self._repace("comm" if kind == "compute" else "compute", self.cls[m], now)

    def _repace(self, kind: str, cls: int, now: int) -> None:
        for unit in sorted(self.running[cls][kind]):
            if unit in self.pace:
                self.left[unit] -= self.pace[unit] * (now - self.since[unit])
                self.since[unit] = now
                self._set_pace(unit, now)

    def _set_pace(self, unit: int, now: int) -> None:
        kind = self.kind[unit]
        other = {"compute": "comm", "comm": "compute"}.get(kind, "")
        slowed = any(self.running[self.cls[m]].get(other) for m in self.members[unit])
        self.pace[unit] = FULL_PACE if slowed else self.permille[unit]
        self.version[unit] = self.version.get(unit, 0) + 1
        self._push(now + max(-(-self.left[unit] // self.pace[unit]), 0), _END, unit)


def _kinds(compiled: Compiled) -> list[str]:
    kinds: list[str] = []
    for cls, program in enumerate(compiled.programs):
        streams = compiled.stream[compiled.tasks_of(cls)]
        of_stream = {stream: program.kind(stream) for stream in np.unique(streams).tolist()}
        kinds += [of_stream[stream] for stream in streams.tolist()]
    return kinds


def _permille(compiled: Compiled, model: OverlapModel, kinds: Sequence[str]) -> list[int]:
    """Slowdown of each task; of a collective, the largest of its members'."""
    compute = np.broadcast_to(np.asarray(model.compute_permille, dtype=np.int64), (compiled.n_tasks,))
    comm = np.broadcast_to(np.asarray(model.comm_permille, dtype=np.int64), (compiled.n_tasks,))
    if compiled.n_tasks and min(compute.min(), comm.min()) < FULL_PACE:
        raise GraphError(
            f"overlap permille {min(compute.min(), comm.min())}; {FULL_PACE} means no slowdown, less is wrong"
        )
    of_kind = {"compute": compute.tolist(), "comm": comm.tolist()}
    own = [of_kind[kind][task] if kind in of_kind else FULL_PACE for task, kind in enumerate(kinds)]
    return [max(own[m] for m in compiled.wiring.members(task)) for task in range(compiled.n_tasks)]


def _followers(compiled: Compiled) -> list[list[tuple[int, int]]]:
    wiring = compiled.wiring
    followers: list[list[tuple[int, int]]] = [[] for _ in range(compiled.n_tasks)]
    for task, before in enumerate(wiring.prev.tolist()):
        if before >= 0:
            followers[before].append((task, 0))
    owner = np.repeat(np.arange(compiled.n_tasks), np.diff(wiring.dep_ptr)).tolist()
    for task, dep, lag in zip(owner, wiring.dep_index.tolist(), compiled.dep_lag_ps.tolist(), strict=True):
        followers[dep].append((task, lag))
    return followers


def _missing(compiled: Compiled) -> list[int]:
    """How many things each unit (known by its first member) waits for."""
    wiring = compiled.wiring
    own = (np.diff(wiring.dep_ptr) + (wiring.prev >= 0)).tolist()
    return [sum(own[m] for m in wiring.members(task)) for task in range(compiled.n_tasks)]
