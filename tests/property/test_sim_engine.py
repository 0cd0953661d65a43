"""Random programs: against a naive simulator that steps a clock, and the invariants any schedule of this kind has."""

import dataclasses
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from perfmodel.errors import GraphError
from perfmodel.sim import HOST, Program, Task, compile_programs, simulate, simulate_compiled
from perfmodel.sim.breakdown import breakdown
from perfmodel.sim.check import check_timeline
from perfmodel.sim.path import critical_path, slack
from perfmodel.sim.sweep import Sweeper
from tests.naive_simulator import naive_simulate
from tests.strategies import programs


def spans(timeline, cls):
    return [
        tuple(row)
        for row in zip(
            timeline.readies(cls).tolist(), timeline.starts(cls).tolist(), timeline.ends(cls).tolist(), strict=True
        )
    ]


def with_durations(program, durations):
    tasks = [dataclasses.replace(t, duration_ps=d) for t, d in zip(program.tasks, durations, strict=True)]
    return dataclasses.replace(program, tasks=tasks)


@given(programs())
def test_agrees_with_the_naive_simulator_to_the_picosecond(case):
    timeline = simulate(case)
    assert [spans(timeline, cls) for cls in range(len(case))] == naive_simulate(case)
    assert check_timeline(timeline) == []


@given(programs(crossing=True, max_tasks=6))
def test_collectives_that_cross_run_or_deadlock_as_in_the_naive_simulator(case):
    expected = naive_simulate(case, limit=1_000)
    if expected is None:
        with pytest.raises(GraphError, match="deadlock: "):
            simulate(case)
    else:
        assert [spans(simulate(case), cls) for cls in range(len(case))] == expected


@given(programs())
def test_numba_and_plain_python_agree(case):
    pytest.importorskip("numba")
    compiled = compile_programs(case)
    release = np.zeros(compiled.n_tasks, dtype=np.int64)
    plain, fast = (Sweeper(compiled, compiled.duration_ps, numba=numba).run(release) for numba in (False, True))
    assert all(np.array_equal(a, b) for a, b in zip(plain, fast, strict=True))


@given(programs(), st.integers(1, 10**6))
def test_scaling_every_time_scales_the_makespan_exactly(case, factor):
    scaled = [
        dataclasses.replace(
            program,
            tasks=[
                dataclasses.replace(
                    t, duration_ps=t.duration_ps * factor, deps=tuple((d, lag * factor) for d, lag in t.deps)
                )
                for t in program.tasks
            ],
        )
        for program in case
    ]
    assert simulate(scaled).makespan_ps == factor * simulate(case).makespan_ps


@given(programs(), st.data())
def test_adding_a_dep_never_shortens(case, data):
    cls = data.draw(st.integers(0, len(case) - 1))
    tasks = list(case[cls].tasks)
    if len(tasks) < 2:
        return
    late = data.draw(st.integers(1, len(tasks) - 1))
    early = data.draw(st.integers(0, late - 1))
    tasks[late] = dataclasses.replace(tasks[late], deps=(*tasks[late].deps, (early, data.draw(st.integers(0, 9)))))
    more = [*case[:cls], dataclasses.replace(case[cls], tasks=tasks), *case[cls + 1 :]]
    assert (simulate(more).end_ps >= simulate(case).end_ps).all()


@given(programs(), st.data())
def test_shortening_a_task_never_lengthens(case, data):
    compiled = compile_programs(case)
    before = simulate_compiled(compiled)
    shorter = compiled.duration_ps.copy()
    task = data.draw(st.integers(0, compiled.n_tasks - 1))
    shorter[task] = data.draw(st.integers(0, int(shorter[task])))
    assert (simulate_compiled(compiled, shorter).end_ps <= before.end_ps).all()


@given(programs(), st.data())
def test_renumbering_ranks_and_groups_changes_nothing(case, data):
    order = data.draw(st.permutations(range(len(case))))
    timeline, renumbered = simulate(case), simulate([relabel(case[cls]) for cls in order])
    assert [spans(renumbered, i) for i in range(len(case))] == [spans(timeline, cls) for cls in order]


def relabel(program):
    tasks = [dataclasses.replace(t, group=9000 - t.group if t.group >= 0 else t.group) for t in program.tasks]
    return dataclasses.replace(program, tasks=tasks)


@given(programs(), st.data())
def test_identical_ranks_finish_together(case, data):
    cls = data.draw(st.integers(0, len(case) - 1))
    timeline = simulate([*case, case[cls]])
    assert spans(timeline, cls) == spans(timeline, len(case))
    assert timeline.makespan_ps == simulate(case).makespan_ps


@given(programs())
def test_path_and_breakdown_sum_exactly_to_the_makespan(case):
    timeline = simulate(case)
    path = critical_path(timeline)
    assert sum(s.length_ps for s in path) == timeline.makespan_ps
    assert all(a.end_ps == b.start_ps for a, b in pairwise(path))
    for cls in range(len(case)):
        parts = breakdown(timeline, cls)
        assert parts.total_ps == timeline.makespan_ps
        assert min(dataclasses.astuple(parts)) >= 0
        assert parts.hidden_comm_ps >= 0


@given(programs())
def test_makespan_is_the_longest_path(case):
    """A second method: memoised longest path from the definition, recursing over predecessors."""
    compiled = compile_programs(case)
    wiring, lag = compiled.wiring, compiled.dep_lag_ps
    memo: dict[int, int] = {}

    def end(task: int) -> int:
        members = tuple(wiring.members(task))
        if members[0] not in memo:
            starts = [0]
            for m in members:
                starts += [end(int(wiring.prev[m]))] if wiring.prev[m] >= 0 else []
                starts += [
                    end(int(wiring.dep_index[d])) + int(lag[d]) for d in range(wiring.dep_ptr[m], wiring.dep_ptr[m + 1])
                ]
            memo[members[0]] = max(starts) + max(int(compiled.duration_ps[m]) for m in members)
        return memo[members[0]]

    assert simulate_compiled(compiled).makespan_ps == max(end(t) for t in range(compiled.n_tasks))


@given(programs(), st.data())
def test_slack_is_exactly_how_long_a_task_may_grow(case, data):
    compiled = compile_programs(case)
    timeline = simulate_compiled(compiled)
    room = slack(timeline)
    assert (room >= 0).all()
    task = data.draw(st.integers(0, compiled.n_tasks - 1))
    members = compiled.wiring.members(task)
    grown = compiled.duration_ps.copy()
    grown[members] = int(timeline.end_ps[task] - timeline.start_ps[task]) + int(room[task])
    assert simulate_compiled(compiled, grown).makespan_ps == timeline.makespan_ps
    grown[members] += 1
    assert simulate_compiled(compiled, grown).makespan_ps == timeline.makespan_ps + 1


@given(programs())
def test_same_input_same_output(case):
    assert simulate(case).end_ps.tobytes() == simulate(case).end_ps.tobytes()


@given(st.integers(1, 5), st.integers(0, 9))
def test_a_chain_is_the_sum_of_its_parts(n, duration):
    chain = Program(tasks=[Task(stream=HOST, duration_ps=duration)] * n)
    assert simulate([chain]).makespan_ps == n * duration
