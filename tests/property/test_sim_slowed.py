"""Iterations that slow each other, found by sweeps: against the event engine, and against the law instant by instant."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from perfmodel.sim import COMM, COMPUTE, HOST, Program, Task, compile_programs
from perfmodel.sim.check import check_timeline
from perfmodel.sim.loops import has_numba
from perfmodel.sim.rivals import OverlapModel
from perfmodel.sim.slowed_sweep import EXACT_SWEEPS
from perfmodel.sim.steady import CarryDep, simulate_steady_compiled
from perfmodel.sim.steady_overlap import simulate_overlapped_steady
from perfmodel.sim.steady_slowed import SlowedPrograms, simulate_slowed
from tests.strategies import programs


def shares(case, seed, most=701):
    held, traffic, memory = np.random.default_rng(seed).integers(0, most, (3, sum(len(p.tasks) for p in case)))
    return OverlapModel(held=held, traffic=traffic, memory=memory)


def behind_a_barrier(case):
    """The programs with a host task in front of everything, which waits for all of the iteration before, of all classes."""
    found, carry = [], []
    for cls, program in enumerate(case):
        first = Task(stream=-1, duration_ps=3)
        rest = [
            dataclasses.replace(task, deps=((0, 0), *((dep + 1, lag) for dep, lag in task.deps)))
            for task in program.tasks
        ]
        n = len(rest) + 1
        last = Task(stream=-1, duration_ps=0, deps=tuple((on, 0) for on in range(1, n)))
        meeting = Task(stream=9, duration_ps=0, deps=((n, 0),), group=1)
        found.append(
            Program(tasks=[first, *rest, last, meeting], n_ranks=program.n_ranks, stream_kinds={-1: "host", 9: "copy"})
        )
        carry.append(CarryDep(cls=cls, task=0, on=n + 1, lag_ps=2))
    return found, carry


@given(programs(), st.integers(0, 10**6), st.sampled_from([1, 1000]))
def test_iterations_behind_a_barrier_are_those_of_the_event_engine(case, seed, factor):
    """Nothing of the iteration before runs on, so there is one solution, and both must find it to the picosecond."""
    longer = [
        dataclasses.replace(
            program, tasks=[dataclasses.replace(task, duration_ps=task.duration_ps * factor) for task in program.tasks]
        )
        for program in case
    ]
    found, carry = behind_a_barrier(longer)
    model = shares(found, seed)
    swept = SlowedPrograms(compile_programs(found), carry, model).run(numba=False)
    engine = simulate_overlapped_steady(found, model, carry_deps=carry)
    assert engine.converged
    assert swept.iteration_ps == engine.iteration_ps
    for field in ("ready_ps", "start_ps", "end_ps"):
        mine, its = getattr(swept.timeline, field), getattr(engine.timeline, field)
        assert np.array_equal(mine - swept.timeline.begin_ps, its - engine.timeline.begin_ps)
    assert check_timeline(swept.timeline) == []


@given(programs(), st.integers(0, 10**6))
def test_iterations_that_run_into_each_other_keep_the_law(case, seed):
    """Each task's work is done at its end and not a picosecond sooner, at the paces that its rivals leave it."""
    compiled, model = compile_programs(case), shares(case, seed)
    slowed = SlowedPrograms(compiled, (), model)
    [(count, growth, begin_ps)], state = slowed._settle(compiled.duration_ps[None, :], numba=False)
    if (
        growth <= 0 or count > EXACT_SWEEPS
    ):  # the first: iterations alternate; from there on single picoseconds are let pass
        return
    steady = slowed._steady(count, growth, begin_ps, state)
    assert check_timeline(steady.timeline) == []
    kind = compiled.kind
    for task in np.flatnonzero((kind == COMPUTE) | (kind == COMM)).tolist():
        members = compiled.wiring.members(task)
        work = 1000 * max(int(compiled.duration_ps[m]) for m in members)
        start, end = int(steady.timeline.start_ps[task]), int(steady.timeline.end_ps[task])
        paces = [1000 - min(900, max(lost(slowed, steady, state, m, at) for m in members)) for at in range(start, end)]
        assert sum(paces) >= work > sum(paces[:-1]) or work == start - end == 0


def lost(slowed, steady, state, task, at):
    """Permille that `task` loses at an instant, to what runs then of any iteration; classes may have paces of their own."""
    compiled, timeline, rivals = steady.timeline.compiled, steady.timeline, slowed._rivals
    mine, found = rivals.unit[task], 0
    cls = compiled.class_of(task)
    tasks, period = compiled.tasks_of(cls), int(state.growth[cls])
    for other in range(tasks.start, tasks.stop):
        if {compiled.kind[task], compiled.kind[other]} != {COMM, COMPUTE}:
            continue
        its = rivals.unit[other]
        runs = any(
            timeline.start_ps[other] + k * period <= at < timeline.end_ps[other] + k * period for k in range(-40, 41)
        )
        both = rivals.traffic[mine] * rivals.memory[its] + rivals.memory[mine] * rivals.traffic[its]
        found += runs * int(rivals.held[its] + both // 1000)
    return found


@given(programs(), st.integers(0, 10**6))
def test_numba_and_plain_python_agree(case, seed):
    if not has_numba():
        pytest.skip("needs numba")
    found, carry = behind_a_barrier(case)
    slowed = SlowedPrograms(compile_programs(found), carry, shares(found, seed))
    plain, fast = slowed.run(numba=False), slowed.run(numba=True)
    for field in ("ready_ps", "start_ps", "end_ps", "release_ps", "duration_ps"):
        assert np.array_equal(getattr(plain.timeline, field), getattr(fast.timeline, field))


@given(programs())
def test_without_shares_the_pace_is_that_of_plain_iterations(case):
    compiled = compile_programs(case)
    plain = simulate_steady_compiled(compiled)
    assert SlowedPrograms(compiled, (), None).iterations_ps(compiled.duration_ps[None, :]) == [plain.iteration_ps]
    if plain.converged:
        assert simulate_slowed(compiled, (), OverlapModel()).steady.iteration_ps == plain.iteration_ps


def test_what_reaches_over_two_iterations():
    """A host task of 1 waits for the kernel of two iterations ago plus 5, while the kernel of 10 before its own runs.

    Its transfer of 4 begins 6 after that kernel did and takes half of its pace: 2 of 10 are done in 4, so it takes 12.
    """
    tasks = [Task(stream=HOST, duration_ps=1), Task(stream=COMPUTE, duration_ps=10, deps=((0, 0),))]
    compiled = compile_programs([Program(tasks=[*tasks, Task(stream=COMM, duration_ps=4, deps=((0, 0),))])])
    carry = [CarryDep(cls=0, task=0, on=1, lag_ps=5, distance=2)]
    slowed = simulate_slowed(compiled, carry, OverlapModel(held=500))
    assert (slowed.steady.iteration_ps, slowed.plain_ps) == (12, 10)
    assert SlowedPrograms(compiled, carry, OverlapModel(held=500)).run(numba=False).cycle == 1


def test_a_collective_at_the_seam_slows_the_next_iteration():
    """As `test_sim_steady` has it by hand: a reduce of 60 that takes a fifth always runs beside the next compute of 100."""
    reduce = Task(stream=COMM, duration_ps=60, deps=((0, 0),))
    compiled = compile_programs([Program(tasks=[Task(stream=COMPUTE, duration_ps=100), reduce])])
    slowed = simulate_slowed(compiled, (), OverlapModel(held=200))
    assert (slowed.steady.iteration_ps, slowed.plain_ps) == (112, 100)
    assert slowed.steady.timeline.duration_ps.tolist() == [112, 60]


def test_iterations_that_alternate_are_left_to_the_event_engine():
    """A kernel and a transfer that nothing ties to each other: their paces differ, so no iteration repeats the one before."""
    free = [Task(stream=COMPUTE, duration_ps=100), Task(stream=COMM, duration_ps=90)]
    compiled, model = compile_programs([Program(tasks=free)]), OverlapModel(held=300)
    slowed = SlowedPrograms(compiled, (), model)
    [(_, growth, _)], _ = slowed._settle(compiled.duration_ps[None, :], numba=False)
    engine = simulate_overlapped_steady([Program(tasks=free)], model)
    assert growth < 0
    found = slowed.run()
    assert found.iteration_ps == slowed.iterations_ps(compiled.duration_ps[None, :])[0] == engine.iteration_ps
    assert check_timeline(found.timeline) == []
