"""How a prediction shows itself in a terminal and a notebook, and as tables."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING, Any

from perfmodel.errors import ConfigError
from perfmodel.units import format_bytes, format_count, format_percent, format_time

if TYPE_CHECKING:
    from perfmodel.pipeline.prediction import Prediction

PARTS = {
    "compute": "compute_s", "exposed communication": "exposed_communication_s", "copy": "exposed_copy_s",
    "wait for other ranks": "wait_s", "host-bound": "host_bound_s", "data loader": "input_s",
    "idle": "idle_s",
}  # fmt: skip
TABLES = ("ranks", "top_ops", "critical_path")


def plain(p: Prediction) -> str:
    """The answer in a few lines."""
    parts = [(name, getattr(p.breakdown, field)) for name, field in PARTS.items()]
    path = ", ".join(f"{s.cause} {format_percent(s.share_frac)}" for s in p.critical_path[:4])
    return "\n".join(
        (
            f"{p.model} on {p.topology} ({p.n_ranks} rank{'s' if p.n_ranks > 1 else ''}, plan {p.plan}, {p.precision})",
            f"  iteration time  {format_time(p.iteration_time_s)}  (range {format_time(p.low_s)} to {format_time(p.high_s)})",
            f"  samples/s       {format_count(p.samples_per_s)}",
            f"  of it           {', '.join(f'{name} {format_time(t)}' for name, t in parts if t)}",
            f"  critical path   {path}",
            f"  memory          {format_bytes(p.memory_bytes)} of {format_bytes(p.ranks[0].memory_capacity_bytes)} a rank",
            f"  priced by       {', '.join(f'{name} {format_percent(share)}' for name, share in p.coverage.items())}",
        )
    )


def html(p: Prediction) -> str:
    """The answer as a small table for notebooks."""
    head, *lines = plain(p).splitlines()
    rows = "".join(
        f"<tr><th style='text-align:left'>{escape(line[2:18].strip())}</th>"
        f"<td style='text-align:left'>{escape(line[18:])}</td></tr>"
        for line in lines
    )
    return f"<table><caption style='text-align:left'><b>{escape(head)}</b></caption><tbody>{rows}</tbody></table>"


def frame(p: Prediction, table: str) -> Any:
    """One of the prediction's tables as a pandas DataFrame; SI units as in the JSON.

    Raises ConfigError: pandas is not installed, or no such table.
    """
    if table not in TABLES:
        raise ConfigError(f"to_pandas: found {table!r}, allowed {', '.join(TABLES)}")
    try:
        import pandas
    except ImportError as error:
        raise ConfigError("to_pandas needs pandas: pip install 'perfmodel[report]'") from error
    return pandas.json_normalize(p.to_dict()[table])
