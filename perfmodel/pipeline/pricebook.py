"""Prices of events as arrays: each op object is priced once on a device, however many plans and runs it is part of."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from threading import Lock
from typing import Any

import numpy as np
from numpy.typing import NDArray

from perfmodel.db.device import Device
from perfmodel.estimate import Estimate
from perfmodel.graph import PHASES, Op
from perfmodel.kernels import calls_of, host_cost_s, kind_of, price
from perfmodel.kernels.host import collective_dispatch_s
from perfmodel.kernels.registry import KernelCall
from perfmodel.kernels.roofline import peak_flops_per_s
from perfmodel.plan.events import Event
from perfmodel.sim.program import COMM, COMPUTE, COPY

MAX_SEQUENCES = 256  # rank classes' events remembered
MAX_ROWS = 200_000  # ops remembered for one device, about 100 MB; beyond it the book starts anew
STREAM_NUMBERS: Mapping[str, int] = {
    "compute": COMPUTE, "comm": COMM, "copy": COPY, "tensor": 4, "send_next": 5, "recv_prev": 6, "send_prev": 7,
    "recv_next": 8, "copies": 9, "context": 10,
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
        rows: for each event by column: `n_kernels` and where they begin in `kernels`, the host's `dispatch_s` (launches
            apart), `stream` number, `phase` (index into PHASES), `label` (index into `names`), `host_sync`, `flops`,
            `recompute`.
        kernels: by column: `time_s`, `low_s`, `high_s`, `source`, `family` (index into `names`), and `ideal_s`, the time
            at the datasheet's peak rates.
        names: labels and families by index.
        derived: what follows from the events, their device and the settings alone, found once however often they are priced.
    """

    rows: Mapping[str, NDArray[np.generic]]
    kernels: Mapping[str, NDArray[np.generic]]
    names: Sequence[str]
    derived: dict[Hashable, Any] = field(default_factory=dict)

    def of_events(self, column: str) -> NDArray[np.generic]:
        """A column of `rows`."""
        return self.rows[column]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Places:
    """Where a sequence of events finds its prices: rows of its ops, which events those are, and the collectives between."""

    events: Sequence[Event]  # held, so that its identity is not reused
    rows: IntArray
    of_op: IntArray
    others: tuple[Event, ...]
    derived: dict[Hashable, Any]


class _Columns:
    """Columns that grow: arrays with room at their ends."""

    def __init__(self, names: Sequence[str]) -> None:
        self.size = 0
        self._arrays: dict[str, NDArray[np.generic]] = {name: np.zeros(0, dtype=_type(name)) for name in names}

    def extend(self, more: Mapping[str, Sequence[float]]) -> None:
        """Adds rows at the end."""
        n_more = len(next(iter(more.values())))
        for name, values in more.items():
            array = self._arrays[name]
            if self.size + n_more > len(array):
                array = np.concatenate([array, np.zeros(max(n_more, len(array)), dtype=array.dtype)])
            array[self.size : self.size + n_more] = values
            self._arrays[name] = array
        self.size += n_more

    def at(self, rows: IntArray) -> dict[str, NDArray[np.generic]]:
        """These rows of every column."""
        return {name: array[rows] for name, array in self._arrays.items()}


class PriceBook:
    """Prices of op objects on one device. Threads may share it."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self._lock = Lock()
        self._clear()

    def _clear(self) -> None:
        self._row_of: dict[int, int] = {}
        self._held: list[Op] = []  # keeps identities from being reused
        self._places: dict[int, _Places] = {}  # of sequences to remember, by identity
        self._row_of_kind: dict[tuple[int, bool], int] = {}  # on a CUDA device, where equal ops cost the same
        self._names: dict[str, int] = {}
        self._rows, self._kernels = _Columns(ROW_COLUMNS), _Columns(KERNEL_COLUMNS)

    def prices(
        self,
        events: Sequence[Event],
        collectives: Mapping[int, Estimate],
        issue_s: Mapping[int, float] | None = None,
        *,
        remember: bool = False,
    ) -> Prices:
        """Prices of events; `collectives` maps instances of collectives to estimates.

        `issue_s` maps some of them to the host's time to ask for one (else that of the device). `remember` a sequence that
        will be asked for again.
        """
        with self._lock:
            places = self._places.get(id(events)) or self._place(events, remember=remember)
            return self._prices(places, collectives, issue_s or {})

    def _place(self, events: Sequence[Event], *, remember: bool) -> _Places:
        # On a CPU a price depends on what ran before (what its caches hold), so every sequence is priced as a whole.
        if len(self._held) > MAX_ROWS or self.device.kind == "cpu":
            self._clear()
        known = self._row_of
        unknown = {id(e.op): e.op for e in events if e.op is not None and id(e.op) not in known}
        if unknown:
            self._meet(list(unknown.values()))
        rows: list[int] = []
        others: list[Event] = []
        of_op: list[int] = []
        for number, event in enumerate(events):
            if event.op is not None:
                rows.append(known[id(event.op)])
                of_op.append(number)
            else:
                others.append(event)
        found = _Places(
            events=events,
            rows=np.array(rows, dtype=np.int64),
            of_op=np.array(of_op, dtype=np.int64),
            others=tuple(others),
            derived={},
        )
        if remember and self.device.kind == "cuda":
            if len(self._places) >= MAX_SEQUENCES:
                self._places = {}
            self._places[id(events)] = found
        return found

    def _prices(self, places: _Places, collectives: Mapping[int, Estimate], issue_s: Mapping[int, float]) -> Prices:
        ops = self._rows.at(places.rows)
        n_kernels = ops["n_kernels"].astype(np.int64)
        begins = np.cumsum(n_kernels) - n_kernels
        taken = np.repeat(ops["first_kernel"].astype(np.int64) - begins, n_kernels) + np.arange(int(n_kernels.sum()))
        ops["first_kernel"] = begins
        kernels = self._kernels.at(taken)
        if places.others:
            more_rows, more_kernels = self._of_collectives(places.others, collectives, issue_s, len(taken))
            ops = _merged(ops, more_rows, places.of_op, len(places.events))
            kernels = {name: np.concatenate([kernels[name], column]) for name, column in more_kernels.items()}
        return Prices(rows=ops, kernels=kernels, names=tuple(self._names), derived=places.derived)

    def _meet(self, ops: Sequence[Op]) -> None:
        """Gives ops their rows: on a CPU each its own, else one to all that cost the same."""
        self._held += ops
        if self.device.kind == "cpu":
            self._row_of |= {id(op): self._rows.size + number for number, op in enumerate(ops)}
            self._add(ops)
            return
        rows = self._row_of_kind
        new: list[Op] = []
        for op in ops:
            key = kind_of(op), op.host_sync
            if key not in rows:
                rows[key] = self._rows.size + len(new)
                new.append(op)
            self._row_of[id(op)] = rows[key]
        if new:
            self._add(new)

    def _add(self, ops: Sequence[Op]) -> None:
        """Prices ops, one new row each."""
        rows, kernels = _empty(ROW_COLUMNS), _empty(KERNEL_COLUMNS)
        for op, estimates in zip(ops, price(ops, self.device), strict=True):
            calls = calls_of(op)
            n_kernels = len(estimates)  # on a CPU one for an op, however many kernels its rule names
            dispatch_s = host_cost_s(op, n_kernels, self.device)
            if self.device.kind == "cuda":
                dispatch_s -= n_kernels * self.device.host.launch_s
            row = {
                "n_kernels": n_kernels,
                "first_kernel": self._kernels.size + len(kernels["time_s"]),
                "dispatch_s": dispatch_s,
                "stream": STREAM_NUMBERS[op.stream],
                "phase": PHASES.index(op.phase),
                "label": self._name(op.name),
                "host_sync": op.host_sync,
                "flops": sum(call.work.flops for call in calls),
                "recompute": op.recompute,
            }
            _append(rows, row)
            parts = [calls] if n_kernels == 1 else [(call,) for call in calls]
            for part, estimate in zip(parts, estimates, strict=True):
                ideal_s = min(sum(self._ideal_s(call) for call in part), estimate.time_s)
                _append(kernels, _kernel(estimate, self._name(part[0].family), ideal_s))
        self._kernels.extend(kernels)
        self._rows.extend(rows)

    def _ideal_s(self, call: KernelCall) -> float:
        """Seconds of a kernel at the datasheet's peak rates."""
        flops_s = call.work.flops / peak_flops_per_s(self.device, call.pipe)
        return max(flops_s, call.work.bytes / self.device.memory_bytes_per_s)

    def _of_collectives(
        self, events: Sequence[Event], collectives: Mapping[int, Estimate], issue_s: Mapping[int, float], first: int
    ) -> tuple[dict[str, NDArray[np.generic]], dict[str, NDArray[np.generic]]]:
        """Rows and kernels of collectives, whose kernels are numbered from `first`."""
        crowding = max(1.0, self.device.n_processes / self.device.n_sms)
        rows, kernels = _empty(ROW_COLUMNS), _empty(KERNEL_COLUMNS)
        for event in events:
            if event.collective is None:
                raise RuntimeError("an event carries an op or a collective")
            name, instance = self._name(event.collective.op), event.collective.instance
            row = {
                "n_kernels": 1,
                "first_kernel": first + len(kernels["time_s"]),
                "dispatch_s": crowding * issue_s[instance]
                if instance in issue_s
                else collective_dispatch_s(self.device),
                "stream": STREAM_NUMBERS[event.stream],
                "phase": PHASES.index(event.phase),
                "label": name,
                "host_sync": event.host_waits,
                "flops": 0,
                "recompute": False,
            }
            _append(rows, row)
            _append(kernels, _kernel(collectives[instance], name, 0.0))
        return _arrays(rows), _arrays(kernels)

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


def _empty(names: Sequence[str]) -> dict[str, list[float]]:
    return {name: [] for name in names}


def _append(columns: Mapping[str, list[float]], values: Mapping[str, float]) -> None:
    for name, value in values.items():
        columns[name].append(value)


def _type(column: str) -> type[np.generic]:
    return np.float64 if column in _FLOATS else np.int64


def _arrays(columns: Mapping[str, Sequence[float]]) -> dict[str, NDArray[np.generic]]:
    return {name: np.array(column, dtype=_type(name)) for name, column in columns.items()}


def _merged(
    first: Mapping[str, NDArray[np.generic]], second: Mapping[str, NDArray[np.generic]], at: IntArray, size: int
) -> dict[str, NDArray[np.generic]]:
    """Columns with the rows of the first at places `at` and those of the second between them."""
    is_first = np.zeros(size, dtype=bool)
    is_first[at] = True
    merged = {}
    for name, column in first.items():
        merged[name] = np.empty(size, dtype=column.dtype)
        merged[name][is_first], merged[name][~is_first] = column, second[name]
    return merged
