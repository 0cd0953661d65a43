"""Errors of a CPU's shipped fits on the cases of its tables that no fit has seen: `python -m calibrate.score_cpu [DEVICE]`.

Prints the table of `perfmodel calibrate kernels` without fitting anything. `noise` is how far the two best of a case's three
rounds differ, over all cases of the family that tell: a family whose median error is near its noise cannot do better.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import numpy as np

from calibrate.fit_cpu import FamilyReport, MeasuredRow, noise_of, read_table
from calibrate.host import TABLE as IN_STEP_TABLE
from calibrate.report import render
from perfmodel.db.device import Device
from perfmodel.db.loading import db_root, load_device
from perfmodel.kernels.correction import Segment, corrected_s, segments_of
from perfmodel.kernels.cpu_law import law


def score_family(rows: Sequence[MeasuredRow], device: Device, family: str) -> FamilyReport | None:
    """The held-out rows of a family priced by its shipped fit; None without such rows."""
    fit = device.fits[family]
    segments = segments_of(fit, device)
    groups: dict[str, list[MeasuredRow]] = {}
    for row in rows:
        if row.heldout and row.key in segments:
            groups.setdefault(row.key, []).append(row)
    if not groups:
        return None
    measured = {key: np.array([row.time_s for row in held]) for key, held in groups.items()}
    predicted = {key: _price(segments[key], held, device) for key, held in groups.items()}
    n_rows = {key: sum(row.key == key and not row.heldout for row in rows) for key in groups}
    return FamilyReport(
        family=family,
        fit=fit,
        n_rows=sum(n_rows.values()),
        measured_s=np.concatenate(list(measured.values())),
        predicted_s=np.concatenate(list(predicted.values())),
        by_operator={key: (n_rows[key], np.abs(predicted[key] / measured[key] - 1.0)) for key in groups},
        cases=tuple(row.case for held in groups.values() for row in held),
        noise=noise_of(rows),
    )


def _price(segment: Segment, rows: Sequence[MeasuredRow], device: Device) -> np.ndarray:
    time_s, _ = corrected_s(segment, law(segment, [row.call for row in rows], device))
    return time_s


def main(arguments: Sequence[str]) -> int:
    """Prints the table; returns the exit status."""
    device = load_device(arguments[0] if arguments else "cpu")
    reports = []
    for table in sorted((db_root() / device.name).glob("*.csv")):
        if table.name != IN_STEP_TABLE and table.stem in device.fits:
            reports.append(score_family(read_table(table, device), device, table.stem))
    sys.stdout.write(render([report for report in reports if report is not None], per_operator=False) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
