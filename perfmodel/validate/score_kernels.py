"""Scores the shipped kernel prices on files of measured kernel times: the engine of `perfmodel db score`.

Every row is priced through the registered rules and the device's fits. Where a measurement includes a launch (eager calls
timed with events), the fit's measurement floor is added to the predicted device time before the two are compared.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from perfmodel.db.device import Device
from perfmodel.db.loading import load_device
from perfmodel.errors import ConfigError
from perfmodel.estimate import Estimate
from perfmodel.kernels import calls_of, price, roofline
from perfmodel.validate.kernel_formats import FORMATS
from perfmodel.validate.kernel_rows import EAGER_MINIMUM, KernelRow, read_rows

Only = Literal["all", "heldout", "fitted"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """Errors |predicted / measured - 1| (fractions) of one device and family.

    `inside_frac` is the share of rows between the estimate's low and high; `roofline_median` the median error of the
    datasheet roofline with the same measurement floor; `published_frac` the mean error published for the same kind of rows
    (in, out of its training distribution), None where there is none; `sources` the number of rows by price source.
    """

    device: str
    family: str
    subset: str
    n_rows: int
    median: float
    mean: float
    p90: float
    worst: float
    inside_frac: float
    roofline_median: float
    published_frac: tuple[float, float] | None
    sources: Mapping[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class PricedRows:
    """Rows with what a measurement of them would read: time, low, high and roofline (s), each [n]."""

    rows: tuple[KernelRow, ...]
    predicted_s: NDArray[np.float64]
    low_s: NDArray[np.float64]
    high_s: NDArray[np.float64]
    roofline_s: NDArray[np.float64]
    sources: tuple[str, ...]


# How far readings of calls too short to matter scatter around their median (NeuSight's vector sweeps, p90 on A100). The
# floor of longer calls scatters as much, apart from the kernel.
MINIMUM_SPREAD = 0.05

# NeuSight (Lee et al., ASPLOS 2025): mean errors per op, fp32, in and out of its training distribution, as recomputed from
# its released predictions on the same rows; quoted in the public data's README.
PUBLISHED_FRAC: Mapping[str, tuple[float, float]] = {
    "bmm fp32": (0.260, 0.138),
    "linear fp32": (0.200, 0.139),
    "elementwise fp32": (0.140, 0.193),
    "softmax fp32": (0.193, 0.139),
    "layer norm fp32": (0.201, 0.567),
}


def score(files: Sequence[str | Path], *, only: Only = "all", min_s: float = 0.0) -> list[Score]:
    """Scores every device and family in `files`.

    `only` keeps all rows, the share that no fit saw, or its complement; `min_s` drops measurements shorter than that. Raises
    ConfigError with one line for each file that is in no known format, MissingCalibrationError for an unknown device.
    """
    rows = _read_all(files)
    kept = [row for row in rows if row.measured_s >= min_s and (only == "all" or row.heldout == (only == "heldout"))]
    groups: dict[tuple[str, str, str], list[KernelRow]] = {}
    for row in kept:
        groups.setdefault((row.device, row.family, row.subset), []).append(row)
    return [score_rows(price_rows(members)) for _, members in sorted(groups.items(), key=lambda item: item[0])]


def _read_all(files: Iterable[str | Path]) -> list[KernelRow]:
    rows: list[KernelRow] = []
    problems: list[str] = []
    for file in files:
        try:
            rows.extend(read_rows(Path(file), FORMATS))
        except ConfigError as error:
            problems.extend(error.problems)
    if problems:
        raise ConfigError(problems)
    return rows


def price_rows(rows: Sequence[KernelRow]) -> PricedRows:
    """Prices rows of one device, measurement floors included."""
    device = load_device(rows[0].device)
    per_op = price([op for row in rows for op in row.ops], device)
    cursor = iter(per_op)
    totals = [_total([kernel for _ in row.ops for kernel in next(cursor)]) for row in rows]
    floor_s = np.array([floor_of(row, device) for row in rows])
    least_s = np.array([minimum_of(row, device) for row in rows])
    roof = _rooflines(rows, device)
    time_s, low_s, high_s = (np.array([getattr(t, name) for t in totals]) for name in ("time_s", "low_s", "high_s"))
    below, above = (np.hypot(side - time_s, MINIMUM_SPREAD * floor_s) for side in (low_s, high_s))
    return PricedRows(
        rows=tuple(rows),
        predicted_s=np.maximum(time_s + floor_s, least_s),
        low_s=np.maximum(time_s - below + floor_s, least_s * (1.0 - MINIMUM_SPREAD)),
        high_s=np.maximum(time_s + above + floor_s, least_s * (1.0 + MINIMUM_SPREAD)),
        roofline_s=np.maximum(roof + floor_s, least_s),
        sources=tuple(total.source.label for total in totals),
    )


def _total(kernels: Sequence[Estimate]) -> Estimate:
    if not kernels:
        raise ConfigError("a measured row runs no kernel by our rules")
    total = kernels[0]
    for kernel in kernels[1:]:
        total = total + kernel
    return total


def _rooflines(rows: Sequence[KernelRow], device: Device) -> NDArray[np.float64]:
    owners, calls = [], []
    for index, row in enumerate(rows):
        for op in row.ops:
            for call in calls_of(op):
                owners.append(index)
                calls.append(call)
    times = [estimate.time_s for estimate in roofline(calls, device)]
    total: NDArray[np.float64] = np.bincount(owners, weights=np.array(times), minlength=len(rows)).astype(np.float64)
    return total


def floor_of(row: KernelRow, device: Device) -> float:
    """The measurement floor (s) that the row's time includes.

    It stands with the fit of the row's kernels, in the segment of the same pipe or for the whole fit.
    """
    if not row.floor:
        return row.extra_s
    own = _measurement(row, device, row.floor)
    return float(measurement_floor_s(own, np.array(row.place))) if own else 0.0


def minimum_of(row: KernelRow, device: Device) -> float:
    """The least time (s) that a measurement of the row's kind reads, however short its kernels; 0 if the fit knows none."""
    return _measurement(row, device, EAGER_MINIMUM).get(EAGER_MINIMUM, 0.0) if row.floor else 0.0


def _measurement(row: KernelRow, device: Device, name: str) -> Mapping[str, float]:
    """Parameters of the row's way of measuring that hold `name`: of the kernels' segment, of the timed op or of the fit."""
    call = calls_of(row.ops[0])[0]
    fit = device.fits.get(call.family)
    if fit is None:
        return {}
    segment = call.pipe + ("_batched" if call.features.get("batch", 1) > 1 and call.family == "gemm" else "")
    for prefix in (f"{segment}.", f"{row.timed}.", ""):
        if f"{prefix}{name}" in fit.parameters:
            return {key.removeprefix(prefix): value for key, value in fit.parameters.items() if key.startswith(prefix)}
    return {}


def measurement_floor_s(parameters: Mapping[str, float], place: NDArray[np.float64]) -> NDArray[np.float64]:
    """What an eager measurement adds to the device's time (s), by the place (0 to 1) of the row in its sweep."""
    growth = parameters.get("floor_growth_s", 0.0) + parameters.get("floor_growth_square_s", 0.0) * place
    floor: NDArray[np.float64] = np.asarray(parameters.get("measurement_floor_s", 0.0) + growth * place)
    return floor


def score_rows(priced: PricedRows) -> Score:
    """The errors of priced rows of one device and family."""
    measured = np.array([row.measured_s for row in priced.rows])
    error = np.abs(priced.predicted_s / measured - 1.0)
    inside = (priced.low_s <= measured) & (measured <= priced.high_s)
    first = priced.rows[0]
    names = sorted(set(priced.sources))
    return Score(
        device=first.device,
        family=first.family,
        subset=first.subset,
        n_rows=len(priced.rows),
        median=float(np.median(error)),
        mean=float(error.mean()),
        p90=float(np.quantile(error, 0.9)),
        worst=float(error.max()),
        inside_frac=float(inside.mean()),
        roofline_median=float(np.median(np.abs(priced.roofline_s / measured - 1.0))),
        published_frac=PUBLISHED_FRAC.get(first.family),
        sources={name: priced.sources.count(name) for name in names},
    )
