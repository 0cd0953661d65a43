"""What a live run says of the machine's pace beside its table."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict

from perfmodel.db.device import Pace
from perfmodel.units import format_percent
from perfmodel.validate.run_suite import SuiteScore


def render_pace(pace: Pace, spread: Mapping[str, tuple[float, float]], without: SuiteScore) -> str:
    """The factors of each resource (tenth to ninetieth percentile of the looks), and the errors of prices without them."""
    lines = [
        "pace of this machine: times as long as when it was calibrated, from kernels of its calibration timed again"
    ]
    for resource, factor in asdict(pace).items():
        seen = f" ({spread[resource][0]:.2f} to {spread[resource][1]:.2f})" if resource in spread else ""
        lines.append(f"  {resource}: {factor:.3f}{seen}")
    errors = {"mean": without.mean, "geometric mean": without.geomean, "worst": without.worst}
    figures = {**errors, "inside the range": without.inside_frac}
    said = ", ".join(f"{name} {format_percent(value)}" for name, value in figures.items() if value is not None)
    return "\n".join([*lines, f"without the pace: {said}"])
