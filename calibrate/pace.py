"""The pace of a CPU now: kernels of its calibration, timed again in turn, as a step runs them.

A shared machine's caches, memory and cores are not the same every hour, and a call among others takes longer than the same
call again and again: the second thread has to be woken, stores of the call before still drain, pages have left the TLB. For
each resource (`db.device.Pace`) some rows of the device's own tables are called one after the other, round after round, for
a fraction of a second; a resource's factor is the median of now / then over its kernels. Together they move more memory than
any cache holds, so each meets its tensors cold, as its row did. Short calls are made SHORT_CALLS times in a row, as they were
then; what cold code costs them in a step has a figure of its own (`calibrate/host.py`). Then is the best lower quartile of
three rounds, now the median: training steps are made of typical calls.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from multiprocessing import get_context
from typing import TYPE_CHECKING

from calibrate.fit_cpu import MeasuredRow, read_table
from perfmodel.db.device import Device, Pace
from perfmodel.db.loading import db_root
from perfmodel.kernels.correction import Segment, segments_of
from perfmodel.kernels.cpu_law import law
from perfmodel.validate.train import pin_threads

if TYPE_CHECKING:
    from calibrate.build import Prepared

PER_FAMILY = 4  # kernels of a family and resource
MAX_NOISE = 0.06  # by how much a row's two best rounds may differ
LONG_S = (3e-4, 4e-3)  # of kernels that show what bytes and arithmetic take
SHORT_S = (1e-6, 8e-6)  # of kernels that are hardly more than a call
MOST = 0.8  # of its time a kernel spends on the resource that it shows
STEP = 0.01  # by which a factor is raised to see what a kernel's time does
LAPS = 5  # round all kernels in one look
SHORT_CALLS = 25
FAMILIES: Mapping[str, tuple[str, ...]] = {
    "compute": ("gemm", "conv", "attention"),
    "memory": ("elementwise", "copy", "optimizer"),
    "host": ("elementwise", "copy", "reduction", "optimizer"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeKernel:
    """A row of a table that is timed again: its case and the seconds it took then."""

    resource: str
    case: str
    then_s: float

    @property
    def n_calls(self) -> int:
        """Calls in a row of which one time is taken."""
        return SHORT_CALLS if self.resource == "host" else 1


def probe_kernels(device: Device, db: str | None = None) -> tuple[ProbeKernel, ...]:
    """Kernels of each resource, the same for the same tables; none where the database has no tables of the device."""
    folder = db_root(db) / device.name
    found: list[ProbeKernel] = []
    for resource, families in FAMILIES.items():
        for family in families:
            table = folder / f"{family}.csv"
            rows = _showing(read_table(table, device), resource, device) if table.exists() else []
            chosen = sorted(rows, key=lambda row: hashlib.sha256(row.case.encode()).hexdigest())[:PER_FAMILY]
            found += [ProbeKernel(resource=resource, case=row.case, then_s=row.time_s) for row in chosen]
    # Long calls of all resources are mixed, as in a step.
    return tuple(sorted(found, key=lambda kernel: hashlib.sha256(kernel.case.encode()).hexdigest()))


def _showing(rows: Sequence[MeasuredRow], resource: str, device: Device) -> list[MeasuredRow]:
    """The rows whose time is that of the resource, by the fitted law, and was measured well."""
    low_s, high_s = SHORT_S if resource == "host" else LONG_S
    state = "warm" if resource == "host" else "cold"
    fit = device.fits.get(json.loads(rows[0].case)["family"]) if rows else None
    segments = {} if fit is None else segments_of(fit, device)
    clean = [row for row in rows if low_s < row.time_s < high_s and row.state == state and not row.noise > MAX_NOISE]
    return [row for row in clean if row.key in segments and _share(row, segments[row.key], resource, device) > MOST]


def _share(row: MeasuredRow, segment: Segment, resource: str, device: Device) -> float:
    """The part of a row's time that grows with the resource's factor."""
    slow = replace(device, pace=Pace(**{resource: 1.0 + STEP}))
    plain_s, slow_s = (float(law(segment, [row.call], on).time_s[0]) for on in (device, slow))
    return (slow_s / plain_s - 1.0) / STEP


def time_kernels(kernels: Sequence[ProbeKernel], n_threads: int) -> list[float]:
    """Median seconds of a call of each kernel over laps round all of them, in this process, which keeps their tensors."""
    import torch

    from calibrate.measure_cpu import set_threads

    set_threads(n_threads)
    with torch.no_grad():
        prepared = [_prepared(kernel.case) for kernel in kernels]
        kept: dict[str, object] = {}
        laps = [
            [_call_s(what, kernel, kept) for what, kernel in zip(prepared, kernels, strict=True)] for _ in range(LAPS)
        ]
    return [statistics.median(times) for times in zip(*laps, strict=True)]


def _call_s(prepared: Prepared, kernel: ProbeKernel, kept: dict[str, object]) -> float:
    """Median seconds of a few calls in a row. The last output is `kept` until the kernel's next turn, as a step keeps it."""
    arguments, times = prepared.arguments[0], []
    for _ in range(kernel.n_calls):
        begun = time.perf_counter()
        kept[kernel.case] = prepared.call(*arguments, **prepared.kwargs)
        times.append(time.perf_counter() - begun)
    return statistics.median(times)


@cache
def _prepared(case: str) -> Prepared:
    """The case with one set of tensors; from the first on, the process keeps its pages, as calibration does."""
    from calibrate.build import prepare
    from calibrate.cases.case import case_from_json
    from calibrate.measure_cpu import M_MMAP_MAX, M_TRIM_THRESHOLD, NEVER_TRIM_BYTES

    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(M_TRIM_THRESHOLD, NEVER_TRIM_BYTES)
        mallopt(M_MMAP_MAX, 0)
    return prepare(replace(case_from_json(case), state="warm"), "cpu", 0)


class Looks:
    """Looks at the machine's pace in a process of its own, beside what else is measured."""

    def __init__(self, pool: Executor, kernels: Sequence[ProbeKernel], n_threads: int) -> None:
        self._pool, self._kernels, self._n_threads = pool, kernels, n_threads
        self._factors: list[list[float]] = []

    def look(self) -> None:
        """Times every kernel once more; the first time prepares them and counts for nothing."""
        if not self._factors:
            self._pool.submit(time_kernels, self._kernels, self._n_threads).result()
        now_s = self._pool.submit(time_kernels, self._kernels, self._n_threads).result()
        self._factors.append([now / kernel.then_s for now, kernel in zip(now_s, self._kernels, strict=True)])

    def pace(self) -> Pace:
        """Of each resource the median over its kernels of the median over all looks; 1 where nothing was looked at.

        Rows of tables that no cache holds have no factor: their calls were measured behind other traffic in the first place.
        """
        found: dict[str, list[float]] = {}
        for index, kernel in enumerate(self._kernels):
            seen = [factors[index] for factors in self._factors]
            if seen:
                found.setdefault(kernel.resource, []).append(statistics.median(seen))
        factors = {resource: statistics.median(seen) for resource, seen in found.items()}
        return Pace(**factors)

    def spread(self) -> dict[str, tuple[float, float]]:
        """Of each resource the tenth and the ninetieth percentile over looks of the median factor of its kernels."""
        found: dict[str, tuple[float, float]] = {}
        for resource in FAMILIES:
            mine = [index for index, kernel in enumerate(self._kernels) if kernel.resource == resource]
            if mine and len(self._factors) > 1:
                medians = [statistics.median(factors[index] for index in mine) for factors in self._factors]
                cuts = statistics.quantiles(medians, n=10, method="inclusive")
                found[resource] = (cuts[0], cuts[-1])
        return found


@contextmanager
def looking(device: Device, n_threads: int, db: str | None = None) -> Iterator[Looks]:
    """Looks at the pace of this machine's CPU while the block runs."""
    kernels = probe_kernels(device, db)
    with ProcessPoolExecutor(1, get_context("spawn"), pin_threads, (1 if n_threads > 1 else 2,)) as pool:
        yield Looks(pool, kernels, n_threads)
