"""Measured counters in place of what is worked out: Nsight Compute CSV, `dcgmi dmon` and `nvidia-smi dmon` logs.

Nsight Compute measures kernels one by one: a mean over kernels, weighted by their time, replaces the estimate of the whole
step's kernel levels and of the families the kernels belong to. DCGM and nvidia-smi sample the device while everything runs: a
mean over the samples replaces the whole step's level.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from perfmodel.errors import ConfigError
from perfmodel.traces.spans import DeviceSpan
from perfmodel.units import MEBI, MEGA, US_PER_S
from perfmodel.utilisation.families import family_of
from perfmodel.utilisation.levels import Level, Utilisation

PERCENT = 100.0
# Nsight Compute metric -> level (Kernel Profiling Guide, "Metrics reference"). All are percentages of a peak.
_NCU: Mapping[str, str] = {
    "sm__warps_active.avg.pct_of_peak_sustained_active": "occupancy",
    "smsp__issue_active.avg.pct_of_peak_sustained_active": "issue_slots",
    "sm__inst_issued.avg.pct_of_peak_sustained_active": "issue_slots",
    "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active": "tensor_pipe",
    "sm__inst_executed_pipe_tensor.avg.pct_of_peak_sustained_active": "tensor_pipe",
    "sm__pipe_fma_cycles_active.avg.pct_of_peak_sustained_active": "fp32_pipe",
    "sm__inst_executed_pipe_fma.avg.pct_of_peak_sustained_active": "fp32_pipe",
    "dram__throughput.avg.pct_of_peak_sustained_elapsed": "memory_bandwidth",
    "gpu__dram_throughput.avg.pct_of_peak_sustained_elapsed": "memory_bandwidth",
    "sm__cycles_active.avg.pct_of_peak_sustained_elapsed": "sm_activity",
}
_NCU_TIME = "gpu__time_duration.sum"
_TIME_UNITS = {
    "nsecond": 1e-9,
    "ns": 1e-9,
    "usecond": 1e-6,
    "us": 1e-6,
    "msecond": 1e-3,
    "ms": 1e-3,
    "second": 1.0,
    "s": 1.0,
}
# DCGM profiling fields by their short names in `dcgmi dmon` (DCGM field identifiers 1001 to 1012), as fractions.
_DCGM: Mapping[str, str] = {
    "GRACT": "device_busy", "SMACT": "sm_activity", "SMOCC": "occupancy", "TENSO": "tensor_pipe", "FP32A": "fp32_pipe",
    "DRAMA": "memory_bandwidth",
}  # fmt: skip
# nvidia-smi dmon: `sm` is the percentage of time in which a kernel ran (nvidia-smi manual, "utilization.gpu").
_SMI: Mapping[str, str] = {"sm": "device_busy"}
_LINK_COLUMNS = ("PCITX", "PCIRX", "NVLTX", "NVLRX", "rxpci", "txpci")


@dataclass(frozen=True, slots=True, kw_only=True)
class Counters:
    """Measured levels (fractions): of the whole run, by kernel family, and bytes per second over links by column name."""

    path: str
    kind: str
    whole: Mapping[str, float]
    families: Mapping[str, Mapping[str, float]]
    links: Mapping[str, float]
    n_rows: int


def read_counters(path: str | Path) -> Counters:
    """Reads a counter file of any of the three kinds.

    Raises:
        ConfigError: the file cannot be read or is none of them.
    """
    try:
        text = Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or error}") from error
    lines = [line for line in text.splitlines() if line.strip()]
    head = next((i for i, line in enumerate(lines) if "Kernel Name" in line and "," in line), None)
    if head is not None:
        return _ncu(str(path), lines[head:])
    if any(line.lstrip().startswith("#") for line in lines):
        return _dmon(str(path), lines)
    raise ConfigError(
        f"{path}: found neither a column 'Kernel Name' (ncu --csv) nor a line that starts with '#' (dcgmi dmon, "
        "nvidia-smi dmon)"
    )


def with_counters(found: Utilisation, counters: Sequence[Counters]) -> Utilisation:
    """Utilisation with measured levels in place of estimates; `counted` says which, and from where."""
    rows, counted = list(found.rows), list(found.counted)
    for source in counters:
        rows = [_counted(row, source) for row in rows]
        counted.append(f"{source.path} ({source.kind}, {source.n_rows} rows): {', '.join(sorted(source.whole))}")
    return replace(found, rows=tuple(rows), counted=tuple(counted))


def _counted(row: Level, source: Counters) -> Level:
    if row.kind == "whole":
        levels = dict(row.levels)
        # Nsight sees kernels only: outside them nothing is active.
        busy = row.levels.get("device_busy") or 1.0
        per_kernel = source.kind == "Nsight Compute"
        for name, value in source.whole.items():
            levels[name] = value * busy if per_kernel and name not in ("occupancy",) else value
        rate = sum(source.links.values())
        return replace(row, levels=levels, link_bytes_per_s=rate or row.link_bytes_per_s)
    if row.kind == "family" and row.name in source.families:
        return replace(row, levels={**row.levels, **source.families[row.name]})
    return row


def _ncu(path: str, lines: Sequence[str]) -> Counters:
    rows = [row for row in csv.DictReader(lines) if row.get("Kernel Name")]
    kernels: dict[str, dict[str, float]] = {}
    names: dict[str, str] = {}
    for number, row in enumerate(rows):
        if "Metric Name" in row:  # one metric a row
            key = row.get("ID") or str(number)
            _put(kernels.setdefault(key, {}), row["Metric Name"], row.get("Metric Value"), row.get("Metric Unit"))
        else:  # --page raw: one kernel a row, metrics as columns
            key = row.get("ID") or str(number)
            for column, value in row.items():
                _put(kernels.setdefault(key, {}), column, value, "ns")
        names[key] = row["Kernel Name"]
    found = {key: values for key, values in kernels.items() if set(values) & set(_NCU.values())}
    if not found:
        wanted = ", ".join(list(_NCU)[:4])
        raise ConfigError(f"{path}: no metric of use among {len(rows)} rows; allowed {wanted}, ...")
    by_family: dict[str, list[dict[str, float]]] = {}
    for key, values in found.items():
        span = DeviceSpan(name=names[key], kind="kernel", stream=0, start_s=0.0, end_s=0.0, correlation=0)
        by_family.setdefault(family_of(span), []).append(values)
    return Counters(
        path=path,
        kind="Nsight Compute",
        whole=_means(found.values()),
        families={family: _means(values) for family, values in by_family.items()},
        links={},
        n_rows=len(rows),
    )


def _put(values: dict[str, float], metric: str | None, text: str | None, unit: str | None) -> None:
    value = _number(text)
    if value is None or metric is None:
        return
    if metric == _NCU_TIME:
        values["time_s"] = value * _TIME_UNITS.get((unit or "ns").strip(), 1e-9)
    elif metric in _NCU:
        values[_NCU[metric]] = value / PERCENT


def _means(kernels: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Means by level, weighted by time where every kernel has one."""
    rows = list(kernels)
    timed = all("time_s" in row for row in rows)
    found = {}
    for level in sorted(set(_NCU.values())):
        pairs = [(row[level], row["time_s"] if timed else 1.0) for row in rows if level in row]
        weight = sum(w for _, w in pairs)
        if weight > 0:
            found[level] = sum(value * w for value, w in pairs) / weight
    return found


def _dmon(path: str, lines: Sequence[str]) -> Counters:
    """Both dmon logs: a line of column names behind `#`, a line of units, then samples. All GPUs are averaged."""
    head = next(line for line in lines if line.lstrip().startswith("#"))
    columns = head.lstrip("# \t").split()
    is_dcgm = any(column in _DCGM for column in columns)
    wanted = _DCGM if is_dcgm else _SMI
    # DCGM's first column, `Entity`, is two words in each sample: `GPU 0`.
    samples = [
        (words[1:] if words[0] in ("GPU", "GPU-I", "GPU-CI") else words)
        for line in lines
        if not line.lstrip().startswith(("#", "ID")) and (words := line.split())
    ]
    whole: dict[str, float] = {}
    links: dict[str, float] = {}
    for index, column in enumerate(columns):
        values = [v for words in samples if index < len(words) and (v := _number(words[index])) is not None]
        if not values:
            continue
        mean = sum(values) / len(values)
        if column in wanted:
            whole[wanted[column]] = mean if is_dcgm else mean / PERCENT
        elif column in _LINK_COLUMNS:
            links[column] = mean if is_dcgm else mean * MEGA
    if not whole and not links:
        raise ConfigError(f"{path}: no column of use among {', '.join(columns)}; allowed {', '.join((*_DCGM, *_SMI))}")
    return Counters(
        path=path,
        kind="DCGM" if is_dcgm else "nvidia-smi dmon",
        whole=whole,
        families={},
        links=links,
        n_rows=len(samples),
    )


def _number(text: str | None) -> float | None:
    try:
        value = float((text or "").replace(",", ""))
    except ValueError:
        return None
    return value if 0 <= value < US_PER_S * MEBI * MEBI else None
