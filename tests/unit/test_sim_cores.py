"""Tasks that share cores, against hand counts of who gets how much of a core and when."""

import numpy as np
import pytest

from perfmodel.sim import COMM, COMPUTE, Program, Task, compile_programs
from perfmodel.sim.cores import Demand, lengths_on_cores, paces


@pytest.mark.parametrize(
    ("running", "n_cores", "expected"),
    [
        ([(2, 1.0)], 2.0, [1.0]),  # a core each
        ([(1, 1.0)], 2.0, [1.0]),  # none gets more than one
        ([(3, 1.0)], 2.0, [2 / 3]),
        ([(2, 1.0), (1, 0.5)], 2.0, [0.75, 1.0]),  # 2 - 0.5 over two
        ([(2, 0.25), (2, 1.0)], 2.0, [1.0, 0.75]),  # the order does not matter
        ([(4, 1.0), (4, 0.5)], 2.0, [0.25, 0.5]),  # all eight get a quarter; half of what the small ones ask for
        ([(1, 1.0), (1, 0.0)], 0.5, [0.5, 1.0]),  # what asks for nothing waits for nothing
    ],
)
def test_small_threads_get_what_they_ask_for_and_large_ones_share_the_rest(running, n_cores, expected):
    assert paces(running, n_cores) == pytest.approx(expected)


def demand_of(threads, shares, beside=None):
    n = len(threads)
    return Demand(
        threads=np.array(threads),
        share=np.array(shares, dtype=float),
        beside=np.ones(n) if beside is None else np.array(beside),
        of_rank=np.ones(n, dtype=np.int64),
    )


def lengths(programs, threads, shares, n_cores=2.0, beside=None):
    compiled = compile_programs(programs)
    demand = demand_of(threads, shares, beside)
    return lengths_on_cores(compiled, compiled.duration_ps.astype(float), demand, n_cores).tolist()


def one(duration, **more):
    return Program(tasks=[Task(stream=COMPUTE, duration_ps=duration)], **more)


def test_four_ranks_on_two_cores_take_twice_as_long():
    assert lengths([one(1000, n_ranks=4)], [4], [1.0]) == pytest.approx([2000])


def test_a_rank_that_is_left_alone_gets_a_whole_core():
    # Three ranks on two cores: 2/3 each until the short ones are done at 600 (400 / (2/3)), then 600 - 0 of the third's 1000
    # done... it has run 600 x 2/3 = 400 and needs 600 more at full pace: 1200 in all.
    assert lengths([one(400, n_ranks=2), one(1000)], [2, 1], [1.0, 1.0]) == pytest.approx([600, 600 + 600])


def test_a_collective_takes_its_share_from_compute_and_waits_for_its_last_member():
    # Two ranks; each computes 1000 beside a collective whose two threads a rank ask for a quarter of a core each: 4 x 0.25 = 1
    # of 2 cores, so compute goes at half pace until the collective ends at 400: 200 done, 800 left at full pace.
    programs = [
        Program(tasks=[Task(stream=COMPUTE, duration_ps=1000), Task(stream=COMM, duration_ps=400, group=7)]),
        Program(tasks=[Task(stream=COMPUTE, duration_ps=1000), Task(stream=COMM, duration_ps=400, group=7)]),
    ]
    found = lengths(programs, [1, 2, 1, 2], [1.0, 0.25, 1.0, 0.25])
    assert found == pytest.approx([1200, 400, 1200, 400])


def test_waiting_members_ask_for_nothing():
    # The collective of both ranks starts when the second has computed; the first's compute after it starts at once.
    programs = [
        Program(tasks=[Task(stream=COMM, duration_ps=100, group=1), Task(stream=COMPUTE, duration_ps=500)]),
        Program(
            tasks=[
                Task(stream=COMPUTE, duration_ps=500),
                Task(stream=COMM, duration_ps=100, deps=((0, 0),), group=1),
            ]
        ),
    ]
    found = lengths(programs, [2, 1, 1, 2], [0.5, 1.0, 1.0, 0.5], n_cores=1.0)
    # Both compute on one core: 1000. Then the collective alone: four threads that ask for half a core get a quarter: 200.
    assert found == pytest.approx([200, 1000, 1000, 200])


def test_tasks_are_slower_beside_other_ranks_and_not_beside_nobody():
    # On a core each: 1.5 times as long until the first is done at 600; the second has done 400 of its 1000 by then.
    found = lengths([one(400), one(1000)], [1, 1], [1.0, 1.0], beside=[1.5, 1.5])
    assert found == pytest.approx([600, 600 + 600])
    # Two ranks of one class are beside each other.
    assert lengths([one(400, n_ranks=2)], [2], [1.0], beside=[1.5]) == pytest.approx([600])


@pytest.mark.parametrize("seed", range(5))
def test_cores_never_do_more_than_they_can(seed):
    rng = np.random.default_rng(seed)
    programs = [
        Program(tasks=[Task(stream=COMPUTE, duration_ps=int(d)) for d in rng.integers(1, 1000, 6)]) for _ in range(5)
    ]
    compiled = compile_programs(programs)
    demand = demand_of([1] * 30, [1.0] * 30)
    found = lengths_on_cores(compiled, compiled.duration_ps.astype(float), demand, 2.0)
    ends = [found[compiled.tasks_of(cls)].sum() for cls in range(5)]
    work = float(compiled.duration_ps.sum())
    assert max(ends) >= work / 2.0 - 1.0  # two cores
    # No core idles while two ranks have work, so what is left when one rank is alone is at most that rank's own work.
    assert max(ends) <= work / 2.0 + max(compiled.duration_ps[compiled.tasks_of(c)].sum() for c in range(5)) / 2.0 + 1.0
    assert (found >= compiled.duration_ps - 1e-6).all()
