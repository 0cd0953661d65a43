"""Fits of transports between hosts: `_fabrics/network/wire.fit.yaml`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from perfmodel.db.device import Fit
from perfmodel.db.fabric import fabrics_dir
from perfmodel.db.fits import fit_path, read_fit, write_fit
from perfmodel.errors import ConfigError

FOLDER, FAMILY, LAW = "network", "wire", "wire-transports-v1"
EFA = "efa"
TRANSPORTS = ("infiniband", "roce", EFA, "tcp")
_KEYS = ("port_s", "bandwidth_frac", "fill_s", "half_bytes", "channel_bytes_per_s", "low_frac", "high_frac")


@dataclass(frozen=True, slots=True, kw_only=True)
class WireFit:
    """One transport.

    Attributes:
        port_s: what a crossing costs beyond NCCL's figure and the ports' own latency.
        bandwidth_frac: share of the modelled bandwidth that large collectives reach.
        fill_s: time that one stage of the pipeline takes to reach its full rate.
        half_bytes: size at which half of that is paid.
        channel_bytes_per_s: most that one channel of an in-switch tree carries between hosts.
        low_frac, high_frac: multipliers of a prediction's range.
    """

    port_s: float
    bandwidth_frac: float
    fill_s: float
    half_bytes: float
    channel_bytes_per_s: float
    low_frac: float
    high_frac: float


WireFits = Mapping[str, WireFit]


def load_wires(root: str | Path | None = None) -> WireFits | None:
    """All transports with a fit; None where the database has none. Raises ConfigError with every mistake."""
    folder = fabrics_dir(root) / FOLDER
    path = fit_path(folder, FAMILY)
    return _load(folder, path.stat().st_mtime_ns) if path.is_file() else None


@lru_cache(maxsize=8)
def _load(folder: Path, stamp: int) -> WireFits:
    return to_wires(read_fit(folder, FAMILY))


def to_wires(fit: Fit) -> WireFits:
    """Types for what is on disk. Raises ConfigError with every mistake."""
    problems = check_wires(fit)
    if problems:
        raise ConfigError(problems)
    named = {name for name in TRANSPORTS if f"{name}.port_s" in fit.parameters}
    return {name: WireFit(**{key: fit.parameters[f"{name}.{key}"] for key in _KEYS}) for name in sorted(named)}


def check_wires(fit: Fit) -> list[str]:
    """Every mistake, one line each: law, unknown transports, missing or impossible figures."""
    problems = [] if fit.law == LAW else [f"wire: law: found {fit.law!r}, allowed {LAW!r}"]
    for name in sorted({key.partition(".")[0] for key in fit.parameters}):
        if name not in TRANSPORTS:
            problems.append(f"wire: {name}: allowed {', '.join(TRANSPORTS)}")
        problems += [f"wire: missing {name}.{key}" for key in _KEYS if f"{name}.{key}" not in fit.parameters]
    problems += [f"wire: {key}: found {value}, allowed 0 or more" for key, value in fit.parameters.items() if value < 0]
    positive = ("bandwidth_frac", "half_bytes", "channel_bytes_per_s")
    zero = [key for key, value in fit.parameters.items() if key.rpartition(".")[2] in positive and value == 0]
    return problems + [f"wire: {key}: found 0, allowed more" for key in zero]


def write_wires(fit: Fit, root: str | Path | None = None) -> Path:
    """Writes the fit whole or not at all. Raises ConfigError if it would not load again."""
    problems = check_wires(fit)
    if problems:
        raise ConfigError(problems)
    return write_fit(fabrics_dir(root) / FOLDER, fit)
