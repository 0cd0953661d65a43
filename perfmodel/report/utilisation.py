"""Utilisation as a table, as JSON and as one picture."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from perfmodel.errors import ConfigError
from perfmodel.report.trace_load import text_table
from perfmodel.units import format_percent, format_rate, format_time
from perfmodel.utilisation.levels import LEVELS, Level, Utilisation

SHORT = {
    "device_busy": "busy",
    "sm_activity": "SMs",
    "occupancy": "occup.",
    "wave_efficiency": "waves",
    "issue_slots": "issue >=",
    "fp32_pipe": "FP32",
    "tensor_pipe": "tensor",
    "memory_bandwidth": "memory",
    "host_link": "PCIe",
    "main_thread": "host",
}
LONG = {
    "device_busy": "device busy",
    "sm_activity": "SM activity",
    "occupancy": "occupancy",
    "wave_efficiency": "wave efficiency",
    "issue_slots": "issue slots (at least)",
    "fp32_pipe": "FP32 pipe",
    "tensor_pipe": "tensor pipe",
    "memory_bandwidth": "memory bandwidth",
    "host_link": "PCIe",
    "main_thread": "main host thread",
}
MAX_ROWS = 8  # of a kind, in the table and the picture
LEAST_SHARE = 0.002  # rows below are of no interest


def utilisation_to_dict(found: Utilisation) -> dict[str, object]:
    """Plain values for JSON; fractions, seconds, bytes per second."""
    return {"schema_version": 1, **asdict(found)}


def shown_rows(found: Utilisation) -> list[Level]:
    """The rows worth showing: the largest of each kind."""
    rows: list[Level] = []
    for kind in ("whole", "phase", "module", "family"):
        rows += [row for row in found.rows if row.kind == kind and row.share_frac >= LEAST_SHARE][:MAX_ROWS]
    return rows


def render_utilisation(found: Utilisation, width: int) -> str:
    """One table: a row a group; `-` where nothing says."""
    head = ("group", "time", "of step", *SHORT.values(), "links", "known")
    rows = []
    for row in shown_rows(found):
        cells = [_percent(row.levels[name]) for name in LEVELS]
        link = format_rate(row.link_bytes_per_s) if row.link_bytes_per_s else "-"
        name = row.name if row.kind == "whole" else f"  {row.name}"
        per_step = row.window_s / found.n_steps
        rows.append(
            (name, format_time(per_step), format_percent(row.share_frac), *cells, link, _percent(row.known_frac))
        )
    steps = f"mean of {found.n_steps} steps" if found.n_steps > 1 else "one step"
    title = f"rank {found.rank}, {found.device}: {format_time(found.step_s, 4)} a step ({steps})\n"
    notes = "".join(f"measured: {line}\n" for line in found.counted)
    return title + text_table(head, rows, width) + notes


def _percent(value: float | None) -> str:
    return "-" if value is None else format_percent(value)


def write_picture(found: Utilisation, path: Path) -> None:
    """Writes the table as a picture: groups down, levels across, colour and number for each. PNG, PDF or SVG by name.

    Raises:
        ConfigError: matplotlib is not installed, or the file cannot be written.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError("a picture needs matplotlib: pip install 'perfmodel[plot]'") from error
    rows = shown_rows(found)
    figure = Figure(figsize=(11, 1.6 + 0.34 * (len(rows) + 2)), dpi=130)
    FigureCanvasAgg(figure)
    _draw(figure, found, rows)
    suffix = path.suffix or ".png"
    try:
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=suffix)
        os.close(handle)
        figure.savefig(name, bbox_inches="tight")
        os.replace(name, path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: cannot write: {error}") from error


def _draw(figure: object, found: Utilisation, rows: Sequence[Level]) -> None:
    import math

    axes = figure.subplots()  # type: ignore[attr-defined] # a matplotlib figure
    values = [[math.nan if row.levels[name] is None else row.levels[name] for name in LEVELS] for row in rows]
    axes.imshow(values, cmap="YlGnBu", vmin=0, vmax=1, aspect="auto")
    for y, row in enumerate(rows):
        for x, name in enumerate(LEVELS):
            value = row.levels[name]
            dark = value is not None and value > 0.55
            text = "·" if value is None else f"{100 * value:.0f}%" if value >= 0.095 else f"{100 * value:.1f}%"
            axes.text(x, y, text, ha="center", va="center", fontsize=8, color="white" if dark else "#444444")
    labels = [
        f"{row.name if row.kind == 'whole' else f'{row.kind}: {row.name}'}  ({100 * row.share_frac:.0f}%)"
        for row in rows
    ]
    axes.set_yticks(range(len(rows)), labels, fontsize=8)
    axes.set_xticks(range(len(LEVELS)), [LONG[name].replace(" ", "\n", 1) for name in LEVELS], fontsize=8)
    axes.xaxis.tick_top()
    kinds = [row.kind for row in rows]
    for y in range(1, len(rows)):
        if kinds[y] != kinds[y - 1]:
            axes.axhline(y - 0.5, color="#222222", linewidth=1)
    axes.set_title(
        f"Utilisation, rank {found.rank}, {found.device}: {format_time(found.step_s, 4)} a step "
        "(share of the step in brackets; · not known)",
        fontsize=10,
        pad=12,
    )
    for spine in axes.spines.values():
        spine.set_visible(False)
