"""Fits the CPU's law to measured tables: one segment per operator, a fifth of the cases held out.

`python -m calibrate.fit_cpu TABLES_DIR [DEVICE]` reads `<family>.csv` from TABLES_DIR and writes the fits of DEVICE (cpu).
"""

from __future__ import annotations

import csv
import hashlib
import json
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from calibrate.fit_smooth import fit_correction
from calibrate.fitting import (
    Bound,
    Rows,
    SegmentFit,
    as_segment,
    assemble,
    fit_law,
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
from perfmodel.kernels.correction import MAX_LOG_CORRECTION, Floats
from perfmodel.kernels.cpu_features import cpu_call, op_key, table_lookups
from perfmodel.kernels.cpu_law import LAW, law
from perfmodel.kernels.cpu_memory import cold, warm
from perfmodel.kernels.registry import KernelCall

HELDOUT_PARTS = 5  # one case in five is held out, by the hash of its text
MIN_ROWS = 8
# By how much (log) a law's parameter may differ from its usual value without the rows saying so loudly.
SPREAD: Mapping[str, float] = {
    "fixed_s": 1.0, "fork_s": 1.5, "work_per_s": 1.5, "shared_bytes_per_s": 0.5, "memory_bytes_per_s": 0.4, "sharp": 0.6,
    "row_s": 2.0, "far_s": 1.0, "flush_s": 0.7, "tail_s": 1.5, "narrow_s": 1.0, "lane": 1.0, "grain": 1.5, "edge": 0.5,
    "half_m": 1.2, "half_n": 1.2, "half_k": 1.2, "pack_bytes_per_s": 2.0,
}  # fmt: skip
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
    """One measured call of a table: its op, as the law reads it, its time, and how far its two best rounds differ.

    `noise` is a share of the time; NaN where the table does not say.
    """

    key: str
    case: str
    op: Op
    call: KernelCall
    state: str
    time_s: float
    heldout: bool
    noise: float = math.nan


def read_table(path: Path, device: Device) -> list[MeasuredRow]:
    """The measured rows of a table; failed and disturbed ones are left out."""
    with path.open(newline="", encoding="utf-8") as file:
        return [_row(row, device) for row in csv.DictReader(file) if row["time_s"] and row["op"]]


def _row(row: Mapping[str, str], device: Device) -> MeasuredRow:
    op = op_from_json(row["op"])
    lookups = table_lookups(op, {})
    far = row["state"] == "cold"
    reach = cold(op) if far else warm(op)
    call = cpu_call(op, reach, lookups, float(device.l2_bytes))
    if far and json.loads(row["case"])["family"] == "embedding":
        call = replace(call, features={**call.features, "flushed": 1.0})
    return MeasuredRow(
        key=op_key(op),
        case=row["case"],
        op=op,
        call=call,
        state=row["state"],
        time_s=float(row["time_s"]),
        heldout=is_heldout(row["case"]),
        noise=float(row["next_s"]) / float(row["time_s"]) - 1.0 if row.get("next_s") else math.nan,
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
        "shared_bytes_per_s": Bound(start=70e9, low=8e9, high=300e9),
        "memory_bytes_per_s": Bound(start=26e9, low=2e9, high=60e9),
        "sharp": Bound(start=2.0, low=1.0, high=8.0),
        "row_s": Bound(start=1e-9, low=1e-11, high=1e-6),
    }
    for feature, name, bound in (
        ("far_rows", "far_s", Bound(start=2e-8, low=1e-10, high=5e-7)),
        ("tails", "tail_s", Bound(start=2e-9, low=1e-11, high=1e-7)),
        ("flushed", "flush_s", Bound(start=4e-5, low=1e-6, high=2e-4)),
        ("narrow", "narrow_s", Bound(start=1e-9, low=1e-12, high=2e-8)),
    ):
        if max(call.features.get(feature, 0.0) for call in rows.calls) > 0:
            found[name] = bound
    if max(call.features.get("lanes_n", 0.0) for call in rows.calls) > 1:
        found["lane"] = Bound(start=0.3, low=0.01, high=1.5)
    if family == "embedding":
        # A lookup's own cost: a sum, a comparison, a place in a sort.
        found["row_s"] = Bound(start=2e-8, low=1e-11, high=1e-6)
    if family in PRODUCTS:
        found |= {"grain": Bound(start=1e6, low=1e3, high=1e9), "edge": Bound(start=1.0, low=0.5, high=4.0)}
        found |= {f"half_{name}": Bound(start=4.0, low=0.05, high=400.0) for name in ("m", "n", "k")}
        found |= {"pack_bytes_per_s": Bound(start=200e9, low=2e9, high=1e13)}
    else:
        found |= {"grain": Bound(start=3e4, low=1e2, high=1e6), "edge": Bound(start=4.0, low=1.0, high=12.0)}
    return found


def fit_family(rows: Sequence[MeasuredRow], family: str, device: Device) -> dict[str, OperatorFit]:
    """A segment for every operator with enough rows."""
    found: dict[str, OperatorFit] = {}
    for key in sorted({row.key for row in rows}):
        mine = _packed([row for row in rows if row.key == key])
        if len(mine) >= MIN_ROWS and mine.heldout.any() and not mine.heldout.all():
            found[key] = fit_operator(mine, family, device)
    return found


def fit_operator(rows: Rows, family: str, device: Device) -> OperatorFit:
    """Law and correction of one operator on the rows that are not held out, scored on those that are."""
    train = rows.where(~rows.heldout)
    fixed, bounds = {"fresh_bytes_per_s": FRESH_BYTES_PER_S}, bounds_of(train, family)
    if max(call.features["rows"] for call in train.calls) <= 1.0:
        # Nothing measured tells what a row costs.
        del bounds["row_s"]
        fixed["row_s"] = ROW_S
    parameters = fit_law(train, device, law, bounds, fixed, SPREAD)
    bare = SegmentFit(parameters=parameters, arrays={}, fit_range={}, heldout={}, n_rows=len(train))
    result = law(as_segment("", bare), train.calls, device)
    target = np.clip(np.log(train.measured_s / result.time_s), -MAX_LOG_CORRECTION, MAX_LOG_CORRECTION)
    chosen = fit_correction(result.features, target, try_own_scales=True)
    ranges = {name: (float(values.min()), float(values.max())) for name, values in result.ranged.items()}
    fitted = SegmentFit(parameters=parameters, arrays=chosen.arrays, fit_range=ranges, heldout={}, n_rows=len(train))
    found = with_heldout(fitted, rows.where(rows.heldout), device, law)
    return OperatorFit(fit=found, left_out=chosen.left_out)


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorFit:
    """A segment, and how far (log) it misses each fitted row when its correction has not seen the row."""

    fit: SegmentFit
    left_out: Floats


@dataclass(frozen=True, slots=True, kw_only=True)
class FamilyReport:
    """A family's fit and how it does on the rows that were held out: per operator (rows fitted, errors).

    `cases` are the texts of the held-out cases, in the order of the times; `left_out` maps those of the fitted cases to the
    error (log) that the fit makes without them; `noise` is how far two rounds of a row differ, of rows that tell.
    """

    family: str
    fit: Fit
    n_rows: int
    measured_s: Floats
    predicted_s: Floats
    by_operator: Mapping[str, tuple[int, Floats]]
    cases: tuple[str, ...]
    left_out: Mapping[str, float] = field(default_factory=dict)
    noise: Floats = field(default_factory=lambda: np.zeros(0))

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
    found = fit_family(rows, table.stem, device)
    if not found:
        return None
    fits = {key: item.fit for key, item in found.items()}
    held = {key: [row for row in rows if row.heldout and row.key == key] for key in fits}
    predicted = {key: predict_s(fit, _packed(held[key]), device, law) for key, fit in fits.items()}
    measured = {key: np.array([row.time_s for row in held[key]]) for key in fits}
    fits = with_step_costs(fits, table)
    return FamilyReport(
        family=table.stem,
        fit=assemble(table.stem, LAW, fits, provenance(table, device)),
        n_rows=sum(fit.n_rows for fit in fits.values()),
        measured_s=np.concatenate(list(measured.values())),
        predicted_s=np.concatenate(list(predicted.values())),
        cases=tuple(row.case for members in held.values() for row in members),
        by_operator={key: (fit.n_rows, np.abs(predicted[key] / measured[key] - 1.0)) for key, fit in fits.items()},
        left_out=_left_out(rows, found),
        noise=noise_of(rows),
    )


def noise_of(rows: Sequence[MeasuredRow]) -> Floats:
    """The known noise of rows."""
    noise = np.array([row.noise for row in rows])
    found: Floats = noise[~np.isnan(noise)]
    return found


def _left_out(rows: Sequence[MeasuredRow], fits: Mapping[str, OperatorFit]) -> dict[str, float]:
    found: dict[str, float] = {}
    for key, item in fits.items():
        fitted = [row.case for row in rows if row.key == key and not row.heldout]
        found |= dict(zip(fitted, np.abs(item.left_out).tolist(), strict=True))
    return found


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
