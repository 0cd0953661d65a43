"""`perfmodel db`: check the device database; score its fits against measured rows."""

from __future__ import annotations

import sys

import click


@click.group()
def db() -> None:
    """Check the device database; score its fits against measured rows."""


@db.command(epilog="Example: perfmodel db check")
@click.option("--db", "root", type=click.Path(), help="Database folder instead of the shipped one.")
def check(root: str | None) -> None:
    """Check every device and fit: schema, provenance, duplicates, nothing faster than the device's own peak."""
    from perfmodel.db.check import check_db

    report = check_db(root)
    for line in (*report.problems, *report.remarks):
        click.echo(line)
    click.echo(f"{report.n_devices} devices, {report.n_fits} fits, {len(report.problems)} problems")
    if report.problems:
        sys.exit(1)
