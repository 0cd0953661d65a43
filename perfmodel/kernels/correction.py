"""What every calibrated family shares: segments of a fit, the stored correction, and its fading outside the fit range.

A fit holds one or more *segments*: sets of law parameters for one arithmetic pipe (`bf16_tensor`, `fp32_batched`, ...).
Segment `s` of a fit is its parameters `s.<name>`, its arrays `s.<name>` and its range `s.<feature>`. An estimate is

    time = law(parameters, call, device) * exp(w * clip(correction(features), -bound, bound)) * trim

where `correction` is a sum of regression trees over the law's features, stored as plain arrays, and w goes from 1 inside
the fit range to 0 at FADE_OCTAVES outside it or on another compute capability: beyond its data the law alone speaks.

Arrays of the trees (all nodes of all trees behind each other; the two children of a node lie side by side):

- `tree_roots` [trees]: index of each root.
- `tree_feature` [nodes]: column of the feature matrix, LEAF at a leaf.
- `tree_child` [nodes]: left child's index minus the root's; the right child is the next node.
- `tree_value` [nodes]: threshold (left if feature <= threshold) or the leaf's value.

A fit of few rows may have a smooth part beside or in place of the trees (see `smooth`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from perfmodel.db.device import Device, Fit
from perfmodel.db.fits import INHERITED_KEY
from perfmodel.errors import MissingCalibrationError
from perfmodel.estimate import Estimate, Source
from perfmodel.kernels.ranges import range_frac
from perfmodel.kernels.registry import KernelCall
from perfmodel.kernels.roofline import roofline
from perfmodel.kernels.smooth import evaluate_smooth

Floats = NDArray[np.float64]

LEAF = 255
FADE_OCTAVES = (
    2.0  # the correction is gone at 4 times beyond the measured range; halving each octave is the mildest ramp
)
RANGE_SLACK = 1.02  # a size within 2 % of the range's edge is inside it
MAX_LOG_CORRECTION = 1.2  # |log| bound of a correction: the law itself is within 3.3 times of nearly every measurement
OUTSIDE_WIDENING = (
    1.3  # range of an estimate outside the data: the split by ranges shows p90 errors up to this much wider
)
# A law on a chip that it was not fitted on: bf16 products from another generation's fit miss by 30 to 36 % at the 90th
# percentile (H100 from A100 and from L40S, A100 from H100), from a sister's by 11 to 13 % (H100 and H200), where own fits
# miss by 6 to 8 % (`python -m calibrate.hard_splits DATA/kernels devices`, docs/accuracy.md). What that leaves in quadrature
# (logarithms) is over 1.28 for a range of 80 %, the ratio of the two percentiles in own fits. Borrowing from another pipe or
# kernel of the chip is taken to be as uncertain as from another chip; nothing public tests it.
OTHER_CHIP_WIDENING = 1.25
SISTER_CHIP_WIDENING = 1.08


def wider(ends: tuple[float, float], widening: float) -> tuple[float, float]:
    """A range's multipliers (low, high) with an independent error on top: their logarithms add in quadrature."""
    low, high = (math.hypot(math.log(end), math.log(widening)) for end in ends)
    return math.exp(-low), math.exp(high)


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """One set of law parameters of a fit with its correction, range and residual quantiles."""

    name: str
    parameters: Mapping[str, float]
    arrays: Mapping[str, NDArray[np.generic]]
    fit_range: Mapping[str, tuple[float, float]]
    low_frac: float
    high_frac: float
    source: Source
    corrected: bool

    def only_law(self) -> Segment:
        """The same law for another pipe or chip: no correction, DERIVED, a wider range."""
        low, high = wider((self.low_frac, self.high_frac), OTHER_CHIP_WIDENING)
        return Segment(
            name=self.name,
            parameters=self.parameters,
            arrays={},
            fit_range=self.fit_range,
            low_frac=low,
            high_frac=high,
            source=max(self.source, Source.DERIVED),
            corrected=False,
        )

    def of_sister(self) -> Segment:
        """The same segment on another device with the chip it was measured on: DERIVED, a somewhat wider range."""
        low, high = wider((self.low_frac, self.high_frac), SISTER_CHIP_WIDENING)
        return replace(self.derived(), low_frac=low, high_frac=high)

    def derived(self) -> Segment:
        """The same segment, marked DERIVED."""
        return Segment(
            name=self.name,
            parameters=self.parameters,
            arrays=self.arrays,
            fit_range=self.fit_range,
            low_frac=self.low_frac,
            high_frac=self.high_frac,
            source=max(self.source, Source.DERIVED),
            corrected=self.corrected,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class LawResult:
    """A law's answer for n calls: device time (s) [n], features of the correction [n, f], and what the range bounds."""

    time_s: Floats
    features: Floats
    ranged: Mapping[str, Floats]


Law = Callable[[Segment, Sequence[KernelCall], Device], LawResult]
Chooser = Callable[[Mapping[str, Segment], KernelCall, Device], Segment | None]


def segments_of(fit: Fit, device: Device) -> dict[str, Segment]:
    """All segments of a fit by name, as they apply on `device`.

    A segment measured on another compute capability loses its correction; one whose parameters say `derived` is DERIVED.
    """
    found: dict[str, dict[str, float]] = {}
    for key, value in fit.parameters.items():
        name, _, parameter = key.partition(".")
        if parameter:
            found.setdefault(name, {})[parameter] = value
    return {name: _segment(name, parameters, fit, device) for name, parameters in found.items()}


def _segment(name: str, parameters: Mapping[str, float], fit: Fit, device: Device) -> Segment:
    prefix = f"{name}."
    arrays = {key.removeprefix(prefix): value for key, value in fit.arrays.items() if key.startswith(prefix)}
    derived = parameters.get("derived", 0.0) > 0
    segment = Segment(
        name=name,
        parameters=parameters,
        arrays=arrays,
        fit_range={k.removeprefix(prefix): v for k, v in fit.fit_range.items() if k.startswith(prefix)},
        low_frac=parameters.get("low_frac", fit.low_frac),
        high_frac=parameters.get("high_frac", fit.high_frac),
        source=max(fit.source, Source.DERIVED) if derived else fit.source,
        corrected=bool(arrays),
    )
    measured_on = parameters.get("compute_capability", 0.0)
    same_chip = device.kind == "cpu" or measured_on == float(device.compute_capability or 0)
    if not same_chip:
        return segment.only_law()
    return segment.of_sister() if INHERITED_KEY in fit.provenance else segment


def evaluate_trees(arrays: Mapping[str, NDArray[np.generic]], features: Floats) -> Floats:
    """Sum of the leaves that each row of `features` [n, f] reaches, over all trees: [n]."""
    roots = arrays["tree_roots"].astype(np.int64)
    feature = arrays["tree_feature"]
    # A child's index within its tree becomes one among all nodes; leaves have none.
    owner = np.repeat(roots, np.diff(np.append(roots, feature.size)))
    child = arrays["tree_child"].astype(np.int64) + owner
    value = arrays["tree_value"]
    n_rows, n_columns = features.shape
    node = np.tile(roots, n_rows)
    offset = np.repeat(np.arange(n_rows) * n_columns, roots.size)
    flat = features.astype(np.float32).ravel()
    walking = np.flatnonzero(feature[node] != LEAF)
    while walking.size:
        here = node[walking]
        right = flat[offset[walking] + feature[here]] > value[here]
        here = child[here] + right
        node[walking] = here
        walking = walking[feature[here] != LEAF]
    total: Floats = value[node].reshape(n_rows, roots.size).sum(axis=1, dtype=np.float64)
    return total


def correction(arrays: Mapping[str, NDArray[np.generic]], features: Floats) -> Floats:
    """The stored correction (log) of each row of `features` [n, f]: its trees and its smooth part, whichever there are."""
    found: Floats = np.zeros(len(features))
    if "tree_roots" in arrays:
        found = found + evaluate_trees(arrays, features)
    if "smooth_points" in arrays:
        found = found + evaluate_smooth(arrays, features)
    return found


def octaves_outside(ranged: Mapping[str, Floats], fit_range: Mapping[str, tuple[float, float]]) -> Floats:
    """How far (factors of two, summed over features) each call lies outside the measured range; 0 inside."""
    total: Floats = np.zeros(next(iter(ranged.values())).shape)
    for name, values in ranged.items():
        if name not in fit_range:
            continue
        low, high = fit_range[name]
        inside = np.clip(values, low / RANGE_SLACK, high * RANGE_SLACK)
        total = total + np.abs(np.log2(np.maximum(values, 1e-30) / np.maximum(inside, 1e-30)))
    return total


def corrected_s(segment: Segment, result: LawResult) -> tuple[Floats, Floats]:
    """Corrected times (s) and the octaves by which each call lies outside the fit range."""
    outside = octaves_outside(result.ranged, segment.fit_range)
    trim = segment.parameters.get("trim", 1.0)
    if not segment.corrected:
        return result.time_s * trim, outside
    # Many rows share a feature vector only across identical calls, which the pricing core has merged already.
    raw = correction(segment.arrays, result.features)
    weight = np.clip(1.0 - outside / FADE_OCTAVES, 0.0, 1.0)
    return result.time_s * trim * np.exp(weight * np.clip(raw, -MAX_LOG_CORRECTION, MAX_LOG_CORRECTION)), outside


def price_by_segments(
    calls: Sequence[KernelCall], device: Device, fit_name: str, law_name: str, parts: tuple[Chooser, Law]
) -> list[Estimate]:
    """Prices calls of one family: each by the segment that `parts[0]` chooses, through the law `parts[1]`.

    Calls without a segment, or all of them without a fit, get the datasheet roofline. Raises MissingCalibrationError if
    the fit was written for another law.
    """
    fit = device.fits.get(fit_name)
    if fit is None:
        return roofline(calls, device)
    if fit.law != law_name:
        raise MissingCalibrationError(
            f"kernels_db/{device.name}/{fit_name}.fit.yaml: law: found {fit.law!r}, allowed {law_name!r}: fit it again"
        )
    choose, law = parts
    segments = segments_of(fit, device)
    groups: dict[tuple[object, ...], tuple[Segment | None, list[int]]] = {}
    for index, call in enumerate(calls):
        segment = choose(segments, call, device)
        # One segment of the fit may be chosen as it is and, borrowed, with a wider range.
        key = (segment.name, segment.source, segment.corrected, segment.low_frac, segment.high_frac) if segment else ()
        groups.setdefault(key, (segment, []))[1].append(index)
    priced: dict[int, Estimate] = {}
    for segment, members in groups.values():
        chosen = [calls[i] for i in members]
        found = _price_segment(segment, chosen, device, law) if segment else roofline(chosen, device)
        priced.update(zip(members, found, strict=True))
    return [priced[i] for i in range(len(calls))]


def _price_segment(segment: Segment, calls: Sequence[KernelCall], device: Device, law: Law) -> list[Estimate]:
    time_s, outside = corrected_s(segment, law(segment, calls, device))
    widen = OUTSIDE_WIDENING ** np.minimum(outside, FADE_OCTAVES)
    least, most = range_frac(segment.parameters, time_s, (segment.low_frac, segment.high_frac))
    low, high = time_s * least / widen, time_s * most * widen
    return [
        Estimate(time_s=t, low_s=lo, high_s=hi, source=Source.EXTRAPOLATED if out > 0 else segment.source)
        for t, lo, hi, out in zip(time_s.tolist(), low.tolist(), high.tolist(), outside.tolist(), strict=True)
    ]
