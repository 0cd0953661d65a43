"""Shipped fits never beat their device's peaks; the check that says so sees a law that does."""

from dataclasses import replace

import pytest

from perfmodel.db import list_devices, load_device
from perfmodel.estimate import Estimate, Source
from perfmodel.kernels.probe import SIZES, check_prices, faults, probes
from perfmodel.kernels.registry import FAMILIES


@pytest.mark.parametrize("name", list_devices())
def test_no_shipped_fit_beats_its_devices_peak(name):
    problems, _ = check_prices(load_device(name))
    assert problems == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: 0.0, "0.0 s is no time"),
        (lambda t: float("nan"), "nan s is no time"),
        (lambda t: t / 100, "FLOP/s is above the device's peak"),
    ],
)
def test_the_check_sees_a_law_that_is_too_fast(monkeypatch, change, message):
    law = FAMILIES["gemm"]
    monkeypatch.setitem(
        FAMILIES,
        "gemm",
        lambda calls, device: [
            Estimate(time_s=change(e.time_s), low_s=e.low_s, high_s=e.high_s, source=Source.FITTED)
            for e in law(calls, device)
        ],
    )
    problems, _ = check_prices(load_device("a100_sxm_80gb"), [p for p in probes() if p.label.startswith("mm, n")])
    assert any(message in problem for problem in problems)


def test_bytes_faster_than_memory_are_seen():
    from perfmodel.kernels import calls_of

    device = load_device("a100_sxm_80gb")
    op = next(p for p in probes() if p.label == "clone, rows in float32").ops[-1]
    (call,) = calls_of(op)  # 128 MiB in 10 us are 13 TB/s
    fast = Estimate(time_s=1e-5, low_s=1e-5, high_s=1e-5, source=Source.FITTED)
    assert any("B/s is above memory and L2" in fault for fault in faults(call, fast, device))
    slow = replace(fast, time_s=1e-3)
    assert list(faults(call, slow, device)) == []


def test_a_time_that_falls_is_remarked(monkeypatch):
    law = FAMILIES["gemm"]

    def shrinking(calls, device):
        return [
            replace(e, time_s=e.time_s * (0.01 if c.features["n"] == SIZES[-1] else 1.0))
            for c, e in zip(calls, law(calls, device), strict=True)
        ]

    monkeypatch.setitem(FAMILIES, "gemm", shrinking)
    _, remarks = check_prices(load_device("a100_sxm_80gb"), [p for p in probes() if p.label == "mm, n in float32"])
    assert any("8192 -> 16384" in remark for remark in remarks)
