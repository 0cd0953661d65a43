"""A script is profiled from outside: window, step times, ranks, annotations; scripts that end too soon are told."""

import sys
import textwrap

import pytest

from perfmodel.errors import ConfigError
from perfmodel.profiling.hook import StepWatcher
from perfmodel.profiling.run import StepTimes, run_profiled
from perfmodel.profiling.settings import ProfileSettings
from perfmodel.traces.kineto import read_kineto

SCRIPT = textwrap.dedent(
    """
    import sys, torch
    torch.set_num_threads(1)
    model = torch.nn.Linear(64, 64)
    first, second = (torch.optim.SGD([p], lr=0.1) for p in model.parameters())
    for step in range(int(sys.argv[1])):
        first.zero_grad(), second.zero_grad()
        model(torch.randn(32, 64)).sum().backward()
        first.step(), second.step()
        torch.save(model.state_dict(), sys.argv[2])
    print("the script's end")
    """
)


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    return path


def settings(folder, **more):
    return ProfileSettings(**{"folder": str(folder / "out"), "warm_up": 2, "plain": 3, "active": 4, **more})


def test_a_window_of_steps_is_profiled_and_timed(script, tmp_path):
    command = [sys.executable, str(script), "100", str(tmp_path / "model.pt")]
    found = run_profiled(command, settings(tmp_path))
    assert found.exit_code == 0
    (times,) = found.times
    assert (len(times.before_s), len(times.profiled_s), len(times.after_s)) == (3, 4, 3)
    trace = read_kineto(found.traces[0])
    assert len(trace.steps) == 4  # two optimizers, one step of the first each
    assert sum(op.name == "torch.save" for op in trace.ops) == 4
    marked = sum(step.duration_s for step in trace.steps)
    assert marked == pytest.approx(sum(times.profiled_s), rel=0.2)


@pytest.mark.parametrize(
    ("command", "message"),
    [([sys.executable, "-c", ""], "before 13 optimizer steps"), (["/no/such/program"], "cannot start")],
)
def test_what_cannot_be_profiled_is_one_line(tmp_path, command, message):
    with pytest.raises(ConfigError, match=message) as caught:
        run_profiled(command, settings(tmp_path))
    assert len(caught.value.problems) == 1


def test_settings_travel_as_text(tmp_path):
    sent = settings(tmp_path, ranks=(1, 3), stacks=True)
    assert ProfileSettings.from_text(sent.to_text()) == sent


def test_overhead_and_drift_by_hand():
    times = StepTimes(rank=0, before_s=(1.0, 1.0, 1.2), profiled_s=(1.5, 1.8, 1.5), after_s=(1.0, 1.2, 1.2))
    assert times.plain_s == pytest.approx(1.1)
    assert times.overhead_frac == pytest.approx(1.5 / 1.1 - 1)
    assert times.drift_frac == pytest.approx(0.2)


def test_only_the_first_optimizer_counts(tmp_path):
    watcher = StepWatcher(settings(tmp_path, warm_up=100), 0)
    one, two = object(), object()
    for _ in range(5):
        watcher.stepped(one)
        watcher.stepped(two)
    assert watcher.number == 5
