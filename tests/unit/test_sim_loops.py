"""When the compiled loops are used, and that their absence only costs time."""

import numpy as np
import pytest

from perfmodel.sim import COMPUTE, HOST, Program, Task, compile_programs, loops, overlap, simulate, sweep, warm
from perfmodel.sim.order import general_order
from perfmodel.sim.overlap import overlapped_with
from perfmodel.sim.rivals import OverlapModel


def many(n=300):
    tasks = []
    for i in range(n):
        tasks += [Task(stream=HOST, duration_ps=3), Task(stream=COMPUTE, duration_ps=5, deps=((2 * i, 1),))]
    return [Program(tasks=tasks)]


@pytest.fixture
def nothing_loaded(monkeypatch):
    warm.WARMING.wait()  # what a predictor of another test may have begun
    monkeypatch.setattr(loops, "_LOADED", {})


def test_small_runs_do_not_load_numba(nothing_loaded):
    assert not loops.use_numba(sweep.sweep_loop, loops.COMPILED_FROM_TASKS - 1)
    simulate(many())
    assert loops._LOADED == {}


def test_large_runs_do_if_it_is_there(nothing_loaded, monkeypatch):
    monkeypatch.setattr(loops, "has_numba", lambda: True)
    assert loops.use_numba(sweep.sweep_loop, loops.COMPILED_FROM_TASKS)
    monkeypatch.setattr(loops, "has_numba", lambda: False)
    assert not loops.use_numba(sweep.sweep_loop, 10 * loops.COMPILED_FROM_TASKS)


def test_after_warming_up_small_runs_are_compiled_too():
    pytest.importorskip("numba")
    assert sweep.warm_up()
    assert overlap.warm_up()
    assert loops.use_numba(sweep.sweep_loop, loops.LOADED_FROM_TASKS)
    assert not loops.use_numba(sweep.sweep_loop, loops.LOADED_FROM_TASKS - 1)
    assert simulate(many()).makespan_ps == 3 + 1 + 300 * 5


def test_without_numba_warming_up_says_so(monkeypatch):
    monkeypatch.setattr(sweep, "has_numba", lambda: False)
    monkeypatch.setattr(overlap, "has_numba", lambda: False)
    assert not sweep.warm_up()
    assert not overlap.warm_up()


def test_an_unwritable_cache_costs_only_the_compile(nothing_loaded, monkeypatch):
    numba = pytest.importorskip("numba")
    real = numba.njit

    def njit(**options):
        if options.get("cache"):
            raise RuntimeError("cannot cache function: no locator available")
        return real(**options)

    monkeypatch.setattr(numba, "njit", njit)
    compiled = compile_programs(many(5))
    release = np.zeros(compiled.n_tasks, dtype=np.int64)
    ends = sweep.Sweeper(compiled, compiled.duration_ps, numba=True).run(release)[2]
    assert np.array_equal(ends, simulate(many(5)).end_ps)


def test_the_general_order_agrees_under_numba(nothing_loaded):
    pytest.importorskip("numba")
    ahead = [Task(stream=10 + g, duration_ps=g, group=g) for g in range(300)]
    compiled = compile_programs([Program(tasks=ahead), Program(tasks=ahead[::-1])])
    plain, fast = (general_order(compiled.wiring, numba=numba) for numba in (False, True))
    assert len(plain) == compiled.n_tasks
    assert np.array_equal(plain, fast)


def test_the_overlap_loop_without_tasks():
    empty = overlapped_with(compile_programs([Program(tasks=())]), OverlapModel(), None, numba=False)
    assert empty.makespan_ps == 0


class Child:
    """A process that compiles, as long as `code` is None."""

    code = None

    def poll(self):
        return self.code


@pytest.fixture
def warming(monkeypatch):
    """(warming, the child it starts, what it did)."""
    child, did = Child(), []
    monkeypatch.setattr(warm, "has_numba", lambda: True)
    monkeypatch.setattr(warm, "warm_up_all", lambda: did.append("loaded"))
    monkeypatch.setattr(warm, "is_cached", lambda *_: False)
    monkeypatch.setattr(warm.subprocess, "Popen", lambda *_, **__: did.append("compiles") or child)
    return warm.Warming(), child, did


def go_on(made):
    made.go_on()
    made._thread.join()


def test_machine_code_is_compiled_by_another_process_and_then_loaded_once(warming):
    made, child, did = warming
    go_on(made)
    go_on(made)
    assert did == ["compiles"]
    child.code = 0
    for _ in range(3):
        go_on(made)
    assert did == ["compiles", "loaded"]


def test_machine_code_on_the_disk_is_loaded_at_once(warming, monkeypatch):
    monkeypatch.setattr(warm, "is_cached", lambda *_: True)
    go_on(warming[0])
    assert warming[2] == ["loaded"]


def test_a_loop_without_machine_code_does_not_count_as_loaded(nothing_loaded):
    pytest.importorskip("numba")
    loops.compiled_loop(sweep.sweep_loop)
    assert not loops.use_numba(sweep.sweep_loop, loops.LOADED_FROM_TASKS)
    sweep.warm_up()
    assert loops.use_numba(sweep.sweep_loop, loops.LOADED_FROM_TASKS)
    assert loops.is_cached(sweep.sweep_loop)
