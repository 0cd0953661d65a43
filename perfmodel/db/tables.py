"""Measured tables of a device: `<family>.csv` and, beside it, its provenance `<family>.csv.yaml`.

Columns are in base units. `time_s` is the measured time; a row that failed has an empty `time_s` and says why in `failed`.
Optional: `flops`, `bytes` (work of the row), `pipe` (which peak bounds its FLOPs), `repeats`, `next_s`, `low_s`, `high_s`.
All other columns are the case; two rows of one case are duplicates.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path

from perfmodel.config.reading import read_mapping
from perfmodel.db.device import Device
from perfmodel.errors import ConfigError

TIME, FAILED, FLOPS, BYTES, PIPE = "time_s", "failed", "flops", "bytes", "pipe"
_RESULTS = frozenset({TIME, FAILED, FLOPS, BYTES, PIPE, "repeats", "next_s", "low_s", "high_s"})
# STYLE section 6: what a row set says of itself. A key that does not apply says "none".
TABLE_PROVENANCE = (
    "device",
    "driver",
    "cuda",
    "torch",
    "clocks",
    "date",
    "commit",
    "script_sha256",
    "plan_sha256",
    "rows",
    "repeats",
    "statistic",
)
# Boost clocks and rounding of datasheet figures; a measurement further above the peak is wrong.
PEAK_SLACK = 1.05
MAX_REMARKS = 5  # per table

Row = Mapping[str, str]


def provenance_path(table: Path) -> Path:
    """Where the provenance of a measured table lies."""
    return table.with_name(f"{table.name}.yaml")


def check_table(table: Path, device: Device) -> tuple[list[str], list[str]]:
    """Problems and remarks of one measured table."""
    try:
        with table.open(newline="", encoding="utf-8") as file:
            reader = csv.DictReader(file)
            columns, rows = tuple(reader.fieldnames or ()), list(reader)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        return [f"{table}: cannot be read: {error}"], []
    problems = list(_provenance_faults(table))
    if TIME not in columns:
        return [*problems, f"{table}: missing the column {TIME}; found {', '.join(columns) or 'nothing'}"], []
    case = tuple(name for name in columns if name not in _RESULTS)
    problems += _duplicates(table, rows, case)
    for number, row in enumerate(rows, start=2):
        problems += [f"{table}: line {number}: {fault}" for fault in _row_faults(row, device)]
    return problems, list(_falling(table, rows, case))[:MAX_REMARKS] if not problems else []


def _provenance_faults(table: Path) -> Iterator[str]:
    path = provenance_path(table)
    try:
        found = read_mapping(path)
    except ConfigError as error:
        yield f"{table}: no provenance: {error.problems[0]}"
        return
    for key in TABLE_PROVENANCE:
        if found.get(key) in (None, ""):
            yield f"{path}: missing {key}"


def _duplicates(table: Path, rows: Sequence[Row], case: Sequence[str]) -> Iterator[str]:
    seen: dict[tuple[str, ...], int] = {}
    for number, row in enumerate(rows, start=2):
        first = seen.setdefault(tuple(row[name] for name in case), number)
        if first != number:
            yield f"{table}: line {number}: the same case as line {first}"


def _number(row: Row, column: str) -> float | None:
    try:
        return float(row[column])
    except (KeyError, TypeError, ValueError):
        return None


def _row_faults(row: Row, device: Device) -> Iterator[str]:
    if not row.get(TIME) and row.get(FAILED):
        return
    time_s = _number(row, TIME)
    if time_s is None or not math.isfinite(time_s) or time_s <= 0:
        yield f"{TIME}: found {row.get(TIME)!r}, allowed a positive time, or a reason in {FAILED!r}"
        return
    flops, moved = _number(row, FLOPS), _number(row, BYTES)
    peak = device.peak_flops_per_s.get(row.get(PIPE) or "fp32")
    if flops and peak and flops / time_s > PEAK_SLACK * peak:
        yield f"{TIME}: {flops / time_s:.3g} FLOP/s is above the device's peak of {peak:.3g}"
    fastest = max(device.memory_bytes_per_s, device.l2_bytes_per_s)
    if moved and moved / time_s > PEAK_SLACK * fastest:
        yield f"{TIME}: {moved / time_s:.3g} B/s is above the device's memory and L2 peak of {fastest:.3g}"


def _falling(table: Path, rows: Sequence[Row], case: Sequence[str]) -> Iterator[str]:
    """Cases that differ from another in one size only, are larger and yet faster by more than 10 %."""
    timed = [(row, time_s) for row in rows if (time_s := _number(row, TIME)) is not None]
    for column in case:
        groups: dict[tuple[str, ...], list[tuple[float, float]]] = {}
        for row, time_s in timed:
            size = _number(row, column)
            if size is not None:
                key = tuple(row[name] for name in case if name != column)
                groups.setdefault(key, []).append((size, time_s))
        for key, points in groups.items():
            points.sort()
            for (small, before_s), (large, after_s) in pairwise(points):
                if large > small and after_s < 0.9 * before_s:
                    fixed = ", ".join(key)
                    yield f"{table}: {column} {small:g} -> {large:g} at ({fixed}) takes {before_s:.3g} -> {after_s:.3g} s"
