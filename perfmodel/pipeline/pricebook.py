"""Prices of events as arrays: each op object is priced once on a device, however many plans and runs it is part of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from perfmodel.db.device import Device
from perfmodel.estimate import Estimate
from perfmodel.graph import PHASES, Op
from perfmodel.kernels import calls_of, host_cost_s, price
from perfmodel.kernels.registry import KernelCall
from perfmodel.kernels.roofline import peak_flops_per_s
from perfmodel.plan.events import Event
from perfmodel.sim.program import COMM, COMPUTE, COPY

MAX_ROWS = 200_000  # ops remembered for one device, about 100 MB; beyond it the book starts anew
STREAM_NUMBERS: Mapping[str, int] = {
    "compute": COMPUTE, "comm": COMM, "copy": COPY, "tensor": 4, "send_next": 5, "recv_prev": 6, "send_prev": 7,
    "recv_next": 8,
}  # fmt: skip

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]
# Columns of one row an op or collective, and of one row a kernel.
ROW_COLUMNS = ("n_kernels", "first_kernel", "dispatch_s", "stream", "phase", "label", "host_sync", "flops", "recompute")
KERNEL_COLUMNS = ("time_s", "low_s", "high_s", "source", "family", "ideal_s")
_FLOATS = {"dispatch_s", "time_s", "low_s", "high_s", "ideal_s", "flops"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Prices:
    """Prices of the events of one rank class.

    Attributes:
        row: row of each event in the columns of `rows`.
        rows: by column: `n_kernels` and where they begin in `kernels`, the host's `dispatch_s` (launches apart), `stream`
            number, `phase` (index into PHASES), `label` (index into `names`), `host_sync`, `flops`, `recompute`.
        kernels: by column: `time_s`, `low_s`, `high_s`, `source`, `family` (index into `names`), and `ideal_s`, the time
            at the datasheet's peak rates.
        names: labels and families by index.
    """

    row: IntArray
    rows: Mapping[str, NDArray[np.generic]]
    kernels: Mapping[str, NDArray[np.generic]]
    names: Sequence[str]

    def of_events(self, column: str) -> NDArray[np.generic]:
        """A column of `rows` for each event."""
        return self.rows[column][self.row]


class PriceBook:
    """Prices of op objects on one device. Only ever added to, so threads may share it."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self._clear()

    def _clear(self) -> None:
        self._row_of: dict[int, int] = {}
        self._held: list[Op] = []  # keeps identities from being reused
        self._names: dict[str, int] = {}
        self._rows: dict[str, list[float]] = {name: [] for name in ROW_COLUMNS}
        self._kernels: dict[str, list[float]] = {name: [] for name in KERNEL_COLUMNS}
        self._arrays: tuple[Mapping[str, NDArray[np.generic]], Mapping[str, NDArray[np.generic]]] | None = None

    def prices(self, events: Sequence[Event], collectives: Mapping[int, Estimate]) -> Prices:
        """Prices of events; `collectives` maps instances of collectives to estimates."""
        # On a CPU a price depends on what ran before (what its caches hold), so every sequence is priced as a whole.
        if len(self._held) > MAX_ROWS or self.device.kind == "cpu":
            self._clear()
        known = self._row_of
        unknown = {id(e.op): e.op for e in events if e.op is not None and id(e.op) not in known}
        if unknown:
            self._add(list(unknown.values()))
        first = len(self._held)
        rows: list[int] = []
        others: list[Event] = []
        for event in events:
            if event.op is not None:
                rows.append(known[id(event.op)])
            else:
                rows.append(first + len(others))
                others.append(event)
        if self._arrays is None:
            self._arrays = _arrays(self._rows), _arrays(self._kernels)
        own_rows, own_kernels = self._arrays
        more_rows, more_kernels = self._of_collectives(others, collectives)
        return Prices(
            row=np.array(rows, dtype=np.int64),
            rows=_joined(own_rows, more_rows),
            kernels=_joined(own_kernels, more_kernels),
            names=tuple(self._names),
        )

    def _add(self, ops: Sequence[Op]) -> None:
        for op, estimates in zip(ops, price(ops, self.device), strict=True):
            calls = calls_of(op)
            n_kernels = len(estimates)  # on a CPU one for an op, however many kernels its rule names
            dispatch_s = host_cost_s(op, n_kernels, self.device)
            if self.device.kind == "cuda":
                dispatch_s -= n_kernels * self.device.host.launch_s
            self._add_row(
                n_kernels=n_kernels,
                first_kernel=len(self._kernels["time_s"]),
                dispatch_s=dispatch_s,
                stream=STREAM_NUMBERS[op.stream],
                phase=PHASES.index(op.phase),
                label=self._name(op.name),
                host_sync=op.host_sync,
                flops=sum(call.work.flops for call in calls),
                recompute=op.recompute,
            )
            parts = [calls] if n_kernels == 1 else [(call,) for call in calls]
            for part, estimate in zip(parts, estimates, strict=True):
                ideal_s = min(sum(self._ideal_s(call) for call in part), estimate.time_s)
                _append(self._kernels, _kernel(estimate, self._name(part[0].family), ideal_s))
        # The identities come last: another thread that sees one finds its row complete.
        self._arrays = None
        for op in ops:
            self._row_of[id(op)] = len(self._held)
            self._held.append(op)

    def _ideal_s(self, call: KernelCall) -> float:
        """Seconds of a kernel at the datasheet's peak rates."""
        flops_s = call.work.flops / peak_flops_per_s(self.device, call.pipe)
        return max(flops_s, call.work.bytes / self.device.memory_bytes_per_s)

    def _add_row(self, **values: float) -> None:
        _append(self._rows, values)

    def _of_collectives(
        self, events: Sequence[Event], collectives: Mapping[int, Estimate]
    ) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
        rows: dict[str, list[float]] = {name: [] for name in ROW_COLUMNS}
        kernels: dict[str, list[float]] = {name: [] for name in KERNEL_COLUMNS}
        for event in events:
            if event.collective is None:
                raise RuntimeError("an event carries an op or a collective")
            name = self._name(event.collective.op)
            values = {
                "n_kernels": 1,
                "first_kernel": len(self._kernels["time_s"]) + len(kernels["time_s"]),
                "dispatch_s": self.device.host.op_dispatch_s,
                "stream": STREAM_NUMBERS[event.stream],
                "phase": PHASES.index(event.phase),
                "label": name,
                "host_sync": event.host_waits,
                "flops": 0,
                "recompute": False,
            }
            _append(rows, values)
            _append(kernels, _kernel(collectives[event.collective.instance], name, 0.0))
        return rows, kernels

    def _name(self, name: str) -> int:
        return self._names.setdefault(name, len(self._names))


def _kernel(estimate: Estimate, family: int, ideal_s: float) -> dict[str, float]:
    return {
        "time_s": estimate.time_s,
        "low_s": estimate.low_s,
        "high_s": estimate.high_s,
        "source": int(estimate.source),
        "family": family,
        "ideal_s": ideal_s,
    }


def _append(columns: Mapping[str, list[float]], values: Mapping[str, float]) -> None:
    for name, column in columns.items():
        column.append(values[name])


def _arrays(columns: Mapping[str, Sequence[float]]) -> dict[str, NDArray[np.generic]]:
    return {
        name: np.array(column, dtype=np.float64 if name in _FLOATS else np.int64) for name, column in columns.items()
    }


def _joined(
    own: Mapping[str, NDArray[np.generic]], more: Mapping[str, Sequence[float]]
) -> Mapping[str, NDArray[np.generic]]:
    if not any(more.values()):
        return own
    return {name: np.concatenate([own[name], column]) for name, column in _arrays(more).items()}
