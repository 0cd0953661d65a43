"""Compute and communication that slow each other: against the naive clock-stepping simulator, and by hand."""

import dataclasses
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from perfmodel.errors import GraphError
from perfmodel.sim import COMM, COMPUTE, COPY, Program, Task, compile_programs, simulate
from perfmodel.sim.breakdown import breakdown
from perfmodel.sim.check import check_timeline
from perfmodel.sim.overlap import overlapped_with, simulate_overlapped, simulate_overlapped_compiled
from perfmodel.sim.path import critical_path
from perfmodel.sim.rivals import OverlapModel
from tests.naive_simulator import naive_simulate
from tests.strategies import programs


def spans(timeline, cls):
    rows = zip(timeline.readies(cls), timeline.starts(cls), timeline.ends(cls), strict=True)
    return [tuple(int(x) for x in row) for row in rows]


def shares(case, seed):
    """Random shares of all tasks, as the model takes them and as the naive simulator does."""
    drawn = np.random.default_rng(seed).integers(0, 701, size=(3, sum(len(program.tasks) for program in case)))
    at = np.cumsum([0, *(len(program.tasks) for program in case)])
    rows = [[tuple(column) for column in drawn[:, low:high].T.tolist()] for low, high in pairwise(at)]
    return OverlapModel(held=drawn[0], traffic=drawn[1], memory=drawn[2]), rows


@given(programs(), st.integers(0, 10**6))
def test_agrees_with_the_naive_simulator_to_the_picosecond(case, seed):
    model, rows = shares(case, seed)
    timeline = simulate_overlapped(case, model)
    assert [spans(timeline, cls) for cls in range(len(case))] == naive_simulate(case, slow=rows)
    assert check_timeline(timeline) == []
    assert sum(s.length_ps for s in critical_path(timeline)) == timeline.makespan_ps


@given(programs(), st.integers(0, 10**6))
def test_numba_and_plain_python_agree(case, seed):
    pytest.importorskip("numba")
    compiled, (model, _) = compile_programs(case), shares(case, seed)
    plain, fast = (overlapped_with(compiled, model, None, numba=numba) for numba in (False, True))
    for field in ("ready_ps", "start_ps", "end_ps"):
        assert np.array_equal(getattr(plain, field), getattr(fast, field))


@given(programs())
def test_without_slowdown_it_is_the_fast_engine(case):
    fast, slow = simulate(case), simulate_overlapped(case, OverlapModel())
    for field in ("ready_ps", "start_ps", "end_ps"):
        assert np.array_equal(getattr(fast, field), getattr(slow, field))


@given(programs(), st.integers(1, 1000), st.integers(0, 400))
def test_no_task_is_stretched_beyond_what_runs_beside_it_takes(case, factor, held):
    """Two streams of communication at most (see strategies), so no kernel loses more than twice what one collective holds."""
    compiled = compile_programs(case)
    durations = compiled.duration_ps * factor
    timeline = simulate_overlapped_compiled(compiled, OverlapModel(held=held), durations)
    length = timeline.end_ps - timeline.start_ps
    due = np.array([max(durations[m] for m in compiled.wiring.members(t)) for t in range(compiled.n_tasks)])
    assert (length >= due).all()
    assert ((1000 - 2 * held) * length <= 1000 * due + 1000).all()


def test_one_kernel_beside_one_transfer_by_hand():
    """The kernel, all of it bound by memory, loses 10 % + 40 %, the transfer 40 %: 60 of it take 100, when 50 of the kernel
    are done; the other 50 run alone."""
    both = [Task(stream=COMPUTE, duration_ps=100), Task(stream=COMM, duration_ps=60), Task(stream=COPY, duration_ps=95)]
    timeline = simulate_overlapped([Program(tasks=both)], OverlapModel(held=100, traffic=400, memory=1000))
    assert timeline.ends(0).tolist() == [150, 100, 95]
    parts = breakdown(timeline, 0)
    assert (parts.compute_ps, parts.exposed_comm_ps, parts.hidden_comm_ps) == (150, 0, 100)


def test_a_kernel_bound_by_arithmetic_loses_multiprocessors_alone():
    both = [Task(stream=COMPUTE, duration_ps=90), Task(stream=COMM, duration_ps=100)]
    timeline = simulate_overlapped([Program(tasks=both)], OverlapModel(held=100, traffic=400, memory=0))
    assert timeline.ends(0).tolist() == [100, 100]


def test_two_collectives_at_once_take_the_sum():
    tasks = [Task(stream=COMPUTE, duration_ps=70), Task(stream=COMM, duration_ps=500), Task(stream=4, duration_ps=500)]
    timeline = simulate_overlapped([Program(tasks=tasks)], OverlapModel(held=np.array([0, 100, 200])))
    assert timeline.ends(0).tolist() == [100, 500, 500]


def test_shares_that_add_up_to_more_leave_a_tenth_of_the_pace():
    tasks = [Task(stream=COMPUTE, duration_ps=7), Task(stream=COMM, duration_ps=500), Task(stream=4, duration_ps=500)]
    timeline = simulate_overlapped([Program(tasks=tasks)], OverlapModel(held=700))
    assert timeline.ends(0).tolist() == [70, 500, 500]


def test_a_collective_is_slowed_by_the_busiest_member_and_waiting_slows_nothing():
    """Class 0 computes 40 while it waits for class 1, ready at 30: full pace to 30, then both at half until 40 are done."""
    busy = Program(tasks=[Task(stream=COMPUTE, duration_ps=40), Task(stream=COMM, duration_ps=20, group=1)])
    late = Program(
        tasks=[Task(stream=COMPUTE, duration_ps=30), Task(stream=COMM, duration_ps=20, deps=((0, 0),), group=1)]
    )
    timeline = simulate_overlapped([busy, late], OverlapModel(traffic=500, memory=1000))
    # From 30 the kernel's last 10 take 20; the collective does 10 in that time, the other 10 at full pace: 60.
    assert (timeline.ends(0).tolist(), timeline.ends(1).tolist()) == ([50, 60], [30, 60])


@pytest.mark.parametrize(("name", "value"), [("held", -1), ("traffic", 1001), ("memory", np.array([2000]))])
def test_what_is_no_share_is_refused(name, value):
    program = Program(tasks=[Task(stream=COMPUTE, duration_ps=1)])
    with pytest.raises(GraphError, match="shares are 0 to 1000 permille"):
        simulate_overlapped([program], OverlapModel(**{name: value}))


@pytest.mark.parametrize("numbers", [1, 3])
def test_durations_must_fit_the_tasks(numbers):
    compiled = compile_programs([Program(tasks=[Task(stream=COMPUTE, duration_ps=1)] * 2)])
    with pytest.raises(GraphError, match=f"{numbers} durations for 2 tasks"):
        simulate_overlapped_compiled(compiled, OverlapModel(), np.ones(numbers, dtype=np.int64))


def test_a_wrong_length_is_still_caught_by_the_checker():
    program = Program(tasks=[Task(stream=COMPUTE, duration_ps=10)])
    timeline = simulate_overlapped([program], OverlapModel())
    assert check_timeline(dataclasses.replace(timeline, end_ps=timeline.end_ps - 1))
