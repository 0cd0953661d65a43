"""Where tensors lie on a CPU: distances and freed blocks counted by hand on steps of two or three ops."""

import math

import pytest

from perfmodel.graph import Op, TensorSpec
from perfmodel.kernels.cpu_memory import MAP_BYTES, cold, level_bytes, reaches, warm


def vector(storage: int, n_elems: int) -> TensorSpec:
    return TensorSpec(id=storage, shape=(n_elems,), dtype="float32", strides=(1,), storage=storage)


def op(index: int, inputs: list[TensorSpec], outputs: list[TensorSpec]) -> Op:
    return Op(
        id=index, name="aten.relu", inputs=tuple(inputs), input_names=("self",) * len(inputs), outputs=tuple(outputs)
    )


def test_a_repeated_op_meets_its_own_tensors_one_call_ago() -> None:
    (reach,) = reaches([op(0, [vector(1, 100)], [vector(2, 100)])], [None])
    # 400 bytes in, 400 out: both were touched in the call before, and the call itself touches 800.
    assert reach.tensors == ((400.0, 800.0), (400.0, 800.0))
    assert reach.fresh_bytes == 0.0


def test_distance_counts_what_ran_in_between() -> None:
    # x -> a; y -> b (large); a is read again behind y and b: 400 + 400 ... see the counts.
    ops = [
        op(0, [vector(1, 100)], [vector(2, 100)]),
        op(1, [vector(3, 1000)], [vector(4, 1000)]),
        op(2, [vector(2, 100)], [vector(5, 100)]),
    ]
    reach = reaches(ops, [None] * 3)[2]
    # Since op 0 ended, op 1 touched 4000 + 4000 bytes; op 2 itself touches 800.
    assert reach.tensors[0] == (400.0, 8800.0)


def test_an_output_takes_the_block_that_its_size_last_freed() -> None:
    # Each step frees a 400-byte block when its last reader has run; the next step's first output takes it.
    ops = [op(0, [vector(1, 100)], [vector(2, 100)]), op(1, [vector(2, 100)], [vector(3, 100)])]
    first, second = reaches(ops, [None] * 2)
    assert first.tensors[1][1] < math.inf
    assert second.tensors[1][1] < math.inf


def test_an_output_above_the_mapping_threshold_is_new_each_time() -> None:
    n_elems = MAP_BYTES // 4 + 1
    (reach,) = reaches([op(0, [vector(1, 4)], [vector(2, n_elems)])], [None])
    assert reach.fresh_bytes == 4 * n_elems


def test_warm_and_cold_cases_are_the_two_ends() -> None:
    one = op(0, [vector(1, 100)], [vector(2, 100)])
    sizes = {"private": 1e6, "shared": 1e8}
    assert level_bytes(cold(one), sizes, 3.0) == (0.0, 800.0)
    shared, memory = level_bytes(warm(one), sizes, 3.0)
    assert shared + memory == pytest.approx(0.0, abs=1e-3)


def test_a_set_as_large_as_the_cache_loses_half_of_itself() -> None:
    big = op(0, [vector(1, 1000)], [vector(2, 1000)])
    _, memory = level_bytes(warm(big), {"private": 1.0, "shared": 8000.0}, 3.0)
    # The input lies as far back as the cache is large; of the output two blocks take turns, half as far again.
    assert memory == pytest.approx(4000.0 * 0.5 + 4000.0 * 1.5**3 / (1.0 + 1.5**3))
