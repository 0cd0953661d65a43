"""The checker finds every kind of wrong timeline: one saboteur each."""

import dataclasses

import pytest

from perfmodel.sim import COMM, COMPUTE, HOST, Program, Task, simulate
from perfmodel.sim import check as check_module
from perfmodel.sim.check import check_timeline


def good():
    tasks = [
        Task(stream=HOST, duration_ps=10),
        Task(stream=COMPUTE, duration_ps=30, deps=((0, 4),)),
        Task(stream=COMPUTE, duration_ps=8),
        Task(stream=COMM, duration_ps=20, deps=((1, 0),), group=3),
    ]
    return simulate([Program(tasks=tasks), Program(tasks=[*tasks[:2], tasks[2], tasks[3]])])


def moved(timeline, task, **by):
    changes = {}
    for field, shift in by.items():
        changed = getattr(timeline, field).copy()
        changed[task] += shift
        changes[field] = changed
    return dataclasses.replace(timeline, **changes)


def test_the_untouched_timeline_passes():
    assert check_timeline(good()) == []


SABOTEURS = [
    # what is moved (class 1 holds global tasks 4 to 7), and the rule that must be named
    (1, {"ready_ps": -3, "start_ps": -3, "end_ps": -3}, "class 0 task 1: starts before a dep has ended plus its lag"),
    (2, {"ready_ps": -5, "start_ps": -5, "end_ps": -5}, "class 0 task 2: overlaps the task before it on its stream"),
    (0, {"ready_ps": -1, "start_ps": -1, "end_ps": -1}, "class 0 task 0: ready before its release"),
    (2, {"start_ps": -1, "end_ps": -1}, "class 0 task 2: starts before it is ready"),
    (2, {"start_ps": 1, "end_ps": 1}, "class 0 task 2: starts though nothing held it"),
    (2, {"ready_ps": 1, "start_ps": 1, "end_ps": 1}, "class 0 task 2: is ready later than its stream and deps ask for"),
    (2, {"end_ps": 1}, "class 0 task 2: does not last as long as its duration"),
    (2, {"end_ps": -1}, "class 0 task 2: does not last as long as its duration"),
    (7, {"start_ps": 1}, "class 1 task 3 (group 3): does not start with the other members of its group"),
    (7, {"end_ps": 1}, "class 1 task 3 (group 3): does not end with the other members of its group"),
    ([3, 7], {"start_ps": 2, "end_ps": 2}, "class 0 task 3 (group 3): starts though nothing held it"),
]


@pytest.mark.parametrize(("task", "by", "problem"), SABOTEURS)
def test_every_saboteur_is_caught(task, by, problem):
    assert problem in check_timeline(moved(good(), task, **by))


def test_a_task_may_take_longer_only_where_overlap_is_modelled():
    longer = moved(good(), 2, end_ps=1)
    assert check_timeline(dataclasses.replace(longer, stretched=True)) == []
    shorter = moved(good(), 2, end_ps=-1)
    assert check_timeline(dataclasses.replace(shorter, stretched=True))


def test_sums_that_do_not_add_up_are_caught(monkeypatch):
    timeline = good()
    whole = check_module.breakdown(timeline, 0)
    monkeypatch.setattr(check_module, "breakdown", lambda *_: dataclasses.replace(whole, idle_ps=whole.idle_ps + 1))
    assert check_timeline(timeline)[0] == "class 0: breakdown sums to 65 ps, the makespan is 64 ps"
    monkeypatch.undo()
    path = check_module.critical_path(timeline)
    monkeypatch.setattr(check_module, "critical_path", lambda *_: path[1:])
    assert check_timeline(timeline) == ["critical path sums to 54 ps, the makespan is 64 ps"]


def test_a_stream_busier_than_the_run_is_caught(monkeypatch):
    monkeypatch.setattr(check_module, "stream_busy", lambda *_: {COMPUTE: 65})
    assert check_timeline(good())[0] == "class 0 stream 1: busy 65 ps of 64 ps"
