"""Peaks of live memory, predicted beside measured, as a table, Markdown or JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from statistics import fmean

from perfmodel.report.listing import render_rows
from perfmodel.units import format_bytes, format_percent
from perfmodel.validate.live_memory import PeakGap

SCHEMA_VERSION = 1
COLUMNS = ("case", "predicted", "measured", "error")


def render_peaks(gaps: Sequence[PeakGap], *, markdown: bool = False, as_json: bool = False) -> str:
    """One line a case, then the mean and the worst error."""
    errors = [abs(gap.error_frac) for gap in gaps]
    mean, worst = fmean(errors), max(errors)
    if as_json:
        cases = [{**asdict(gap), "error_frac": gap.error_frac} for gap in gaps]
        return json.dumps(
            {"schema_version": SCHEMA_VERSION, "mean_error_frac": mean, "worst_error_frac": worst, "cases": cases}
        )
    rows = [_cells(gap) for gap in gaps]
    if markdown:
        lines = [f"| {' | '.join(row)} |" for row in (COLUMNS, ("---",) * len(COLUMNS), *rows)]
    else:
        lines = [render_rows([dict(zip(COLUMNS, row, strict=True)) for row in rows])]
    return "\n".join(
        (*lines, "", f"{len(gaps)} cases: mean error {format_percent(mean)}, worst {format_percent(worst)}", "")
    )


def _cells(gap: PeakGap) -> tuple[str, str, str, str]:
    sizes = format_bytes(gap.predicted_bytes), format_bytes(gap.measured_bytes)
    return gap.name, *sizes, f"{100 * gap.error_frac:+.1f}%"
