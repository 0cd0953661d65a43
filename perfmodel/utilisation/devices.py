"""Which device of the database a trace was taken on."""

from __future__ import annotations

from perfmodel.db import list_devices, load_device
from perfmodel.db.device import Device
from perfmodel.errors import ConfigError, MissingCalibrationError
from perfmodel.traces.spans import KinetoTrace

CPU = "cpu"
_MEMORY_SLACK = 0.08  # a driver keeps part of the memory to itself


def device_of(trace: KinetoTrace, name: str | None = None, db: str | None = None) -> Device:
    """The device called `name`, else the one the trace names or one with its SMs and memory; the CPU without device work.

    Raises:
        ConfigError: the trace names none that the database has, and `name` is not given.
        MissingCalibrationError: the database has no device called `name`.
    """
    if name:
        return load_device(name, db)
    if not trace.device and not any("launch" in call.name.lower() for call in trace.calls):
        return load_device(CPU, db)
    given = trace.facts.name or trace.info.get("gpu", "")
    try:
        return load_device(given, db)
    except MissingCalibrationError as error:
        alike = _alike(trace, db)
        if alike is not None:
            return alike
        found = f"names {given!r}, which the database has not" if given else "does not name its device"
        raise ConfigError(f"{trace.path}: {found}; say --device NAME (perfmodel devices lists them)") from error


def _alike(trace: KinetoTrace, db: str | None) -> Device | None:
    """The device with as many SMs and nearly the same memory; of several the one for SXM sockets, then by name."""
    facts = trace.facts
    if not facts.n_sms or not facts.memory_bytes:
        return None
    found = [
        device
        for name in list_devices(db)
        if (device := load_device(name, db)).n_sms == facts.n_sms
        and abs(device.memory_bytes / facts.memory_bytes - 1.0) < _MEMORY_SLACK
    ]
    return min(found, key=lambda device: ("sxm" not in device.name, device.name), default=None)
