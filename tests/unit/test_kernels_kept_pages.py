"""A process told to keep its pages meets no new ones: in glibc itself, and in the price of a step."""

import os
import subprocess
import sys

import pytest

from perfmodel.config import load_topology
from perfmodel.kernels.cpu_heap import NEVER_TRIMMED_BYTES, NO_MAPS, TRIM_FROM, keeps_pages
from perfmodel.pipeline.run import PriceBooks

KEPT = {NO_MAPS: "0", TRIM_FROM: str(NEVER_TRIMMED_BYTES)}
FAULTS = """
import ctypes, resource
libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
libc.malloc.argtypes = [ctypes.c_size_t]
libc.free.argtypes = [ctypes.c_void_p]
def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for turn in range(6):
    before = faults()
    block = libc.malloc(40 << 20)
    ctypes.memset(block, 1, 40 << 20)
    libc.free(block)
print(faults() - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's variables")
@pytest.mark.parametrize(("env", "faults_at_least", "faults_below"), [({}, 5000, 12000), (KEPT, 0, 100)])
def test_glibc_keeps_pages_under_these_variables(env, faults_at_least, faults_below) -> None:
    """A block of 40 MiB is 10,240 pages of 4 KiB (fewer faults where the system makes huge pages, hence half)."""
    plain = {name: text for name, text in os.environ.items() if not name.startswith("MALLOC_")}
    found = subprocess.run(
        [sys.executable, "-c", FAULTS], env={**plain, **env}, capture_output=True, text=True, check=True
    )
    assert faults_at_least <= int(found.stdout) < faults_below


def test_only_both_variables_together_keep_pages() -> None:
    assert keeps_pages(KEPT)
    for wrong in (
        {},
        {NO_MAPS: "0"},
        {TRIM_FROM: KEPT[TRIM_FROM]},
        {**KEPT, NO_MAPS: "65536"},
        {**KEPT, TRIM_FROM: "many"},
    ):
        assert not keeps_pages(wrong)


def test_a_step_on_a_cpu_that_keeps_pages_is_shorter_and_books_do_not_mix() -> None:
    from perfmodel import predict

    plain = load_topology("cpu")
    kept = plain.model_copy(update={"env": KEPT})
    times = {name: predict("dlrm_small", machine, batch=2048, bounds=False).iteration_time_s for name, machine in
             (("plain", plain), ("kept", kept), ("plain again", plain))}  # fmt: skip
    assert times["kept"] < times["plain"] == times["plain again"]
    books = PriceBooks()
    assert books.device("cpu", None, 1, KEPT).keeps_pages
    assert not books.device("cpu", None).keeps_pages
