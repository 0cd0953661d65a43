"""One calibration of one device, as the command line runs it: settings, measuring, tables, fits, report."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from calibrate import adaptive, host, host_cuda, plan_cuda
from calibrate.cases.case import case_from_json
from calibrate.fit_cpu import FamilyReport, fit_table
from calibrate.fit_cuda import fit_tables
from calibrate.kernels import Progress, Settings, check_families, device_title, facts, tables
from calibrate.kernels import measure as measure_kernels
from calibrate.report import plot_rows, render
from calibrate.session import write_provenance
from perfmodel.db.device import Device
from perfmodel.db.fits import write_fit
from perfmodel.db.host import HOST_FILE
from perfmodel.db.loading import db_root, load_device, resolve_device
from perfmodel.errors import ConfigError, MissingCalibrationError

__all__ = ["fit", "measure", "render", "settings_of"]


def settings_of(
    device_name: str,
    *,
    families: Sequence[str],
    limit_s: float,
    out: Path | None,
    share: float,
    n_threads: int | None,
) -> Settings:
    """Settings of a run. `cuda` means the GPU that torch sees. Raises ConfigError or MissingCalibrationError."""
    chosen = check_families(families)
    device = load_device(_cuda_name() if device_name == "cuda" else device_name)
    return Settings(
        device=device,
        families=chosen,
        out=out or db_root() / device.name,
        share=share,
        limit_s=limit_s,
        plan_s=limit_s,
        n_threads=n_threads or (device.n_sms if device.kind == "cpu" else 1),
    )


def measure(settings: Settings, progress: Progress) -> bool:
    """Measures what is missing: first plan, what surrounds the calls of a step, then cases where the law fits worst.

    What surrounds them is a GPU's host overheads, measured before the plan, or on a CPU what a step adds to each call.
    False if the time limit came first.
    """
    started = time.monotonic()
    if settings.device.kind == "cuda":
        _check_gpu(settings.device)
    if settings.device.kind == "cuda" and not (settings.out / HOST_FILE).exists():
        progress(0, 1, "host overheads")
        figures = host_cuda.measure(host_cuda.CudaHost())
        host_cuda.write(settings.out, figures, facts(settings, host_cuda.STATISTIC))
    if not measure_kernels(settings, progress):
        return False
    if settings.device.kind == "cpu" and not (settings.out / host.TABLE).exists():
        progress(0, 1, "what a step adds to a call")
        host.write(settings.out, host.measure(settings.families))
        write_provenance(settings.out / host.TABLE, facts(settings, host.STATISTIC))
    if not all(adaptive.path_of(settings.out, family).exists() for family in settings.families):
        progress(0, 1, "where the law fits worst")
        found = worst(settings)
        for family in settings.families:
            errors = found.get(family, {})
            if settings.device.kind == "cuda":
                adaptive.extend(settings.out, family, errors, partial(plan_cuda.drawn, settings.device))
            else:
                adaptive.extend(settings.out, family, errors)
    left_s = settings.limit_s - (time.monotonic() - started)
    return measure_kernels(replace(settings, limit_s=left_s), progress)


def worst(settings: Settings) -> dict[str, dict[str, float]]:
    """|log(predicted / measured)| of the fitted cases of each family, by their text, each under a fit that has not seen it.

    Held-out cases have no say in what is measured next: they would be no test of it.
    """
    found: dict[str, dict[str, float]] = {}
    for report in _reports(settings):
        for text, error in report.left_out.items():
            found.setdefault(case_from_json(text).family, {})[text] = error
    return found


def _reports(settings: Settings) -> list[FamilyReport]:
    """Writes the tables of all rounds so far; fits to them."""
    paths = [settings.out / f"{family}.csv" for family in tables(settings)]
    if settings.device.kind == "cuda":
        return fit_tables(paths, settings.device)
    reports = (fit_table(path, settings.device) for path in paths)
    return [report for report in reports if report is not None]


def _check_gpu(device: Device) -> None:
    """Raises ConfigError if the GPU that torch sees is another one."""
    seen = _cuda_name()
    if resolve_device(seen) != device.name:
        raise ConfigError(f"--device: found {device.name}, allowed {resolve_device(seen)}: torch sees {seen} here")


def _cuda_name() -> str:
    import torch

    if not torch.cuda.is_available():
        raise MissingCalibrationError("--device cuda: torch sees no GPU here; --device cpu needs none")
    return device_title("cuda")


def fit(settings: Settings, *, plot: Path | None) -> list[FamilyReport]:
    """Writes the tables of all rounds so far and the fits to them; returns each family's errors on held-out cases."""
    reports = _reports(settings)
    for report in reports:
        write_fit(settings.out, report.fit)
    if plot is not None:
        plot_rows(reports, plot, settings.device.title)
    return reports
