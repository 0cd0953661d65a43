"""The result of a search as a table for people."""

from __future__ import annotations

from collections.abc import Sequence
from io import StringIO
from typing import Protocol

from perfmodel.pipeline.prediction import Prediction
from perfmodel.units import format_bytes, format_percent, format_time


class Row(Protocol):
    """A ranked plan."""

    @property
    def label(self) -> str:
        """Plan and micro-batch in one line."""

    @property
    def prediction(self) -> Prediction:
        """Its prediction."""

    @property
    def why(self) -> str:
        """What puts it behind the first."""


def render_search(rows: Sequence[Row], summary: Sequence[str], *, width: int = 120, color: bool = False) -> str:
    """Ranked plans, each with what puts it behind the first, and lines of summary below."""
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    buffer = StringIO()
    console = Console(file=buffer, width=width, no_color=not color, highlight=False, force_terminal=color)
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("", justify="right")
    table.add_column("plan", overflow="fold")
    for name in ("iteration", "samples/s", "slower", "memory"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("behind the first by", overflow="fold")
    first = rows[0].prediction
    for number, row in enumerate(rows, 1):
        p = row.prediction
        slower = format_percent(first.samples_per_s / p.samples_per_s - 1.0) if number > 1 else "-"
        cells = (format_time(p.iteration_time_s), f"{p.samples_per_s:,.4g}", slower, format_bytes(p.memory_bytes))
        table.add_row(str(number), row.label, *cells, row.why or "-")
    console.print(table)
    for line in summary:
        console.print(line, markup=False)
    return buffer.getvalue()
