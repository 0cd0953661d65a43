"""Host overheads measured beside a device: `kernels_db/<device>/host.yaml`, as a CUDA calibration writes it.

    host:        {op_dispatch_s: 7.1e-06, backward_op_s: 5.9e-06, launch_s: 2.4e-06, launch_latency_s: 1.9e-06, sync_s: 4e-06}
    provenance:  device, driver, cuda, torch, date, statistic, ...

Figures of a machine in base units; they take the place of those in device.yaml, which are other hosts'.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from pydantic import Field

from perfmodel.config.loading import Spec, validate
from perfmodel.config.reading import read_mapping
from perfmodel.db.device import HostCosts
from perfmodel.errors import ConfigError

HOST_FILE = "host.yaml"
LONGEST_S = 1e-3  # of any of the figures on a machine that does nothing else
PROVENANCE_KEYS = ("device", "date", "torch", "statistic")
# Spread between runs on one host, as HostCosts has it by default: what was measured belongs to this host.
_ONE_HOST = HostCosts(op_dispatch_s=0.0, backward_op_s=0.0, launch_s=0.0, launch_latency_s=0.0, sync_s=0.0, source="")


class _Figures(Spec):
    op_dispatch_s: float = Field(ge=0.0, description="seconds")
    backward_op_s: float = Field(ge=0.0, description="seconds")
    launch_s: float = Field(gt=0.0, description="seconds")
    launch_latency_s: float = Field(ge=0.0, description="seconds")
    sync_s: float = Field(gt=0.0, description="seconds")


class _HostFile(Spec):
    host: _Figures
    provenance: dict[str, str] = Field(description="device, date, torch, statistic, ...")


def host_costs(device_dir: Path, datasheet: HostCosts) -> HostCosts:
    """The host costs measured in a device's folder, else those of its datasheet. Raises ConfigError with every mistake."""
    path = device_dir / HOST_FILE
    if not path.is_file():
        return datasheet
    spec = validate(_HostFile, _floats(read_mapping(path)), str(path))
    faults = list(_faults(spec, path))
    if faults:
        raise ConfigError(faults)
    known = spec.provenance
    return replace(
        datasheet,
        **spec.host.model_dump(),
        low_frac=_ONE_HOST.low_frac,
        high_frac=_ONE_HOST.high_frac,
        source=f"measured on {known['device']}, {known['date']}, torch {known['torch']}: {known['statistic']}",
    )


def _faults(spec: _HostFile, path: Path) -> Iterator[str]:
    for name, value in spec.host.model_dump().items():
        if not math.isfinite(value) or value > LONGEST_S:
            yield f"{path}: host.{name}: found {value}, allowed seconds up to {LONGEST_S}"
    for key in PROVENANCE_KEYS:
        if not spec.provenance.get(key):
            yield f"{path}: provenance: missing {key}, needs text"


def _floats(body: Mapping[str, object]) -> dict[str, object]:
    """The figures as floats: a zero may be written without a point."""
    found = dict(body)
    figures = body.get("host")
    if isinstance(figures, Mapping):
        found["host"] = {key: float(value) if isinstance(value, int) else value for key, value in figures.items()}
    return found
