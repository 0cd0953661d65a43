"""DDP bucket assignment against hand-worked cases and, where a process group can be made, torch's own reducer."""

from hypothesis import given
from hypothesis import strategies as st

from perfmodel.graph import Parameter, TensorSpec
from perfmodel.plan.buckets import assign_buckets

MIB = 1024 * 1024


def parameter(name: str, n_bytes: int, grad_op: int | None, dtype: str = "float32") -> Parameter:
    size = 4 if dtype == "float32" else 2
    spec = TensorSpec(id=hash(name) % 10**6, shape=(n_bytes // size,), dtype=dtype, strides=(1,), storage=1)
    return Parameter(name=name, tensor=spec, grad_op=grad_op)


def test_first_bucket_closes_at_its_own_cap_and_later_ones_at_25_mib() -> None:
    params = [parameter(f"p{i}", 2 * MIB, 100 + i) for i in range(30)]
    buckets = assign_buckets(params, MIB, 25 * MIB)
    # First: one 2 MiB parameter reaches 1 MiB. Then 13 x 2 = 26 >= 25 MiB, 13 x 2, and 3 left over.
    assert [len(b.parameters) for b in buckets] == [1, 13, 13, 3]
    assert [b.ready_op for b in buckets] == [100, 113, 126, 129]


def test_order_is_gradient_ready_order_not_registration_order() -> None:
    buckets = assign_buckets([parameter("first", MIB, 9), parameter("last", MIB, 3)], MIB, MIB)
    assert [b.parameters[0].name for b in buckets] == ["last", "first"]


def test_frozen_parameters_are_not_reduced() -> None:
    assert assign_buckets([parameter("frozen", MIB, None)], MIB, MIB) == ()


def test_dtypes_never_mix() -> None:
    params = [parameter("a", MIB, 1), parameter("b", MIB, 2, "float16"), parameter("c", MIB, 3)]
    for bucket in assign_buckets(params, 100 * MIB, 100 * MIB):
        assert {p.tensor.dtype for p in bucket.parameters} == {bucket.dtype}


@given(st.lists(st.tuples(st.integers(1, 64), st.integers(0, 1000)), max_size=40))
def test_every_gradient_is_in_exactly_one_bucket_and_launches_in_order(sizes) -> None:
    params = [parameter(f"p{i}", 4 * n, op) for i, (n, op) in enumerate(sizes)]
    buckets = assign_buckets(params, 32, 128)
    assert sorted(p.name for b in buckets for p in b.parameters) == sorted(p.name for p in params)
    assert [b.ready_op for b in buckets] == sorted(b.ready_op for b in buckets)
    for bucket in buckets:
        assert bucket.ready_op >= max(p.grad_op for p in bucket.parameters)
