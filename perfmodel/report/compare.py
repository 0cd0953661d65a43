"""Two predictions side by side as one page; the figures are those of `report.diff`."""

from __future__ import annotations

from typing import Any

from perfmodel.pipeline.prediction import Prediction
from perfmodel.report import charts
from perfmodel.report.diff import ROUNDING, Difference, diff_predictions, signed_percent, signed_time
from perfmodel.report.html import render
from perfmodel.report.svg import BLUE, INK, VERMILION, WIDTH, picture, stacked_bars, tag, text, title
from perfmodel.units import format_bytes, format_percent, format_time

MAX_CAUSES = 20


def render_compare_page(before: Prediction, after: Prediction) -> str:
    """The page of what changed from one prediction to another."""
    difference = diff_predictions(before, after)
    asked = [(c.what, c.before, c.after) for c in difference.changes if not c.what.startswith("price of ")]
    prices = [(c.what, c.before, c.after) for c in difference.changes if c.what.startswith("price of ")]
    ratio = signed_percent(difference.difference_s / difference.before_s) if difference.before_s else "-"
    return render(
        "compare.html.j2",
        {
            "title": f"{before.model}: {format_time(difference.before_s)} to {format_time(difference.after_s)}",
            "before": before,
            "after": after,
            "d": difference,
            "signed": signed_time,
            "ratio": ratio,
            "bytes": format_bytes,
            "asked": asked,
            "prices": prices,
            "rows": _rows(difference),
            "part_keys": charts.legend(charts.PARTS),
            "memory_keys": charts.legend(charts.MEMORY_PARTS),
            "charts": {
                "causes": contribution_bars(difference),
                "breakdown": _sides(before, after, charts.PARTS, "breakdown"),
                "memory": _sides(before, after, charts.MEMORY_PARTS, "memory"),
            },
            "difference": {"before": before.to_dict(), "after": after.to_dict()},
        },
    )


def _rows(difference: Difference) -> list[list[Any]]:
    return [
        [
            row.cause, format_time(row.before_s), format_time(row.after_s),
            {"value": row.difference_s, "text": signed_time(row.difference_s)},
            format_percent(row.difference_s / difference.difference_s) if difference.difference_s else "-",
        ]
        for row in difference.contributions
        if row.cause != ROUNDING
    ]  # fmt: skip


def _sides(before: Prediction, after: Prediction, parts: dict[str, tuple[str, str]], what: str) -> str:
    """The bounding rank's breakdown, or the fullest rank's memory, of both."""
    rows = []
    for name, p in (("before", before), ("after", after)):
        fullest = max(p.ranks, key=lambda rank: rank.memory.total_bytes)
        values = p.breakdown if what == "breakdown" else fullest.memory
        rows.append(
            (name, [(words, float(getattr(values, field)), colour) for field, (words, colour) in parts.items()])
        )
    return stacked_bars(rows, format_time if what == "breakdown" else format_bytes, f"{what} before and after")


def contribution_bars(difference: Difference) -> str:
    """What each cause adds (right, vermilion) or saves (left, blue)."""
    rows = [row for row in difference.contributions if row.cause != ROUNDING][:MAX_CAUSES]
    longest = max((abs(row.difference_s) for row in rows), default=0.0) or 1.0
    middle, reach, height = WIDTH / 2 + 60, WIDTH / 2 - 190, 24.0
    parts = [tag("line", x1=middle, x2=middle, y1=0, y2=height * max(len(rows), 1), stroke=INK)]
    for number, row in enumerate(rows):
        y, span = number * height, abs(row.difference_s) / longest * reach
        more = row.difference_s > 0
        x = middle if more else middle - span
        words = f"{row.cause}: {format_time(row.before_s)} to {format_time(row.after_s)}"
        colour = VERMILION if more else BLUE
        parts.append(tag("rect", title(words), x=x, y=y + 4, width=max(span, 0.5), height=height - 8, fill=colour))
        parts.append(text(row.cause[:26], 4, y + 16, font_size=12))
        anchor, place = ("start", middle + span + 6) if more else ("end", middle - span - 6)
        parts.append(text(signed_time(row.difference_s), place, y + 16, text_anchor=anchor, font_size=12))
    return picture(WIDTH, max(len(rows), 1) * height, parts, "What each cause adds to or takes from the iteration time")
