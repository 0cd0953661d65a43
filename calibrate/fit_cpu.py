"""Fits the CPU's law to measured tables: one segment per operator, a fifth of the cases held out.

`python -m calibrate.fit_cpu TABLES_DIR [DEVICE]` reads `<family>.csv` from TABLES_DIR and writes the fits of DEVICE (cpu).
"""

from __future__ import annotations

import csv
import hashlib
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from calibrate.fitting import (
    Bound,
    Rows,
    SegmentFit,
    as_segment,
    assemble,
    fit_law,
    fit_trees,
    predict_s,
    with_heldout,
)
from calibrate.host import TABLE as IN_STEP_TABLE
from calibrate.host import extra_s
from calibrate.report import render
from calibrate.session import op_from_json
from perfmodel.db.device import Device, Fit
from perfmodel.db.fits import write_fit
from perfmodel.db.loading import db_root, load_device
from perfmodel.graph import Op
from perfmodel.kernels.correction import MAX_LOG_CORRECTION, Floats, evaluate_trees
from perfmodel.kernels.cpu_features import cpu_call, op_key, table_lookups
from perfmodel.kernels.cpu_law import LAW, law
from perfmodel.kernels.cpu_memory import cold, warm
from perfmodel.kernels.registry import KernelCall

HELDOUT_PARTS = 5  # one case in five is held out, by the hash of its text
MIN_ROWS = 8
MIN_TREE_ROWS = 16
LEAF_ROWS = 4  # plans have tens of cases an operator, each the best of several rounds
TREE_COUNTS = (15, 40, 100, 250)
# A page that a process touches first costs a fault and its zeros: `fill_` of new maps of 1 to 100 MiB takes 1 s per 3.4-3.9
# GB longer than of old ones, and unmapping costs again (2 threads, measured 2026-11-29).
FRESH_BYTES_PER_S = 3.6e9
# One more row of a pointwise loop (TensorIterator's outer loop): median of the segments whose cases have rows.
ROW_S = 3e-9
# Segments whose name is not their operator's.
OPERATORS: Mapping[str, tuple[str, ...]] = {
    "product": ("mm", "addmm"),
    "add_row": ("add",),
    "mul_row": ("mul",),
    "add__sparse": ("add_.sparse",),
    "_coalesce_sparse": ("_coalesce.sparse",),
    "sparse_mask_sparse": ("sparse_mask.sparse",),
    "square": ("pow",),
    "max_pool2d_with_indices_last": ("max_pool2d_with_indices",),
    "max_pool2d_with_indices_backward_last": ("max_pool2d_with_indices_backward",),
    "_embedding_bag_backward_sparse": ("_embedding_bag_backward",),
    "_embedding_bag_backward_dense": ("_embedding_bag_backward",),
    "native_batch_norm_last": ("native_batch_norm",),
    "native_batch_norm_backward_last": ("native_batch_norm_backward",),
    "convolution_last": ("convolution",),
    "convolution_backward_last": ("convolution_backward",),
}
PRODUCTS = frozenset({"gemm", "conv", "attention"})


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredRow:
    """One measured call of a table: its op, as the law reads it, and its time."""

    key: str
    case: str
    op: Op
    call: KernelCall
    state: str
    time_s: float
    heldout: bool


def read_table(path: Path, device: Device) -> list[MeasuredRow]:
    """The measured rows of a table; failed and disturbed ones are left out."""
    with path.open(newline="", encoding="utf-8") as file:
        return [_row(row, device) for row in csv.DictReader(file) if row["time_s"] and row["op"]]


def _row(row: Mapping[str, str], device: Device) -> MeasuredRow:
    op = op_from_json(row["op"])
    lookups = table_lookups(op, {})
    far = row["state"] == "cold"
    reach = cold(op) if far else warm(op)
    return MeasuredRow(
        key=op_key(op),
        case=row["case"],
        op=op,
        call=cpu_call(op, reach, lookups, float(device.l2_bytes)),
        state=row["state"],
        time_s=float(row["time_s"]),
        heldout=is_heldout(row["case"]),
    )


def is_heldout(case: str) -> bool:
    """True for one case in HELDOUT_PARTS, by the hash of its arguments: a case in both states is on one side."""
    digest = int(hashlib.sha256(json.dumps(json.loads(case)["args"]).encode()).hexdigest()[:8], 16)
    return digest % HELDOUT_PARTS == 0


def bounds_of(rows: Rows, family: str) -> dict[str, Bound]:
    """Where each parameter of a segment may lie, from the rows themselves."""
    work = np.array([call.features["work"] for call in rows.calls])
    rate = float(np.max(work / rows.measured_s))
    least = float(np.min(rows.measured_s))
    found = {
        "fixed_s": Bound(start=least * 0.7, low=2e-7, high=least * 1.2 + 1e-6),
        "fork_s": Bound(start=1e-6, low=1e-8, high=2e-5),
        "work_per_s": Bound(start=rate * 0.7, low=rate * 0.02, high=rate * 6),
        "shared_bytes_per_s": Bound(start=80e9, low=8e9, high=400e9),
        "memory_bytes_per_s": Bound(start=30e9, low=2e9, high=60e9),
        "sharp": Bound(start=2.0, low=1.0, high=8.0),
        "row_s": Bound(start=1e-9, low=1e-11, high=1e-6),
    }
    if max(call.features.get("far_rows", 0.0) for call in rows.calls) > 0:
        found["far_s"] = Bound(start=2e-8, low=1e-10, high=5e-7)
    if family in PRODUCTS:
        found |= {"grain": Bound(start=1e6, low=1e3, high=1e9), "edge": Bound(start=1.0, low=0.5, high=4.0)}
        found |= {f"half_{name}": Bound(start=4.0, low=0.05, high=400.0) for name in ("m", "n", "k")}
        found |= {"pack_bytes_per_s": Bound(start=200e9, low=2e9, high=1e13)}
    else:
        found |= {"grain": Bound(start=3e4, low=1e2, high=1e6), "edge": Bound(start=4.0, low=1.0, high=12.0)}
    return found


def fit_family(rows: Sequence[MeasuredRow], family: str, device: Device) -> dict[str, SegmentFit]:
    """A segment for every operator with enough rows."""
    found: dict[str, SegmentFit] = {}
    for key in sorted({row.key for row in rows}):
        mine = _packed([row for row in rows if row.key == key])
        if len(mine) >= MIN_ROWS and mine.heldout.any() and not mine.heldout.all():
            found[key] = fit_operator(mine, family, device)
    return found


def fit_operator(rows: Rows, family: str, device: Device) -> SegmentFit:
    """Law and correction of one operator on the rows that are not held out, scored on those that are."""
    train = rows.where(~rows.heldout)
    fixed, bounds = {"fresh_bytes_per_s": FRESH_BYTES_PER_S}, bounds_of(train, family)
    if max(call.features["rows"] for call in train.calls) <= 1.0:
        # Nothing measured tells what a row costs.
        del bounds["row_s"]
        fixed["row_s"] = ROW_S
    parameters = fit_law(train, device, law, bounds, fixed)
    bare = SegmentFit(parameters=parameters, arrays={}, fit_range={}, heldout={}, n_rows=len(train))
    result = law(as_segment("", bare), train.calls, device)
    target = np.clip(np.log(train.measured_s / result.time_s), -MAX_LOG_CORRECTION, MAX_LOG_CORRECTION)
    n_trees = best_trees(result.features, target)
    arrays = (
        fit_trees(result.features, target, np.ones(len(train)), n_trees=n_trees, leaf_rows=LEAF_ROWS) if n_trees else {}
    )
    ranges = {name: (float(values.min()), float(values.max())) for name, values in result.ranged.items()}
    fitted = SegmentFit(parameters=parameters, arrays=arrays, fit_range=ranges, heldout={}, n_rows=len(train))
    return with_heldout(fitted, rows.where(rows.heldout), device, law)


def best_trees(features: Floats, target: Floats) -> int:
    """How many trees leave the least median error on rows that they did not see (five folds of the fitted rows).

    Few rows teach trees their noise; the law alone is the first choice.
    """
    if len(target) < MIN_TREE_ROWS:
        return 0
    fold = np.arange(len(target)) % HELDOUT_PARTS
    left = {0: np.abs(target)}
    for n_trees in TREE_COUNTS:
        error = np.zeros(len(target))
        for part in range(HELDOUT_PARTS):
            seen = fold != part
            arrays = fit_trees(
                features[seen], target[seen], np.ones(int(seen.sum())), n_trees=n_trees, leaf_rows=LEAF_ROWS
            )
            error[~seen] = np.abs(target[~seen] - evaluate_trees(arrays, features[~seen]))
        left[n_trees] = error
    return min(left, key=lambda count: float(np.median(left[count]) + np.quantile(left[count], 0.9) / 4))


@dataclass(frozen=True, slots=True, kw_only=True)
class FamilyReport:
    """A family's fit and how it does on the rows that were held out: per operator (rows fitted, errors).

    `cases` are the texts of the held-out cases, in the order of the times.
    """

    family: str
    fit: Fit
    n_rows: int
    measured_s: Floats
    predicted_s: Floats
    by_operator: Mapping[str, tuple[int, Floats]]
    cases: tuple[str, ...]

    @property
    def error(self) -> Floats:
        """|predicted / measured - 1| of every held-out row."""
        found: Floats = np.abs(self.predicted_s / self.measured_s - 1.0)
        return found


def _packed(rows: Sequence[MeasuredRow]) -> Rows:
    return Rows(
        calls=[row.call for row in rows],
        measured_s=np.array([row.time_s for row in rows]),
        heldout=np.array([row.heldout for row in rows]),
        place=np.zeros(len(rows)),
    )


def provenance(table: Path, device: Device) -> dict[str, str]:
    """What a fit says of its table."""
    return {
        "source": f"own calibration, kernels_db/{device.name}/{table.name}",
        "commit": "none",
        "licence": "as this repository",
    }


def fit_table(table: Path, device: Device) -> FamilyReport | None:
    """The fit of one table with its held-out errors; None if no operator has enough rows."""
    rows = read_table(table, device)
    fits = fit_family(rows, table.stem, device)
    if not fits:
        return None
    held = [row for row in rows if row.heldout and row.key in fits]
    predicted = {
        key: predict_s(fit, _packed([row for row in held if row.key == key]), device, law) for key, fit in fits.items()
    }
    measured = {key: np.array([row.time_s for row in held if row.key == key]) for key in fits}
    fits = with_step_costs(fits, table)
    return FamilyReport(
        family=table.stem,
        fit=assemble(table.stem, LAW, fits, provenance(table, device)),
        n_rows=sum(fit.n_rows for fit in fits.values()),
        measured_s=np.concatenate(list(measured.values())),
        predicted_s=np.concatenate(list(predicted.values())),
        cases=tuple(row.case for key in fits for row in held if row.key == key),
        by_operator={key: (fit.n_rows, np.abs(predicted[key] / measured[key] - 1.0)) for key, fit in fits.items()},
    )


def with_step_costs(fits: Mapping[str, SegmentFit], table: Path) -> dict[str, SegmentFit]:
    """The fits with what a step adds to each call, from `in_step.csv` beside the table (see `calibrate.host`)."""
    extra = extra_s(table.with_name(IN_STEP_TABLE))
    found: dict[str, SegmentFit] = {}
    for key, fit in fits.items():
        names = [name for name in OPERATORS.get(key, (key,)) if f"aten.{name}" in extra]
        cost_s = [extra[f"aten.{name}"] for name in names] or [extra.get(f"family:{table.stem}", 0.0)]
        found[key] = replace(fit, parameters={**fit.parameters, "in_step_s": sum(cost_s) / len(cost_s)})
    return found


def main(arguments: Sequence[str]) -> int:
    """Fits and writes; returns the exit status."""
    if not arguments:
        sys.stderr.write("usage: python -m calibrate.fit_cpu TABLES_DIR [DEVICE]\n")
        return 2
    device = load_device(arguments[1] if len(arguments) > 1 else "cpu")
    reports = []
    for table in sorted(Path(arguments[0]).glob("*.csv")):
        if table.name == IN_STEP_TABLE:
            continue
        report = fit_table(table, device)
        if report is not None:
            write_fit(db_root() / device.name, report.fit)
            reports.append(report)
    sys.stderr.write(render(reports) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
