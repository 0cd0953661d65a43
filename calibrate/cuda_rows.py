"""Rows of a CUDA calibration's tables: the kernels of each measured operator, and what each of them took.

An operator that runs several kernels shows their sum. Each kernel gets its part of it as the device's laws divide the sum;
a part below MIN_PART says more of the others' errors than of its own kernel and is left out.

Rows are warm (the operands may still be in L2, as the laws assume it) or cold (they come from memory): for those the share
that L2 serves is taken out of the laws.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from calibrate.fit_cpu import is_heldout
from calibrate.session import op_from_json
from perfmodel.db.device import Device
from perfmodel.kernels import calls_of, price_calls, vector_law
from perfmodel.kernels.correction import Floats, Law, LawResult, Segment
from perfmodel.kernels.embedding import GATHER
from perfmodel.kernels.registry import KernelCall
from perfmodel.kernels.roofline import PIPE_FALLBACK
from perfmodel.kernels.streaming import PATTERN_FRAC

COLD = "cold"  # feature of a call whose operands come from memory
MIN_PART = 0.25
VECTOR = ("elementwise", "norm", "reduction", "softmax")
# Parameters by which L2 serves operands, as they are for a cold call, by family.
COLD_PARAMETERS: Mapping[str, Mapping[str, float]] = {
    "gemm": {"hot": 0.0},
    **{family: {"l2_share": 1e-6} for family in VECTOR},
}
BATCHED = "fp32_batched"


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnRow:
    """One measured operator: its name, its table's case, its kernels, device time (s), and whether fits may see it.

    `noise` is how far its two best rounds differ, as a share; NaN with one round.
    """

    name: str
    case: str
    calls: tuple[KernelCall, ...]
    time_s: float
    heldout: bool
    cold: bool = False
    noise: float = math.nan


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """What one kernel of a row took (s); `row` is the row's place. `whole` if it is the operator's only kernel."""

    row: int
    call: KernelCall
    time_s: float
    whole: bool


def read_rows(table: Path, device: Device) -> list[OwnRow]:
    """Rows of a table whose operator runs a kernel; failed and disturbed ones are left out."""
    with table.open(newline="", encoding="utf-8") as file:
        rows = [_row(row, device) for row in csv.DictReader(file) if row["time_s"] and row["op"]]
    return [row for row in rows if row.calls]


def _row(row: Mapping[str, str], device: Device) -> OwnRow:
    cold = row["state"] == COLD
    return OwnRow(
        name=row["name"],
        case=row["case"],
        calls=tuple(_as_run(call, device, cold=cold) for call in calls_of(op_from_json(row["op"]))),
        time_s=float(row["time_s"]),
        heldout=is_heldout(row["case"]),
        cold=cold,
        noise=float(row["next_s"]) / float(row["time_s"]) - 1.0 if row.get("next_s") else math.nan,
    )


def _as_run(call: KernelCall, device: Device, *, cold: bool) -> KernelCall:
    """The call on a pipe that the device has, marked if its operands come from memory."""
    pipe = call.pipe
    while pipe not in device.peak_flops_per_s and pipe in PIPE_FALLBACK:
        pipe = PIPE_FALLBACK[pipe]
    return replace(call, pipe=pipe, features={**call.features, COLD: float(cold)})


def segment_of(call: KernelCall) -> str | None:
    """The segment whose parameters price the call; None for kernels that no law here fits."""
    if call.family == "gemm":
        return BATCHED if call.pipe == "fp32" and call.features["batch"] > 1 else call.pipe
    if call.family == "conv":
        return call.pipe
    if call.family == "attention":
        return _attention_segment(call)
    if call.family == "embedding":
        own = call.features["stage"] == GATHER and not call.features.get("vectorised", 0.0)
        return "gather" if own else "rows"
    if call.family in VECTOR:
        return vector_law.segment_name(call)
    return "all" if call.family in PATTERN_FRAC else None


def _attention_segment(call: KernelCall) -> str | None:
    """PyTorch's own flash kernels are FlashAttention-2; those before Ampere are memory-efficient ones."""
    if not call.pipe.endswith("_tensor"):
        return None
    kernel = "efficient" if call.features["variant"] == 1.0 else "flash2"
    return f"{kernel}_backward" if call.features["backward"] else kernel


def state_aware(law: Law, family: str) -> Law:
    """The law, for calls of which some are cold."""
    changed = COLD_PARAMETERS.get(family)
    if changed is None:
        return law

    def both(segment: Segment, calls: Sequence[KernelCall], device: Device) -> LawResult:
        warm = law(segment, calls, device)
        cold = np.array([call.features.get(COLD, 0.0) > 0 for call in calls])
        if not cold.any():
            return warm
        other = law(replace(segment, parameters={**segment.parameters, **changed}), calls, device)
        return LawResult(
            time_s=np.where(cold, other.time_s, warm.time_s),
            features=np.where(cold[:, None], other.features, warm.features),
            ranged=warm.ranged,
        )

    return both


def without_l2(device: Device) -> Device:
    """The device as cold calls meet it: nothing of their operands is in L2."""
    fits = dict(device.fits)
    for family, changed in COLD_PARAMETERS.items():
        if family in fits:
            parameters = {
                name: changed.get(name.rpartition(".")[2], value) for name, value in fits[family].parameters.items()
            }
            fits[family] = replace(fits[family], parameters=parameters)
    return replace(device, fits=fits)


def priced_s(rows: Sequence[OwnRow], device: Device) -> list[Floats]:
    """Seconds of each row's kernels on the device."""
    found: list[Floats] = [np.zeros(0)] * len(rows)
    for state, met in ((False, device), (True, without_l2(device))):
        places = [place for place, row in enumerate(rows) if row.cold is state]
        estimates = iter(price_calls([call for place in places for call in rows[place].calls], met))
        for place in places:
            found[place] = np.array([next(estimates).time_s for _ in rows[place].calls])
    return found


def parts_of(rows: Sequence[OwnRow], device: Device) -> dict[tuple[str, str], list[Part]]:
    """The kernels of all rows by family and segment, each with its part of its operator's time."""
    found: dict[tuple[str, str], list[Part]] = {}
    for place, (row, times) in enumerate(zip(rows, priced_s(rows, device), strict=True)):
        whole = len(row.calls) == 1
        for call, share in zip(row.calls, times / times.sum(), strict=True):
            name = segment_of(call)
            if name is not None and share >= MIN_PART:
                part = Part(row=place, call=call, time_s=row.time_s * float(share), whole=whole)
                found.setdefault((call.family, name), []).append(part)
    return found
