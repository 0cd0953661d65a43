"""Fits the laws of a CUDA device to its own tables, as `perfmodel calibrate kernels --device cuda` measures them.

Rows are device times (events around graph replays), so that no measurement floor is fitted. An operator that runs one
kernel is a row of that kernel's family, whichever table it is in; operators that run several only show their sum and are
left out. Embedding, copies and random numbers keep the fits of the database, or the roofline.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import numpy as np

from calibrate import fit_attention, fit_conv, fit_gemm, fit_vector
from calibrate.fit_cpu import FamilyReport, is_heldout
from calibrate.fitting import Rows, SegmentFit, assemble, fit_segment, predict_s
from calibrate.session import op_from_json
from perfmodel.db.device import Device, Fit
from perfmodel.kernels import attention_law, calls_of, conv_law, gemm_law, vector_law
from perfmodel.kernels.correction import Floats, Law
from perfmodel.kernels.registry import KernelCall

Value = TypeVar("Value")
MIN_ROWS = 30  # of one segment: fewer do not tell a dozen parameters
_MEASURED_FLOORS = ("measurement_floor_s", "floor_growth_s", "floor_growth_square_s")
ATTENTION_SEGMENT = "flash2"  # PyTorch's own flash kernels are FlashAttention-2


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnRow:
    """One measured kernel: its table's case, its call, device time (s), and whether fits may see it."""

    case: str
    call: KernelCall
    time_s: float
    heldout: bool


def read_rows(table: Path) -> list[OwnRow]:
    """Rows of a table whose operator runs one kernel; failed and disturbed ones are left out."""
    found = []
    with table.open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            calls = calls_of(op_from_json(row["op"])) if row["time_s"] and row["op"] else ()
            if len(calls) == 1:
                held = is_heldout(row["case"])
                found.append(OwnRow(case=row["case"], call=calls[0], time_s=float(row["time_s"]), heldout=held))
    return found


def segment_of(call: KernelCall) -> str | None:
    """The segment whose parameters price the call; None for kernels that no law here fits."""
    if call.family == "gemm":
        return f"{call.pipe}_batched" if call.pipe == "fp32" and call.features["batch"] > 1 else call.pipe
    if call.family == "conv":
        return call.pipe
    if call.family == "attention":
        return None if call.features["backward"] or not call.pipe.endswith("_tensor") else ATTENTION_SEGMENT
    return vector_law.segment_name(call) if call.family in fit_vector.FAMILIES else None


def _fit_gemm(rows: Rows, device: Device) -> SegmentFit:
    return fit_segment(rows, device, gemm_law.law, fit_gemm.BOUNDS, {"clock_hz": device.clock_hz})


def _fit_conv(rows: Rows, device: Device) -> SegmentFit:
    bounds = {name: bound for name, bound in fit_conv.BOUNDS.items() if name not in _MEASURED_FLOORS}
    return fit_segment(
        rows, device, conv_law.law, bounds, {"floor_s": device.kernel_floor_s, "pointwise_slowdown": 1.0}
    )


def _fit_attention(rows: Rows, device: Device) -> SegmentFit:
    return fit_segment(rows, device, attention_law.law, fit_attention.BOUNDS, {})


def _fit_vector(rows: Rows, device: Device) -> SegmentFit:
    pointwise = rows.calls[0].family == "elementwise"
    names = fit_vector.POINTWISE if pointwise else tuple(fit_vector.BOUNDS)
    n_rows = len(rows)
    sample = fit_vector.Sample(
        calls=rows.calls,
        columns=vector_law.columns_of(rows.calls),
        measured_s=rows.measured_s,
        weight=np.ones(n_rows),
        op_index=np.full(n_rows, -1),
        ops=(),
        repeats=np.ones(n_rows),
        heldout=rows.heldout,
        test_split=np.zeros(n_rows, dtype=bool),
    )
    return fit_vector.fit_one(sample, device, names, corrected=not pointwise)


FITS: Mapping[str, tuple[str, Law, Callable[[Rows, Device], SegmentFit]]] = {
    "gemm": (gemm_law.LAW, gemm_law.law, _fit_gemm),
    "conv": (conv_law.LAW, conv_law.law, _fit_conv),
    "attention": (attention_law.LAW, attention_law.law, _fit_attention),
    **dict.fromkeys(fit_vector.FAMILIES, (vector_law.LAW, vector_law.law, _fit_vector)),
}


def fit_tables(tables: Sequence[Path], device: Device) -> list[FamilyReport]:
    """A fit of every family with enough rows in the tables, with its errors on the rows held out."""
    groups: dict[str, dict[str, list[OwnRow]]] = {}
    for row in (row for table in tables for row in read_rows(table)):
        name = segment_of(row.call)
        if name is not None:
            groups.setdefault(row.call.family, {}).setdefault(name, []).append(row)
    reports = (_fit_family(family, segments, device) for family, segments in sorted(groups.items()))
    return [report for report in reports if report is not None]


def _fit_family(family: str, segments: Mapping[str, Sequence[OwnRow]], device: Device) -> FamilyReport | None:
    law_name, law, fit_one = FITS[family]
    fits: dict[str, SegmentFit] = {}
    held: dict[str, list[OwnRow]] = {}
    predicted: dict[str, Floats] = {}
    for name, rows in sorted(segments.items()):
        left = [row for row in rows if row.heldout]
        if len(rows) - len(left) < MIN_ROWS or not left:
            continue
        fits[name] = fit_one(_packed(rows), device)
        held[name], predicted[name] = left, predict_s(fits[name], _packed(left), device, law)
    if not fits:
        return None
    measured = {name: np.array([row.time_s for row in rows]) for name, rows in held.items()}
    provenance = {
        "source": f"own calibration of {device.title}",
        "commit": "none",
        "licence": "as this repository",
        "heldout": "a fifth of the cases, by the hash of their arguments",
    }
    return FamilyReport(
        family=family,
        fit=merged(device.fits.get(family), assemble(family, law_name, fits, provenance), tuple(fits)),
        n_rows=sum(fit.n_rows for fit in fits.values()),
        measured_s=np.concatenate(list(measured.values())),
        predicted_s=np.concatenate(list(predicted.values())),
        by_operator={name: (fits[name].n_rows, np.abs(predicted[name] / measured[name] - 1.0)) for name in fits},
        cases=tuple(row.case for rows in held.values() for row in rows),
    )


def merged(old: Fit | None, new: Fit, measured: Sequence[str]) -> Fit:
    """The new fit with the segments of the old one that were not measured again; another law's segments are dropped."""
    if old is None or old.law != new.law:
        return new

    before = old.provenance.get("source", "the database")
    return replace(
        new,
        parameters={**_kept(old.parameters, measured), **new.parameters},
        arrays={**_kept(old.arrays, measured), **new.arrays},
        fit_range={**_kept(old.fit_range, measured), **new.fit_range},
        heldout={**_kept(old.heldout, measured), **new.heldout},
        provenance={**new.provenance, "other_segments": before},
    )


def _kept(values: Mapping[str, Value], measured: Sequence[str]) -> dict[str, Value]:
    """Entries of segments that were not measured."""
    return {key: value for key, value in values.items() if key.partition(".")[0] not in measured}


def _packed(rows: Sequence[OwnRow]) -> Rows:
    return Rows(
        calls=[row.call for row in rows],
        measured_s=np.array([row.time_s for row in rows]),
        heldout=np.array([row.heldout for row in rows], dtype=bool),
        place=np.zeros(len(rows)),
    )
