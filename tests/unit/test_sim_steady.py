"""Steady state: hand-counted pipelines of iterations, and a second method (the cycle mean of the max-plus matrix)."""

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from perfmodel.errors import GraphError
from perfmodel.sim import COMM, COMPUTE, COPY, HOST, Program, Task, compile_programs, simulate
from perfmodel.sim.breakdown import breakdown
from perfmodel.sim.check import check_timeline
from perfmodel.sim.launch import MAX_DISTANCE, with_launch_queue
from perfmodel.sim.path import critical_path
from perfmodel.sim.rivals import OverlapModel
from perfmodel.sim.steady import CarryDep, simulate_steady, unrolled
from perfmodel.sim.steady_overlap import simulate_overlapped_steady
from tests.strategies import programs


def launches(host_ps, kernel_ps, n=4, latency_ps=2):
    tasks = []
    for _ in range(n):
        tasks.append(Task(stream=HOST, duration_ps=host_ps))
        tasks.append(Task(stream=COMPUTE, duration_ps=kernel_ps, deps=((len(tasks) - 1, latency_ps),)))
    return Program(tasks=tasks)


@pytest.mark.parametrize(("host", "kernel"), [(3, 10), (10, 3), (5, 5)])
def test_without_syncs_the_slower_of_host_and_device_sets_the_pace(host, kernel):
    steady = simulate_steady([launches(host, kernel)])
    assert (steady.iteration_ps, steady.converged, steady.cycle) == (4 * max(host, kernel), True, 1)
    assert steady.timeline.makespan_ps == steady.iteration_ps
    parts = breakdown(steady.timeline, 0)
    assert parts.compute_ps == 4 * kernel
    assert parts.total_ps == steady.iteration_ps
    assert sum(s.length_ps for s in critical_path(steady.timeline)) == steady.iteration_ps
    assert check_timeline(steady.timeline) == []


def test_a_sync_at_the_end_makes_every_iteration_like_the_first():
    program = launches(3, 10)
    synced = Program(tasks=[*program.tasks, Task(stream=HOST, duration_ps=1, deps=((7, 1),))])
    assert simulate_steady([synced]).iteration_ps == simulate([synced]).makespan_ps == 3 + 2 + 40 + 1 + 1


def test_input_prefetch_is_hidden_under_the_previous_iteration():
    """Copy 30, then compute 50; a copy may start once the compute of two iterations before has freed a buffer."""
    program = Program(tasks=[Task(stream=COPY, duration_ps=30), Task(stream=COMPUTE, duration_ps=50, deps=((0, 0),))])
    two_buffers = simulate_steady([program], carry_deps=[CarryDep(cls=0, task=0, on=1, distance=2)])
    one_buffer = simulate_steady([program], carry_deps=[CarryDep(cls=0, task=0, on=1)])
    assert (two_buffers.iteration_ps, one_buffer.iteration_ps) == (50, 80)
    parts = breakdown(two_buffers.timeline, 0)
    assert (parts.compute_ps, parts.exposed_copy_ps, parts.idle_ps) == (50, 0, 0)


def test_a_pattern_of_two_iterations_has_a_fraction_for_its_mean():
    """Two streams, each waiting for the other's task of the iteration before: a cycle over two iterations."""
    program = Program(tasks=[Task(stream=COMPUTE, duration_ps=10), Task(stream=COPY, duration_ps=15)])
    crossing = [CarryDep(cls=0, task=0, on=1, lag_ps=20), CarryDep(cls=0, task=1, on=0, lag_ps=20)]
    steady = simulate_steady([program], carry_deps=crossing)
    assert (steady.iteration_ps, steady.cycle, steady.converged) == (Fraction(10 + 15 + 40, 2), 2, True)


def test_the_launch_queue_holds_the_host_back():
    limited, carry = with_launch_queue([launches(1, 10, n=8)], depth=3)
    first = simulate(limited)
    # Host task i (at index 2i) waits for kernel i - 3; kernels end at 13, 23, 33, ...: task 3 runs 13-14.
    assert first.starts(0)[0::2].tolist() == [0, 1, 2, 13, 23, 33, 43, 53]
    steady = simulate_steady(limited, carry_deps=carry)
    assert steady.iteration_ps == 80
    ahead = steady.timeline.starts(0)[1::2] - steady.timeline.starts(0)[0::2]
    assert (ahead <= 3 * 10).all()  # three kernels at most between a launch and its start


def test_a_queue_longer_than_an_iteration_reaches_over_several():
    limited, carry = with_launch_queue([launches(1, 10, n=2)], depth=5)
    assert sorted((c.task, c.on, c.distance) for c in carry) == [(0, 3, 3), (2, 1, 2)]
    steady = simulate_steady(limited, carry_deps=carry)
    assert (steady.iteration_ps, steady.converged) == (20, True)


def test_a_queue_far_longer_than_an_iteration_is_left_out():
    assert with_launch_queue([launches(1, 10, n=2)], depth=2 * MAX_DISTANCE)[1]
    assert not with_launch_queue([launches(1, 10, n=2)], depth=2 * MAX_DISTANCE + 2)[1]


@pytest.mark.parametrize("depth", [0, -1])
def test_a_queue_without_room_is_refused(depth):
    with pytest.raises(GraphError, match="launch queue depth"):
        with_launch_queue([launches(1, 1)], depth=depth)


@pytest.mark.parametrize(
    "dep", [CarryDep(cls=1, task=0, on=0), CarryDep(cls=0, task=9, on=0), CarryDep(cls=0, task=0, on=0, distance=0)]
)
def test_malformed_carry_deps_are_refused(dep):
    with pytest.raises(GraphError, match="carry dep"):
        simulate_steady([launches(1, 1)], carry_deps=[dep])


def test_no_pattern_within_the_limit_is_said():
    steady = simulate_steady([launches(3, 10)], max_iterations=2)
    assert (steady.converged, steady.cycle, steady.n_iterations) == (False, 0, 2)
    with pytest.raises(GraphError, match="max_iterations"):
        simulate_steady([launches(3, 10)], max_iterations=0)


@given(programs(max_classes=3, max_tasks=8), st.integers(1, 4))
def test_iterations_one_after_another_equal_one_long_program(case, n):
    """`unrolled` is the definition: the same tasks n times over, groups renumbered."""
    steady = simulate_steady(case, max_iterations=n)
    assert check_timeline(steady.timeline) == []
    n = min(n, steady.n_iterations)
    long = simulate(unrolled(case, n))
    for cls, program in enumerate(case):
        size = len(program.tasks)
        assert long.ends(cls)[-size:].tolist() == steady.timeline.ends(cls).tolist()


@given(programs(max_classes=3, max_tasks=8))
def test_the_pace_is_the_largest_cycle_mean(case):
    """Karp's cycle-mean theorem (1978) on the matrix of longest paths from stream to stream over one iteration."""
    steady = simulate_steady(case, max_iterations=400)
    if steady.converged:
        assert steady.iteration_ps == largest_cycle_mean(seam_matrix(case))


def seam_matrix(case):
    """matrix[i][j]: longest path from the end of stream i's last task, one iteration before, to that of stream j."""
    compiled = compile_programs(case)
    tasks = range(compiled.n_tasks)
    prev, wiring = compiled.wiring.prev.tolist(), compiled.wiring
    ends = [t for t in tasks if t not in prev]
    heads = {t: next(h for h in chain(t, prev) if prev[h] < 0) for t in ends}
    matrix = []
    for source in ends:
        end = {}
        for task in compiled.order.tolist():
            if task in end:
                continue
            members, starts = wiring.members(task), []
            for m in members:
                starts += [0] if m == heads[source] else []
                starts += [end[prev[m]]] if prev[m] >= 0 else []
                rows = range(wiring.dep_ptr[m], wiring.dep_ptr[m + 1])
                starts += [end[int(wiring.dep_index[d])] + int(compiled.dep_lag_ps[d]) for d in rows]
            longest = max(starts, default=-np.inf) + max(int(compiled.duration_ps[m]) for m in members)
            end.update(dict.fromkeys(members, longest))
        matrix.append([end[t] for t in ends])
    return matrix


def chain(task, prev):
    while task >= 0:
        yield task
        task = prev[task]


def largest_cycle_mean(matrix):
    n = len(matrix)
    best = None
    for root in range(n):  # the graph need not be connected: every root gets its own walk lengths
        walks = [[-np.inf] * n]
        walks[0][root] = 0
        for _ in range(n):
            walks.append([max(walks[-1][i] + matrix[i][j] for i in range(n)) for j in range(n)])
        for j in range(n):
            if walks[n][j] == -np.inf:
                continue
            means = [Fraction(int(walks[n][j] - walks[k][j]), n - k) for k in range(n) if walks[k][j] != -np.inf]
            best = min(means) if best is None else max(best, min(means))
    return best


@given(programs(max_classes=3, max_tasks=8))
def test_without_slowdown_the_long_run_and_the_iterated_one_agree(case):
    iterated, long = simulate_steady(case), simulate_overlapped_steady(case, OverlapModel())
    if iterated.converged and long.converged:
        assert long.iteration_ps == iterated.iteration_ps
    assert check_timeline(long.timeline) == []


def test_an_all_reduce_hidden_under_the_next_iteration_slows_its_compute():
    """Compute 100, then a reduce of 60 that nothing waits for: it always runs beside the next iteration's compute.

    Of its pace it takes a fifth: in 60 of it 48 of the compute's 100 are done, the other 52 run at full pace: 112.
    """
    program = Program(
        tasks=[Task(stream=COMPUTE, duration_ps=100), Task(stream=COMM, duration_ps=60, deps=((0, 0),), group=1)]
    )
    model = OverlapModel(held=200)
    assert simulate_overlapped_steady([program], model).iteration_ps == 112
    each = OverlapModel(held=np.array([0, 200]))
    steady = simulate_overlapped_steady([program], each)
    assert (steady.iteration_ps, steady.converged, steady.timeline.makespan_ps) == (112, True, 112)
    parts = breakdown(steady.timeline, 0)
    assert (parts.compute_ps, parts.hidden_comm_ps, parts.idle_ps) == (112, 60, 0)
    assert simulate_steady([program]).iteration_ps == 100
