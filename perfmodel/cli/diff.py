"""`perfmodel diff`: what changed between two predictions."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from perfmodel.errors import ConfigError

if TYPE_CHECKING:
    from perfmodel.pipeline.prediction import Prediction

PIPE_WIDTH = 120  # columns of the table where stdout is no terminal


@click.command(epilog="Example: perfmodel diff before.json after.json")
@click.argument("before", type=click.Path(path_type=Path))
@click.argument("after", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of the table.")
def diff(before: Path, after: Path, *, as_json: bool) -> None:
    """Say what changed from BEFORE to AFTER (files of `perfmodel predict --json`) and what each cause contributes."""
    from perfmodel.report.diff import diff_predictions, render_diff

    found = diff_predictions(_read(before), _read(after))
    if as_json:
        click.echo(found.to_json())
        return
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else PIPE_WIDTH
    click.echo(render_diff(found, width=width), nl=False)


def _read(path: Path) -> Prediction:
    from perfmodel.pipeline.prediction import Prediction

    try:
        return Prediction.from_json(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: cannot read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: found bytes that are no UTF-8 text") from error
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error
