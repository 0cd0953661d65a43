"""A device database of one's own, from a trace: the device with its host costs as measured, and the tables behind them.

The folder holds the device with all its fits (so it stands alone: `--db FOLDER`), the shipped fabrics, and under `_trace/`
the overheads, kernel times and collective times with their provenance.
"""

from __future__ import annotations

import csv
import io
import os
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import yaml

from perfmodel.db import db_root, load_device
from perfmodel.db.device import Device, HostCosts
from perfmodel.db.fits import write_fit
from perfmodel.db.loading import DEVICE_FILE
from perfmodel.errors import ConfigError
from perfmodel.traces.overheads import as_rows, collective_times, host_costs, kernel_times, measure_overheads
from perfmodel.traces.ranks import Job
from perfmodel.units import US_PER_S

TABLES = "_trace"
_FABRICS = "_fabrics"


def write_overlay(job: Job, device: Device, root: str | Path, db: str | None = None) -> Device:
    """Writes the folder `root`, which must not exist, whole or not at all; returns the device as it loads from it.

    Raises:
        ConfigError: the folder exists or cannot be written, or the traces launch nothing.
    """
    folder = Path(root)
    if folder.exists():
        raise ConfigError(f"{folder}: exists already; name a new folder")
    costs = host_costs(job.traces[0], device.host)
    try:
        temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    except OSError as error:
        raise ConfigError(f"{folder}: cannot write: {error.strerror or error}") from error
    try:
        _write_device(temporary / device.name, device, costs, db)
        if (db_root(db) / _FABRICS).is_dir():
            shutil.copytree(db_root(db) / _FABRICS, temporary / _FABRICS)
        _write_tables(temporary / TABLES, job, device)
        temporary.chmod(0o755)
        os.replace(temporary, folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return load_device(device.name, folder)


def _write_device(folder: Path, device: Device, costs: HostCosts, db: str | None) -> None:
    folder.mkdir()
    body = yaml.safe_load((db_root(db) / device.name / DEVICE_FILE).read_text(encoding="utf-8"))
    body["host"] = {
        "op_dispatch": _us(costs.op_dispatch_s),
        "backward_op": _us(costs.backward_op_s),
        "launch": _us(costs.launch_s),
        "launch_latency": _us(costs.launch_latency_s),
        "sync": _us(costs.sync_s),
        "source": costs.source,
    }
    (folder / DEVICE_FILE).write_text(yaml.safe_dump(body, sort_keys=False, allow_unicode=True), encoding="utf-8")
    for family in sorted(device.fits):
        write_fit(folder, device.fits[family])


def _us(time_s: float) -> str:
    return f"{time_s * US_PER_S:.6g} us"


def _write_tables(folder: Path, job: Job, device: Device) -> None:
    folder.mkdir()
    tables = {
        "overheads": as_rows(measure_overheads(job.traces[0])),
        "kernels": as_rows(kernel_times(job)),
        "collectives": as_rows(collective_times(job)),
    }
    for name, rows in tables.items():
        if rows:
            (folder / f"{name}.csv").write_text(_csv(rows), encoding="utf-8")
    provenance = {
        "device": device.name,
        "reported_device": job.traces[0].facts.name,
        "traces": [trace.path for trace in job.traces],
        "ranks": list(job.ranks),
        "rows": {name: len(rows) for name, rows in tables.items()},
        "notes": sorted({f"{note.kind}: {note.text}" for trace in job.traces for note in trace.notes}),
        "statistic": "medians of the calls in the trace; collectives: minimum over ranks, then median over calls",
    }
    (folder / "provenance.yaml").write_text(yaml.safe_dump(provenance, sort_keys=True), encoding="utf-8")


def _csv(rows: Sequence[Mapping[str, object]]) -> str:
    buffer = io.StringIO()
    writer = csv.DictWriter(buffer, fieldnames=list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return buffer.getvalue()
