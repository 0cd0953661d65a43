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
from perfmodel.kernels import calls_of, host_cost_s, kinds_of, price
from perfmodel.kernels.host import collective_dispatch_s
from perfmodel.kernels.registry import KernelCall
from perfmodel.kernels.roofline import peak_flops_per_s
from perfmodel.plan.columns import ChainedOps, EventColumns, OpRun, collective_of, columns_of, joined
from perfmodel.plan.events import Event
from perfmodel.plan.splices import Splices, splices_of
from perfmodel.sim.program import COMM, COMPUTE, COPY, COPY_BACK

MAX_EVENTS = 400_000  # of the sequences remembered, about 400 bytes each with what follows from them
MAX_ROWS = 200_000  # of different ops on one device, about 100 MB; beyond it the book starts anew
NO_ROW = -1
STREAM_NUMBERS: Mapping[str, int] = {
    "compute": COMPUTE, "comm": COMM, "copy": COPY, "tensor": 4, "send_next": 5, "recv_prev": 6, "send_prev": 7,
    "recv_next": 8, "copies": 9, "context": 10, "copy_back": COPY_BACK,
}  # fmt: skip

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]
# Columns of one row an op or collective, and of one row a kernel.
ROW_COLUMNS = ("n_kernels", "first_kernel", "dispatch_s", "stream", "phase", "label", "host_sync", "flops", "recompute")
KERNEL_COLUMNS = ("time_s", "low_s", "high_s", "source", "family", "ideal_s", "memory_frac")
_FLOATS = {"dispatch_s", "time_s", "low_s", "high_s", "ideal_s", "memory_frac", "flops"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Prices:
    """Prices of the events of one rank class.

    Attributes:
        rows: for each event by column: `n_kernels` and where they begin in `kernels`, the host's `dispatch_s` (launches
            apart), `stream` number, `phase` (index into PHASES), `label` (index into `names`), `host_sync`, `flops`,
            `recompute`.
        kernels: by column, in the order of the events: `time_s`, `low_s`, `high_s`, `source`, `family` (index into `names`),
            and `ideal_s`, the time at the datasheet's peak rates.
        names: labels and families by index.
        columns: the events themselves.
        derived: what follows from the events, their device and the settings alone, found once however often they are priced.
    """

    rows: Mapping[str, NDArray[np.generic]]
    kernels: Mapping[str, NDArray[np.generic]]
    names: Sequence[str]
    columns: EventColumns
    derived: dict[Hashable, Any] = field(default_factory=dict)

    def of_events(self, column: str) -> NDArray[np.generic]:
        """A column of `rows`."""
        return self.rows[column]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PricedClasses:
    """Prices of several rank classes on one device: of `whole`, one behind the other, and of each of `parts`.

    Events of class i begin at `first_event[i]` of the whole; the last entry is their number.
    """

    whole: Prices
    parts: tuple[Prices, ...]
    first_event: IntArray


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Places:
    """Where sequences of events, one behind the other, find their prices: the row of each of their ops.

    They begin at `first`; `parts` are the columns of each, and what follows from it.
    """

    held: object  # what they were found for, so that its identity is not reused
    columns: EventColumns
    rows: IntArray
    first: IntArray
    parts: tuple[tuple[EventColumns, dict[Hashable, Any]], ...]


def _in_a_row(places: Sequence[_Places]) -> _Places:
    """The places of single sequences, one behind the other."""
    if len(places) == 1:
        return places[0]
    return _Places(
        held=places,
        columns=joined([place.columns for place in places]),
        rows=np.concatenate([place.rows for place in places]),
        first=np.cumsum([0, *(place.columns.size for place in places)]),
        parts=tuple(place.parts[0] for place in places),
    )


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
        self._n_remembered = 0  # events of those
        self._row_of_kind: IntArray = np.empty(0, dtype=np.int64)  # on a CUDA device, where equal ops cost the same
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
        """Prices of the events of one rank class: see `prices_of`."""
        return self.prices_of([events], collectives, issue_s, remember=remember).parts[0]

    def prices_of(
        self,
        sequences: Sequence[Sequence[Event]],
        collectives: Mapping[int, Estimate],
        issue_s: Mapping[int, float] | None = None,
        *,
        remember: bool = False,
    ) -> PricedClasses:
        """Prices of sequences of events; `collectives` maps instances of collectives to estimates.

        `issue_s` maps some of them to the host's time to ask for one (else that of the device). `remember` sequences that
        will be asked for again. On a CPU, where a price depends on what ran before, sequences are priced one by one.
        """
        if self.device.kind == "cpu" and len(sequences) > 1:
            raise ValueError("sequences of events on a CPU are priced one by one")
        with self._lock:
            self._make_room()
            return self._prices(self._find(sequences, remember=remember), collectives, issue_s or {})

    def prices_in(self, columns: EventColumns, collectives: Mapping[int, Estimate]) -> Prices:
        """Prices of events by their columns, on a CUDA device."""
        with self._lock:
            self._make_room()
            return self._prices(self._place(columns, columns, remember=False), collectives, {}).whole

    def _make_room(self) -> None:
        """Forgets what is too much to remember, and on a CPU all: there an op costs what ran before it makes it cost."""
        if self._rows.size > MAX_ROWS or self.device.kind == "cpu":
            self._clear()
        elif self._n_remembered > MAX_EVENTS:
            self._places, self._n_remembered = {}, 0

    def _find(self, sequences: Sequence[Sequence[Event]], *, remember: bool) -> _Places:
        splices, known = splices_of(sequences), self._places
        if splices is not None:
            return known.get(id(splices)) or self._place(splices, splices.columns, remember=remember)
        return _in_a_row(
            [
                known.get(id(events)) or self._place(events, columns_of(events), remember=remember)
                for events in sequences
            ]
        )

    def _place(self, held: object, columns: EventColumns, *, remember: bool) -> _Places:
        splices = held if isinstance(held, Splices) else None
        found = _Places(
            held=held,
            columns=columns,
            rows=self._own_rows(columns.ops) if self.device.kind == "cpu" else self._rows_of(columns.ops),
            first=np.array([0, columns.size]) if splices is None else splices.first,
            parts=tuple((own, {}) for own in ([columns] if splices is None else splices.parts())),
        )
        if remember and self.device.kind == "cuda":
            self._places[id(held)] = found
            self._n_remembered += columns.size
        return found

    def _own_rows(self, ops: Sequence[Op]) -> IntArray:
        """The row of each op object, one for each."""
        known = self._row_of
        unknown = list({id(op): op for op in ops if id(op) not in known}.values())
        if unknown:
            self._held += unknown
            known |= {id(op): self._rows.size + number for number, op in enumerate(unknown)}
            self._add(unknown)
        return np.array([known[id(op)] for op in ops], dtype=np.int64)

    def _rows_of(self, ops: Sequence[Op]) -> IntArray:
        """The row of each op: one for all that cost the same."""
        kinds = known_kinds(ops)
        most = int(kinds.max(initial=-1)) + 1
        if most > len(self._row_of_kind):
            more = np.full(max(most - len(self._row_of_kind), len(self._row_of_kind)), NO_ROW, dtype=np.int64)
            self._row_of_kind = np.concatenate([self._row_of_kind, more])
        rows = self._row_of_kind[kinds]
        new = np.flatnonzero(rows == NO_ROW)
        if len(new):
            firsts = np.sort(new[np.unique(kinds[new], return_index=True)[1]])
            self._row_of_kind[kinds[firsts]] = self._rows.size + np.arange(len(firsts))
            all_ops = list(ops)
            self._add([all_ops[i] for i in firsts.tolist()])
            rows = self._row_of_kind[kinds]
        return rows

    def _prices(
        self, places: _Places, collectives: Mapping[int, Estimate], issue_s: Mapping[int, float]
    ) -> PricedClasses:
        columns, first = places.columns, places.first
        of_ops = self._rows.at(places.rows)
        more_rows, more_kernels, number = self._of_collectives(columns, collectives, issue_s)
        rows = {name: np.empty(columns.size, dtype=column.dtype) for name, column in of_ops.items()}
        for name, column in rows.items():
            column[columns.op_at] = of_ops[name]
            column[columns.collective_at] = more_rows[name][number]
        n_kernels = rows["n_kernels"].astype(np.int64)
        begins = np.cumsum(n_kernels) - n_kernels
        kernels = self._kernels_of(rows["first_kernel"].astype(np.int64), n_kernels, begins)
        for name, column in kernels.items():
            column[begins[columns.collective_at]] = more_kernels[name][number]
        rows["first_kernel"] = begins
        names = tuple(self._names)
        whole = Prices(rows=rows, kernels=kernels, names=names, columns=columns, derived=places.parts[0][1])
        if len(places.parts) == 1:
            return PricedClasses(whole=whole, parts=(whole,), first_event=first)
        edges = np.append(begins, len(kernels["time_s"]))[first].tolist()
        parts = []
        for i, (own, derived) in enumerate(places.parts):
            mine = {name: column[first[i] : first[i + 1]] for name, column in rows.items()}
            mine["first_kernel"] = mine["first_kernel"] - edges[i]
            cut = {name: column[edges[i] : edges[i + 1]] for name, column in kernels.items()}
            parts.append(Prices(rows=mine, kernels=cut, names=names, columns=own, derived=derived))
        return PricedClasses(whole=whole, parts=tuple(parts), first_event=first)

    def _kernels_of(self, first: IntArray, n_kernels: IntArray, begins: IntArray) -> dict[str, NDArray[np.generic]]:
        """Kernels of events whose kernels begin at `first` of the book and at `begins` of the result."""
        taken = np.repeat(first - begins, n_kernels) + np.arange(int(n_kernels.sum()))
        if not self._kernels.size:  # collectives alone, whose kernels stand in no book
            return _arrays({name: [0.0] * len(taken) for name in KERNEL_COLUMNS})
        return self._kernels.at(taken)

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
                peak_s, memory_s = (sum(times) for times in zip(*map(self._ideal_s, part), strict=True))
                ideal_s = min(peak_s, estimate.time_s)
                memory_frac = memory_s / peak_s if peak_s > 0 else 0.0
                _append(kernels, _kernel(estimate, self._name(part[0].family), ideal_s, memory_frac))
        self._kernels.extend(kernels)
        self._rows.extend(rows)

    def _ideal_s(self, call: KernelCall) -> tuple[float, float]:
        """Seconds of a kernel at the datasheet's peak rates, and at that of memory alone."""
        flops_s = call.work.flops / peak_flops_per_s(self.device, call.pipe)
        memory_s = call.work.bytes / self.device.memory_bytes_per_s
        return max(flops_s, memory_s), memory_s

    def _of_collectives(
        self, columns: EventColumns, collectives: Mapping[int, Estimate], issue_s: Mapping[int, float]
    ) -> tuple[dict[str, NDArray[np.generic]], dict[str, NDArray[np.generic]], IntArray]:
        """Rows and kernels of different collectives, and which of them each event is."""
        crowding = max(1.0, self.device.n_processes / self.device.n_sms)
        rows, kernels = _empty(ROW_COLUMNS), _empty(KERNEL_COLUMNS)
        known: dict[tuple[int, str, str, bool], int] = {}
        numbers: list[int] = []
        for event, instance in zip(columns.collectives, columns.instance.tolist(), strict=True):
            key = (instance, event.stream, event.phase, event.host_waits)
            number = known.setdefault(key, len(known))
            numbers.append(number)
            if number < len(rows["label"]):
                continue
            name = self._name(collective_of(event).op)
            row = {
                "n_kernels": 1,
                "first_kernel": 0,
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
            _append(kernels, _kernel(collectives[instance], name, 0.0, 0.0))
        return _arrays(rows), _arrays(kernels), np.array(numbers, dtype=np.int64)

    def _name(self, name: str) -> int:
        return self._names.setdefault(name, len(self._names))


def _kernel(estimate: Estimate, family: int, ideal_s: float, memory_frac: float) -> dict[str, float]:
    return {
        "time_s": estimate.time_s,
        "low_s": estimate.low_s,
        "high_s": estimate.high_s,
        "source": int(estimate.source),
        "family": family,
        "ideal_s": ideal_s,
        "memory_frac": memory_frac,
    }


def _empty(names: Sequence[str]) -> dict[str, list[float]]:
    return {name: [] for name in names}


def _append(columns: Mapping[str, list[float]], values: Mapping[str, float]) -> None:
    for name, value in values.items():
        columns[name].append(value)


def known_kinds(ops: Sequence[Op]) -> IntArray:
    """The kind of each op; found once of those that stand in many places."""
    if type(ops) is ChainedOps:
        return np.concatenate([known_kinds(part) for part in ops.parts])
    if not isinstance(ops, OpRun):
        return kinds_of(ops)
    found: IntArray | None = ops.kept.get("kinds")
    if found is None:
        found = ops.kept["kinds"] = kinds_of(ops)
    return found


def _type(column: str) -> type[np.generic]:
    return np.float64 if column in _FLOATS else np.int64


def _arrays(columns: Mapping[str, Sequence[float]]) -> dict[str, NDArray[np.generic]]:
    return {name: np.array(column, dtype=_type(name)) for name, column in columns.items()}
