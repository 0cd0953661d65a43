"""glibc's heap: addresses, new pages and thresholds counted by hand, and free chunks against a brute-force map."""

import random

import pytest

from perfmodel.graph import Op, TensorSpec
from perfmodel.kernels.cpu_heap import LEAST_MAP_BYTES, MAP_BYTES, MAPPED, PAGE_BYTES, TOP_PAD_BYTES, Heap, chunk_bytes
from perfmodel.kernels.cpu_memory import GIVEN_BACK_FRAC, lifetimes, new_bytes, reaches
from perfmodel.units import KIBI, MEBI


def test_a_freed_block_is_found_again_without_new_pages() -> None:
    heap = Heap()
    first, fresh = heap.allocate(64 * KIBI)
    assert fresh == chunk_bytes(64 * KIBI) == 64 * KIBI + 64
    heap.allocate(64 * KIBI)
    assert heap.free(first, 64 * KIBI) == 0
    # The smaller block takes the beginning of the free chunk; what is left serves the next.
    assert heap.allocate(16 * KIBI) == (first, 0)
    assert heap.allocate(16 * KIBI) == (first + chunk_bytes(16 * KIBI), 0)


def test_a_map_raises_both_thresholds_when_it_is_freed() -> None:
    heap = Heap()
    address, fresh = heap.allocate(MEBI)
    assert (address, fresh) == (MAPPED, MEBI)
    assert heap.free(address, MEBI) == MEBI
    # 1 MiB and its headers in whole pages is 257 pages: the same request comes from the heap from now on.
    assert heap.map_bytes == MEBI + PAGE_BYTES
    assert heap.trim_bytes == 2 * heap.map_bytes
    again, _ = heap.allocate(MEBI)
    assert again != MAPPED
    large, _ = heap.allocate(MAP_BYTES + 1)
    assert large == MAPPED
    heap.free(large, MAP_BYTES + 1)
    assert heap.map_bytes == MEBI + PAGE_BYTES


def test_the_top_is_given_back_beyond_the_trim_threshold_unless_something_lies_on_it() -> None:
    def run(*, pinned: bool) -> int:
        heap = Heap()
        heap.map_bytes, heap.trim_bytes = MAP_BYTES, 2 * LEAST_MAP_BYTES
        blocks = [heap.allocate(200 * KIBI)[0] for _ in range(4)]
        if pinned:
            heap.allocate(2 * KIBI)
        return sum(heap.free(block, 200 * KIBI) for block in reversed(blocks))

    # The first free leaves 200 KiB, below 256; the second passes it, and then every free does, the pad apart.
    assert run(pinned=False) == 4 * chunk_bytes(200 * KIBI) - TOP_PAD_BYTES
    assert run(pinned=True) == 0


def test_no_two_blocks_overlap_and_chunks_join() -> None:
    draw = random.Random(7)
    heap, live = Heap(), dict[int, int]()
    heap.map_bytes = heap.trim_bytes = MAP_BYTES
    for _ in range(2000):
        if live and draw.random() < 0.5:
            start = draw.choice(list(live))
            heap.free(start, live.pop(start))
        else:
            size = draw.randrange(1 * KIBI, 300 * KIBI)
            start, _ = heap.allocate(size)
            spans = [(s, s + chunk_bytes(n)) for s, n in live.items()]
            assert all(start + chunk_bytes(size) <= a or b <= start for a, b in spans)
            live[start] = size
        # Two free chunks never touch, and none touches the top.
        assert not set(heap.ends) & set(heap.starts)
        assert heap.top not in heap.ends


def vector(storage: int, n_bytes: int) -> TensorSpec:
    return TensorSpec(id=storage, shape=(n_bytes // 4,), dtype="float32", strides=(1,), storage=storage)


def op(phase: str, inputs: list[TensorSpec], outputs: list[TensorSpec]) -> Op:
    return Op(id=0, name="aten.relu", inputs=tuple(inputs), input_names=("self",) * len(inputs),
              outputs=tuple(outputs), phase=phase)  # fmt: skip


def step(*, states: bool) -> list[Op]:
    """A forward, a gradient, and an optimizer that keeps a state of its own or none."""
    weight, state = vector(1, 4 * MEBI), vector(9, 4 * MEBI)
    kept = [state] if states else []
    return [
        op("forward", [weight], [vector(2, 4 * MEBI)]),
        op("forward", [vector(2, 4 * MEBI)], [vector(4, 4 * MEBI)]),
        op("backward", [vector(2, 4 * MEBI), vector(4, 4 * MEBI)], [vector(3, 4 * MEBI)]),
        op("optimizer", [weight, vector(3, 4 * MEBI), *kept], [weight]),
    ]


def test_a_heap_that_empties_beyond_the_threshold_faults_again() -> None:
    # Without states the step ends with an empty heap of 12 MiB, above the trim threshold of 8: all but the pad faults again.
    plain = step(states=False)
    assert sum(new_bytes(plain, lifetimes(plain)).values()) == 3 * chunk_bytes(4 * MEBI) - TOP_PAD_BYTES
    # In the first step all blocks were maps; the state, allocated last, lies at the bottom of the heap and pins nothing.
    with_state = step(states=True)
    assert new_bytes(with_state, lifetimes(with_state)) == new_bytes(plain, lifetimes(plain))


def test_gradients_live_to_the_end_of_the_step_and_new_pages_are_counted() -> None:
    ops = step(states=False)
    lives = lifetimes(ops)
    assert lives.dies == {2: [2, 4], 4: [3]}
    fresh = sum(reach.fresh_bytes for reach in reaches(ops, [None] * len(ops)))
    assert fresh == pytest.approx(GIVEN_BACK_FRAC * sum(min(n, 4.0 * MEBI) for n in new_bytes(ops, lives).values()))
