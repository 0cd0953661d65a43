"""Bounds against hand counts, and never above what they bound."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from perfmodel.errors import GraphError
from perfmodel.sim import COMM, COMPUTE, HOST, Program, Task, compile_programs, simulate_compiled
from perfmodel.sim.whatif import scaled_durations, without_host, without_network
from tests.strategies import programs


def small():
    return compile_programs(
        [
            Program(
                tasks=[
                    Task(stream=HOST, duration_ps=10),
                    Task(stream=COMPUTE, duration_ps=30, deps=((0, 4),)),
                    Task(stream=COMM, duration_ps=20, deps=((1, 0),)),
                    Task(stream=HOST, duration_ps=3, deps=((2, 1),)),
                    Task(stream=COMPUTE, duration_ps=5, deps=((3, 4),)),
                ]
            )
        ]
    )


def test_bounds_by_hand():
    compiled = small()
    assert simulate_compiled(compiled).makespan_ps == 10 + 4 + 30 + 20 + 1 + 3 + 4 + 5
    assert simulate_compiled(without_host(compiled)).makespan_ps == 30 + 20 + 5
    assert simulate_compiled(without_network(compiled)).makespan_ps == 10 + 4 + 30 + 1 + 3 + 4 + 5
    assert simulate_compiled(compiled, scaled_durations(compiled, {"compute": 0.5})).makespan_ps == 77 - 15 - 2 - 1


def test_a_collective_on_the_compute_stream_is_communication():
    tasks = [Task(stream=COMPUTE, duration_ps=8), Task(stream=COMPUTE, duration_ps=9, group=1)]
    compiled = compile_programs([Program(tasks=tasks)])
    assert compiled.kinds_of(0).tolist() == [COMPUTE, COMM]
    assert scaled_durations(compiled, {"comm": 2}).tolist() == [8, 18]


@given(programs(), st.sampled_from(["host", "compute", "comm", "copy"]), st.sampled_from([0, 0.25, 0.5]))
def test_a_bound_never_lies_above_the_run(case, kind, factor):
    compiled = compile_programs(case)
    run = simulate_compiled(compiled).makespan_ps
    assert simulate_compiled(without_host(compiled)).makespan_ps <= run
    assert simulate_compiled(without_network(compiled)).makespan_ps <= run
    durations = scaled_durations(compiled, {kind: factor})
    assert (durations <= compiled.duration_ps).all()
    assert simulate_compiled(compiled, durations).makespan_ps <= run


@pytest.mark.parametrize("factor", [-1, float("nan")])
def test_negative_factors_are_refused(factor):
    with pytest.raises(GraphError, match="factor"):
        scaled_durations(small(), {"comm": factor})


def test_the_original_is_left_alone():
    compiled = small()
    before = compiled.duration_ps.copy()
    without_host(compiled)
    assert np.array_equal(compiled.duration_ps, before)
