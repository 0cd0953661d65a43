"""Processes that share a CPU: limits that must hold whatever the fit."""

import numpy as np
import pytest

from perfmodel.db import load_device
from perfmodel.db.device import shared
from perfmodel.kernels.cpu_law import slowdown

GRAIN = {"grain": 1e6, "edge": 1.0}


@pytest.mark.parametrize(("n_processes", "small", "large"), [(1, 1.0, 1.0), (2, 1.0, 2.0), (4, 2.0, 4.0)])
def test_slowdown_of_two_cores(n_processes, small, large):
    device = shared(load_device("cpu"), n_processes)
    assert device.n_sms == 2
    found = slowdown(GRAIN, {"work": np.array([1.0, 1e15]), "parts": np.zeros(2)}, device)
    # A small call uses one core anyway; a large one loses the other; four processes take turns on two cores.
    assert found == pytest.approx([small, large], rel=1e-3)


def test_memory_and_host_are_shared_too():
    whole, part = load_device("cpu"), shared(load_device("cpu"), 4)
    assert part.memory_bytes == whole.memory_bytes // 4
    assert part.host.op_dispatch_s == pytest.approx(2 * whole.host.op_dispatch_s)
    assert shared(load_device("v100_sxm2_32gb"), 8) == load_device("v100_sxm2_32gb")
