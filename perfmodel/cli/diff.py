"""`perfmodel diff` and `perfmodel compare`, one command: what changed between two predictions."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from perfmodel.cli.console import OUT_FILE, STDIN, read_text, stdout_width
from perfmodel.errors import ConfigError

if TYPE_CHECKING:
    from perfmodel.pipeline.prediction import Prediction


@click.command(epilog="Example: perfmodel compare before.json after.json --html compare.html")
@click.argument("before", type=click.Path(path_type=Path))
@click.argument("after", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of the table.")
@click.option("--html", "html_path", type=OUT_FILE, help="Also write a page that shows both side by side.")
def diff(before: Path, after: Path, *, as_json: bool, html_path: Path | None) -> None:
    """Say what changed from BEFORE to AFTER and what each cause contributes.

    Both are files of `perfmodel predict --json`; one of them may be - for stdin. `perfmodel compare` is the same command.
    """
    from perfmodel.report.diff import diff_predictions, render_diff

    if str(before) == str(after) == STDIN:
        raise ConfigError("BEFORE and AFTER: found - for each, allowed - for one: stdin is read once")
    sides = _read(before), _read(after)
    if html_path is not None:
        from perfmodel.report.compare import render_compare_page
        from perfmodel.report.write import write_text

        write_text(html_path, render_compare_page(*sides))
    found = diff_predictions(*sides)
    click.echo(found.to_json() if as_json else render_diff(found, width=stdout_width()), nl=as_json)


def _read(path: Path) -> Prediction:
    from perfmodel.pipeline.prediction import Prediction

    try:
        return Prediction.from_json(read_text(path))
    except ConfigError as error:
        words = str(error)
        raise ConfigError(words if words.startswith(f"{path}:") else f"{path}: {words}") from error
