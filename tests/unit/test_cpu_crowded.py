"""Processes that share the memory of a CPU host, against what two and four of them took for the same work at once."""

from dataclasses import replace

import numpy as np
import pytest

from perfmodel.db.device import shared
from perfmodel.db.loading import load_device
from perfmodel.graph import Op, TensorSpec
from perfmodel.kernels.cpu_law import crowded_faults_s
from perfmodel.kernels.pricing import price
from perfmodel.pipeline.crowding import alone, crowding

ELEMS = 4 * 2**20


def one_thread(n_processes):
    """The one-thread device as each of `n_processes` on two cores sees it."""
    device = load_device("cpu_1t")
    part = shared(replace(device, n_sms=2), n_processes)
    return replace(part, n_sms=1, n_processes=-(-n_processes // 2))


def add_s(device):
    """Seconds of adding two tensors of 16 MiB into a third, again and again."""
    a, b, out = (TensorSpec(id=i, shape=(ELEMS,), dtype="float32", strides=(1,), storage=i) for i in range(3))
    op = Op(
        id=0,
        name="aten.add",
        overload="out",
        inputs=(a, b),
        input_names=("self", "other"),
        outputs=(out,),
        phase="forward",
    )
    return price([op], device)[0][0].time_s


def test_two_that_stream_share_the_bandwidth():
    # 2.03 ms alone, 2.71 ms each of two at once (torch 2.13, 2 cores, measured 2026-11-29): 1.33.
    assert add_s(one_thread(2)) / add_s(load_device("cpu_1t")) == pytest.approx(1.33, rel=0.12)


def test_a_process_whose_neighbours_wait_has_the_bandwidth_to_itself():
    device = one_thread(4)
    assert crowding(device) == 2.0
    assert add_s(alone(device)) == pytest.approx(add_s(load_device("cpu_1t")), rel=0.02)


@pytest.mark.parametrize(("n", "crowd", "page_us"), [(2, 1.0, 6.7), (4, 2.0, 13.5)])
def test_faults_take_what_they_took_beside_others(n, crowd, page_us):
    # A fault's own 2.86 us, as long as processes take turns, and what is added.
    added = crowded_faults_s(np.array([4096.0]), n, np.array([crowd]))[0]
    assert (2.86e-6 * crowd + added) * 1e6 == pytest.approx(page_us, rel=0.02)
