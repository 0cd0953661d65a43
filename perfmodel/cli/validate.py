"""`perfmodel validate`: predicted against measured, on a suite of published cases or on this machine."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from perfmodel.pipeline.prediction import Prediction
    from perfmodel.validate.suite import Case


@click.command(epilog="Example: perfmodel validate transformers_gpu --max-error 0.1")
@click.argument("suite")
@click.option(
    "--max-error",
    type=click.FloatRange(min=0),
    help="Exit 1 if the mean |predicted / measured - 1| is above this (0.1 is 10 %).",
)
@click.option("--db", type=click.Path(), help="Device database to use instead of the shipped one.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of the table.")
@click.option("--markdown", is_flag=True, help="Print Markdown instead of the table.")
def validate(suite: str, max_error: float | None, db: str | None, *, as_json: bool, markdown: bool) -> None:
    """Predict every case of SUITE (a shipped name or a CSV file) and compare with what was measured.

    Exit code 1 if a case cannot be predicted or the mean error is above --max-error.
    """
    from perfmodel.report.validation import render_markdown, render_validation, validation_json
    from perfmodel.validate.run_suite import run_suite, score_suite
    from perfmodel.validate.suite import load_suite

    loaded = load_suite(suite)
    results = run_suite(loaded.cases, lambda case: predict_case(case, db))
    score = score_suite(results)
    render = validation_json if as_json else render_markdown if markdown else render_validation
    click.echo(render(loaded.name, results, score).rstrip("\n"))
    if not score.passes(max_error):
        sys.exit(1)


def predict_case(case: Case, db: str | None = None) -> Prediction:
    """The prediction of one case of a suite."""
    from perfmodel.api import predict

    return predict(
        case.model,
        case.topology,
        case.plan,
        batch=case.batch_per_rank,
        seq_len=case.seq_len,
        precision=case.precision,
        phase=case.phase,
        mode=case.mode,
        bounds=False,
        db=db,
    )
