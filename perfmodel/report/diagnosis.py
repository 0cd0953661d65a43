"""Findings as text and as plain values."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import asdict

from perfmodel.diagnose.finding import Finding
from perfmodel.units import format_percent, format_time


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
