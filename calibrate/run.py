"""One calibration of one device, as the command line runs it: settings, measuring, tables, fits, report."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from calibrate import host
from calibrate.fit_cpu import FamilyReport, fit_table
from calibrate.kernels import Progress, Settings, check_families, device_title, facts, tables
from calibrate.kernels import measure as measure_kernels
from calibrate.report import plot_rows, render
from calibrate.session import write_provenance
from perfmodel.db.fits import write_fit
from perfmodel.db.loading import db_root, load_device
from perfmodel.errors import MissingCalibrationError

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
        n_threads=n_threads or device.n_sms,
    )


def measure(settings: Settings, progress: Progress) -> bool:
    """Measures what is missing: kernels, then on a CPU what a step adds to a call. False if the time limit came first."""
    if not measure_kernels(settings, progress):
        return False
    if settings.device.kind == "cpu" and not (settings.out / host.TABLE).exists():
        host.write(settings.out, host.measure(settings.families))
        write_provenance(settings.out / host.TABLE, facts(settings, host.STATISTIC))
    return True


def _cuda_name() -> str:
    import torch

    if not torch.cuda.is_available():
        raise MissingCalibrationError("--device cuda: torch sees no GPU here; --device cpu needs none")
    return device_title("cuda")


def fit(settings: Settings, *, plot: Path | None) -> list[FamilyReport]:
    """Writes the tables of all rounds so far and the fits to them; returns each family's errors.

    A CUDA device gets its tables alone: the GPU laws are fitted by `calibrate.fit_gemm` and its siblings, which do not read
    these tables yet.
    """
    reports: list[FamilyReport] = []
    measured = tables(settings)
    if settings.device.kind == "cuda":
        return reports
    for family in measured:
        report = fit_table(settings.out / f"{family}.csv", settings.device)
        if report is not None:
            write_fit(settings.out, report.fit)
            reports.append(report)
    if plot is not None:
        plot_rows(reports, plot, settings.device.title)
    return reports
