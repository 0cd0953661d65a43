"""The CUDA measuring code on a pretended device: a clock that only events and replays advance, and torch's own names."""

from collections import Counter
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from calibrate import host_cuda
from calibrate.build import Prepared
from calibrate.measure_cuda import LAUNCHES, CudaClock, round_s, time_prepared
from perfmodel.db.device import HostCosts
from perfmodel.db.host import host_costs


class Machine:
    """A device with an integer clock in microseconds: a call takes `call_us`, issuing one takes the host `host_us`."""

    def __init__(self, *, call_us: int = 7, host_us: int = 2, capturable: bool = True) -> None:
        self.call_us, self.host_us, self.capturable = call_us, host_us, capturable
        self.now_us = 0
        self.capturing: list[int] | None = None
        self.seen: Counter[int] = Counter()
        self.order: list[int] = []
        self.streams: list[str] = []

    def call(self, place: int) -> None:
        self.seen[place] += 1
        self.order.append(place)
        if self.capturing is not None:
            if not self.capturable:
                raise RuntimeError("operation not permitted when stream is capturing")
            self.capturing.append(place)
        else:
            self.now_us += max(self.call_us, self.host_us)

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        machine = self

        class Event:
            def __init__(self, *, enable_timing: bool) -> None:
                assert enable_timing
                self.at_us: int | None = None

            def record(self) -> None:
                self.at_us = machine.now_us

            def synchronize(self) -> None:
                assert self.at_us is not None

            def elapsed_time(self, other: Any) -> float:
                return (other.at_us - self.at_us) / 1000  # milliseconds, as torch's

        class CUDAGraph:
            def __init__(self) -> None:
                self.nodes: list[int] = []

            def replay(self) -> None:
                machine.now_us += machine.call_us * len(self.nodes)

        @contextmanager
        def graph(made: CUDAGraph) -> Any:
            machine.capturing = made.nodes
            try:
                yield
            finally:
                machine.capturing = None

        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(torch.cuda, "CUDAGraph", CUDAGraph)
        monkeypatch.setattr(torch.cuda, "graph", graph)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda: "the default stream")
        monkeypatch.setattr(torch.cuda, "set_stream", self.streams.append)

    def prepared(self, n_sets: int) -> Prepared:
        return Prepared(call=self.call, arguments=tuple((i,) for i in range(n_sets)), kwargs={}, moved_bytes=0)


def test_a_replayed_graph_is_timed_per_call(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(call_us=7)
    machine.install(monkeypatch)
    timing = time_prepared(machine.prepared(1), 1e-3, CudaClock())
    assert timing.median_s == pytest.approx(7e-6)
    assert timing.n_calls % LAUNCHES == 0
    # 1 ms of budget holds 7 series of 20 calls of 7 us, and the one that passes it.
    assert timing.n_calls == 8 * LAUNCHES


@pytest.mark.parametrize("n_sets", [1, 3, 20, 50])
def test_every_set_is_met_equally_often_and_only_after_all_others(monkeypatch: pytest.MonkeyPatch, n_sets: int) -> None:
    machine = Machine()
    machine.install(monkeypatch)
    time_prepared(machine.prepared(n_sets), 0.0, CudaClock())
    assert set(machine.seen) == set(range(n_sets))
    assert len(set(machine.seen.values())) == 1
    again = [machine.order[i + n_sets] - place for i, place in enumerate(machine.order[:-n_sets])]
    assert not any(again)  # a full lap lies between two visits, so a cold case finds nothing of its own in the cache


def test_what_cannot_be_captured_is_timed_eagerly_if_the_device_is_the_slower(monkeypatch: pytest.MonkeyPatch) -> None:
    slow = Machine(call_us=500, capturable=False)
    slow.install(monkeypatch)
    monkeypatch.setattr("calibrate.measure_cuda.time.perf_counter", lambda: 0.0)
    assert time_prepared(slow.prepared(1), 1e-3, CudaClock()).median_s == pytest.approx(500e-6)
    assert slow.streams == ["the default stream"]  # not the one of the capture that broke off


def test_what_waits_for_the_device_is_not_captured_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    slow = Machine(call_us=500)
    slow.install(monkeypatch)
    monkeypatch.setattr("calibrate.measure_cuda.time.perf_counter", lambda: 0.0)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", None)
    assert time_prepared(slow.prepared(1), 1e-3, CudaClock(), capture=False).median_s == pytest.approx(500e-6)


@pytest.mark.parametrize(
    ("n_sets", "call_us", "n_launches"), [(1, 7, 20), (3, 7, 18), (50, 7, 50), (1, 500, 4), (2, 9000, 2)]
)
def test_series_of_long_calls_are_short(
    n_sets: int, call_us: int, n_launches: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # 20 calls in whole laps, or as many laps as fill 2 ms; at least three series, by a budget of nothing.
    machine = Machine(call_us=call_us)
    machine.install(monkeypatch)
    before_s = machine.now_us * 1e-6
    timing = time_prepared(machine.prepared(n_sets), 0.0, CudaClock())
    assert timing.n_calls == 3 * n_launches
    # Two laps to warm up, one replay that nobody times, three that are timed.
    assert machine.now_us * 1e-6 - before_s == pytest.approx(call_us * 1e-6 * (2 * n_sets + 4 * n_launches))
    assert round_s(call_us * 1e-6, n_sets, 0.0) == pytest.approx(call_us * 1e-6 * (2 * n_sets + 4 * n_launches))


def test_a_reading_that_is_the_hosts_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    quick = Machine(call_us=1, host_us=9, capturable=False)
    quick.install(monkeypatch)
    monkeypatch.setattr("calibrate.measure_cuda.time.perf_counter", lambda: quick.now_us * 1e-6)
    with pytest.raises(ValueError, match="reading is the host's"):
        time_prepared(quick.prepared(1), 1e-3, CudaClock())


class FakeHost:
    """A machine of known figures whose first batch of each kind is ten times slower."""

    def __init__(self) -> None:
        self.asked: Counter[str] = Counter()

    def _cost(self, name: str, each_s: float) -> float:
        self.asked[name] += 1
        return each_s * (10 if self.asked[name] == 1 else 1)

    def op_s(self, n_calls: int) -> float:
        return self._cost("op", 6e-6 * n_calls)

    def backward_s(self, n_nodes: int) -> float:
        return self._cost("backward", 9e-6 * n_nodes)

    def launch_s(self, n_launches: int) -> float:
        return self._cost("launch", 3e-6 * n_launches)

    def sync_s(self) -> float:
        return self._cost("sync", 5e-6)

    def round_trip_s(self) -> float:
        return self._cost("round trip", 9.5e-6)


def test_host_figures_are_per_call_and_leave_the_first_batch_out(tmp_path: Path) -> None:
    figures = host_cuda.measure(FakeHost())
    # Operators have one launch each (3 us), which is counted apart; the round trip is a launch, a latency and a wait.
    assert figures == pytest.approx(
        {"op_dispatch_s": 3e-6, "backward_op_s": 6e-6, "launch_s": 3e-6, "launch_latency_s": 1.5e-6, "sync_s": 5e-6}
    )
    facts = {"device": "a card", "date": "2026-11-30", "torch": "2.11", "statistic": host_cuda.STATISTIC}
    host_cuda.write(tmp_path, figures, facts)
    before = HostCosts(
        op_dispatch_s=9.0, backward_op_s=9.0, launch_s=9.0, launch_latency_s=9.0, sync_s=9.0, low_frac=0.5, source="old"
    )
    read = host_costs(tmp_path, before)
    assert {name: getattr(read, name) for name in figures} == pytest.approx(figures)
    assert (read.low_frac, read.high_frac) == (0.79, 1.23)  # the spread of one host (see HostCosts)
    assert read.source.startswith("measured on a card, 2026-11-30, torch 2.11")
