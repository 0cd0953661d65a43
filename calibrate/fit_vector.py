"""Fits pointwise kernels, norms and softmax to public measurements: `python -m calibrate.fit_vector DATA_DIR [NAME ...]`.

NAME is a device or a family; without one, all are fitted.

Reads `kernels/neusight_vector_fp32` (eager calls timed with events), `kernels/vidur_mlp_ops_fp16` and
`traces/trace_resnet50_v100_2steps` (kernel durations) from DATA_DIR and writes
`kernels_db/<device>/{elementwise,norm,softmax}.fit.yaml`.

An eager call reads max(minimum_op, floor_op + device time): the event behind it is recorded once the host is through with
the call (minimum), or when the kernel ends, which starts only after the operator's own host time (floor). Both are fitted:
`minimum_op` is the median of the smallest calls of an operator, `floor_op = minimum_op - slack` with one slack per device.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from scipy.optimize import least_squares

from calibrate.fit_ranges import HIGH_QUANTILE, LOW_QUANTILE, range_parameters
from calibrate.fitting import (
    ROBUST_SCALE,
    SEED,
    Bound,
    SegmentFit,
    as_segment,
    assemble,
    errors,
    fit_trees,
)
from calibrate.trace_rows import trace_rows
from perfmodel.db.device import Device, Fit
from perfmodel.db.fits import write_fit
from perfmodel.db.loading import db_root, load_device
from perfmodel.kernels import calls_of
from perfmodel.kernels.correction import MAX_LOG_CORRECTION, Floats, corrected_s
from perfmodel.kernels.registry import KernelCall
from perfmodel.kernels.vector_law import LAW, columns_of, evaluate, segment_name
from perfmodel.validate.kernel_rows import EAGER_FLOOR, EAGER_MINIMUM, KernelRow, read_rows
from perfmodel.validate.vector_formats import VECTOR_FORMATS

BOUNDS: Mapping[str, Bound] = {
    "floor_s": Bound(start=1.8e-6, low=0.5e-6, high=6e-6),
    "bw_eff": Bound(start=0.85, low=0.3, high=1.0),
    "stream_gain": Bound(start=1.0, low=0.8, high=1.1),
    "l2_share": Bound(start=0.7, low=0.05, high=1.5),
    "l2_sharp": Bound(start=4.0, low=0.7, high=12.0),
    "l2_eff": Bound(start=0.6, low=0.1, high=1.2),
    "ramp_s": Bound(start=0.1e-6, low=1e-8, high=8e-6),
    "sharp": Bound(start=3.0, low=1.0, high=12.0),
    "block_gain": Bound(start=0.8, low=0.2, high=1.2),
    "again_gain": Bound(start=0.6, low=0.2, high=1.2),
    "long_gain": Bound(start=0.5, low=0.2, high=1.2),
    "slots": Bound(start=16.0, low=1.0, high=64.0),
    "row_s": Bound(start=0.5e-6, low=1e-9, high=20e-6),
    "row_rate": Bound(start=16.0, low=0.5, high=512.0),
}
FAMILIES = ("elementwise", "norm", "softmax")
# What only a kernel's own duration shows: an eager call of this size reads its host time.
SMALL_KERNELS = frozenset({"floor_s", "ramp_s", "l2_eff"})
POINTWISE = ("floor_s", "bw_eff", "stream_gain", "l2_share", "l2_sharp", "l2_eff", "ramp_s")
# Strided and broadcast pointwise kernels: one element and its address a thread; V100 listing of DLRM training, a permuted
# 2048 x 351 matrix in 13 us (owensgroup/ml_perf_model), less floor and bytes: about 8 elements a clock and SM.
STRIDED_RATE = 8.0
SLACK = Bound(start=10e-6, low=1e-7, high=60e-6)
UNSEEN_FLOOR_S = 14e-6  # where no row is short enough to show it: what the A100 40 GB of the same source adds
# What rows that are all larger than L2 can tell; the rest keeps the values of BOUNDS.
LARGE = frozenset({"bw_eff", "stream_gain", "block_gain", "again_gain", "long_gain"})
SMALL_BYTES = 200e3  # a call of this size takes less than a microsecond beyond its floor on every device here
RESOLUTION_S = 0.29e-6  # standard deviation of a duration rounded to a microsecond (uniform: 1 / sqrt(12))
LAW_ROWS = 4000
KNOWN_SHARE = 0.2  # of device time in a reading; below it the reading's scatter is larger than what is to be learned
UNKNOWN_WEIGHT = 0.02
MIN_TREE_ROWS = 40
# With fewer rows than FEW_ROWS: softmax and layer norm of A100 80 GB and L4 have 57 to 66 fitted rows of a dozen lengths,
# whose kernel goes with the length. Five folds of those rows: 7.4, 6.2, 0.5 and 4.6 % by the law, 1.2, 1.0, 0.2 and 0.5 %
# with these trees (median).
FEW_ROWS = 200
FEW_TREES, FEW_LEAF_ROWS = 60, 3
PROVENANCE = {
    "licence": "MIT (NeuSight, Vidur), BSD-3-Clause (kineto)",
    "commit": "NeuSight 6945927d9afcca2b9daf021f8395e53edc5b4eef; Vidur 7d47513363ec447a741ac5e47241580b47724fbf; "
    "kineto 041e7ce99f1562dd81232ee58b7c454ef16bfae2",
    "source": "sitar-lab/NeuSight neusight_vector_fp32 (torch 2.1.0 cu121, eager calls); microsoft/vidur mlp.csv and, "
    "for V100, pytorch/kineto's ResNet-50 trace (kernel durations)",
    "heldout": "15 % of shapes by CRC-32 of the shape (perfmodel.validate.kernel_rows.is_heldout)",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """Rows of one segment on one device: columns of the law, measured times and the operator that sets their floor."""

    calls: Sequence[KernelCall]
    columns: Mapping[str, Floats]
    measured_s: Floats
    weight: Floats
    op_index: np.ndarray
    ops: tuple[str, ...]
    repeats: Floats
    heldout: np.ndarray
    test_split: np.ndarray

    def where(self, mask: np.ndarray) -> Sample:
        """The rows that `mask` keeps."""
        return Sample(
            calls=[call for call, keep in zip(self.calls, mask.tolist(), strict=True) if keep],
            columns={name: values[mask] for name, values in self.columns.items()},
            measured_s=self.measured_s[mask],
            weight=self.weight[mask],
            op_index=self.op_index[mask],
            ops=self.ops,
            repeats=self.repeats[mask],
            heldout=self.heldout[mask],
            test_split=self.test_split[mask],
        )


def sample_of(rows: Sequence[KernelRow]) -> Sample:
    """Columns of rows whose ops run one kernel each."""
    calls = [calls_of(row.ops[0])[0] for row in rows]
    ops = tuple(sorted({floor_name(row.timed) for row in rows if row.floor}))
    measured = np.array([row.measured_s for row in rows])
    rounded = np.array([not row.floor for row in rows])
    return Sample(
        calls=calls,
        columns=columns_of(calls),
        measured_s=measured,
        # What a microsecond's rounding leaves of a short duration counts less, against the robust scale of the fit.
        weight=np.where(rounded, 1.0 / np.hypot(1.0, RESOLUTION_S / measured / ROBUST_SCALE), 1.0),
        op_index=np.array([ops.index(floor_name(row.timed)) if row.floor else -1 for row in rows]),
        ops=ops,
        repeats=np.array([float(len(row.ops)) for row in rows]),
        heldout=np.array([row.heldout for row in rows]),
        test_split=np.array([row.subset == "test" for row in rows]),
    )


def floor_name(timed: str) -> str:
    """Parameter that holds what an eager call of an operator adds to the device's time."""
    return f"{timed}.{EAGER_FLOOR}"


def minimum_name(floor: str) -> str:
    """Parameter that holds what the shortest call of an operator reads."""
    return floor.replace(EAGER_FLOOR, EAGER_MINIMUM)


def has_durations(sample: Sample) -> bool:
    """True if some rows are durations of kernels, without a host's share."""
    return bool((sample.op_index < 0).any())


def reaches_floor(sample: Sample) -> bool:
    """True if some rows are short enough to read the measurement's own floor."""
    timed = sample.op_index >= 0
    return bool(timed.any()) and float(sample.columns["bytes"][timed].min()) < SMALL_BYTES


def minima(sample: Sample) -> dict[str, float]:
    """What the shortest calls read, by operator: the median of small ones, or of the 20 smallest."""
    found = {}
    if not reaches_floor(sample):
        return {minimum_name(op): 0.0 for op in sample.ops}
    for index, op in enumerate(sample.ops):
        mine = sample.op_index == index
        size = sample.columns["bytes"]
        small = mine & (size <= max(SMALL_BYTES, float(np.sort(size[mine])[:20][-1])))
        found[minimum_name(op)] = float(np.median(sample.measured_s[small]))
    return found


def readings(time_s: Floats, sample: Sample, parameters: Mapping[str, float]) -> Floats:
    """What the measurements would read for device times `time_s`."""
    floors = np.array([*(parameters[op] for op in sample.ops), 0.0])
    least = np.array([*(parameters[minimum_name(op)] for op in sample.ops), 0.0])
    found: Floats = np.maximum(least[sample.op_index], floors[sample.op_index] + time_s * sample.repeats)
    return found


def with_floors(parameters: Mapping[str, float], sample: Sample, slack_s: float) -> dict[str, float]:
    """Parameters with the floor of each operator: its minimum less the slack."""
    least = {op: parameters[minimum_name(op)] for op in sample.ops}
    floors = {op: max(value - slack_s, 0.0) if value > 0.0 else UNSEEN_FLOOR_S for op, value in least.items()}
    return {**parameters, **floors}


def fit_parameters(
    sample: Sample, device: Device, names: Sequence[str], fixed: Mapping[str, float]
) -> dict[str, float]:
    """Law parameters and slack by robust least squares on log(reading / measured)."""
    bounds = {name: BOUNDS[name] for name in names} | ({"slack": SLACK} if reaches_floor(sample) else {})
    chosen = np.zeros(len(sample.calls), dtype=bool)
    chosen[np.random.default_rng(SEED).permutation(len(sample.calls))[:LAW_ROWS]] = True
    part = sample.where(chosen)
    base = {**fixed, **minima(sample)}

    def unpack(vector: Floats) -> dict[str, float]:
        values = {name: float(np.exp(x)) for name, x in zip(bounds, vector, strict=True)}
        slack = values.pop("slack", 0.0)
        return with_floors({**base, **values}, part, slack)

    def residual(vector: Floats) -> Floats:
        parameters = unpack(vector)
        time_s = evaluate(parameters, part.columns, device).time_s
        return part.weight * np.log(readings(time_s, part, parameters) / part.measured_s)

    low, high, start = (np.log([getattr(b, side) for b in bounds.values()]) for side in ("low", "high", "start"))
    found = least_squares(residual, start, bounds=(low, high), loss="soft_l1", f_scale=ROBUST_SCALE, max_nfev=80)
    return unpack(found.x)


def correction_of(sample: Sample, parameters: Mapping[str, float], device: Device) -> dict[str, np.ndarray]:
    """Trees on what the law leaves, weighted by how much of a reading is device time."""
    result = evaluate(parameters, sample.columns, device)
    reading = readings(result.time_s, sample, parameters)
    device_read = result.time_s * sample.repeats
    floors = floors_of(sample, parameters)
    share = np.where(reading > floors + device_read * 1.0001, 0.0, device_read / reading)
    device_s = np.maximum(sample.measured_s - floors, 0.05 * sample.measured_s) / sample.repeats
    target = np.clip(np.log(device_s / result.time_s), -MAX_LOG_CORRECTION, MAX_LOG_CORRECTION)
    known = share > KNOWN_SHARE
    if known.sum() < MIN_TREE_ROWS:
        return {}
    # A reading that is nearly all floor says nothing of its kernel: there the law stands uncorrected.
    few = len(target) < FEW_ROWS
    return fit_trees(
        result.features,
        np.where(known, target, 0.0),
        np.where(known, (share * sample.weight) ** 2, UNKNOWN_WEIGHT),
        n_trees=FEW_TREES if few else None,
        leaf_rows=FEW_LEAF_ROWS if few else None,
        options={"loss": "absolute_error"} if few else None,
    )


def floors_of(sample: Sample, parameters: Mapping[str, float]) -> Floats:
    """What each reading adds to the device time."""
    found: Floats = np.array([*(parameters[op] for op in sample.ops), 0.0])[sample.op_index]
    return found


def predicted_s(fit: SegmentFit, sample: Sample, device: Device) -> Floats:
    """Readings by law and correction."""
    result = evaluate(fit.parameters, sample.columns, device)
    time_s, _ = corrected_s(as_segment("", fit), result)
    return readings(time_s, sample, fit.parameters)


def fit_one(sample: Sample, device: Device, names: Sequence[str], *, corrected: bool = True) -> SegmentFit:
    """Law and correction from the rows that are not held out; errors and range from those that are."""
    train, held = sample.where(~sample.heldout), sample.where(sample.heldout)
    if sample.ops and not reaches_floor(sample):
        names = [name for name in names if name in LARGE]
    if not has_durations(sample):
        names = [name for name in names if name not in SMALL_KERNELS]
    fixed = {name: bound.start for name, bound in BOUNDS.items() if name not in names}
    fixed |= {"strided_rate": STRIDED_RATE}
    if not has_durations(sample):
        fixed |= {"floor_s": device.kernel_floor_s}
    parameters = fit_parameters(train, device, names, fixed)
    parameters["compute_capability"] = float(device.compute_capability or 0)
    ranged = evaluate(parameters, train.columns, device).ranged
    fit_range = {name: (float(values.min()), float(values.max())) for name, values in ranged.items()}
    arrays = correction_of(train, parameters, device) if corrected else {}
    fit = SegmentFit(parameters=parameters, arrays=arrays, fit_range=fit_range, heldout={}, n_rows=len(train.calls))
    return with_errors(fit, held, device)


def with_errors(fit: SegmentFit, held: Sample, device: Device) -> SegmentFit:
    """The fit with its errors on rows it has not seen."""
    predicted = predicted_s(fit, held, device)
    low, high = np.quantile(held.measured_s / predicted, [LOW_QUANTILE, HIGH_QUANTILE])
    device_read = np.maximum(predicted - floors_of(held, fit.parameters), 1e-9)
    device_s = np.maximum(held.measured_s - floors_of(held, fit.parameters), 0.0)
    known = range_parameters(device_read / held.repeats, device_s / held.repeats, device_read / predicted)
    extra = {}
    for name, mask in (("test_split", held.test_split), ("train_split", ~held.test_split)):
        if mask.any() and not mask.all():
            extra[name] = errors(predicted[mask], held.measured_s[mask])
    return SegmentFit(
        parameters={**fit.parameters, "low_frac": float(min(low, 1.0)), "high_frac": float(max(high, 1.0)), **known},
        arrays=fit.arrays,
        fit_range=fit.fit_range,
        heldout=errors(predicted, held.measured_s),
        n_rows=fit.n_rows,
        extra=extra,
    )


def by_range(sample: Sample, device: Device, names: Sequence[str], *, corrected: bool) -> dict[str, float]:
    """Errors on the authors' test shapes (beyond the sweep) of a fit that saw only the sweep; empty without both."""
    if sample.test_split.all() or not sample.test_split.any():
        return {}
    sweep = sample.where(~sample.test_split)
    fit = fit_one(sweep, device, names, corrected=corrected)
    beyond = sample.where(sample.test_split)
    return errors(predicted_s(fit, beyond, device), beyond.measured_s)


def fit_family(rows: Sequence[KernelRow], device: Device, family: str) -> dict[str, SegmentFit]:
    """One segment for each element size and implementation with rows."""
    groups: dict[str, list[KernelRow]] = {}
    for row in rows:
        groups.setdefault(segment_name(calls_of(row.ops[0])[0]), []).append(row)
    names = POINTWISE if family == "elementwise" else tuple(BOUNDS)
    fits = {}
    for name, members in sorted(groups.items()):
        sample = sample_of(members)
        # Pointwise kernels follow their law to 1-3 %: trees gained nothing on held-out rows.
        fit = fit_one(sample, device, names, corrected=family != "elementwise")
        beyond = by_range(sample, device, names, corrected=family != "elementwise")
        extra = {**fit.extra, **({"by_range": beyond} if beyond else {})}
        fits[name] = SegmentFit(
            parameters=fit.parameters,
            arrays=fit.arrays,
            fit_range=fit.fit_range,
            heldout=fit.heldout,
            n_rows=fit.n_rows,
            extra=extra,
        )
    return fits


def report(device: Device, family: str, fits: Mapping[str, SegmentFit]) -> None:
    """Errors on held-out rows, one line a segment."""
    for name, fit in fits.items():
        parts = [("held out", fit.heldout), *fit.extra.items()]
        text = "; ".join(f"{key} {e['n_rows']:.0f}: {e['median']:.3f} / {e['p90']:.3f}" for key, e in parts)
        sys.stderr.write(f"{device.name} {family} {name}: {fit.n_rows} rows; median / p90: {text}\n")


def floors_by_op(fit: Fit) -> Fit:
    """The fit with what belongs to the measurement under the operator's name, not under a segment of the device."""
    measured = (EAGER_FLOOR, EAGER_MINIMUM)
    parameters = {
        key.partition(".")[2] if key.endswith(measured) else key: value for key, value in fit.parameters.items()
    }
    return replace(fit, parameters=parameters)


def main(arguments: Sequence[str]) -> int:
    """Fits and writes; returns the exit status."""
    if not arguments:
        sys.stderr.write("usage: python -m calibrate.fit_vector DATA_DIR [NAME ...]\n")
        return 2
    folder = Path(arguments[0])
    names = ("neusight_vector_fp32.csv*", "vidur_mlp_ops_fp16.csv*")
    paths = [path for name in names for path in sorted((folder / "kernels").glob(name))]
    rows = [row for path in paths for row in read_rows(path, VECTOR_FORMATS)]
    rows += trace_rows(folder / "traces" / "trace_resnet50_v100_2steps.json.gz", "v100_pcie_32gb")
    families = tuple(name for name in arguments[1:] if name in FAMILIES) or FAMILIES
    wanted = tuple(name for name in arguments[1:] if name not in FAMILIES)
    for name in wanted or tuple(sorted({row.device for row in rows})):
        device = load_device(name)
        for family in families:
            mine = [row for row in rows if row.device == name and calls_of(row.ops[0])[0].family == family]
            if mine:
                fits = fit_family(mine, device, family)
                report(device, family, fits)
                write_fit(db_root() / name, floors_by_op(assemble(family, LAW, fits, PROVENANCE)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
