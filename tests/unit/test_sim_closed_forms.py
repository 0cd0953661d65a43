"""Cases whose answer is a formula or a hand count."""

import pytest

from perfmodel.errors import GraphError
from perfmodel.sim import (
    COMM,
    COMPUTE,
    HOST,
    ArrayProgram,
    Program,
    Task,
    compile_programs,
    simulate,
    simulate_compiled,
)
from perfmodel.sim.breakdown import breakdown, host_bound_spans, stream_busy
from perfmodel.sim.check import check_timeline
from perfmodel.sim.path import critical_path, slack


def pipeline(n_stages, n_micro, forward_ps, backward_ps):
    """GPipe: every stage runs all forwards, then all backwards; a transfer of no length joins neighbours."""
    programs = []
    for stage in range(n_stages):
        tasks = []

        def transfer(micro, boundary, backward, stage=stage, tasks=tasks):
            after = ((len(tasks) - 1, 0),) if (boundary == stage) != backward and tasks else ()
            group = (2 * micro + backward) * n_stages + boundary
            tasks.append(Task(stream=4 + 2 * boundary + backward, duration_ps=0, deps=after, group=group))
            return ((len(tasks) - 1, 0),)

        for backward, duration in ((False, forward_ps), (True, backward_ps)):
            for micro in range(n_micro):
                source = stage if backward else stage - 1
                sink = stage - 1 if backward else stage
                deps = transfer(micro, source, backward) if 0 <= source < n_stages - 1 else ()
                tasks.append(Task(stream=COMPUTE, duration_ps=duration, deps=deps))
                if 0 <= sink < n_stages - 1:
                    transfer(micro, sink, backward)
        programs.append(Program(tasks=tasks))
    return programs


@pytest.mark.parametrize(("p", "m"), [(1, 1), (2, 1), (4, 8), (8, 32), (3, 2)])
def test_gpipe_bubble_is_p_minus_1_over_m(p, m):
    forward, backward = 1000, 2000
    timeline = simulate(pipeline(p, m, forward, backward))
    # Huang et al., GPipe (2019), section 2.3: (m + p - 1) slots of forward and of backward.
    assert timeline.makespan_ps == (m + p - 1) * (forward + backward)
    for stage in range(p):
        parts = breakdown(timeline, stage)
        assert parts.compute_ps == m * (forward + backward)
        assert timeline.makespan_ps - parts.compute_ps == (p - 1) * (forward + backward)
    assert check_timeline(timeline) == []


@pytest.mark.parametrize(("layer", "reduce"), [(10, 4), (10, 10), (10, 25)])
def test_ddp_overlap_hides_all_but_the_last_bucket(layer, reduce):
    n = 6
    tasks = []
    for bucket in range(n):
        tasks.append(Task(stream=COMPUTE, duration_ps=layer))
        tasks.append(Task(stream=COMM, duration_ps=reduce, deps=((len(tasks) - 1, 0),), group=bucket))
    timeline = simulate([Program(tasks=tasks, n_ranks=4), Program(tasks=tasks, n_ranks=4)])
    # Communication-bound: the first layer, then all reduces back to back. Compute-bound: all layers, then one reduce.
    assert timeline.makespan_ps == max(layer + n * reduce, n * layer + reduce)
    parts = breakdown(timeline, 0)
    assert parts.compute_ps == n * layer
    assert parts.exposed_comm_ps == timeline.makespan_ps - n * layer
    assert parts.hidden_comm_ps == n * reduce - parts.exposed_comm_ps
    assert parts.wait_ps == parts.idle_ps == parts.host_ps == 0


def test_a_collective_waits_for_the_last_rank_and_ends_together():
    early = Program(
        tasks=[Task(stream=COMPUTE, duration_ps=3), Task(stream=COMM, duration_ps=5, deps=((0, 0),), group=7)]
    )
    late = Program(
        tasks=[Task(stream=COMPUTE, duration_ps=11), Task(stream=COMM, duration_ps=6, deps=((0, 0),), group=7)]
    )
    timeline = simulate([early, late])
    assert timeline.readies(0).tolist() == [0, 3]
    assert timeline.starts(0).tolist() == [0, 11]
    assert timeline.ends(0).tolist() == [3, 17]  # the slower member's 6 ps count for both
    assert timeline.waits(0).tolist() == [0, 8]
    parts = breakdown(timeline, 0)
    assert (parts.compute_ps, parts.wait_ps, parts.exposed_comm_ps, parts.idle_ps) == (3, 8, 6, 0)
    path = [(s.cls, s.task, s.length_ps, s.cause) for s in critical_path(timeline)]
    assert path == [(1, 0, 11, "begin"), (0, 1, 6, "last member")]
    assert slack(timeline).tolist() == [8, 0, 0, 0]


def test_launch_latency_host_time_and_a_blocking_sync():
    tasks = [
        Task(stream=HOST, duration_ps=10),
        Task(stream=COMPUTE, duration_ps=30, deps=((0, 4),)),
        Task(stream=HOST, duration_ps=2, deps=((1, 1),)),  # the sync returns 1 ps after the kernel and costs 2 ps
        Task(stream=COMPUTE, duration_ps=5, deps=((2, 4),)),
    ]
    timeline = simulate([Program(tasks=tasks)])
    assert timeline.starts(0).tolist() == [0, 14, 45, 51]
    assert timeline.makespan_ps == 56
    parts = breakdown(timeline, 0)
    assert (parts.compute_ps, parts.host_ps, parts.idle_ps) == (35, 20, 1)
    assert host_bound_spans(timeline, 0) == [(0, 14), (45, 51)]
    assert stream_busy(timeline, 0) == {HOST: 12, COMPUTE: 35}
    path = [(s.task, s.length_ps, s.cause, s.lag) for s in critical_path(timeline)]
    assert path == [
        (0, 10, "begin", False),
        (1, 4, "dep", True),
        (1, 30, "dep", False),
        (2, 1, "dep", True),
        (2, 2, "dep", False),
        (3, 4, "dep", True),
        (3, 5, "dep", False),
    ]


def test_ties_are_settled_the_same_way_whatever_the_order_of_classes():
    """Three collectives are ready at one instant on one stream; program order decides, then the lowest class."""
    tasks = [Task(stream=COMM, duration_ps=5, group=g) for g in range(3)]
    timeline = simulate([Program(tasks=tasks) for _ in range(4)])
    assert all(timeline.starts(cls).tolist() == [0, 5, 10] for cls in range(4))
    assert {s.cls for s in critical_path(timeline)} == {0}


def test_collectives_issued_in_opposite_orders_on_two_streams_are_legal():
    first, second = Task(stream=COMM, duration_ps=3, group=1), Task(stream=4, duration_ps=3, group=2)
    assert simulate([Program(tasks=[first, second]), Program(tasks=[second, first])]).makespan_ps == 3


def test_a_deadlock_names_the_tasks_and_groups():
    first, second = Task(stream=COMM, duration_ps=3, group=71), Task(stream=COMM, duration_ps=3, group=72)
    with pytest.raises(GraphError) as caught:
        simulate([Program(tasks=[first, second]), Program(tasks=[second, first])])
    assert str(caught.value) == (
        "deadlock: 0 of 4 tasks can run; class 0 task 0 (group 71) waits for class 1 task 0 (group 72) "
        "waits for class 0 task 0 (group 71)"
    )


@pytest.mark.parametrize(
    ("tasks", "message"),
    [
        (
            [Task(stream=0, duration_ps=1, deps=((0, 0),))],
            "class 0 task 0: dep on task 0; a dep must point to an earlier",
        ),
        ([Task(stream=0, duration_ps=-1)], "class 0 task 0: duration -1 ps"),
        ([Task(stream=0, duration_ps=1), Task(stream=0, duration_ps=1, deps=((0, -2),))], "class 0 task 1: lag -2 ps"),
        ([Task(stream=2, duration_ps=1, group=5)] * 2, "class 0: group 5 occurs 2 times; once is allowed"),
    ],
)
def test_malformed_programs_are_refused_with_their_place(tasks, message):
    with pytest.raises(GraphError, match=message):
        simulate([Program(tasks=tasks)])


def test_no_programs_is_an_error_and_no_tasks_is_not():
    with pytest.raises(GraphError, match="no programs"):
        simulate([])
    empty = simulate([Program(tasks=[])])
    assert (empty.makespan_ps, critical_path(empty), check_timeline(empty)) == (0, (), [])
    assert breakdown(empty, 0).total_ps == 0


def test_arrays_are_the_same_program_and_new_durations_need_no_new_compile():
    program = pipeline(3, 4, 5, 7)[1]
    arrays = program.arrays()
    assert isinstance(arrays, ArrayProgram)
    others = [p for i, p in enumerate(pipeline(3, 4, 5, 7)) if i != 1]
    compiled = compile_programs([others[0], arrays, others[1]])
    assert simulate_compiled(compiled).makespan_ps == (4 + 2) * 12
    assert simulate_compiled(compiled, compiled.duration_ps * 3).makespan_ps == (4 + 2) * 36
    with pytest.raises(GraphError, match="2 durations for"):
        simulate_compiled(compiled, compiled.duration_ps[:2])
