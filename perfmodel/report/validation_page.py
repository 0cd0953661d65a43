"""A suite's or a live comparison's outcome as one self-contained page; the figures are those of its JSON, which it carries."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from statistics import fmean
from typing import Any

from perfmodel.report.html import render
from perfmodel.report.svg import BLUE, INK, SKY, VERMILION, WIDTH, Plane, picture, tag, text, title
from perfmodel.report.validation import (
    case_cells,
    case_header,
    cause_name,
    remarks,
    signed_percent,
    validation_dict,
)  # fmt: skip
from perfmodel.units import format_percent, format_time
from perfmodel.validate.run_suite import CaseResult, SuiteScore

MAX_BARS = 60
_TEN_PERCENT = 0.1
_INSIDE, _OUTSIDE = ("measured inside the predicted range", BLUE), ("outside", VERMILION)
_NAME_WIDTH = 46


def render_validation_page(name: str, results: Sequence[CaseResult], score: SuiteScore) -> str:
    """The page: figures, predicted against measured, errors, causes, every case and its source. Same input, same bytes."""
    predicted = [result for result in results if result.predicted_s is not None]
    header = case_header(results)
    words = tuple(i for i, column in enumerate(header) if column in ("case", "largest cause"))
    context = {
        "title": f"{name}: predicted against measured",
        "heading": f"Suite {name}",
        "score": score,
        "facts": _facts(score),
        "remarks": remarks(results),
        "charts": {"plot": scatter(predicted), "errors": error_bars(predicted)},
        "plot_keys": [(*_INSIDE, "circle"), (*_OUTSIDE, "diamond")],
        "left_out": max(len(predicted) - MAX_BARS, 0),
        "cause_rows": _causes(predicted),
        "header": header,
        "rows": [_row(result, header) for result in results],
        "words": words,
        "long": words,
        "failed": [(result.case.name, result.reason) for result in results if result.predicted_s is None],
        "sources": [(result.case.name, result.case.source or "-") for result in results],
        "body": validation_dict(name, results, score),
    }
    return render("validation.html.j2", context)


def _facts(score: SuiteScore) -> list[tuple[str, float | None, str]]:
    shares = (
        ("mean |error|", score.mean), ("median", score.median), ("p90", score.p90), ("worst", score.worst),
        ("inside the range", score.inside_frac), ("median width of a range", score.median_width_frac),
    )  # fmt: skip
    facts = [(name, value, "-" if value is None else format_percent(value)) for name, value in shares]
    rank = "-" if score.spearman is None else f"{score.spearman:.3f}"
    return [*facts, ("Spearman rank correlation", score.spearman, rank)]


def _row(result: CaseResult, header: Sequence[str]) -> list[Any]:
    cells: list[Any] = list(case_cells(result, header))
    values = {"predicted": result.predicted_s, "measured": result.case.measured_s, "error": result.error}
    for column, value in values.items():
        place = list(header).index(column)
        if value is not None:
            cells[place] = {"value": value, "text": cells[place]}
    return cells


def _causes(results: Sequence[CaseResult]) -> list[list[Any]]:
    by_cause: dict[str, list[CaseResult]] = defaultdict(list)
    for result in results:
        by_cause[cause_name(result.cause)].append(result)
    rows = []
    for name, found in sorted(by_cause.items(), key=lambda item: (-len(item[1]), item[0])):
        mean = fmean(abs(result.error or 0.0) for result in found)
        outside = sum(not result.inside for result in found)
        rows.append([name, len(found), outside, {"value": mean, "text": format_percent(mean)}])
    return rows


def scatter(results: Sequence[CaseResult]) -> str:
    """Predicted times and their ranges against measured ones, on logarithmic axes; empty without a prediction."""
    places = [(r, r.predicted_s, r.low_s or r.predicted_s, r.high_s or r.predicted_s) for r in results if r.predicted_s]
    if not places:
        return ""
    values = [value for r, _, low, high in places for value in (r.case.measured_s, low, high)]
    limits = min(values) / 1.3, max(values) * 1.3
    plane = Plane(limits, limits, log=(True, True), size=(WIDTH, 520.0))
    plane.axes(("measured", "predicted"), (format_time, format_time))
    plane.line([(v, v) for v in limits], INK, "predicted = measured", stroke_width=1.2)
    for off in (-_TEN_PERCENT, _TEN_PERCENT):
        factor = 1.0 + off
        ends = max(limits[0], limits[0] / factor), min(limits[1], limits[1] / factor)
        line = [(v, v * factor) for v in ends]
        plane.line(line, "#888", signed_percent(off), stroke_width=1, stroke_dasharray="4 4")
    for r, predicted_s, low_s, high_s in places:
        colour = _INSIDE[1] if r.inside else _OUTSIDE[1]
        plane.line([(r.case.measured_s, low_s), (r.case.measured_s, high_s)], colour, stroke_width=1.4, opacity=0.5)
        words = (
            f"{r.case.name}: predicted {format_time(predicted_s)} ({format_time(low_s)} to {format_time(high_s)}), "
            f"measured {format_time(r.case.measured_s)}, {signed_percent(r.error or 0.0)}"
        )
        plane.dot((r.case.measured_s, predicted_s), 5.0, colour, words, "circle" if r.inside else "diamond")
    return plane.done("Predicted against measured times of every case")


def error_bars(results: Sequence[CaseResult]) -> str:
    """Signed errors, the largest first, with where they would lie over the predicted range; empty without a prediction."""
    ordered = sorted(results, key=lambda r: (-abs(r.error or 0.0), r.case.name))[:MAX_BARS]
    if not ordered:
        return ""
    edges = [edge for r in ordered for edge in (r.error or 0.0, *_span(r))]
    low, high = min(0.0, *edges), max(0.0, *edges)
    left, right, height = 330.0, WIDTH - 66.0, 20.0

    def x(value: float) -> float:
        return left + (value - low) / ((high - low) or 1.0) * (right - left)

    drawn = []
    for number, r in enumerate(ordered):
        y, error = number * height, r.error or 0.0
        colour = _INSIDE[1] if r.inside else _OUTSIDE[1]
        start, end = _span(r)
        name = r.case.name if len(r.case.name) <= _NAME_WIDTH else f"{r.case.name[: _NAME_WIDTH - 1]}…"
        words = f"{r.case.name}: {signed_percent(error)}, range {signed_percent(start)} to {signed_percent(end)}"
        drawn.append(text(name, 4, y + 14, font_size=11))
        drawn.append(
            tag("rect", title(words), x=x(start), y=y + 8, width=max(x(end) - x(start), 1.0), height=4.0, fill=SKY)
        )
        drawn.append(
            tag("rect", title(words), x=min(x(error), x(0.0)), y=y + 4, width=max(abs(x(error) - x(0.0)), 1.0),
                height=height - 8, fill=colour, fill_opacity=0.8)
        )  # fmt: skip
        drawn.append(text(signed_percent(error), WIDTH - 4, y + 14, font_size=11, text_anchor="end"))
    drawn.append(tag("line", x1=x(0.0), x2=x(0.0), y1=0, y2=height * len(ordered), stroke=INK))
    return picture(WIDTH, height * len(ordered), drawn, "Signed error of each case")


def _span(result: CaseResult) -> tuple[float, float]:
    low, high = result.low_s, result.high_s
    if low is None or high is None or not math.isfinite(high):
        return result.error or 0.0, result.error or 0.0
    return low / result.case.measured_s - 1.0, high / result.case.measured_s - 1.0
