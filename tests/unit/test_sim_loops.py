"""When the compiled loops are used, and that their absence only costs time."""

import numpy as np
import pytest

from perfmodel.sim import COMPUTE, HOST, Program, Task, compile_programs, loops, overlap, simulate, sweep
from perfmodel.sim.overlap import overlapped_with
from perfmodel.sim.rivals import OverlapModel


def many(n=300):
    tasks = []
    for i in range(n):
        tasks += [Task(stream=HOST, duration_ps=3), Task(stream=COMPUTE, duration_ps=5, deps=((2 * i, 1),))]
    return [Program(tasks=tasks)]


@pytest.fixture
def nothing_loaded(monkeypatch):
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


def test_orders_that_cross_agree_under_numba(nothing_loaded, monkeypatch):
    pytest.importorskip("numba")
    ahead = [Task(stream=10 + g, duration_ps=g, group=g) for g in range(300)]
    programs = [Program(tasks=ahead), Program(tasks=ahead[::-1])]
    plain = simulate(programs)
    monkeypatch.setattr(loops, "COMPILED_FROM_TASKS", 1)
    fast = simulate(programs)
    assert len(loops._LOADED) == 2
    assert np.array_equal(plain.end_ps, fast.end_ps)


def test_the_overlap_loop_without_tasks():
    empty = overlapped_with(compile_programs([Program(tasks=())]), OverlapModel(), None, numba=False)
    assert empty.makespan_ps == 0
