"""Live comparison on GPUs, as far as a machine without one can tell: refusals, the topology, marks on a device's stream."""

import pytest
from click.testing import CliRunner

from perfmodel.cli.validate import validate
from perfmodel.errors import ConfigError
from perfmodel.validate.live_cuda import Gpus, gpu_topology
from perfmodel.validate.train import MIN_STEPS
from perfmodel.validate.train_cuda import timed_by_marks


class Device:
    """A device on which every step takes its number in milliseconds, as its marks tell."""

    def __init__(self) -> None:
        self.clock_ms, self.n_steps = 0.0, 0

    def step(self) -> None:
        self.n_steps += 1
        self.clock_ms += self.n_steps

    def mark(self):
        device = self

        class Mark:
            def record(self) -> None:
                self.at_ms = device.clock_ms

            def elapsed_time(self, end) -> float:
                return end.at_ms - self.at_ms

        return Mark()


def test_the_median_is_of_the_devices_own_time_between_marks():
    device = Device()
    timed = timed_by_marks(device.step, 0.0, lambda n: n, (device.mark, lambda: None))
    # Three steps warm up; the five that count take 4, 5, 6, 7 and 8 ms.
    assert timed.n_steps == MIN_STEPS == 5
    assert timed.median_s == pytest.approx(6e-3)


def test_without_a_gpu_one_line_says_so():
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    result = CliRunner().invoke(validate, ["--live", "--device", "cuda"])
    assert isinstance(result.exception, ConfigError)
    assert str(result.exception).startswith("--device cuda: found no GPU")
    assert "\n" not in str(result.exception)


@pytest.mark.parametrize("flag", ["--plans", "--attribute", "--sharding"])
def test_what_needs_the_processor_is_refused_on_gpus(flag):
    result = CliRunner().invoke(validate, ["--live", "--device", "cuda", flag])
    assert isinstance(result.exception, ConfigError)


def test_one_gpu_is_a_topology_and_a_part_of_them_is_none():
    spec = gpu_topology(Gpus(count=8, device="h100_sxm"), 1)
    assert spec.node.gpus[0].device == "h100_sxm"
    assert sum(g.count for g in spec.node.gpus) == 1
    with pytest.raises(ConfigError, match="--ranks: found 2, allowed 1 or 8"):
        gpu_topology(Gpus(count=8, device="h100_sxm"), 2)
