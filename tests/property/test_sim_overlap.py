"""Compute and communication that slow each other: against the naive clock-stepping simulator, and by hand."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from perfmodel.errors import GraphError
from perfmodel.sim import COMM, COMPUTE, COPY, Program, Task, compile_programs, simulate
from perfmodel.sim.breakdown import breakdown
from perfmodel.sim.check import check_timeline
from perfmodel.sim.overlap import OverlapModel, overlapped_with, simulate_overlapped, simulate_overlapped_compiled
from perfmodel.sim.path import critical_path
from tests.naive_simulator import naive_simulate
from tests.strategies import programs


def spans(timeline, cls):
    rows = zip(timeline.readies(cls), timeline.starts(cls), timeline.ends(cls), strict=True)
    return [tuple(int(x) for x in row) for row in rows]


@given(programs(), st.integers(1000, 3000), st.integers(1000, 3000))
def test_agrees_with_the_naive_simulator_to_the_picosecond(case, compute, comm):
    timeline = simulate_overlapped(case, OverlapModel(compute_permille=compute, comm_permille=comm))
    assert [spans(timeline, cls) for cls in range(len(case))] == naive_simulate(case, slow=(compute, comm))
    assert check_timeline(timeline) == []
    assert sum(s.length_ps for s in critical_path(timeline)) == timeline.makespan_ps


@given(programs(), st.integers(1000, 3000), st.integers(1000, 3000))
def test_numba_and_plain_python_agree(case, compute, comm):
    pytest.importorskip("numba")
    compiled, model = compile_programs(case), OverlapModel(compute_permille=compute, comm_permille=comm)
    plain, fast = (overlapped_with(compiled, model, None, numba=numba) for numba in (False, True))
    for field in ("ready_ps", "start_ps", "end_ps"):
        assert np.array_equal(getattr(plain, field), getattr(fast, field))


@given(programs())
def test_without_slowdown_it_is_the_fast_engine(case):
    fast, slow = simulate(case), simulate_overlapped(case, OverlapModel())
    for field in ("ready_ps", "start_ps", "end_ps"):
        assert np.array_equal(getattr(fast, field), getattr(slow, field))


@given(programs(), st.integers(1, 1000), st.integers(1000, 2000))
def test_no_task_is_stretched_beyond_its_factor(case, factor, permille):
    compiled = compile_programs(case)
    durations = compiled.duration_ps * factor
    timeline = simulate_overlapped_compiled(compiled, OverlapModel(compute_permille=permille), durations)
    length = timeline.end_ps - timeline.start_ps
    due = np.array([max(durations[m] for m in compiled.wiring.members(t)) for t in range(compiled.n_tasks)])
    assert (length >= due).all()
    assert (1000 * length <= due * permille + 1000).all()


def test_one_kernel_beside_one_transfer_by_hand():
    """Compute 100 at 5/4 of its time, transfer 60 at 3/2: the transfer ends at 90, by when 72 of the kernel are done."""
    both = [Task(stream=COMPUTE, duration_ps=100), Task(stream=COMM, duration_ps=60), Task(stream=COPY, duration_ps=95)]
    timeline = simulate_overlapped([Program(tasks=both)], OverlapModel(compute_permille=1250, comm_permille=1500))
    assert timeline.ends(0).tolist() == [90 + 28, 90, 95]
    parts = breakdown(timeline, 0)
    assert (parts.compute_ps, parts.exposed_comm_ps, parts.hidden_comm_ps) == (118, 0, 90)


def test_a_collective_is_slowed_by_the_busiest_member_and_waiting_slows_nothing():
    """Class 0 computes 40 while it waits for class 1, ready at 30: full pace to 30, then both slow until 40 are done."""
    busy = Program(tasks=[Task(stream=COMPUTE, duration_ps=40), Task(stream=COMM, duration_ps=20, group=1)])
    late = Program(
        tasks=[Task(stream=COMPUTE, duration_ps=30), Task(stream=COMM, duration_ps=20, deps=((0, 0),), group=1)]
    )
    model = OverlapModel(compute_permille=2000, comm_permille=2000)
    timeline = simulate_overlapped([busy, late], model)
    # From 30 the kernel's last 10 take 20; the collective does 10 in that time, the other 10 at full pace: 60.
    assert (timeline.ends(0).tolist(), timeline.ends(1).tolist()) == ([50, 60], [30, 60])


def test_a_factor_for_each_task():
    program = Program(
        tasks=[
            Task(stream=COMM, duration_ps=1000),
            Task(stream=COMPUTE, duration_ps=100),
            Task(stream=COMPUTE, duration_ps=100),
        ]
    )
    factors = np.array([1000, 1100, 1500])
    timeline = simulate_overlapped([program], OverlapModel(compute_permille=factors))
    assert timeline.ends(0).tolist() == [1000, 110, 260]


def test_speeding_up_by_overlap_is_refused():
    with pytest.raises(GraphError, match="overlap permille 999"):
        simulate_overlapped([Program(tasks=[Task(stream=COMPUTE, duration_ps=1)])], OverlapModel(compute_permille=999))


@pytest.mark.parametrize("numbers", [1, 3])
def test_durations_must_fit_the_tasks(numbers):
    compiled = compile_programs([Program(tasks=[Task(stream=COMPUTE, duration_ps=1)] * 2)])
    with pytest.raises(GraphError, match=f"{numbers} durations for 2 tasks"):
        simulate_overlapped_compiled(compiled, OverlapModel(), np.ones(numbers, dtype=np.int64))


def test_a_wrong_length_is_still_caught_by_the_checker():
    program = Program(tasks=[Task(stream=COMPUTE, duration_ps=10)])
    timeline = simulate_overlapped([program], OverlapModel())
    assert check_timeline(dataclasses.replace(timeline, end_ps=timeline.end_ps - 1))
