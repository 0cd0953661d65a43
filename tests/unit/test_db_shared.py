"""What a process sees of a CPU that it shares: whose fits, how many cores, which part of the caches."""

import pytest

from perfmodel.db import load_device, load_shared


@pytest.mark.parametrize(("n_processes", "takes_turns"), [(2, 1), (3, 2), (4, 2)])
def test_a_process_with_one_core_has_the_prices_of_one_thread(n_processes, takes_turns):
    whole, one, part = load_device("cpu"), load_device("cpu_1t"), load_shared("cpu", None, n_processes)
    assert part.fits is one.fits
    assert (part.n_sms, part.n_processes) == (1, takes_turns)
    assert part.l2_bytes == whole.l2_bytes // n_processes
    assert part.memory_bytes == whole.memory_bytes // n_processes


def test_alone_or_on_a_gpu_nothing_changes():
    assert load_shared("cpu", None, 1) == load_device("cpu")
    assert load_shared("h100_sxm", None, 4) == load_device("h100_sxm")
    assert load_shared("cpu_1t", None, 2).n_sms == 1
