"""`perfmodel report`: a table of many predictions as one page."""

from __future__ import annotations

from pathlib import Path

import click

from perfmodel.cli.console import OUT_FILE, STDIN, read_text


@click.command(epilog="Example: perfmodel report sweep.csv --x nodes --y batch --html sweep.html")
@click.argument("table", type=click.Path(path_type=Path))
@click.option("--html", "html_path", type=OUT_FILE, required=True, help="Page to write.")
@click.option("--x", required=True, help="Column across the heat map.")
@click.option("--y", required=True, help="Column down the heat map.")
@click.option("--value", default="iteration_time_s", show_default=True, help="Column that is shown.")
@click.option(
    "--against", help="The Pareto front's other column.  [default: cost_per_hour with --prices, else memory_bytes]"
)
@click.option("--larger", multiple=True, help="Column that is better when larger; may be repeated.")
@click.option(
    "--prices",
    type=click.Path(dir_okay=False, path_type=Path),
    help="YAML price list, 'per_hour: {h100_sxm: 2.5, dgx_a100: 20}': adds cost_per_hour and cost_per_iteration.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the Pareto front as JSON.")
def report(table: Path, *, html_path: Path, as_json: bool, prices: Path | None, **options: object) -> None:
    """Show TABLE, one row a prediction, as a page: a heat map over two columns and a Pareto front.

    TABLE is CSV, JSON or Parquet, as `perfmodel sweep` and `perfmodel search` write them, or - for CSV or JSON on stdin.
    """
    import json

    from perfmodel.report.sweep import (
        COST_PER_HOUR,
        SweepChoice,
        pareto_front,
        read_table,
        render_sweep_page,
        with_costs,
    )
    from perfmodel.report.write import write_text

    rows = read_table(table, read_text(STDIN) if str(table) == STDIN else None)
    if prices is not None:
        rows = with_costs(rows, prices)
    against = options["against"] or (COST_PER_HOUR if prices else "memory_bytes")
    larger = options["larger"]
    choice = SweepChoice(
        x=str(options["x"]),
        y=str(options["y"]),
        value=str(options["value"]),
        against=str(against),
        larger=larger if isinstance(larger, tuple) else (),
    )
    write_text(html_path, render_sweep_page("stdin" if str(table) == STDIN else table.name, rows, choice))
    if as_json:
        front = [rows[i] for i in pareto_front(rows, choice)]
        click.echo(json.dumps({"schema_version": 1, "pareto_front": front}, indent=2))
