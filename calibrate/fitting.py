"""Fits a family's law and its correction to measured rows, and keeps score on rows it has not seen.

A *segment fit* has two steps: few physical parameters by robust least squares on log residuals, then boosted trees on what
is left, stored as plain arrays. The rows of a fixed share of shapes are held out from both; the range of estimates and the
errors in the fit file come from them.
"""

from __future__ import annotations

import datetime
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import scipy
import sklearn
from numpy.typing import NDArray
from scipy.optimize import least_squares
from sklearn.ensemble import HistGradientBoostingRegressor

from calibrate.fit_ranges import HIGH_QUANTILE, LOW_QUANTILE, range_parameters
from perfmodel.db.device import Device, Fit
from perfmodel.estimate import Source
from perfmodel.kernels.correction import LEAF, MAX_LOG_CORRECTION, Floats, Law, Segment, corrected_s
from perfmodel.kernels.registry import KernelCall
from perfmodel.validate.score_kernels import measurement_floor_s

SEED = 20261129
LAW_ROWS = 2500  # rows that fit the dozen law parameters; more change them by less than their own spread
ROBUST_SCALE = 0.08  # log residuals beyond 8 % count linearly: a law of one formula cannot follow every library choice
# NVIDIA and aiconfigurator sweep up to 30,000 shapes per device: small leaves pay; see docs/accuracy.md for the choice.
TREES = {"max_leaf_nodes": 31, "learning_rate": 0.12, "min_samples_leaf": 10, "l2_regularization": 1.0}
MANY_TREES, SOME_TREES = 400, 250  # about 100 and 62 KB in a file
MANY_ROWS = 20000  # segments with fewer rows gain nothing from more than SOME_TREES


@dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    """One law parameter: where the search starts and the interval it may not leave (all positive)."""

    start: float
    low: float
    high: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """Measured calls of one segment on one device; `place` (0 to 1) is where in its sweep each was measured."""

    calls: Sequence[KernelCall]
    measured_s: Floats
    heldout: NDArray[np.bool_]
    place: Floats

    def __len__(self) -> int:
        return len(self.calls)

    def where(self, mask: NDArray[np.bool_]) -> Rows:
        """The rows that `mask` keeps."""
        return Rows(
            calls=[call for call, keep in zip(self.calls, mask.tolist(), strict=True) if keep],
            measured_s=self.measured_s[mask],
            heldout=self.heldout[mask],
            place=self.place[mask],
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentFit:
    """A fitted segment, its floor (s) and its errors on held-out rows."""

    parameters: Mapping[str, float]
    arrays: Mapping[str, NDArray[np.generic]]
    fit_range: Mapping[str, tuple[float, float]]
    heldout: Mapping[str, float]
    n_rows: int
    extra: Mapping[str, Mapping[str, float]] = field(default_factory=dict)


def as_segment(name: str, fit: SegmentFit) -> Segment:
    """The segment as the pricing code sees it."""
    return Segment(
        name=name,
        parameters=fit.parameters,
        arrays=fit.arrays,
        fit_range=fit.fit_range,
        low_frac=fit.parameters.get("low_frac", 1.0),
        high_frac=fit.parameters.get("high_frac", 1.0),
        source=Source.FITTED,
        corrected=bool(fit.arrays),
    )


def predict_s(fit: SegmentFit, rows: Rows, device: Device, law: Law) -> Floats:
    """What a measurement would read: corrected device time plus the measurement floor."""
    time_s, _ = corrected_s(as_segment("", fit), law(as_segment("", fit), rows.calls, device))
    return time_s + measurement_floor_s(fit.parameters, rows.place)


def fit_law(
    rows: Rows,
    device: Device,
    law: Law,
    bounds: Mapping[str, Bound],
    fixed: Mapping[str, float],
    spread: Mapping[str, float] | None = None,
) -> dict[str, float]:
    """Law parameters by robust least squares on log(predicted / measured); `fixed` ones are kept as given.

    `spread` says by how much (log) each parameter is expected to differ from where its search starts: few rows then leave
    what they say nothing about where it was. A parameter off by its spread costs as much as a row off by ROBUST_SCALE.
    """
    generator = np.random.default_rng(SEED)
    chosen = np.zeros(len(rows), dtype=bool)
    chosen[generator.permutation(len(rows))[:LAW_ROWS]] = True
    sample = rows.where(chosen)
    names = list(bounds)

    def unpack(vector: Floats) -> dict[str, float]:
        return {**fixed, **{name: float(np.exp(x)) for name, x in zip(names, vector, strict=True)}}

    def residual(vector: Floats) -> Floats:
        parameters = unpack(vector)
        result = law(bare_segment(parameters), sample.calls, device)
        floor_s = measurement_floor_s(parameters, sample.place)
        found = np.log((result.time_s + floor_s) / sample.measured_s)
        return found if spread is None else np.concatenate([found, ROBUST_SCALE * (vector - start) / wide])

    wide = np.array([(spread or {}).get(name, 1.0) for name in names])
    low, high, start = (np.log([getattr(b, side) for b in bounds.values()]) for side in ("low", "high", "start"))
    found = least_squares(residual, start, bounds=(low, high), loss="soft_l1", f_scale=ROBUST_SCALE, max_nfev=40)
    return unpack(found.x)


def bare_segment(parameters: Mapping[str, float]) -> Segment:
    """A segment with these parameters and nothing else."""
    return Segment(
        name="",
        parameters=parameters,
        arrays={},
        fit_range={},
        low_frac=1.0,
        high_frac=1.0,
        source=Source.FITTED,
        corrected=False,
    )


def fit_segment(
    rows: Rows,
    device: Device,
    law: Law,
    bounds: Mapping[str, Bound],
    fixed: Mapping[str, float],
    trees: Mapping[str, float | str] | None = None,
) -> SegmentFit:
    """Fits law and correction on the rows that are not held out, and scores both on those that are.

    `trees` replaces options of the correction's trees (TREES).
    """
    train = rows.where(~rows.heldout)
    parameters = fit_law(train, device, law, bounds, fixed)
    parameters |= {"compute_capability": 0.0 if device.kind == "cpu" else float(device.compute_capability or 0)}
    fit_range = _ranges(law(bare_segment(parameters), train.calls, device).ranged)
    bare = SegmentFit(parameters=parameters, arrays={}, fit_range=fit_range, heldout={}, n_rows=len(train))
    # The law reads the range as well (a product outside it may be turned round): features come from the final segment.
    result = law(as_segment("", bare), train.calls, device)
    arrays = fit_trees(result.features, *targets(result.time_s, train, parameters), options=trees)
    fitted = SegmentFit(parameters=parameters, arrays=arrays, fit_range=fit_range, heldout={}, n_rows=len(train))
    return with_heldout(fitted, rows.where(rows.heldout), device, law)


def targets(time_s: Floats, rows: Rows, parameters: Mapping[str, float]) -> tuple[Floats, Floats]:
    """Log correction of the device time and its weight.

    d log(measured) = (device share of the measurement) d log(device time): a row that is mostly launch floor says little
    about the device and gets the square of that share as weight.
    """
    floor_s = measurement_floor_s(parameters, rows.place)
    device_s = np.maximum(rows.measured_s - floor_s, 0.05 * rows.measured_s)
    share = device_s / rows.measured_s
    target = np.clip(np.log(device_s / time_s), -MAX_LOG_CORRECTION, MAX_LOG_CORRECTION)
    return target, share**2


def _ranges(ranged: Mapping[str, Floats]) -> dict[str, tuple[float, float]]:
    return {name: (float(values.min()), float(values.max())) for name, values in ranged.items()}


def with_heldout(fit: SegmentFit, rows: Rows, device: Device, law: Law) -> SegmentFit:
    """The fit with its errors on rows it has not seen, and the range of estimates that follows from them."""
    predicted = predict_s(fit, rows, device, law)
    ratio = rows.measured_s / predicted
    low, high = np.quantile(ratio, [LOW_QUANTILE, HIGH_QUANTILE])
    parameters = {**fit.parameters, "low_frac": float(min(low, 1.0)), "high_frac": float(max(high, 1.0))}
    if device.kind != "cpu":
        floor_s = measurement_floor_s(fit.parameters, rows.place)
        device_s = np.maximum(rows.measured_s - floor_s, 0.0)
        parameters |= range_parameters(predicted - floor_s, device_s, 1.0 - floor_s / predicted)
    return SegmentFit(
        parameters=parameters,
        arrays=fit.arrays,
        fit_range=fit.fit_range,
        heldout=errors(predicted, rows.measured_s),
        n_rows=fit.n_rows,
        extra=fit.extra,
    )


def errors(predicted: Floats, measured: Floats) -> dict[str, float]:
    """Rows, median, mean and p90 of |predicted / measured - 1|."""
    error = np.abs(predicted / measured - 1.0)
    return {
        "n_rows": float(error.size),
        "median": float(np.median(error)),
        "mean": float(error.mean()),
        "p90": float(np.quantile(error, 0.9)),
    }


def fit_trees(
    features: Floats,
    target: Floats,
    weight: Floats,
    *,
    n_trees: int | None = None,
    leaf_rows: int | None = None,
    options: Mapping[str, float | str] | None = None,
) -> dict[str, NDArray[np.generic]]:
    """Boosted regression trees as the arrays that `evaluate_trees` reads.

    How many follows from the rows unless given; `leaf_rows` replaces the fewest rows of a leaf, `options` any of TREES.
    """
    if n_trees is None:
        n_trees = MANY_TREES if len(target) >= MANY_ROWS else SOME_TREES
    chosen = {**TREES, **({} if leaf_rows is None else {"min_samples_leaf": leaf_rows}), **(options or {})}
    model = HistGradientBoostingRegressor(random_state=SEED, early_stopping=False, max_iter=n_trees, **chosen)
    model.fit(features, target, sample_weight=weight)
    # scikit-learn has no public access to the nodes of its trees.
    return tree_arrays([stage[0].nodes for stage in model._predictors], model._baseline_prediction.item())


def tree_arrays(nodes: Sequence[NDArray[np.void]], baseline: float) -> dict[str, NDArray[np.generic]]:
    """Trees of scikit-learn behind each other, and their baseline as a tree of one leaf."""
    trees = [_tree_arrays(part) for part in nodes]
    trees.append((np.array([LEAF], np.uint8), np.array([0], np.uint16), np.array([baseline])))
    sizes = np.array([tree[0].size for tree in trees])
    return {
        "tree_roots": (np.cumsum(sizes) - sizes).astype(np.uint32),
        "tree_feature": np.concatenate([tree[0] for tree in trees]),
        "tree_child": np.concatenate([tree[1] for tree in trees]),
        "tree_value": np.concatenate([tree[2] for tree in trees]).astype(np.float32),
    }


def _tree_arrays(nodes: NDArray[np.void]) -> tuple[NDArray[np.uint8], NDArray[np.uint16], Floats]:
    """One tree renumbered so that the children of a node lie side by side."""
    feature, child, value = [LEAF], [0], [0.0]
    queue = [(0, 0)]
    while queue:
        old, new = queue.pop(0)
        node = nodes[old]
        if node["is_leaf"]:
            value[new] = float(node["value"])
            continue
        first = len(feature)
        feature += [LEAF, LEAF]
        child += [0, 0]
        value += [0.0, 0.0]
        feature[new], child[new], value[new] = int(node["feature_idx"]), first, float(node["num_threshold"])
        queue += [(int(node["left"]), first), (int(node["right"]), first + 1)]
    return np.array(feature, np.uint8), np.array(child, np.uint16), np.array(value)


def assemble(family: str, law_name: str, segments: Mapping[str, SegmentFit], provenance: Mapping[str, str]) -> Fit:
    """One fit file of several segments."""
    parameters: dict[str, float] = {}
    arrays: dict[str, NDArray[np.generic]] = {}
    ranges: dict[str, tuple[float, float]] = {}
    heldout: dict[str, dict[str, float]] = {}
    for name, segment in segments.items():
        parameters |= {f"{name}.{key}": value for key, value in segment.parameters.items()}
        arrays |= {f"{name}.{key}": value for key, value in segment.arrays.items()}
        ranges |= {f"{name}.{key}": value for key, value in segment.fit_range.items()}
        heldout |= {name: dict(segment.heldout)} if segment.heldout else {}
        heldout |= {f"{name}.{key}": dict(value) for key, value in segment.extra.items()}
    own = [s for s in segments.values() if not s.parameters.get("derived")]
    return Fit(
        family=family,
        law=law_name,
        parameters=parameters,
        arrays=arrays,
        fit_range=ranges,
        heldout=heldout,
        low_frac=min(s.parameters["low_frac"] for s in own or segments.values()),
        high_frac=max(s.parameters["high_frac"] for s in own or segments.values()),
        provenance={
            "rows": str(sum(s.n_rows for s in own)),
            "heldout_rows": str(int(sum(s.heldout.get("n_rows", 0) for s in own))),
            "software": software(),
            "date": datetime.datetime.now(tz=datetime.UTC).date().isoformat(),
            **provenance,
        },
    )


def software() -> str:
    """Versions that made the fit."""
    return (
        f"python {platform.python_version()}, numpy {np.__version__}, scipy {scipy.__version__}, "
        f"scikit-learn {sklearn.__version__}"
    )


def derived(segment: SegmentFit, *, with_correction: bool) -> SegmentFit:
    """A segment for a device it was not measured on: marked `derived`; its correction only on the same silicon."""
    return SegmentFit(
        parameters={**segment.parameters, "derived": 1.0},
        arrays=segment.arrays if with_correction else {},
        fit_range=segment.fit_range,
        heldout={},
        n_rows=0,
    )
