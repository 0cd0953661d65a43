"""The pricing core: rules found and remembered, families asked once, nothing unknown is free."""

from dataclasses import replace

import pytest

from perfmodel.db import Device, load_device
from perfmodel.estimate import Source, Work
from perfmodel.graph import Op, TensorSpec
from perfmodel.kernels import calls_of, has_rule, price, price_calls, registered_rules, roofline, work
from perfmodel.kernels.pricing import _Memory, signature
from perfmodel.kernels.registry import FAMILIES, RULES, KernelCall, kernel_family, kernel_rule
from perfmodel.kernels.roofline import peak_flops_per_s


def tensor(id: int, *shape: int, dtype: str = "float32", storage: int | None = None) -> TensorSpec:
    strides = []
    step = 1
    for size in reversed(shape):
        strides.append(step)
        step *= size
    return TensorSpec(
        id=id, shape=shape, dtype=dtype, strides=tuple(reversed(strides)), storage=id if storage is None else storage
    )


def op(name: str, inputs: tuple[TensorSpec, ...], outputs: tuple[TensorSpec, ...], **attrs: object) -> Op:
    return Op(
        id=0,
        name=name,
        inputs=inputs,
        input_names=tuple(f"arg{i}" for i in range(len(inputs))),
        outputs=outputs,
        attrs=attrs,
    )


@pytest.fixture
def device() -> Device:
    """100 SMs, 10 TFLOP/s, 1 TB/s, 2 us: figures that a person can divide by."""
    return replace(
        load_device("v100_sxm2_16gb"),
        peak_flops_per_s={"fp32": 10e12, "fp16_tensor": 100e12},
        memory_bytes_per_s=1e12,
        kernel_floor_s=2e-6,
        fits={},
    )


@pytest.mark.parametrize(
    ("flops", "n_bytes", "pipe", "expected_s"),
    [
        (10**9, 10**3, "fp32", 100e-6),  # 1 GFLOP at 10 TFLOP/s
        (10**9, 10**3, "fp16_tensor", 10e-6),  # at 100 TFLOP/s
        (10**3, 10**9, "fp32", 1e-3),  # 1 GB at 1 TB/s
        (10**3, 10**3, "fp32", 2e-6),  # the floor
        (10**9, 10**3, "tf32_tensor", 100e-6),  # no such pipe: fp32 stands in
        (10**9, 10**3, "bf16_tensor", 100e-6),  # bf16, then fp32
    ],
)
def test_roofline_by_hand(device: Device, flops: int, n_bytes: int, pipe: str, expected_s: float) -> None:
    call = KernelCall(family="x", work=Work(flops=flops, read_bytes=n_bytes // 2, write_bytes=n_bytes // 2), pipe=pipe)
    (estimate,) = roofline([call], device)
    assert estimate.time_s == pytest.approx(expected_s)
    assert estimate.low_s < estimate.time_s < estimate.high_s
    assert estimate.source is Source.ROOFLINE


def test_a_misspelt_pipe_is_a_bug_not_a_guess(device: Device) -> None:
    with pytest.raises(RuntimeError, match="'fp23' is no pipe"):
        peak_flops_per_s(device, "fp23")


def test_an_op_without_a_rule_costs_its_bytes_and_says_so(device: Device) -> None:
    a, b = tensor(1, 1000, 1000), tensor(2, 1000, 1000)
    mystery = op("custom.mystery", (a, a, b), (tensor(3, 1000, 500),))
    assert not has_rule(mystery)
    # a counts once though it is passed twice: 4 MB + 4 MB read, 2 MB written.
    assert work(mystery) == Work(read_bytes=8_000_000, write_bytes=2_000_000)
    ((estimate,),) = price([mystery], device)
    assert estimate.time_s == pytest.approx(10e-6)
    assert estimate.source is Source.UNMODELLED


def test_an_op_without_a_rule_and_without_tensors_is_not_free(device: Device) -> None:
    ((estimate,),) = price([op("custom.nothing", (), ())], device)
    assert estimate.time_s == device.kernel_floor_s


def test_a_view_costs_nothing_by_rule(device: Device) -> None:
    view = op("aten.view", (tensor(1, 4, 6),), (tensor(2, 24, storage=1),))
    assert has_rule(view)
    assert price([view], device) == [()]
    assert work(view) == Work()


def test_answers_come_in_order_and_one_for_each_kernel(device: Device) -> None:
    ops = [
        op("aten.zeros", (), (tensor(1, 10**6),)),
        op("aten.view", (tensor(1, 10**6),), (tensor(2, 1000, 1000, storage=1),)),
        op("custom.mystery", (tensor(1, 10**6),), (tensor(3, 10**6),)),
        op("aten.zeros", (), (tensor(4, 10**8),)),
    ]
    priced = price(ops, device)
    assert [len(estimates) for estimates in priced] == [len(calls_of(each)) for each in ops] == [1, 0, 1, 1]
    assert priced[3][0].time_s > 50 * priced[0][0].time_s


def test_equal_ops_share_one_call_and_a_family_is_asked_once(device: Device) -> None:
    asked = []

    @kernel_family("test_once")
    def law(calls, on):  # type: ignore[no-untyped-def]
        asked.append(len(calls))
        return roofline(calls, on)

    @kernel_rule("test.once")
    def rule(each: Op) -> tuple[KernelCall, ...]:
        return (KernelCall(family="test_once", work=Work(read_bytes=each.inputs[0].bytes)),)

    try:
        ops = [op("test.once", (tensor(i, 1000 + i % 3),), ()) for i in range(30)]
        priced = price(ops, device)
        assert asked == [3]
        assert priced[0] == priced[3]
        # Asked again, nothing is computed; another device, or another law, starts anew.
        assert price(ops, device) == priced
        assert asked == [3]
        slower = replace(device, memory_bytes_per_s=1e9)
        assert price(ops, slower)[0][0].time_s > priced[0][0].time_s
        assert asked == [3, 3]
        # The same, asked for one at a time.
        assert [price([each], device)[0] for each in ops] == priced
    finally:
        del FAMILIES["test_once"], RULES["test.once"]


def test_a_family_that_loses_a_call_is_caught(device: Device) -> None:
    @kernel_family("test_short")
    def law(calls, on):  # type: ignore[no-untyped-def]
        return roofline(calls, on)[1:]

    try:
        with pytest.raises(RuntimeError, match="test_short gave 1 estimates for 2 calls"):
            price_calls([KernelCall(family="test_short", work=Work(flops=i)) for i in range(2)], device)
    finally:
        del FAMILIES["test_short"]


def test_the_signature_sees_what_a_rule_may_look_at() -> None:
    base = op("aten.copy_", (tensor(1, 4, 4), tensor(2, 4, 4)), (tensor(1, 4, 4),), alpha=1)
    renumbered = op("aten.copy_", (tensor(7, 4, 4), tensor(9, 4, 4)), (tensor(7, 4, 4),), alpha=1)
    assert signature(base) == signature(replace(renumbered, id=5, module="a.b"))
    for changed in (
        replace(base, name="aten.copy"),
        replace(base, overload="Tensor"),
        replace(base, attrs={"alpha": 2}),
        replace(base, phase="backward"),
        replace(base, recompute=True),
        replace(base, input_names=("self", "src")),
        replace(base, inputs=(tensor(1, 4, 4), tensor(2, 16))),
        replace(base, inputs=(tensor(1, 4, 4), tensor(2, 4, 4, dtype="float16"))),
        replace(base, inputs=(tensor(1, 4, 4), tensor(1, 4, 4))),  # self is also src
        replace(base, outputs=(tensor(3, 4, 4),)),  # out of place
    ):
        assert signature(changed) != signature(base)


def test_memory_starts_anew_when_full(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("perfmodel.kernels.pricing.MAX_REMEMBERED_OPS", 2)
    memory = _Memory()
    ops = [op("aten.zeros", (), (tensor(i, 10 + i),)) for i in range(5)]
    for each in ops:
        memory.calls(each)
    assert len(memory.by_identity) <= 2


def test_two_rules_or_laws_for_one_name_are_an_error() -> None:
    registered_rules()
    with pytest.raises(RuntimeError, match=r"aten\.view has two kernel rules"):
        kernel_rule(" aten.view ")(lambda each: ())
    with pytest.raises(RuntimeError, match="family copy has two laws"):
        kernel_family("copy")(roofline)


def test_a_sparse_argument_finds_the_sparse_rule() -> None:
    table, indices, values = tensor(1, 10**7, 64), tensor(2, 1, 512, dtype="int64"), tensor(3, 512, 64)
    add = Op(
        id=0,
        name="aten.add_",
        inputs=(table, indices, values),
        input_names=("self", "other.indices", "other.values"),
        outputs=(table,),
        attrs={"alpha": 1},
    )
    # 512 rows of 64 floats: values read, rows read and written, never the 2.56 GB table.
    assert work(add) == Work(flops=512 * 64, read_bytes=2 * 512 * 256 + 512 * 8, write_bytes=512 * 256)
