"""`perfmodel models` and `perfmodel topologies`: what is shipped."""

from __future__ import annotations

import json

import click

JSON_SCHEMA_VERSION = 1


@click.command(epilog="Example: perfmodel models")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of the table.")
def models(*, as_json: bool) -> None:
    """List the shipped models."""
    from perfmodel.config import list_configs, load_model
    from perfmodel.report.listing import model_row

    rows = [model_row(name, load_model(name)) for name in list_configs("models")]
    show("models", rows, as_json=as_json)


@click.command(epilog="Example: perfmodel topologies")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of the table.")
def topologies(*, as_json: bool) -> None:
    """List the shipped topologies."""
    from perfmodel.config import list_configs, load_topology
    from perfmodel.report.listing import topology_row
    from perfmodel.topology import build_topology

    rows = [topology_row(build_topology(load_topology(name)), name) for name in list_configs("topologies")]
    show("topologies", rows, as_json=as_json)


def show(title: str, rows: list[dict[str, str]], *, as_json: bool) -> None:
    """Prints rows of equal keys as a table or as JSON."""
    from perfmodel.report.listing import render_rows

    if as_json:
        click.echo(json.dumps({"schema_version": JSON_SCHEMA_VERSION, title: rows}, indent=2))
    else:
        click.echo(render_rows(rows), nl=False)
