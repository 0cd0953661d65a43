"""The device database against its schema and against what its devices can do: the engine of `perfmodel db check`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from perfmodel.db import list_devices, load_device
from perfmodel.db.check import DbReport, check_db
from perfmodel.kernels.probe import check_prices


def check_database(root: str | Path | None = None) -> DbReport:
    """Every file's schema and provenance, then every device's prices at probe sizes.

    A price faster than the device's own peak is a problem; a place where time falls as work grows is a remark, since tiles and
    protocol switches do that.
    """
    report = check_db(root)
    if report.problems:
        return report
    problems: list[str] = []
    remarks: list[str] = list(report.remarks)
    for name in list_devices(root):
        wrong, odd = check_prices(load_device(name, root))
        problems += wrong
        remarks += odd
    return replace(report, problems=tuple(problems), remarks=tuple(remarks))
