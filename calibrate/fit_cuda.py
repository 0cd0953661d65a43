"""Fits the laws of a CUDA device to its own tables, as `perfmodel calibrate kernels --device cuda` measures them.

Rows are device times (events around graph replays), so that no measurement floor is fitted. Kernels of every table that
share a family and a segment are fitted together, whichever operator ran them; operators of several kernels are divided by
the laws as they were, and once more by the laws just fitted (`cuda_rows`). Every family with a law is fitted: products,
convolutions and attention, forward and backward, pointwise kernels, reductions, norms, softmax, embedding, and what streams
(copies, gathers, optimizers, random numbers, pooling). Segments with few rows keep the fits of the database.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import numpy as np

from calibrate import fit_attention, fit_conv, fit_embedding, fit_gemm, fit_vector
from calibrate.cuda_rows import VECTOR, OwnRow, Part, parts_of, priced_s, read_rows, state_aware
from calibrate.fit_cpu import FamilyReport, OperatorFit
from calibrate.fit_smooth import fit_correction
from calibrate.fitting import Bound, Rows, SegmentFit, as_segment, assemble, fit_law, with_heldout
from perfmodel.db.device import Device, Fit
from perfmodel.kernels import attention_law, conv_law, embedding_law, gemm_law, streaming, vector_law
from perfmodel.kernels.correction import MAX_LOG_CORRECTION, Law

Value = TypeVar("Value")
Key = tuple[str, str]  # family and segment
MIN_ROWS = 30  # of one segment: fewer do not tell a dozen parameters
LAST = streaming.PATTERN_FRAC  # families that are priced by the device's pointwise kernels: fitted after those
_MEASURED_FLOORS = ("measurement_floor_s", "floor_growth_s", "floor_growth_square_s")
_WINOGRAD = ("winograd_2_eff", "winograd_4_eff", "transform")
_HOST_LINK = ("uvm_eff", "uvm_rmw_eff", "link_eff")  # nothing measured here crosses it
POINTWISE_SLOWDOWN = Bound(start=1.2, low=0.7, high=3.0)
EMBEDDING_FLOOR = Bound(start=2e-6, low=0.5e-6, high=12e-6)
EMBEDDING_REACH = 5.0  # times what other devices' rows say, either way
STREAMING_EXTRA = Bound(start=0.1e-6, low=1e-9, high=40e-6)


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """How a segment is fitted: the law, its free parameters and how far (log) they may stray, and those that are given."""

    law_name: str
    law: Law
    bounds: Mapping[str, Bound]
    fixed: Mapping[str, float]
    spread: Mapping[str, float] | None = None


def _gemm(name: str, device: Device) -> Recipe:
    return Recipe(law_name=gemm_law.LAW, law=gemm_law.law, bounds=fit_gemm.BOUNDS, fixed={"clock_hz": device.clock_hz})


def _conv(name: str, device: Device) -> Recipe:
    left_out = (*_MEASURED_FLOORS, *(_WINOGRAD if name.endswith("_tensor") else ()))
    bounds = {key: bound for key, bound in fit_conv.BOUNDS.items() if key not in left_out}
    bounds |= {"pointwise_slowdown": POINTWISE_SLOWDOWN, "floor_s": fit_gemm.BOUNDS["floor_s"]}
    return Recipe(law_name=conv_law.LAW, law=conv_law.law, bounds=bounds, fixed={})


def _attention(name: str, device: Device) -> Recipe:
    return Recipe(law_name=attention_law.LAW, law=attention_law.law, bounds=fit_attention.BOUNDS, fixed={})


def _vector(name: str, device: Device) -> Recipe:
    fixed = {"strided_rate": fit_vector.STRIDED_RATE}
    return Recipe(law_name=vector_law.LAW, law=vector_law.law, bounds=fit_vector.BOUNDS, fixed=fixed)


def _pointwise(name: str, device: Device) -> Recipe:
    bounds = {key: fit_vector.BOUNDS[key] for key in fit_vector.POINTWISE}
    bounds["strided_rate"] = Bound(start=fit_vector.STRIDED_RATE, low=1.0, high=128.0)
    fixed = {key: bound.start for key, bound in fit_vector.BOUNDS.items() if key not in bounds}
    return Recipe(law_name=vector_law.LAW, law=vector_law.law, bounds=bounds, fixed=fixed)


def _embedding(name: str, device: Device) -> Recipe:
    start = {key: value for key, value in fit_embedding.START.items() if key not in _HOST_LINK}
    bounds = {
        key: Bound(start=value, low=value / EMBEDDING_REACH, high=value * EMBEDDING_REACH)
        for key, value in start.items()
    }
    return Recipe(
        law_name=embedding_law.LAW,
        law=embedding_law.law,
        bounds={**bounds, "floor_s": EMBEDDING_FLOOR},
        fixed={key: fit_embedding.START[key] for key in _HOST_LINK},
        spread=dict.fromkeys(start, fit_embedding.PRIOR_SPREAD),
    )


def _streaming(family: str) -> Callable[[str, Device], Recipe]:
    bounds = {
        "pattern_frac": Bound(start=streaming.PATTERN_FRAC[family], low=0.01, high=1.5),
        "extra_s": STREAMING_EXTRA,
    }
    return lambda name, device: Recipe(law_name=streaming.LAW, law=streaming.law, bounds=bounds, fixed={})


RECIPES: Mapping[str, Callable[[str, Device], Recipe]] = {
    "gemm": _gemm,
    "conv": _conv,
    "attention": _attention,
    "embedding": _embedding,
    **dict.fromkeys(VECTOR, _vector),
    "elementwise": _pointwise,
    **{family: _streaming(family) for family in LAST},
}


def fit_tables(tables: Sequence[Path], device: Device) -> list[FamilyReport]:
    """A fit of every family with enough rows in the tables, with its errors on the operators held out."""
    rows = [row for table in tables for row in read_rows(table, device)]
    found: dict[Key, OperatorFit] = {}
    fitted = device
    parts = parts_of(rows, device)
    for again in (False, True):
        for last in (False, True):
            for (family, name), members in sorted(parts.items()):
                divided = not all(part.whole for part in members)
                if (family in LAST) is last and (divided or not again) and _enough(members, rows):
                    found[family, name] = fit_parts(members, rows, fitted, RECIPES[family](name, device))
            fitted = with_fits(device, found)
        parts = parts_of(rows, fitted)
    return _reports(rows, found, fitted, parts)


def _enough(parts: Sequence[Part], rows: Sequence[OwnRow]) -> bool:
    held = sum(rows[part.row].heldout for part in parts)
    return held > 0 and len(parts) - held >= MIN_ROWS


def fit_parts(parts: Sequence[Part], rows: Sequence[OwnRow], device: Device, recipe: Recipe) -> OperatorFit:
    """Law and correction of one segment on the rows that are not held out, scored on those that are."""
    packed = Rows(
        calls=[part.call for part in parts],
        measured_s=np.array([part.time_s for part in parts]),
        heldout=np.array([rows[part.row].heldout for part in parts], dtype=bool),
        place=np.zeros(len(parts)),
    )
    law = state_aware(recipe.law, parts[0].call.family)
    train = packed.where(~packed.heldout)
    parameters = fit_law(train, device, law, recipe.bounds, recipe.fixed, recipe.spread)
    parameters["compute_capability"] = float(device.compute_capability)
    bare = SegmentFit(parameters=parameters, arrays={}, fit_range={}, heldout={}, n_rows=len(train))
    ranged = law(as_segment("", bare), train.calls, device).ranged
    fit_range = {name: (float(values.min()), float(values.max())) for name, values in ranged.items()}
    # The law reads the range as well: features come from the final segment.
    result = law(as_segment("", replace(bare, fit_range=fit_range)), train.calls, device)
    target = np.clip(np.log(train.measured_s / result.time_s), -MAX_LOG_CORRECTION, MAX_LOG_CORRECTION)
    chosen = fit_correction(result.features, target)
    fit = replace(bare, arrays=chosen.arrays, fit_range=fit_range)
    return OperatorFit(fit=with_heldout(fit, packed.where(packed.heldout), device, law), left_out=chosen.left_out)


def with_fits(device: Device, found: Mapping[Key, OperatorFit]) -> Device:
    """The device with the segments found so far, and the database's where there are none."""
    families = sorted({family for family, _ in found})
    return replace(device, fits={**device.fits, **{family: _fit_of(family, found, device) for family in families}})


def _fit_of(family: str, found: Mapping[Key, OperatorFit], device: Device) -> Fit:
    segments = {name: item.fit for (owner, name), item in found.items() if owner == family}
    provenance = {
        "source": f"own calibration of {device.title}",
        "commit": "none",
        "licence": "as this repository",
        "heldout": "a fifth of the cases, by the hash of their arguments",
    }
    law_name = RECIPES[family](next(iter(segments)), device).law_name
    return merged(device.fits.get(family), assemble(family, law_name, segments, provenance), tuple(segments))


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


def _reports(
    rows: Sequence[OwnRow], found: Mapping[Key, OperatorFit], fitted: Device, parts: Mapping[Key, Sequence[Part]]
) -> list[FamilyReport]:
    """One report a family, of the operators that spend most in it."""
    kernels = priced_s(rows, fitted)
    owner = [row.calls[int(times.argmax())].family for row, times in zip(rows, kernels, strict=True)]
    total = np.array([times.sum() for times in kernels])
    left_out = _left_out(rows, found, parts)
    reports = []
    for family in sorted({family for family, _ in found}):
        mine = [place for place, name in enumerate(owner) if name == family]
        held = [place for place in mine if rows[place].heldout]
        measured = np.array([rows[place].time_s for place in held])
        error = np.abs(total[held] / measured - 1.0)
        names = [rows[place].name for place in held]
        operators = {
            name: (
                sum(rows[place].name == name and not rows[place].heldout for place in mine),
                error[np.array([other == name for other in names], dtype=bool)],
            )
            for name in sorted(set(names))
        }
        noise = np.array([rows[place].noise for place in mine])
        reports.append(
            FamilyReport(
                family=family,
                fit=fitted.fits[family],
                n_rows=sum(item.fit.n_rows for (other, _), item in found.items() if other == family),
                measured_s=measured,
                predicted_s=total[held],
                by_operator=operators,
                cases=tuple(rows[place].case for place in held),
                left_out={rows[place].case: left_out[place] for place in mine if place in left_out},
                noise=noise[~np.isnan(noise)],
            )
        )
    return reports


def _left_out(
    rows: Sequence[OwnRow], found: Mapping[Key, OperatorFit], parts: Mapping[Key, Sequence[Part]]
) -> dict[int, float]:
    """|log(predicted / measured)| of fitted rows under a correction that has not seen them: of a row's worst kernel."""
    errors: dict[int, float] = {}
    for key, item in found.items():
        fitted = [part.row for part in parts.get(key, ()) if not rows[part.row].heldout]
        if len(fitted) != len(item.left_out):
            continue  # divided anew since: another number of parts
        for place, error in zip(fitted, np.abs(item.left_out).tolist(), strict=True):
            errors[place] = max(error, errors.get(place, 0.0))
    return errors
