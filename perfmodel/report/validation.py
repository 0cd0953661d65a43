"""Suites and live comparisons as a table, Markdown or JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from io import StringIO
from typing import Any

from perfmodel.pipeline.prediction import PathShare
from perfmodel.report.listing import render_rows
from perfmodel.units import format_percent, format_time
from perfmodel.validate.attribute import OpGap
from perfmodel.validate.run_suite import CaseResult, SuiteScore

SCHEMA_VERSION = 1
# MLCommons asks for these words beside any figure derived from its results that it has not checked.
UNVERIFIED = "not verified by MLCommons"


def render_validation(name: str, results: Sequence[CaseResult], score: SuiteScore, *, width: int = 140) -> str:
    """A suite as a text table: one line a case, then the figures."""
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    header = case_header(results)
    for column in header:
        left = column in ("case", "largest cause")
        table.add_column(column, justify="left" if left else "right", overflow="fold", no_wrap=not left)
    for result in results:
        table.add_row(*case_cells(result, header))
    buffer = StringIO()
    Console(file=buffer, width=width, no_color=True, highlight=False, markup=False).print(table)
    return "\n".join((f"suite {name}", buffer.getvalue().strip("\n"), "", *_figures(results, score), ""))


def render_markdown(name: str, results: Sequence[CaseResult], score: SuiteScore) -> str:
    """The same as Markdown, for documents."""
    header = case_header(results)
    lines = [f"### {name}", "", _markdown_row(header), _markdown_row(["---"] * len(header))]
    lines += [_markdown_row(case_cells(result, header)) for result in results]
    return "\n".join((*lines, "", *_figures(results, score), ""))


def validation_json(name: str, results: Sequence[CaseResult], score: SuiteScore) -> str:
    """The same as JSON: times in seconds, errors as fractions; `error` is signed, the figures are of |error|."""
    return json.dumps(validation_dict(name, results, score), indent=2)


def validation_dict(name: str, results: Sequence[CaseResult], score: SuiteScore) -> dict[str, Any]:
    """The body of that JSON."""
    return {
        "schema_version": SCHEMA_VERSION,
        "suite": name,
        "cases": [_case_dict(result) for result in results],
        "score": asdict(score),
        "remarks": remarks(results),
    }


def render_gaps(title: str, gaps: Sequence[OpGap], n_rows: int = 15) -> str:
    """Operators by how much of a step's error they are: predicted and measured time of a step, calls, gap."""
    total_s = sum(gap.measured_s for gap in gaps)
    rows = [
        {
            "operator": gap.name,
            "predicted": format_time(gap.predicted_s),
            "measured": format_time(gap.measured_s),
            "calls": f"{gap.calls[0]:g} / {gap.calls[1]:g}",
            "gap": signed_percent(gap.gap_s / total_s),
        }
        for gap in gaps[:n_rows]
    ]
    error = sum(gap.gap_s for gap in gaps) / total_s
    return f"{title}: step error {signed_percent(error)}; largest gaps as shares of the step\n{render_rows(rows)}"


def signed_percent(fraction: float) -> str:
    """With its sign: `+5.2%`."""
    return f"{'+' if fraction >= 0 else '-'}{format_percent(abs(fraction))}"


def _case_dict(result: CaseResult) -> dict[str, Any]:
    case = asdict(result.case)
    return {
        **case,
        "status": "failed" if result.predicted_s is None else "predicted",
        "predicted_s": result.predicted_s,
        "low_s": result.low_s,
        "high_s": result.high_s,
        "error": result.error,
        "inside": result.inside,
        "cause": None if result.cause is None else asdict(result.cause),
        "cause_factor": result.cause_factor,
        "reason": result.reason or None,
        "remarks": list(result.remarks),
        "noise": result.noise,
    }


def case_header(results: Sequence[CaseResult]) -> list[str]:
    """Names of the columns of a table of cases."""
    noise = ["noise"] if any(result.noise is not None for result in results) else []
    return ["case", "predicted", "range", "measured", "error", *noise, "largest cause"]


def case_cells(result: CaseResult, header: Sequence[str]) -> list[str]:
    """One case's row of that table, in words."""
    noise = [] if "noise" not in header else ["-" if result.noise is None else format_percent(result.noise)]
    measured = format_time(result.case.measured_s)
    if result.predicted_s is None or result.low_s is None or result.high_s is None or result.error is None:
        return [result.case.name, "failed", "-", measured, "-", *noise, result.reason]
    span = f"{format_time(result.low_s)} to {format_time(result.high_s)}"
    error = signed_percent(result.error)
    return [
        result.case.name, format_time(result.predicted_s), span, measured, error, *noise, _cause_text(result)
    ]  # fmt: skip


def cause_name(cause: PathShare | None) -> str:
    """The cause in a word or two."""
    return "none: no price on the path has a range" if cause is None else cause.cause


def _cause_text(result: CaseResult) -> str:
    """The cause, its share of the path, how well it is known, and what it alone would have to be for no error."""
    cause = result.cause
    if cause is None:
        return cause_name(cause)
    below = cause.below_s / cause.time_s
    above = cause.above_s / cause.time_s
    share = format_percent(cause.share_frac)
    known = f"known to -{format_percent(below)} +{format_percent(above)}"
    factor = result.cause_factor
    alone = "cannot explain it alone" if factor is None else f"x{factor:.2f} would explain it"
    return f"{cause.cause}: {share} of the path, {known}; {alone}"


def _markdown_row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |"


def _figures(results: Sequence[CaseResult], score: SuiteScore) -> list[str]:
    failed = f", {score.n_failed} failed" if score.n_failed else ""
    lines = [f"{score.n_cases} cases{failed}"]
    if score.mean is not None:
        named = (
            ("mean", score.mean), ("geometric mean", score.geomean), ("median", score.median), ("p90", score.p90),
            ("worst", score.worst),
        )  # fmt: skip
        lines.append(
            "|error|: " + ", ".join(f"{word} {format_percent(value)}" for word, value in named if value is not None)
        )
    if score.inside_frac is not None:
        width = "" if score.median_width_frac is None else f" (median width {format_percent(score.median_width_frac)})"
        lines.append(f"inside the predicted range: {format_percent(score.inside_frac)} of predicted cases{width}")
    if score.spearman is not None:
        lines.append(f"Spearman rank correlation: {score.spearman:.3f}")
    return [*lines, *remarks(results)]


def remarks(results: Sequence[CaseResult]) -> list[str]:
    """What must stand beside figures of these cases."""
    found = [f"{result.case.name}: {remark}" for result in results for remark in result.remarks]
    if any(UNVERIFIED in result.case.note for result in results):
        found.append(f"measured times derived from MLPerf result files: {UNVERIFIED}")
    return found
