"""The CUDA measuring code on a pretended device: a clock that only events and replays advance, and torch's own names."""

from collections import Counter
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from calibrate import host_cuda
from calibrate.build import Prepared
from calibrate.measure_cuda import LAUNCHES, CudaClock, time_prepared


class Machine:
    """A device with an integer clock in microseconds: a call takes `call_us`, issuing one takes the host `host_us`."""

    def __init__(self, *, call_us: int = 7, host_us: int = 2, capturable: bool = True) -> None:
        self.call_us, self.host_us, self.capturable = call_us, host_us, capturable
        self.now_us = 0
        self.capturing: list[int] | None = None
        self.seen: Counter[int] = Counter()
        self.order: list[int] = []

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


def test_host_figures_are_per_call_and_leave_the_first_batch_out(tmp_path: Path) -> None:
    figures = host_cuda.measure(FakeHost())
    assert figures == pytest.approx(
        {"op_dispatch_s": 6e-6, "backward_op_s": 9e-6, "launch_s": 3e-6, "sync_s": 5e-6}, rel=1e-12
    )
    path = host_cuda.write(tmp_path, figures, {"device": "a card", "statistic": host_cuda.STATISTIC})
    read = yaml.safe_load(path.read_text(encoding="utf-8"))
    assert read["host"]["launch_s"] == pytest.approx(3e-6)
    assert read["provenance"]["device"] == "a card"
