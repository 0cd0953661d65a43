"""`perfmodel db`: check the device database; score its fits against measured rows."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Literal

import click

JSON_SCHEMA_VERSION = 1


@click.group()
def db() -> None:
    """Check the device database; score its fits against measured rows."""


@db.command(epilog="Example: perfmodel db check")
@click.option("--db", "root", type=click.Path(), help="Database folder instead of the shipped one.")
@click.option("--remarks", is_flag=True, help="Also list where time falls as work grows, and other oddities.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of lines.")
def check(root: str | None, *, remarks: bool, as_json: bool) -> None:
    """Check every device and fit: schema, provenance, duplicates, nothing faster than the device's own peak."""
    from perfmodel.validate.database import check_database

    report = check_database(root)
    if as_json:
        click.echo(json.dumps({"schema_version": JSON_SCHEMA_VERSION, **asdict(report)}, indent=2))
        sys.exit(1 if report.problems else 0)
    for line in report.problems:
        click.echo(line)
    if remarks:
        for line in report.remarks:
            click.echo(f"remark: {line}")
    counts = f"{report.n_devices} devices, {report.n_fits} fits, {len(report.problems)} problems"
    click.echo(f"{counts}, {len(report.remarks)} remarks{'' if remarks else ' (--remarks lists them)'}")
    if report.problems:
        sys.exit(1)


@db.command(epilog="Example: perfmodel db score measured_gemm.csv.gz --heldout")
@click.argument("files", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--heldout", is_flag=True, help="Only rows that no shipped fit has used.")
@click.option("--min-time", default="0 s", show_default=True, help="Leave out kernels measured shorter, such as 100us.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of the table.")
@click.option("--markdown", is_flag=True, help="Print Markdown instead of the table.")
def score(files: tuple[Path, ...], *, heldout: bool, min_time: str, as_json: bool, markdown: bool) -> None:
    """Price every measured row of FILES with the shipped fits and print the errors by device and family.

    A file is a CSV (gzipped or not) of measured kernels or collectives; its format is told by its columns.
    """
    from perfmodel.report.listing import render_markdown, render_rows
    from perfmodel.report.scores import collective_row, kernel_row
    from perfmodel.units import parse_seconds
    from perfmodel.validate.collective_rows import is_collective_file, left_out
    from perfmodel.validate.score_collectives import score_collectives
    from perfmodel.validate.score_kernels import score as score_kernels

    collectives = [path for path in files if is_collective_file(path)]
    kernels = [path for path in files if path not in collectives]
    try:
        min_s = parse_seconds(min_time)
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="--min-time") from error
    only: Literal["heldout", "all"] = "heldout" if heldout else "all"
    tables = {
        "kernels": [kernel_row(found) for found in score_kernels(kernels, only=only, min_s=min_s)] if kernels else [],
        "collectives": [collective_row(found) for found in score_collectives(collectives, only=only)]
        if collectives
        else [],
    }
    for line in left_out(collectives) if collectives else ():
        click.echo(line, err=True)
    if as_json:
        click.echo(json.dumps({"schema_version": 1, **tables}, indent=2))
        return
    for rows in tables.values():
        if rows:
            click.echo((render_markdown if markdown else render_rows)(rows), nl=False)
