"""Steady state of programs whose compute and communication slow each other.

Found by sweeps (`sim.slowed_sweep`); where iterations do not repeat one by one, from a long run of the event engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

import numpy as np

from perfmodel.sim.compile import Compiled, compile_programs
from perfmodel.sim.loops import compiled_loop, has_numba, use_numba
from perfmodel.sim.program import COMM, ArrayProgram, IntArray, Program
from perfmodel.sim.rivals import OverlapModel, Rivals, rivals_of
from perfmodel.sim.slowed_sweep import HELPERS, MEMBER, PLAIN, Links, State, settle_rows
from perfmodel.sim.steady import CarryDep, Seam, Steady, seam_of, simulate_steady_compiled
from perfmodel.sim.steady_overlap import simulate_overlapped_steady
from perfmodel.sim.timeline import Timeline

MOST_ENGINE_TASKS = 2_000_000  # of a run that the event engine unrolls: about a second compiled, 7 s in plain Python
FEWEST_ITERATIONS, MOST_ITERATIONS = 8, 64  # of such a run


@dataclass(frozen=True, slots=True, kw_only=True)
class Slowed:
    """A steady state under slowdown; `plain_ps` is the iteration time without it.

    Durations of its timeline are those that tasks have beside each other.
    """

    steady: Steady
    plain_ps: Fraction


def simulate_slowed(compiled: Compiled, carry: Sequence[CarryDep], model: OverlapModel | None) -> Slowed:
    """The steady state of programs whose tasks slow each other by the shares of `model`; without one nothing slows."""
    plain = simulate_steady_compiled(compiled, carry_deps=carry)
    steady = SlowedPrograms(compiled, carry, model).run() if model else plain
    return Slowed(steady=steady, plain_ps=plain.iteration_ps)


class SlowedPrograms:
    """Programs whose tasks slow each other by the shares of `model`; without one nothing slows.

    Args:
        compiled: the programs; their durations are used where none are given.
        carry: waits across iterations.
        model: what tasks want of their rank's device.
    """

    def __init__(self, compiled: Compiled, carry: Sequence[CarryDep], model: OverlapModel | None) -> None:
        self._compiled, self._carry, self._model = compiled, carry, model
        self._seam = seam_of(compiled, carry)
        self._rivals = rivals_of(compiled, model or OverlapModel())
        self._links = _links(compiled, self._seam, self._rivals)

    def run(self, *, numba: bool | None = None) -> Steady:
        """The steady state; `numba` says how to sweep: compiled or plain Python, None leaves it to the size."""
        compiled = use_numba(settle_rows, self._compiled.n_tasks) if numba is None else numba
        [(count, growth, begin_ps)], state = self._settle(self._compiled.duration_ps[None, :], numba=compiled)
        if growth < 0:
            return self._alternating(self._compiled.duration_ps)
        return self._steady(count, growth, begin_ps, state)

    def iterations_ps(self, durations_ps: IntArray) -> list[Fraction]:
        """Time of one iteration (ps) for each row of durations [runs, tasks], as `run` finds it."""
        found, _ = self._settle(durations_ps, numba=has_numba())
        return [
            Fraction(growth) if growth >= 0 else self._alternating(row).iteration_ps
            for (_, growth, _), row in zip(found, durations_ps, strict=True)
        ]

    def _settle(self, rows: IntArray, *, numba: bool) -> tuple[list[list[int]], State]:
        """What `settle_rows` finds of rows of durations, and the state that the last of them ended in."""
        state = _state(self._links, self._compiled, self._seam)
        if numba:
            found = np.zeros((len(rows), 3), dtype=np.int64)
            compiled_loop(settle_rows, *HELPERS)(self._links, rows, state, found)
            return found.tolist(), state
        lists = State(*(array.tolist() for array in state))
        answers = [[0, 0, 0] for _ in rows]
        settle_rows(Links(*(array.tolist() for array in self._links)), rows.tolist(), lists, answers)
        return answers, State(*(np.array(values, dtype=np.int64) for values in lists))

    def _steady(self, count: int, growth: int, begin_ps: int, state: State) -> Steady:
        compiled = self._compiled
        timeline = Timeline(
            compiled=compiled,
            duration_ps=self._stretched(compiled.duration_ps, state.end - state.start),
            release_ps=state.release,
            ready_ps=state.ready,
            start_ps=state.start,
            end_ps=state.end,
            begin_ps=begin_ps,
            steady=True,
        )
        return Steady(iteration_ps=Fraction(growth), timeline=timeline, n_iterations=count, cycle=1, converged=True)

    def _alternating(self, durations_ps: IntArray) -> Steady:
        """The steady state of programs whose iterations do not come to repeat one by one."""
        compiled = replace(self._compiled, duration_ps=durations_ps)
        if self._model is None:
            return simulate_steady_compiled(compiled, seam=self._seam)
        most = max(MOST_ENGINE_TASKS // max(compiled.n_tasks, 1), FEWEST_ITERATIONS)
        found = simulate_overlapped_steady(
            _programs(compiled), self._model, carry_deps=self._carry, max_iterations=min(most, MOST_ITERATIONS)
        )
        timeline = found.timeline
        stretched = self._stretched(durations_ps, timeline.end_ps - timeline.start_ps)
        return replace(found, timeline=replace(timeline, compiled=compiled, duration_ps=stretched, stretched=False))

    def _stretched(self, durations_ps: IntArray, lengths_ps: IntArray) -> IntArray:
        """Durations that tasks have beside each other; members of a collective keep their proportions."""
        longest = self._rivals.largest(durations_ps)[self._rivals.unit]
        shorter = np.flatnonzero(durations_ps < longest)
        stretched = lengths_ps.copy()
        stretched[shorter] = np.rint(durations_ps[shorter] * (lengths_ps[shorter] / longest[shorter]))
        return stretched


def _links(compiled: Compiled, seam: Seam, rivals: Rivals) -> Links:
    wiring, n_slots = compiled.wiring, len(rivals.rival_first)
    slot_class = (np.searchsorted(rivals.slots_ptr, np.arange(n_slots), side="right") - 1) >> 1
    takes = (rivals.held + rivals.traffic + rivals.memory)[rivals.unit] > 0
    item = np.flatnonzero(takes & (rivals.slot >= 0))
    # Nothing slows anything in classes without shares of both kinds, nor of communication alone.
    of_class = np.zeros((compiled.n_classes, 2), dtype=bool)
    of_class[slot_class[rivals.slot[item]], (rivals.kind[item] == COMM).astype(np.int64)] = True
    item = item[np.argsort(rivals.slot[item], kind="stable")]
    works = np.append(of_class[slot_class, 1], False)  # the last: of slot -1
    item = item[works[rivals.slot[item]]]
    slot = np.where(works[rivals.slot], rivals.slot, -1)
    is_last = np.ones(compiled.n_tasks, dtype=bool)
    is_last[wiring.prev[wiring.prev >= 0]] = False
    kept = np.unique(seam.source[(slot[seam.source] < 0) | is_last[seam.source]])
    lone = np.diff(rivals.unit_ptr)[rivals.unit] == 1
    way = np.where(lone & (slot < 0), PLAIN, MEMBER)
    decides = rivals.unit_task[rivals.unit_ptr[1:] - 1]  # the last of each unit
    way[decides] = np.where(way[decides] == PLAIN, PLAIN, 0)
    n_rivals = rivals.rival_end - rivals.rival_first
    links = Links(
        order=compiled.order,
        prev=wiring.prev,
        dep_ptr=wiring.dep_ptr,
        dep_index=wiring.dep_index,
        dep_lag=compiled.dep_lag_ps,
        target=seam.target,
        source=seam.source,
        lag=seam.lag,
        distance=seam.distance,
        kept=kept,
        kept_class=np.searchsorted(wiring.offsets, kept, side="right") - 1,
        way=way,
        unit=rivals.unit,
        unit_ptr=rivals.unit_ptr,
        unit_task=rivals.unit_task,
        held=rivals.held,
        traffic=rivals.traffic,
        memory=rivals.memory,
        slot=slot,
        slot_class=slot_class,
        rival_first=rivals.rival_first,
        rival_end=rivals.rival_end,
        place_ptr=np.cumsum(n_rivals) - n_rivals,
        item=item,
        item_ptr=np.searchsorted(rivals.slot[item], np.arange(n_slots + 1)),
    )
    # The one kind of array that the compiled loop is loaded for.
    return Links(*(np.require(array, dtype=np.int64, requirements=["C", "W"]) for array in links))


def _state(links: Links, compiled: Compiled, seam: Seam) -> State:
    depth = int(seam.distance.max(initial=1))
    n_slots, n_places = len(links.slot_class), int((links.rival_end - links.rival_first).sum())
    tasks, classes, slots, places, kept = (
        np.zeros(shape, dtype=np.int64)
        for shape in ((5, compiled.n_tasks), (3, compiled.n_classes), (2, n_slots), (2, n_places), (2, len(links.kept)))
    )
    return State(
        release=tasks[0],
        ready=tasks[1],
        start=tasks[2],
        end=tasks[3],
        seen=tasks[4],
        growth=classes[0],
        grown=classes[1],
        finish=classes[2],
        until=slots[0],
        beside=slots[1],
        place=places[0],
        lap=places[1],
        last=kept[0],
        step=kept[1],
        past=np.zeros((depth + 1) * len(seam.target), dtype=np.int64),
    )


def _programs(compiled: Compiled) -> list[ArrayProgram]:
    """The programs with the durations and lags of `compiled`, which may be other than those compiled first."""
    ptr = compiled.wiring.dep_ptr
    found = []
    for cls, program in enumerate(compiled.programs):
        tasks = compiled.tasks_of(cls)
        lags = compiled.dep_lag_ps[ptr[tasks.start] : ptr[tasks.stop]]
        found.append(replace(program.arrays(), duration_ps=compiled.duration_ps[tasks], dep_lag_ps=lags))
    return found


def warm_up() -> None:
    """Loads the compiled sweeps, so that later runs of any size use them, where numba is installed."""
    if has_numba():
        SlowedPrograms(compile_programs([Program(tasks=())]), (), OverlapModel()).run(numba=True)
