"""Checks every device and fit of a database; what `perfmodel db check` prints.

Problems (the check fails): a file that does not load (schema, units, missing provenance, arrays of another fit), a name or
alias used twice, a `nearest` that names no device, arrays without a fit, a parameter or error that is not a finite number,
a negative time, a fit without held-out error, a measured table without provenance, with duplicate rows, with times that are
not positive, or faster than the device's peak, a host.yaml (measured host overheads) of wrong figures or without provenance.
Remarks (it does not fail): where a measured time falls although the work grows.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from perfmodel.db.device import Device, Fit
from perfmodel.db.fabric import FAMILY as FABRIC_FAMILY
from perfmodel.db.fabric import check_fabric, fabrics_dir, list_fabrics
from perfmodel.db.fits import ARRAYS_SUFFIX, FIT_SUFFIX, fit_path, read_fit
from perfmodel.db.loading import DEVICE_FILE, db_root, load_own, normalise, read_spec
from perfmodel.db.tables import check_table
from perfmodel.errors import ConfigError, suggest


@dataclass(frozen=True, slots=True, kw_only=True)
class DbReport:
    """What a check found: problems fail it, remarks do not. `n_devices` and `n_fits` say what was read."""

    problems: tuple[str, ...]
    remarks: tuple[str, ...]
    n_devices: int
    n_fits: int


def check_db(root: str | Path | None = None) -> DbReport:
    """Checks the database in `root` (default: the one that predictions use). Raises ConfigError if there is none."""
    folder = db_root(root)
    problems: list[str] = []
    remarks: list[str] = []
    devices: list[Device] = []
    folders = sorted(path.parent for path in folder.glob(f"*/{DEVICE_FILE}"))
    for device_dir in folders:
        try:
            device = load_own(device_dir)
        except ConfigError as error:
            problems.extend(error.problems)
            continue
        devices.append(device)
        for fit in device.fits.values():
            problems.extend(f"{device_dir / fit.family}{FIT_SUFFIX}: {fault}" for fault in fit_faults(fit))
        for table in sorted(device_dir.glob("*.csv")):
            found, noted = check_table(table, device)
            problems.extend(found)
            remarks.extend(noted)
    problems.extend(_names(folders))
    problems.extend(_nearest(folder, devices))
    problems.extend(_strays(folder))
    n_fabrics = 0
    for name in list_fabrics(folder):
        n_fabrics += 1
        problems.extend(_fabric_faults(fabrics_dir(folder) / name))
    n_fits = sum(len(device.fits) for device in devices) + n_fabrics
    return DbReport(problems=tuple(problems), remarks=tuple(remarks), n_devices=len(folders), n_fits=n_fits)


def fit_faults(fit: Fit) -> Iterator[str]:
    """What is wrong with the numbers of one fit."""
    for name, value in fit.parameters.items():
        if not math.isfinite(value):
            yield f"parameters.{name}: found {value}, allowed a finite number"
        elif name.endswith("_s") and value < 0:
            yield f"parameters.{name}: found {value}, allowed a time, not negative"
    for name, (low, high) in fit.fit_range.items():
        if not low <= high:
            yield f"fit_range.{name}: found [{low}, {high}], allowed low to high"
    yield from _heldout_faults(fit)
    for name, array in fit.arrays.items():
        if array.dtype.kind not in "iufb":
            yield f"arrays.{name}: found {array.dtype}, allowed numbers"
        elif not np.isfinite(array).all():
            yield f"arrays.{name}: found a value that is not finite"


def _heldout_faults(fit: Fit) -> Iterator[str]:
    if not fit.heldout:
        yield "heldout: missing, needs the error on rows that were not fitted"
    for subset, errors in fit.heldout.items():
        for name, value in errors.items():
            if not math.isfinite(value) or value < 0:
                yield f"heldout.{subset}.{name}: found {value}, allowed a number, not negative"


def _fabric_faults(fabric_dir: Path) -> Iterator[str]:
    path = fit_path(fabric_dir, FABRIC_FAMILY)
    try:
        fit = read_fit(fabric_dir, FABRIC_FAMILY)
    except ConfigError as error:
        yield from error.problems
        return
    yield from (f"{path}: {fault}" for fault in fit_faults(fit))
    yield from check_fabric(fabric_dir.name, fit, str(path))


def _names(folders: Iterable[Path]) -> Iterator[str]:
    owners: dict[str, str] = {}
    for device_dir in folders:
        path = device_dir / DEVICE_FILE
        try:
            spec = read_spec(path)
        except ConfigError:
            continue  # reported already
        for alias in (device_dir.name, spec.title, *spec.aliases):
            owner = owners.setdefault(normalise(alias), device_dir.name)
            if owner != device_dir.name:
                yield f"{path}: aliases: {alias!r} already names {owner}"


def _nearest(folder: Path, devices: Iterable[Device]) -> Iterator[str]:
    known = {device.name for device in devices}
    for device in devices:
        if device.nearest and device.nearest not in known:
            near = suggest(device.nearest, known)
            yield f"{folder / device.name / DEVICE_FILE}: nearest: found {device.nearest!r}, allowed a device{near}"


def _strays(folder: Path) -> Iterator[str]:
    for arrays in sorted(folder.glob(f"*/*{ARRAYS_SUFFIX}")):
        if not arrays.with_name(arrays.name.removesuffix(ARRAYS_SUFFIX) + FIT_SUFFIX).is_file():
            yield f"{arrays}: arrays without a fit of this name"
    for device_dir in sorted(
        path for path in folder.iterdir() if path.is_dir() and not path.name.startswith((".", "_"))
    ):
        if not (device_dir / DEVICE_FILE).is_file():
            yield f"{device_dir}: a folder without {DEVICE_FILE}"
