"""FBGEMM's table-batched operators on one H100, predicted in and out of sample: `python -m calibrate.score_fbgemm DATA_DIR`.

DATA_DIR holds `sharding/fbgemm_tbe_h100_measured.json`: forward and backward of ten tables in device memory, in host memory
(UVM) and behind a row cache. The shipped fit has six parameters and these six durations, so its errors say little; beside
them stand: each duration predicted by a fit of the other five; each placement by a fit of the other two; and the forward
pass in evaluation mode, which no fit has seen. A parameter that the rows left in say nothing of keeps its starting value
(`calibrate.fit_embedding.START`).
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean

from calibrate.fit_embedding import Point, fit_points, h100_points
from perfmodel.db.device import Device
from perfmodel.db.loading import load_device
from perfmodel.kernels.correction import segments_of
from perfmodel.report.listing import render_markdown
from perfmodel.units import MS_PER_S, format_percent, format_time

DEVICE = "h100_sxm"
FITTED = ("stream_eff", "random_eff", "rmw_eff", "uvm_eff", "uvm_rmw_eff", "link_eff")
AIMS = {"hbm": 0.15, "uvm": 0.30, "uvm_caching": 0.30}
WAYS = ("shipped fit", "without this duration", "without this placement")


def placement_of(point: Point) -> str:
    """`hbm`, `uvm` or `uvm_caching`."""
    return point.name.split()[0]


def leave_out(points: Sequence[Point], device: Device, out: Sequence[Point]) -> dict[str, float]:
    """Errors by name of the points `out`, by a fit of the others."""
    kept = [point for point in points if point not in out]
    parameters = fit_points(kept, device, FITTED)
    return {point.name: point.predicted_s(parameters, device) / point.measured_s - 1.0 for point in out}


def all_errors(points: Sequence[Point], device: Device) -> dict[str, dict[str, float]]:
    """Signed errors of each duration by way of predicting it."""
    shipped = segments_of(device.fits["embedding"], device)["rows"].parameters
    found: dict[str, dict[str, float]] = {
        point.name: {WAYS[0]: point.predicted_s(shipped, device) / point.measured_s - 1.0} for point in points
    }
    for point in points:
        found[point.name][WAYS[1]] = leave_out(points, device, [point])[point.name]
    for placement in AIMS:
        group = [point for point in points if placement_of(point) == placement]
        for name, error in leave_out(points, device, group).items():
            found[name][WAYS[2]] = error
    return found


def evaluation_points(points: Sequence[Point], folder: Path) -> list[Point]:
    """The forward pass in evaluation mode: the same kernels, timed once more; in no fit."""
    cases = json.loads((folder / "sharding" / "fbgemm_tbe_h100_measured.json").read_text(encoding="utf-8"))
    forward = [point for point in points if point.name.endswith("forward")]
    return [
        Point(name=f"{placement_of(point)} evaluation", calls=point.calls, measured_s=case["trc_eval_ms"] / MS_PER_S)
        for point, case in zip(forward, cases, strict=True)
    ]


def means(errors: Mapping[str, Mapping[str, float]], way: str) -> dict[str, float]:
    """Mean |error| by placement."""
    return {
        placement: fmean(
            abs(e[way]) for name, e in errors.items() if name.split()[0] == placement and way in e
        )
        for placement in AIMS
    }  # fmt: skip


def report(folder: Path) -> str:
    """The table and the means."""
    device = load_device(DEVICE)
    points = h100_points(folder)
    errors = all_errors(points, device)
    shipped = segments_of(device.fits["embedding"], device)["rows"].parameters
    extra = evaluation_points(points, folder)
    errors |= {point.name: {WAYS[0]: point.predicted_s(shipped, device) / point.measured_s - 1.0} for point in extra}
    rows = [
        {
            "duration": point.name,
            "measured": format_time(point.measured_s),
            **{way: _signed(errors[point.name].get(way)) for way in WAYS},
            "aim": format_percent(AIMS[placement_of(point)]),
        }
        for point in (*points, *extra)
    ]
    lines = [
        f"mean |error|, {way}: "
        + ", ".join(f"{placement} {format_percent(mean)}" for placement, mean in means(errors, way).items())
        for way in WAYS
    ]
    return "\n".join((render_markdown(rows), *lines, ""))


def _signed(error: float | None) -> str:
    return "-" if error is None else f"{'+' if error >= 0 else '-'}{format_percent(abs(error))}"


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.stderr.write("usage: python -m calibrate.score_fbgemm DATA_DIR\n")
        sys.exit(2)
    sys.stdout.write(report(Path(sys.argv[1])))
