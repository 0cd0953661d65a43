"""The breakdowns of all classes at once are those of each class alone, on random programs, in steady state and from idle."""

from hypothesis import given, settings

from perfmodel.sim import simulate
from perfmodel.sim.breakdown import breakdown, breakdowns
from perfmodel.sim.steady import simulate_steady
from tests.strategies import programs


@settings(max_examples=60, deadline=None)
@given(found=programs())
def test_all_at_once_are_each_alone(found) -> None:
    for timeline in (simulate(found), simulate_steady(found).timeline):
        n = timeline.compiled.n_classes
        assert breakdowns(timeline) == [breakdown(timeline, cls) for cls in range(n)]
        assert all(parts.total_ps == timeline.makespan_ps for parts in breakdowns(timeline))
