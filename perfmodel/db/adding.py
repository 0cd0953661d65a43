"""Adds a device that was never measured: its datasheet, and the efficiencies of the nearest measured device."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

from perfmodel.db.device import Device
from perfmodel.db.fits import write_fit
from perfmodel.db.inherit import inherit_fits
from perfmodel.db.loading import DEVICE_FILE, db_root, load_device, load_own, normalise, read_spec, to_device
from perfmodel.errors import ConfigError


def add_device(datasheet: str | Path, root: str | Path) -> Device:
    """Adds the device that `datasheet` (a YAML file like device.yaml) describes to the database folder `root`.

    Fits that a device in `root` has are inherited when the device is loaded, and follow that device's later fits. Fits
    that only the shipped database has are copied, marked as inherited, so that `root` stands alone. The new folder
    appears whole or not at all. Raises ConfigError with every mistake in the datasheet, or if the name is taken.
    """
    path, folder = Path(datasheet), Path(root)
    spec = read_spec(path)
    folder.mkdir(parents=True, exist_ok=True)
    _refuse_taken(folder, path, (spec.name, spec.title, *spec.aliases))
    here = _own_devices(folder)
    device = inherit_fits(to_device(spec), here)
    complete = inherit_fits(device, _own_devices(db_root()) if folder.resolve() != db_root().resolve() else ())
    temporary = Path(tempfile.mkdtemp(prefix=f".{spec.name}.", dir=folder))
    try:
        shutil.copyfile(path, temporary / DEVICE_FILE)
        for family in sorted(set(complete.fits) - set(device.fits)):
            write_fit(temporary, complete.fits[family])
        temporary.chmod(0o755)
        os.replace(temporary, folder / spec.name)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return load_device(spec.name, folder)


def _refuse_taken(folder: Path, path: Path, names: tuple[str, ...]) -> None:
    problems = []
    for owner in sorted(folder.glob(f"*/{DEVICE_FILE}")):
        other = read_spec(owner)
        known = {normalise(name) for name in (other.name, other.title, *other.aliases)}
        problems += [
            f"{path}: found {name!r}, which already names {other.name} in {folder}"
            for name in names
            if normalise(name) in known
        ]
    if problems:
        raise ConfigError(problems)


def _own_devices(folder: Path) -> tuple[Device, ...]:
    """Devices of a folder with the fits of their own."""
    return tuple(load_own(path.parent) for path in sorted(folder.glob(f"*/{DEVICE_FILE}")))
