"""Fits of collectives on one fabric: `_fabrics/<fabric>/collectives.fit.yaml`, and an npz with its corrections.

A fabric is a way of joining GPUs of one chip (`nvswitch_h100`, `pcie_l40s`); `Topology.fabric` names it. The files have the
form of every other fit (schema, provenance, whole or not at all); this module gives them types and finds the nearest.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from perfmodel.db.device import Fit
from perfmodel.db.fits import fit_path, read_fit, write_fit
from perfmodel.db.loading import db_root
from perfmodel.errors import ConfigError

FABRICS_FOLDER = "_fabrics"
FAMILY = "collectives"
LAW = "collective-regimes-v1"
# Sizes of the correction's grid: 2^9 to 2^30 bytes.
FIRST_LOG2_BYTES, LAST_LOG2_BYTES = 9, 30
N_SIZES = LAST_LOG2_BYTES - FIRST_LOG2_BYTES + 1
_ROWS, _BUS = "rows.n", "bus_bytes_per_s.n"
# A correction never moves a law by more than a factor of two.
MAX_CORRECTION = 0.7
# Fabrics without measurements that share a chip's links with one that has them.
NEAREST: Mapping[str, str] = MappingProxyType(
    {
        "nvswitch_b300": "nvswitch_b200",
        "nvswitch_gb300": "nvswitch_gb200",
        "nvswitch_gh200": "nvswitch_h200",
        "nvswitch_h800": "nvswitch_h100",
        "nvswitch_h20": "nvswitch_h200",
        "nvswitch_a800": "nvswitch_a100",
    }
)
# Any other PCIe box: the healthy one that was measured, its bandwidth part scaled to the box's own links.
_NEAREST_PCIE = "pcie_rtx_pro_6000"


@dataclass(frozen=True, slots=True, kw_only=True)
class RegimeFit:
    """One algorithm and protocol of one operation on one fabric: its law and its correction.

    time = (base_s + step_s x steps(n) + bytes x factor(n) x s_per_byte x growth(n)) x exp(correction). `steps` and `factor`
    are those of the algorithm; growth(n) = exp(n_slope x g(n)), with g given by the law. `correction[d, i, j]` is the
    logarithm of measured over law at dtype class d (0: two bytes and more, 1: one byte), `group_sizes[i]` ranks and
    2^(9+j) bytes; `versions[v][i, j]` is what library version v adds to it.
    """

    base_s: float
    step_s: float
    s_per_byte: float
    n_slope: float
    log2_bytes: tuple[float, float]
    correction: NDArray[np.float64]
    versions: Mapping[str, NDArray[np.float64]]


@dataclass(frozen=True, slots=True, kw_only=True)
class FabricFit:
    """Collectives on one fabric.

    Attributes:
        fabric: its name.
        fit: what is on disk.
        regimes: by (op, regime), a regime being `<algorithm>_<protocol>`.
        group_sizes: numbers of ranks that were measured, ascending.
        bus_bytes_per_s: by number of ranks (measured or not) the ring bandwidth of the measured machine by its topology;
            another machine's bandwidth part scales with it.
        tuner_bus_frac: what NCCL takes that bandwidth for when it chooses, as a share of it.
        range_frac: by op the (low, high) multipliers of a prediction, from held-out residuals.
        power_law: growth(n) is a power of n (PCIe trees) instead of tending to a constant (switches).
    """

    fabric: str
    fit: Fit
    regimes: Mapping[tuple[str, str], RegimeFit]
    group_sizes: tuple[int, ...]
    bus_bytes_per_s: Mapping[int, float]
    tuner_bus_frac: float
    range_frac: Mapping[str, tuple[float, float]]
    power_law: bool


def fabrics_dir(root: str | Path | None = None) -> Path:
    """The folder of all fabrics."""
    return db_root(root) / FABRICS_FOLDER


def list_fabrics(root: str | Path | None = None) -> list[str]:
    """Names of all fabrics with a fit, sorted."""
    return sorted(path.parent.name for path in fabrics_dir(root).glob(f"*/{fit_path(Path(), FAMILY).name}"))


def load_fabric(name: str, root: str | Path | None = None) -> FabricFit | None:
    """The fit of a fabric, or of the one nearest to it; None if neither has one. Raises ConfigError with every mistake."""
    folder = fabrics_dir(root)
    for candidate in (name, NEAREST.get(name, _NEAREST_PCIE if name.startswith("pcie_") else "")):
        path = fit_path(folder / candidate, FAMILY)
        if candidate and path.is_file():
            return _load(folder / candidate, path.stat().st_mtime_ns)
    return None


@lru_cache(maxsize=64)
def _load(folder: Path, stamp: int) -> FabricFit:
    return to_fabric(folder.name, read_fit(folder, FAMILY), str(fit_path(folder, FAMILY)))


def write_fabric(name: str, fit: Fit, root: str | Path | None = None) -> Path:
    """Writes a fabric's fit whole or not at all. Raises ConfigError if it would not load again."""
    problems = check_fabric(name, fit)
    if problems:
        raise ConfigError(problems)
    return write_fit(fabrics_dir(root) / name, fit)


def to_fabric(name: str, fit: Fit, where: str = "") -> FabricFit:
    """Types for what is on disk. Raises ConfigError with every mistake."""
    problems = check_fabric(name, fit, where)
    if problems:
        raise ConfigError(problems)
    values = fit.parameters
    ops = {op for op, _ in _regime_names(fit)}
    return FabricFit(
        fabric=name,
        fit=fit,
        regimes=MappingProxyType({key: _regime(fit, *key) for key in _regime_names(fit)}),
        group_sizes=tuple(_by_ranks(fit, _ROWS)),
        bus_bytes_per_s=MappingProxyType(_by_ranks(fit, _BUS)),
        tuner_bus_frac=values.get("tuner_bus_frac", 1.0),
        range_frac={op: (values[f"{op}.low_frac"], values[f"{op}.high_frac"]) for op in sorted(ops)},
        power_law=values.get("power_law", 0.0) > 0,
    )


def _by_ranks(fit: Fit, prefix: str) -> dict[int, float]:
    """Parameters called `<prefix><ranks>`, by number of ranks, ascending."""
    found = {int(key.removeprefix(prefix)): value for key, value in fit.parameters.items() if key.startswith(prefix)}
    return dict(sorted(found.items()))


def _regime_names(fit: Fit) -> list[tuple[str, str]]:
    return sorted(
        (key.split(".")[0], key.split(".")[1])
        for key in fit.parameters
        if key.endswith(".s_per_byte") and key.count(".") == 2
    )


def _regime(fit: Fit, op: str, regime: str) -> RegimeFit:
    stem = f"{op}.{regime}"
    prefix = f"version.{stem}."
    return RegimeFit(
        base_s=fit.parameters[f"{stem}.base_s"],
        step_s=fit.parameters[f"{stem}.step_s"],
        s_per_byte=fit.parameters[f"{stem}.s_per_byte"],
        n_slope=fit.parameters[f"{stem}.n_slope"],
        log2_bytes=fit.fit_range[f"{stem}.log2_bytes"],
        correction=fit.arrays[f"correction.{stem}"],
        versions={
            key.removeprefix(prefix).replace("_", "."): table
            for key, table in fit.arrays.items()
            if key.startswith(prefix)
        },
    )


def check_fabric(name: str, fit: Fit, where: str = "") -> list[str]:
    """Every mistake of a fabric's fit, one line each: law, missing parameters, ranges, shapes and bounds of corrections."""
    where = where or name
    problems = [] if fit.law == LAW else [f"{where}: law: found {fit.law!r}, allowed {LAW!r}"]
    n_sizes = sum(key.startswith(_ROWS) for key in fit.parameters)
    for prefix in (_ROWS, _BUS):
        if not any(key.startswith(prefix) for key in fit.parameters):
            problems.append(f"{where}: parameters: missing {prefix}<ranks>")
    for op, regime in _regime_names(fit):
        stem = f"{op}.{regime}"
        needed = [f"{stem}.{key}" for key in ("base_s", "step_s", "n_slope")] + [f"{op}.low_frac", f"{op}.high_frac"]
        problems += [f"{where}: parameters: missing {key}" for key in needed if key not in fit.parameters]
        if f"{stem}.log2_bytes" not in fit.fit_range:
            problems.append(f"{where}: fit_range: missing {stem}.log2_bytes")
        values = [fit.parameters.get(f"{stem}.{key}", 0.0) for key in ("base_s", "step_s", "s_per_byte")]
        if min(values) < 0:
            problems.append(f"{where}: {stem}: found a negative time, allowed 0 or more")
        problems += _array_problems(where, fit, stem, (2, n_sizes, N_SIZES))
    return problems


def _array_problems(where: str, fit: Fit, stem: str, shape: tuple[int, ...]) -> list[str]:
    table = fit.arrays.get(f"correction.{stem}")
    if table is None or table.shape != shape:
        found = "none" if table is None else str(table.shape)
        return [f"{where}: arrays: correction.{stem}: found {found}, needs {shape}"]
    tables = [table, *(value for key, value in fit.arrays.items() if key.startswith(f"version.{stem}."))]
    if any(value.shape != shape[1:] for value in tables[1:]):
        return [f"{where}: arrays: version.{stem}: needs {shape[1:]}"]
    if not all(np.all(np.isfinite(value)) and np.max(np.abs(value)) <= MAX_CORRECTION for value in tables):
        return [f"{where}: arrays: {stem}: found a correction beyond {MAX_CORRECTION}, or one that is no number"]
    return []
