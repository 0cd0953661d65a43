"""Memory over time: hand counts, a brute-force count, and the rounding of PyTorch's allocator."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perfmodel.errors import GraphError
from perfmodel.sim import COMPUTE, HOST, Program, Task, simulate
from perfmodel.sim.memory import EXACT, PYTORCH, Allocation, memory_over_time, reserved_bytes

KIB, MIB = 2**10, 2**20


def chain(n, duration=10):
    return simulate([Program(tasks=[Task(stream=COMPUTE, duration_ps=duration)] * n)])


def test_a_small_network_by_hand():
    """Weights 100; activations 30 and 50 live from forward (tasks 0, 1) to backward (3, 2); gradient 100 to the end."""
    allocations = [
        Allocation(bytes=100, born=-1, dies=None),
        Allocation(bytes=30, born=0, dies=3),
        Allocation(bytes=50, born=1, dies=2),
        Allocation(bytes=100, born=3, dies=4),
    ]
    curve = memory_over_time(chain(5), 0, allocations, EXACT)
    assert list(zip(curve.time_ps.tolist(), curve.bytes.tolist(), strict=True)) == [
        (0, 100),
        (0, 130),
        (10, 180),
        (30, 130),
        (30, 230),
        (40, 200),
        (50, 100),
    ]
    assert (curve.peak_bytes, curve.peak_ps) == (230, 30)


def test_memory_is_counted_in_program_order_however_far_the_device_is_behind():
    """The host frees each buffer before it asks for the next, so one buffer is in use though kernels run much later."""
    tasks = []
    for i in range(4):
        tasks += [Task(stream=HOST, duration_ps=1), Task(stream=COMPUTE, duration_ps=50, deps=((2 * i, 0),))]
    allocations = [Allocation(bytes=8, born=2 * i + 1, dies=2 * i + 1) for i in range(4)]
    assert memory_over_time(simulate([Program(tasks=tasks)]), 0, allocations, EXACT).peak_bytes == 8


@given(
    st.lists(
        st.tuples(st.integers(0, 9 * MIB), st.integers(-1, 7), st.none() | st.integers(0, 7)).filter(
            lambda row: row[2] is None or row[1] <= row[2]
        ),
        max_size=12,
    )
)
def test_the_peak_is_the_brute_force_count(rows):
    allocations = [Allocation(bytes=b, born=born, dies=dies) for b, born, dies in rows]
    curve = memory_over_time(chain(8), 0, allocations)
    alive = [
        sum(-(-b // 512) * 512 for b, born, dies in rows if born <= task and (dies is None or dies >= task))
        for task in range(-1, 8)
    ]
    assert curve.peak_bytes == max(alive)
    assert curve.reserved_bytes >= curve.peak_bytes


@pytest.mark.parametrize(
    ("request_bytes", "rounded", "segment"),
    [
        # torch.cuda.memory_allocated and memory_reserved after one torch.empty of so many bytes, per the allocator's
        # documented constants (c10/cuda/CUDACachingAllocator.cpp).
        (1, 512, 2 * MIB),
        (513, 1024, 2 * MIB),
        (MIB, MIB, 2 * MIB),
        (MIB + 1, MIB + 512, 20 * MIB),
        (10 * MIB - 512, 10 * MIB - 512, 20 * MIB),
        (10 * MIB, 10 * MIB, 10 * MIB),
        (11 * MIB + 5, 11 * MIB + 512, 12 * MIB),
    ],
)
def test_requests_are_rounded_as_by_pytorch(request_bytes, rounded, segment):
    assert PYTORCH.rounded(request_bytes) == rounded
    assert reserved_bytes([Allocation(bytes=request_bytes, born=0, dies=None)]) == segment


def test_freed_blocks_are_reused_split_and_merged():
    first = Allocation(bytes=12 * MIB, born=0, dies=0)
    reuse = [first, Allocation(bytes=5 * MIB, born=1, dies=2), Allocation(bytes=7 * MIB, born=2, dies=3)]
    assert reserved_bytes(reuse) == 12 * MIB  # 5 + 7 lie in the 12 MiB segment
    merged = [*reuse, Allocation(bytes=12 * MIB, born=4, dies=4)]
    assert reserved_bytes(merged) == 12 * MIB  # and once both are free they are one block again
    unsplit = [first, Allocation(bytes=11 * MIB, born=1, dies=None), Allocation(bytes=MIB + 512, born=2, dies=None)]
    assert reserved_bytes(unsplit) == (12 + 20) * MIB  # a rest of exactly 1 MiB is not cut off


def test_small_requests_share_a_segment():
    assert reserved_bytes([Allocation(bytes=512 * KIB, born=0, dies=None)] * 4) == 2 * MIB
    assert reserved_bytes([Allocation(bytes=512 * KIB, born=0, dies=None)] * 5) == 4 * MIB


def test_no_storages_is_no_memory():
    curve = memory_over_time(chain(2), 0, [])
    assert (curve.peak_bytes, curve.reserved_bytes, len(curve.time_ps)) == (0, 0, 0)


@pytest.mark.parametrize(
    "allocation",
    [
        Allocation(bytes=-1, born=0, dies=1),
        Allocation(bytes=1, born=2, dies=1),
        Allocation(bytes=1, born=0, dies=9),
        Allocation(bytes=1, born=-2, dies=None),
    ],
)
def test_impossible_lifetimes_are_refused(allocation):
    with pytest.raises(GraphError, match="class 0 allocation 0"):
        memory_over_time(chain(3), 0, [allocation])
