"""Finds, loads and adds devices. The only room that touches `kernels_db/`."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path

from perfmodel.config.device import DeviceSpec
from perfmodel.config.loading import validate
from perfmodel.config.reading import read_mapping
from perfmodel.db.device import Device, Fit, HostCosts
from perfmodel.db.fits import list_fits, read_fit
from perfmodel.db.inherit import inherit_fits
from perfmodel.errors import ConfigError, MissingCalibrationError, suggest

ENVIRONMENT_KEY = "PERFMODEL_DB"
DEVICE_FILE = "device.yaml"
_VENDOR_WORDS = ("nvidia_", "tesla_", "geforce_", "amd_")


def db_root(root: str | Path | None = None) -> Path:
    """The folder that holds the devices: `root`, else $PERFMODEL_DB, else the packaged one, else the repository's.

    Raises ConfigError if a folder that was asked for does not exist.
    """
    asked = root if root is not None else os.environ.get(ENVIRONMENT_KEY)
    if asked:
        if not Path(asked).is_dir():
            name = "--db" if root is not None else ENVIRONMENT_KEY
            raise ConfigError(f"{name}: found {str(asked)!r}, allowed a folder of devices")
        return Path(asked)
    package = Path(__file__).parents[1]
    for candidate in (package / "_data" / "kernels_db", package.parent / "kernels_db"):
        if candidate.is_dir():
            return candidate
    raise ConfigError(f"no device database: {package / '_data' / 'kernels_db'} is missing; reinstall perfmodel")


def list_devices(root: str | Path | None = None) -> list[str]:
    """Names of all devices, sorted."""
    return sorted(path.parent.name for path in db_root(root).glob(f"*/{DEVICE_FILE}"))


def resolve_device(name: str, root: str | Path | None = None) -> str:
    """The database name of a device given by name, alias or driver name (case and punctuation do not matter).

    Raises MissingCalibrationError that names the nearest devices.
    """
    folder = db_root(root)
    names = _names(folder, _stamp(folder))
    found = names.get(normalise(name))
    if found is None:
        known = sorted(set(names.values()))
        near = suggest(normalise(name), names)
        raise MissingCalibrationError(f"device: found {name!r}, allowed {', '.join(known)}{near}")
    return found


def normalise(name: str) -> str:
    """A device name without case, punctuation and vendor words.

    >>> normalise("NVIDIA A100-SXM4-80GB"), normalise("Tesla_V100-PCIE-32GB")
    ('a100_sxm4_80gb', 'v100_pcie_32gb')
    """
    text = re.sub(r"[^a-z0-9]+", "_", name.casefold()).strip("_")
    for word in _VENDOR_WORDS:
        text = text.removeprefix(word)
    return text


def load_device(name: str, root: str | Path | None = None) -> Device:
    """The device called `name` (or one of its aliases) with its own fits and those inherited from the nearest devices.

    Raises MissingCalibrationError if there is none, ConfigError with every mistake in its files.
    """
    folder = db_root(root)
    return _all_devices(folder, _stamp(folder))[resolve_device(name, folder)]


def load_own(device_dir: Path) -> Device:
    """The device in a folder with its own fits only. Raises ConfigError with every mistake of all its files."""
    problems: list[str] = []
    spec = read_spec(device_dir / DEVICE_FILE)
    if spec.name != device_dir.name:
        problems.append(
            f"{device_dir / DEVICE_FILE}: name: found {spec.name!r}, allowed {device_dir.name!r} (its folder)"
        )
    fits = {}
    for family in list_fits(device_dir):
        try:
            fits[family] = read_fit(device_dir, family)
        except ConfigError as error:
            problems.extend(error.problems)
    if problems:
        raise ConfigError(problems)
    return to_device(spec, fits)


def read_spec(path: Path) -> DeviceSpec:
    """Reads and validates one device.yaml. Raises ConfigError with every mistake."""
    return validate(DeviceSpec, read_mapping(path), str(path))


def to_device(spec: DeviceSpec, fits: Mapping[str, Fit] | None = None) -> Device:
    """A device from its datasheet and its own fits."""
    host = spec.host
    return Device(
        name=spec.name,
        title=spec.title,
        kind=spec.kind,
        architecture=spec.architecture,
        compute_capability=spec.compute_capability,
        n_sms=spec.n_sms,
        clock_hz=spec.clock,
        peak_flops_per_s={str(pipe): rate for pipe, rate in spec.peak.items()},
        memory_bytes=spec.memory,
        memory_bytes_per_s=spec.memory_bandwidth,
        l2_bytes=spec.l2,
        l2_bytes_per_s=spec.l2_bandwidth,
        smem_per_sm_bytes=spec.smem_per_sm,
        kernel_floor_s=spec.kernel_floor,
        host_link_bytes_per_s=spec.host_link,
        tdp_w=spec.tdp,
        nearest=spec.nearest,
        host=HostCosts(
            op_dispatch_s=host.op_dispatch,
            backward_op_s=host.backward_op,
            launch_s=host.launch,
            launch_latency_s=host.launch_latency,
            sync_s=host.sync,
            source=host.source,
        ),
        cite=spec.cite,
        fits=dict(fits or {}),
    )


def _stamp(folder: Path) -> tuple[tuple[str, int], ...]:
    """Names and times of all device and fit files: a changed database is read again."""
    paths = sorted([*folder.glob(f"*/{DEVICE_FILE}"), *folder.glob("*/*.fit.*")])
    return tuple((str(path), path.stat().st_mtime_ns) for path in paths)


@lru_cache(maxsize=4)
def _all_devices(folder: Path, stamp: tuple[tuple[str, int], ...]) -> Mapping[str, Device]:
    own: dict[str, Device] = {}
    problems: list[str] = []
    for path in sorted(folder.glob(f"*/{DEVICE_FILE}")):
        try:
            own[path.parent.name] = load_own(path.parent)
        except ConfigError as error:
            problems.extend(error.problems)
    if problems:
        raise ConfigError(problems)
    return {name: inherit_fits(device, own.values()) for name, device in own.items()}


@lru_cache(maxsize=4)
def _names(folder: Path, stamp: tuple[tuple[str, int], ...]) -> Mapping[str, str]:
    names: dict[str, str] = {}
    problems: list[str] = []
    for path in sorted(folder.glob(f"*/{DEVICE_FILE}")):
        spec = read_spec(path)
        for alias in (path.parent.name, spec.title, *spec.aliases):
            owner = names.setdefault(normalise(alias), path.parent.name)
            if owner != path.parent.name:
                problems.append(f"{path}: aliases: {alias!r} already names {owner}")
    if problems:
        raise ConfigError(problems)
    return names
