"""Finds, loads and adds devices. The only room that touches `kernels_db/`."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

from perfmodel.config.device import DeviceSpec, OverlapSpec
from perfmodel.config.loading import validate
from perfmodel.config.reading import read_mapping
from perfmodel.db.device import Device, Fit, HostCosts, Overlap, shared
from perfmodel.db.fits import list_fits, read_fit
from perfmodel.db.host import HOST_FILE, host_costs
from perfmodel.db.inherit import inherit_fits
from perfmodel.errors import ConfigError, MissingCalibrationError, suggest

ENVIRONMENT_KEY = "PERFMODEL_DB"
DEVICE_FILE = "device.yaml"
ONE_THREAD = "_1t"  # behind the name of a CPU: the same machine, calibrated with one thread
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
    return _shipped_root()


@lru_cache(maxsize=1)
def _shipped_root() -> Path:
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
    return _resolve(name, _names(folder, _stamp(folder)))


def _resolve(name: str, names: Mapping[str, str]) -> str:
    found = names.get(normalise(name))
    if found is None:
        known = sorted(set(names.values()))
        near = suggest(normalise(name), names)
        raise MissingCalibrationError(f"device: found {name!r}, allowed {', '.join(known)}{near}")
    return found


def normalise(name: str) -> str:
    """A device name without case, punctuation, vendor words and the power limit that result tables put behind it.

    >>> normalise("NVIDIA A100-SXM4-80GB (400W)"), normalise("Tesla_V100-PCIE-32GB")
    ('a100_sxm4_80gb', 'v100_pcie_32gb')
    """
    bare = re.sub(r"\(\s*\d+\s*w\s*\)", "", name.casefold())
    text = re.sub(r"[^a-z0-9]+", "_", bare).strip("_")
    for word in _VENDOR_WORDS:
        text = text.removeprefix(word)
    return text


def load_device(name: str, root: str | Path | None = None) -> Device:
    """The device called `name` (or one of its aliases) with its own fits and those inherited from the nearest devices.

    Raises MissingCalibrationError if there is none, ConfigError with every mistake in a file that it reads: every
    device.yaml, its own fits, and those it inherits.
    """
    folder = db_root(root)
    stamp = _stamp(folder)
    return _complete(folder, stamp, _resolve(name, _names(folder, stamp)))


def load_shared(name: str, root: str | Path | None, n_processes: int) -> Device:
    """The device as each of `n_processes` busy processes on it sees it.

    A process of a CPU that has one core or less runs one thread: its prices are those of `<name>_1t`, where that was
    calibrated, with its part of the last-level cache.
    """
    device = load_device(name, root)
    part = shared(device, n_processes)
    alone = f"{device.name}{ONE_THREAD}"
    if device.kind != "cpu" or not 1 < device.n_sms <= n_processes or alone not in list_devices(root):
        return part
    return replace(
        part,
        fits=load_device(alone, root).fits,
        n_sms=1,
        n_processes=-(-n_processes // device.n_sms),
        l2_bytes=part.l2_bytes // n_processes,
    )


def load_own(device_dir: Path) -> Device:
    """The device in a folder with its own fits only. Raises ConfigError with every mistake of all its files."""
    problems: list[str] = []
    spec = read_spec(device_dir / DEVICE_FILE)
    problems.extend(_wrong_name(spec, device_dir / DEVICE_FILE))
    fits = {}
    for family in list_fits(device_dir):
        try:
            fits[family] = read_fit(device_dir, family)
        except ConfigError as error:
            problems.extend(error.problems)
    device = to_device(spec, fits)
    try:
        device = replace(device, host=host_costs(device_dir, device.host))
    except ConfigError as error:
        problems.extend(error.problems)
    if problems:
        raise ConfigError(problems)
    return device


def _wrong_name(spec: DeviceSpec, path: Path) -> list[str]:
    if spec.name == path.parent.name:
        return []
    return [f"{path}: name: found {spec.name!r}, allowed {path.parent.name!r} (its folder)"]


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
            low_frac=host.low_frac,
            high_frac=host.high_frac,
            source=host.source,
        ),
        cite=spec.cite,
        overlap=_overlap(spec.overlap),
        fits=dict(fits or {}),
    )


def _overlap(spec: OverlapSpec | None) -> Overlap:
    if spec is None:
        return Overlap()
    return Overlap(scale=spec.scale, low_frac=spec.low_frac, high_frac=spec.high_frac, is_measured=True)


class _FitsOnDisk(Mapping[str, Fit]):
    """The fits in a device's folder, each read when it is first asked for."""

    def __init__(self, device_dir: Path) -> None:
        self._dir = device_dir
        self._families = tuple(list_fits(device_dir))
        self._read: dict[str, Fit] = {}

    def __getitem__(self, family: str) -> Fit:
        if family not in self._families:
            raise KeyError(family)
        if family not in self._read:
            self._read[family] = read_fit(self._dir, family)
        return self._read[family]

    def __contains__(self, family: object) -> bool:
        return family in self._families

    def __iter__(self) -> Iterator[str]:
        return iter(self._families)

    def __len__(self) -> int:
        return len(self._families)


Stamp = tuple[tuple[str, str, int], ...]


def _stamp(folder: Path) -> Stamp:
    """Names and times of all device, host and fit files: a changed database is read again."""
    found = []
    with os.scandir(folder) as entries:
        device_dirs = [entry.path for entry in entries if entry.is_dir() and not entry.name.startswith(".")]
    for device_dir in device_dirs:
        with os.scandir(device_dir) as files:
            found += [
                (device_dir, file.name, file.stat().st_mtime_ns)
                for file in files
                if file.name in {DEVICE_FILE, HOST_FILE} or ".fit." in file.name
            ]
    return tuple(sorted(found))


@lru_cache(maxsize=4)
def _specs(folder: Path, stamp: Stamp) -> Mapping[str, DeviceSpec]:
    """The datasheet of every device, by folder."""
    specs: dict[str, DeviceSpec] = {}
    problems: list[str] = []
    for path in sorted(folder.glob(f"*/{DEVICE_FILE}")):
        try:
            specs[path.parent.name] = read_spec(path)
        except ConfigError as error:
            problems.extend(error.problems)
        else:
            problems.extend(_wrong_name(specs[path.parent.name], path))
    if problems:
        raise ConfigError(problems)
    return specs


@lru_cache(maxsize=4)
def _devices(folder: Path, stamp: Stamp) -> Mapping[str, Device]:
    """Every device with its own fits, unread."""
    specs = _specs(folder, stamp)
    return {name: _unread(folder / name, spec) for name, spec in specs.items()}


def _unread(device_dir: Path, spec: DeviceSpec) -> Device:
    device = to_device(spec)
    return replace(device, host=host_costs(device_dir, device.host), fits=_FitsOnDisk(device_dir))


@lru_cache(maxsize=256)
def _complete(folder: Path, stamp: Stamp, name: str) -> Device:
    devices = _devices(folder, stamp)
    return inherit_fits(devices[name], devices.values())


@lru_cache(maxsize=4)
def _names(folder: Path, stamp: Stamp) -> Mapping[str, str]:
    names: dict[str, str] = {}
    problems: list[str] = []
    for name, spec in _specs(folder, stamp).items():
        for alias in (name, spec.title, *spec.aliases):
            owner = names.setdefault(normalise(alias), name)
            if owner != name:
                problems.append(f"{folder / name / DEVICE_FILE}: aliases: {alias!r} already names {owner}")
    if problems:
        raise ConfigError(problems)
    return names
