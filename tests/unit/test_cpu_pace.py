"""Prices at another pace: what grows with which factor, in closed form; and the factors, from times written down by hand."""

import json
import math
from concurrent.futures import Future
from dataclasses import asdict, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from calibrate.pace import FAMILIES, Looks, ProbeKernel, probe_kernels
from perfmodel.config import load_topology
from perfmodel.db.device import Pace, paced
from perfmodel.db.loading import load_device
from perfmodel.errors import ConfigError
from perfmodel.graph import Op, TensorSpec
from perfmodel.kernels.cpu_features import cpu_call, table_lookups
from perfmodel.kernels.cpu_law import LEFT_FRAC, _segments, flushed, law, price_step
from perfmodel.kernels.cpu_memory import cold, warm
from perfmodel.report.live_pace import render_pace
from perfmodel.validate.live import with_pace_range
from perfmodel.validate.run_suite import CaseResult, score_suite
from perfmodel.validate.suite import Case

CPU = load_device("cpu")
FACTORS = st.floats(0.5, 3.0)


def tensor(storage: int, *shape: int) -> TensorSpec:
    strides = (shape[1], 1) if len(shape) == 2 else (1,)
    return TensorSpec(id=storage, shape=shape, dtype="float32", strides=strides, storage=storage)


def product(m: int, n: int, k: int) -> Op:
    return Op(id=0, name="aten.mm", inputs=(tensor(1, m, k), tensor(2, k, n)), input_names=("self", "mat2"),
              outputs=(tensor(3, m, n),))  # fmt: skip


def relu(n_elems: int) -> Op:
    return Op(
        id=0, name="aten.relu", inputs=(tensor(1, n_elems),), input_names=("self",), outputs=(tensor(2, n_elems),)
    )


def law_s(op: Op, pace: Pace, *, far: bool) -> float:
    device = replace(CPU, pace=pace)
    call = cpu_call(op, cold(op) if far else warm(op), None, float(CPU.l2_bytes))
    key = "product" if op.name == "aten.mm" else "relu"
    return float(law(_segments(device)[key], [call], device).time_s[0])


@given(factor=FACTORS, n=st.integers(1, 2000), far=st.booleans())
@settings(max_examples=40, deadline=None)
def test_a_machine_that_is_slower_in_all_takes_as_much_longer(factor, n, far):
    pace = Pace(compute=factor, memory=factor, lookups=factor, host=factor)
    for op in (product(n, 64, n), relu(1000 * n)):
        assert law_s(op, pace, far=far) == pytest.approx(factor * law_s(op, Pace(), far=far), rel=1e-9)


def test_a_large_product_follows_arithmetic_and_a_stream_the_memory():
    for op, far, mine in ((product(1500, 1500, 1500), False, "compute"), (relu(20_000_000), True, "memory")):
        plain_s = law_s(op, Pace(), far=far)
        grown = {name: law_s(op, Pace(**{name: 2.0}), far=far) / plain_s for name in asdict(Pace())}
        assert grown.pop(mine) > 1.9
        assert max(grown.values()) < 1.1


def test_a_step_takes_as_much_longer_and_the_correction_stays():
    ops = [product(300, 200, 100), relu(5000)]
    pace = Pace(compute=1.5, memory=1.5, lookups=1.5, host=1.5)
    plain, slow = (price_step(ops, device) for device in (CPU, paced(CPU, pace)))
    for before, after in zip(plain, slow, strict=True):
        assert after[0].time_s == pytest.approx(1.5 * before[0].time_s, rel=1e-9)
        assert after[0].high_s == pytest.approx(1.5 * before[0].high_s, rel=1e-9)


def test_calls_on_tables_wait_for_what_the_step_swept_out_since():
    table, n_bytes = tensor(1, 10_000, 16), float(CPU.l2_bytes)
    lookups = Op(id=0, name="aten.embedding", inputs=(table, tensor(2, 64)), input_names=("weight", "indices"),
                 outputs=(tensor(3, 64, 16),))  # fmt: skip
    shares = []
    for gap_bytes in (0.0, LEFT_FRAC * n_bytes, 10 * n_bytes, math.inf):
        reach = replace(cold(lookups), gap_bytes=gap_bytes)
        call = cpu_call(lookups, reach, table_lookups(lookups, {}), n_bytes)
        shares.append(flushed(call, reach, CPU).features["flushed"])
    # Half is lost where the sweep is as large as what neighbours leave (`cpu_memory.beyond`).
    assert shares[:2] == pytest.approx([0.0, 0.5])
    assert shares[2] > 0.99
    assert shares[3] == 1.0
    stream = relu(1000)
    plain = cpu_call(stream, cold(stream), None, n_bytes)
    assert flushed(plain, cold(stream), CPU) is plain


def test_a_gpu_has_no_pace():
    gpu = load_device("a100_sxm_80gb")
    assert paced(gpu, Pace(compute=2.0)) is gpu


def test_kernels_are_those_of_the_tables_and_the_same_each_time():
    kernels = probe_kernels(CPU)
    assert kernels == probe_kernels(CPU)
    assert {kernel.resource for kernel in kernels} == set(FAMILIES)
    assert {json.loads(k.case)["state"] for k in kernels if k.resource != "host"} == {"cold"}
    assert all(k.then_s > 0 for k in kernels)


class _Written:
    """A pool whose results are written down."""

    def __init__(self, *results: list[float]) -> None:
        self.results = list(results)

    def submit(self, *_: object) -> "Future[list[float]]":
        done: Future[list[float]] = Future()
        done.set_result(self.results.pop(0))
        return done


def test_factors_are_medians_over_kernels_of_medians_over_looks():
    kernels = [ProbeKernel(resource=r, case="", then_s=1.0) for r in ("compute", "compute", "compute", "memory")]
    looks = Looks(_Written([9.0] * 4, [1.0, 1.2, 5.0, 2.0], [1.1, 1.3, 5.0, 3.0], [9.0, 1.4, 5.0, 4.0]), kernels, 1)  # type: ignore[arg-type]  # only submits
    for _ in range(3):
        looks.look()
    # The first answer prepares and is not counted. Medians over looks: 1.1, 1.3, 5.0 and 3.0.
    assert looks.pace() == Pace(compute=1.3, memory=3.0, lookups=1.0, host=1.0)
    assert looks.spread()["memory"] == pytest.approx((2.2, 3.8))
    assert "compute: 1.300" in render_pace(looks.pace(), looks.spread(), score_suite([]))


def test_ranges_hold_what_other_looks_saw_in_quadrature():
    case = Case(
        name="a",
        model="m",
        topology="cpu",
        plan="ddp",
        batch_per_rank=1,
        seq_len=None,
        precision="fp32",
        mode="eager",
        phase="train",
        measured_s=1.0,
        weight=1.0,
        source="",
        note="",
    )
    usual = CaseResult(case=case, predicted_s=10.0, low_s=7.0, high_s=13.0)
    fast, slow = replace(usual, predicted_s=6.0), replace(usual, predicted_s=14.0)
    (found,) = with_pace_range([usual], [fast], [slow])
    assert (found.predicted_s, found.low_s, found.high_s) == (10.0, 5.0, 15.0)
    # A machine that was never faster says nothing about the lower end; no prediction has no range.
    assert with_pace_range([usual], [usual], [usual])[0] == usual
    failed = CaseResult(case=case, reason="no such model")
    assert with_pace_range([failed], [failed], [failed])[0] == failed


def test_no_tables_no_pace(tmp_path):
    (tmp_path / "cpu").mkdir()
    assert probe_kernels(CPU, str(tmp_path)) == ()
    assert Looks(_Written(), (), 1).pace() == Pace()  # type: ignore[arg-type]  # never asked


def test_a_machine_says_its_pace_and_nonsense_is_refused(tmp_path):
    node = "name: x\nnode:\n  cpus: {{loopback_bandwidth: 1 GB/s, loopback_latency: 1 us, pace: {{{}}}}}\n"
    (tmp_path / "good.yaml").write_text(node.format("compute: 1.1, memory: 1.3"))
    assert load_topology(str(tmp_path / "good.yaml")).node.cpus.pace.memory == 1.3
    (tmp_path / "bad.yaml").write_text(node.format("compute: 0"))
    with pytest.raises(ConfigError, match=r"node\.cpus\.pace\.compute"):
        load_topology(str(tmp_path / "bad.yaml"))
