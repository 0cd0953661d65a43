"""What a calibration says of itself: errors per family and operator, and predicted against measured."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from perfmodel.errors import ConfigError

if TYPE_CHECKING:
    from calibrate.fit_cpu import FamilyReport


def render(reports: Sequence[FamilyReport], *, per_operator: bool = True) -> str:
    """A table of held-out errors: rows, median and p90 of |predicted / measured - 1|, and the rows' own noise, in percent."""
    quantiles = "".join(f" {name:>8s}" for name in ("median", "p90", "noise", "its p90"))
    lines = [f"{'family':12s} {'operator':44s} {'rows':>5s} {'held out':>8s}{quantiles}"]
    for report in reports:
        lines.append(_line(report.family, "all", report.n_rows, report.error) + _quantiles(report.noise))
        if per_operator:
            lines += [_line("", key, n, error) for key, (n, error) in sorted(report.by_operator.items())]
    return "\n".join(line.rstrip() for line in lines)


def _line(family: str, name: str, n_rows: int, error: np.ndarray) -> str:
    return f"{family:12s} {name:44s} {n_rows:5d} {error.size:8d}{_quantiles(error)}"


def _quantiles(share: np.ndarray) -> str:
    """Median and p90 in percent; blanks if there is nothing to tell."""
    values = (f"{100 * np.quantile(share, q):7.1f}%" if share.size else "" for q in (0.5, 0.9))
    return "".join(f" {value:>8s}" for value in values)


def plot_rows(reports: Sequence[FamilyReport], path: Path, title: str) -> None:
    """Predicted against measured times of held-out rows, one colour a family. Raises ConfigError without matplotlib."""
    try:
        from matplotlib import colormaps
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError("--plot: needs matplotlib; pip install 'perfmodel[plot]'") from error
    figure = Figure(figsize=(7, 7))
    axes = figure.add_subplot()
    colours = colormaps["tab20"]
    for number, report in enumerate(reports):
        axes.loglog(
            report.measured_s, report.predicted_s, ".", color=colours(number), markersize=4, label=report.family
        )
    low, high = axes.get_xlim()
    axes.plot([low, high], [low, high], "k-", linewidth=0.8)
    axes.set(xlabel="measured (s)", ylabel="predicted (s)", title=f"{title}: held-out cases")
    axes.legend(fontsize="small")
    figure.savefig(path, dpi=120)
