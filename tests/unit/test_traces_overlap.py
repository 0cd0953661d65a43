"""Slowdown of compute beside communication: a made-up trace with a known answer."""

import pytest

from perfmodel.errors import ConfigError
from perfmodel.traces.overlap import measure_overlap
from perfmodel.traces.spans import DeviceSpan, HostSpan, KinetoTrace, Step


def trace(kernels, collectives=()):
    """Kernels as (step, name, start, end): each is launched at the beginning of its 100 s step."""
    device, calls = [], []
    for number, (step, name, start, end) in enumerate([*kernels, *((0, "ncclX", *span) for span in collectives)]):
        common = {"start_s": float(start), "end_s": float(end), "correlation": number + 1}
        device.append(DeviceSpan(name=name, kind="kernel", stream=20 if name == "ncclX" else 7, **common))
        at = 100.0 * step + number / 1000
        calls.append(HostSpan(name="cudaLaunchKernel", thread="1", start_s=at, end_s=at, correlation=number + 1))
    return KinetoTrace(
        path="t.json",
        rank=0,
        world_size=2,
        origin_us=0.0,
        ops=(),
        calls=tuple(calls),
        device=tuple(sorted(device, key=lambda s: s.start_s)),
        steps=tuple(Step(name=f"ProfilerStep#{i}", start_s=100.0 * i, end_s=100.0 * (i + 1)) for i in range(2)),
    )


def test_the_ratio_of_the_same_kernel_with_and_without():
    kernels = [
        (0, "a", 10, 20),  # alone: 10
        (0, "b", 30, 34),  # alone: 4
        (0, "c", 40, 50),  # half beside: not counted
        (1, "a", 110, 122),  # beside: 12
        (1, "b", 122, 128),  # beside: 6
    ]
    found = measure_overlap(trace(kernels, [(45, 60), (109, 125), (125, 130)]))
    assert found.n_kernels == 2
    assert found.time_weighted == pytest.approx(18 / 14)
    assert found.median_ratio == pytest.approx((1.2 + 1.5) / 2)


def test_nothing_to_compare_is_said():
    with pytest.raises(ConfigError, match="no kernel ran both with and without"):
        measure_overlap(trace([(0, "a", 1, 2)]))
