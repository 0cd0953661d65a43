"""Findings as text and as plain values."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import asdict

from perfmodel.diagnose.finding import Finding
from perfmodel.diagnose.live import FixResult
from perfmodel.report.trace_load import text_table
from perfmodel.units import format_percent, format_time

CLOSE_FRAC = 0.25  # of the gain: what a predicted gain should be within


def diagnosis_to_dict(found: Sequence[Finding]) -> dict[str, object]:
    """Plain values for JSON; seconds and fractions."""
    return {"schema_version": 1, "findings": [{**asdict(row), "gain_frac": row.gain_frac} for row in found]}


def render_diagnosis(found: Sequence[Finding], width: int) -> str:
    """One paragraph a finding: what, evidence, where, the fix and its gain."""
    if not found:
        return "nothing found that costs a noticeable part of the step\n"
    blocks = []
    for number, row in enumerate(found, start=1):
        gain = f"{format_time(row.gain_s)} of {format_time(row.step_s)} a step ({format_percent(row.gain_frac)})"
        lines = [
            f"{number}. {row.cause.title} [{row.cause.id}]: gain {gain}",
            *_wrapped("evidence", row.evidence, width),
            *_wrapped("where", _where(row), width),
            *_wrapped("fix", row.cause.fix, width),
            *_wrapped("gain", row.basis, width),
        ]
        blocks.append("\n".join(lines))
    return "\n\n".join(blocks) + "\n\ngains are of each change alone: they do not add up\n"


def _where(row: Finding) -> str:
    parts = [f"rank {i.rank} {format_time(i.start_s, 5)} to {format_time(i.end_s, 5)}" for i in row.intervals]
    parts += [f"ops {', '.join(row.ops)}"] if row.ops else []
    parts += [f"modules {', '.join(row.modules)}"] if row.modules else []
    return "; ".join(parts)


def _wrapped(label: str, text: str, width: int) -> list[str]:
    if not text:
        return []
    return textwrap.wrap(text, width, initial_indent=f"   {label + ':':<10}", subsequent_indent=" " * 13)


def fixes_to_dict(found: Sequence[FixResult]) -> dict[str, object]:
    """Plain values for JSON; seconds and fractions."""
    rows = [
        {**asdict(r), "predicted_s": r.predicted_s, "measured_s": r.measured_s, "error_frac": r.error_frac}
        for r in found
    ]
    return {"schema_version": 1, "fixes": rows}


def render_fixes(found: Sequence[FixResult], width: int) -> str:
    """Predicted beside measured gain of each fix."""
    head = ("cause", "found", "step before", "step after", "predicted gain", "measured gain", "error of the gain")
    rows = [
        (
            row.cause,
            "yes" if row.found else "no",
            format_time(row.before_s),
            format_time(row.after_s),
            format_time(row.predicted_s),
            format_time(row.measured_s),
            f"{100 * row.error_frac:+.1f}%",
        )
        for row in found
    ]
    close = sum(abs(row.error_frac) <= CLOSE_FRAC for row in found)
    return (
        text_table(head, rows, width) + f"{close} of {len(found)} gains predicted within {format_percent(CLOSE_FRAC)}\n"
    )
