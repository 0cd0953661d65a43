"""`perfmodel trace ...`: real traces in, explained; predictions out in the same form."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import click

PIPE_WIDTH = 160  # columns of tables where stdout is no terminal

_FILES = click.argument("files", nargs=-1, required=True, type=click.Path(path_type=Path))
_SALVAGE = click.option("--salvage", is_flag=True, help="Keep whole events of a file that is cut off or damaged.")
_JSON = click.option("--json", "as_json", is_flag=True, help="Print JSON instead of tables.")


def table_width() -> int:
    """Columns for tables."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else PIPE_WIDTH


@click.group()
def trace() -> None:
    """Read profiler traces; explain them; make them from predictions."""


@trace.command(epilog="Example: perfmodel trace load rank*.json.gz")
@_FILES
@_SALVAGE
@_JSON
def load(files: tuple[Path, ...], *, salvage: bool, as_json: bool) -> None:
    """Load FILES (Kineto traces of one or more ranks, or execution traces) and say where their steps' time goes."""
    from perfmodel.report.trace_load import load_to_dict, render_load
    from perfmodel.traces.explain import explain_lateness, explain_steps
    from perfmodel.traces.ranks import load_job

    job = load_job(files, salvage=salvage)
    steps, late = explain_steps(job), explain_lateness(job)
    if as_json:
        click.echo(json.dumps(load_to_dict(job, steps, late), indent=2))
    else:
        click.echo(render_load(job, steps, late, table_width()), nl=False)
