"""Fits embedding kernels to public measurements: `python -m calibrate.fit_embedding DATA_DIR [DEVICE ...]`.

DATA_DIR holds `kernels/`, `overheads/` and `sharding/`. What there is:

- Vidur (fp16 lookups of single rows, kernel durations): A100 SXM, H100 SXM, A40: rate and floor of PyTorch's gather.
- owensgroup/ml_perf_model (V100, table-batched kernels of DLRM_default, batch 2048): bandwidths of pooled lookups and
  updates. Its DLRM_MLPerf capture is not fitted: it is the held-out check.
- NVIDIA/recsys-examples (H100, FBGEMM: in device memory, UVM, UVM caching), five durations for five parameters: nothing is
  held out; the fit's errors say `fitted`.

The rest of each fit is the values of START, marked derived. Each fit names its rows.
"""

from __future__ import annotations

import csv
import gzip
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

import numpy as np
from scipy.optimize import least_squares

from calibrate.fitting import HIGH_QUANTILE, LOW_QUANTILE, ROBUST_SCALE, SegmentFit, assemble, bare_segment, errors
from perfmodel.db.device import Device, Fit
from perfmodel.db.fits import write_fit
from perfmodel.db.loading import db_root, load_device
from perfmodel.graph import TableAccess
from perfmodel.kernels import calls_of, price_calls
from perfmodel.kernels.correction import Floats
from perfmodel.kernels.embedding_law import LAW, law
from perfmodel.kernels.registry import KernelCall
from perfmodel.kernels.table_batch import TableBatch, backward_calls, forward_calls
from perfmodel.units import MS_PER_S, US_PER_S
from perfmodel.validate.kernel_rows import KernelRow, read_rows
from perfmodel.validate.vector_formats import VECTOR_FORMATS

# Where nothing was measured, and where each fit starts. Streams and rows: what V100 reaches in both captures; cache: half of
# the L2 rate, as pointwise kernels (fit_vector); gather_rate: Vidur's three GPUs lie at 0.45 to 0.55 elements a clock and SM;
# step_s: a quarter of a dependent load from device memory (Jia et al., arXiv:1804.06826), four rows in flight; serial_s and
# update_s: NeuSight's embedding backward of 1024 and 2048 lookups (70 and 145 us), V100 trace of a 16-sample step (13 us).
START: Mapping[str, float] = {
    "stream_eff": 0.85,
    "random_eff": 0.8,
    "rmw_eff": 0.6,
    "half_row_bytes": 16.0,
    "l2_share": 0.8,
    "l2_eff": 0.5,
    "gather_rate": 0.5,
    "step_s": 0.15e-6,
    "serial_s": 2.2e-6,
    "update_s": 8e-6,
    "uvm_eff": 0.42,
    "uvm_rmw_eff": 0.6,
    "link_eff": 0.36,
}
PRIOR_SPREAD = 0.3  # log; few rows move few parameters, and those no further than they must
RESOLUTION_S = 0.29e-6  # standard deviation of a duration rounded to a microsecond
FEW_ROWS_FRAC = (0.6, 1.6)  # range of an estimate that rests on a handful of rows
LISTING_COMMIT = "owensgroup/ml_perf_model 5b2522a0190c856e34f61584b3da9c2eae00c6af"
PROVENANCE = {
    "licence": "MIT (Vidur), BSD-3-Clause (ml_perf_model, recsys-examples)",
    "commit": f"vidur 7d47513363ec; {LISTING_COMMIT}; NVIDIA/recsys-examples 43465aeabf61",
    "source": "vidur mlp.csv op emb; v100_dlrm_op_kernel_times; fbgemm_tbe_h100_measured",
    "heldout": "gather: 15 % of shapes by CRC-32; rows on V100: the DLRM_MLPerf capture; rows on H100: none",
}
# Criteo Terabyte with 40 million rows at most, as in the MLPerf benchmark.
MLPERF_ROWS = (
    39884406, 39043, 17289, 7420, 20263, 3, 7120, 1543, 63, 38532951, 2953546, 403346, 10, 2208, 11938, 155, 4, 976, 14,
    39979771, 25641295, 39664984, 585935, 12972, 108, 36,
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One measured duration of the last of `calls` alone, or of all of them."""

    name: str
    calls: Sequence[KernelCall]
    measured_s: float
    last_only: bool = False

    def predicted_s(self, parameters: Mapping[str, float], device: Device) -> float:
        """Seconds by the law with `parameters`, other families as the device prices them."""
        calls = self.calls[-1:] if self.last_only else self.calls
        total = 0.0
        for call in calls:
            if call.family == "embedding":
                total += float(law(bare_segment(parameters), [call], device).time_s[0])
            else:
                total += price_calls([call], device)[0].time_s
        return total


def v100_points(folder: Path) -> tuple[list[Point], list[Point]]:
    """Lookup and update kernels of the two models (fitted, held out)."""
    default = TableBatch(
        tables=tuple(TableAccess(parameter=f"t{i}", rows=1_000_000, dim=64, pooling_factor=100.0) for i in range(8)),
        batch=2048,
    )
    mlperf = TableBatch(
        tables=tuple(TableAccess(parameter=f"t{i}", rows=rows, dim=128) for i, rows in enumerate(MLPERF_ROWS)),
        batch=2048,
    )
    durations: dict[tuple[str, str], list[float]] = {}
    with gzip.open(folder / "overheads" / "v100_dlrm_op_kernel_times.csv.gz", "rt", encoding="utf-8") as lines:
        for row in csv.DictReader(lines):
            if "batched_embedding" in row["kernel"]:
                which = "backward" if "backward" in row["kernel"] else "forward"
                model = row["capture"].split("_B")[0]
                durations.setdefault((model, which), []).append(float(row["total_us"]) / US_PER_S)

    def points(model: str, tables: TableBatch) -> list[Point]:
        return [
            Point(
                name=f"{model} {which}", calls=make(tables), measured_s=median(durations[model, which]), last_only=True
            )
            for which, make in (("forward", forward_calls), ("backward", backward_calls))
        ]

    return points("DLRM_default", default), points("DLRM_MLPerf", mlperf)


def h100_points(folder: Path) -> list[Point]:
    """Forward and backward of FBGEMM in device memory, UVM and UVM caching (100 batches served before)."""
    found = []
    for case in json.loads((folder / "sharding" / "fbgemm_tbe_h100_measured.json").read_text(encoding="utf-8")):
        label = case["label"]
        placement = "uvm_caching" if case["caching"] else ("uvm" if "no_caching" in label else "hbm")
        tables = TableBatch(
            tables=tuple(
                TableAccess(parameter=f"t{i}", rows=rows, dim=case["embedding_dim"], zipf_exponent=case["alpha"])
                for i, rows in enumerate(case["num_embeddings_per_feature"])
            ),
            batch=case["batch_size"],
            pooled=False,
            placement=placement,
            cache_load_factor=case["cache_footprint_ratio"] or 0.2,
            warm_batches=100.0 if case["caching"] else float("inf"),
        )
        for which, make in (("forward", forward_calls), ("backward", backward_calls)):
            measured_s = case[f"trc_{which}_ms"] / MS_PER_S
            found.append(Point(name=f"{placement} {which}", calls=make(tables), measured_s=measured_s))
    return found


def fit_points(points: Sequence[Point], device: Device, names: Sequence[str]) -> dict[str, float]:
    """The parameters `names` by least squares on log errors, held near START by PRIOR_SPREAD."""
    fixed = {**START, "floor_s": device.kernel_floor_s}

    def unpack(vector: Floats) -> dict[str, float]:
        return {**fixed, **{name: START[name] * float(np.exp(x)) for name, x in zip(names, vector, strict=True)}}

    def residual(vector: Floats) -> Floats:
        parameters = unpack(vector)
        logs = [np.log(point.predicted_s(parameters, device) / point.measured_s) / ROBUST_SCALE for point in points]
        return np.array([*logs, *(vector / PRIOR_SPREAD)])

    upper = np.array([np.log(max(1.0 / START[name], 1.01)) if name.endswith("eff") else 3.0 for name in names])
    found = least_squares(residual, np.zeros(len(names)), bounds=(np.full(len(names), -2.0), upper))
    return unpack(found.x)


def score(points: Sequence[Point], parameters: Mapping[str, float], device: Device) -> dict[str, float]:
    """Errors of the points."""
    predicted = np.array([point.predicted_s(parameters, device) for point in points])
    measured = np.array([point.measured_s for point in points])
    for point, time_s in zip(points, predicted.tolist(), strict=True):
        ratio = time_s / point.measured_s - 1.0
        sys.stderr.write(
            f"  {device.name} {point.name}: {time_s:.3e} s, measured {point.measured_s:.3e} s ({ratio:+.1%})\n"
        )
    return errors(predicted, measured)


def rows_segment(device: Device, folder: Path) -> SegmentFit:
    """Pooled lookups and updates: measured on V100 and H100, else the starting values, marked derived."""
    names = ("stream_eff", "random_eff", "rmw_eff")
    base = {**START, "floor_s": device.kernel_floor_s}
    extra: dict[str, Mapping[str, float]] = {}
    heldout: Mapping[str, float] = {}
    n_rows, derived = 0, {"derived": 1.0}
    if device.name == "v100_pcie_32gb":
        fitted, held = v100_points(folder)
        base, n_rows, derived = fit_points(fitted, device, names), len(fitted), {}
        extra, heldout = {"fitted": score(fitted, base, device)}, score(held, base, device)
    elif device.name == "h100_sxm":
        points = h100_points(folder)
        base = fit_points(points, device, (*names, "uvm_eff", "uvm_rmw_eff", "link_eff"))
        n_rows, derived, extra = len(points), {}, {"fitted": score(points, base, device)}
    low, high = FEW_ROWS_FRAC
    parameters = {**base, **derived, "low_frac": low, "high_frac": high, "compute_capability": _capability(device)}
    return SegmentFit(parameters=parameters, arrays={}, fit_range={}, heldout=heldout, n_rows=n_rows, extra=extra)


def _capability(device: Device) -> float:
    return float(device.compute_capability or 0)


def gather_segment(rows: Sequence[KernelRow], device: Device) -> SegmentFit:
    """PyTorch's gather: rate, floor and memory efficiency from kernel durations; the starting values without rows."""
    base = {**START, "floor_s": device.kernel_floor_s, "compute_capability": _capability(device)}
    if not rows:
        low, high = FEW_ROWS_FRAC
        parameters = {**base, "derived": 1.0, "low_frac": low, "high_frac": high}
        return SegmentFit(parameters=parameters, arrays={}, fit_range={}, heldout={}, n_rows=0)
    calls = [calls_of(row.ops[0])[0] for row in rows]
    measured = np.array([row.measured_s for row in rows])
    held = np.array([row.heldout for row in rows])
    weight = 1.0 / np.hypot(ROBUST_SCALE, RESOLUTION_S / measured)
    names = ("gather_rate", "floor_s", "stream_eff")

    def unpack(vector: Floats) -> dict[str, float]:
        return {**base, **{name: float(np.exp(x)) for name, x in zip(names, vector, strict=True)}}

    train = [call for call, out in zip(calls, held.tolist(), strict=True) if not out]

    def residual(vector: Floats) -> Floats:
        time_s = law(bare_segment(unpack(vector)), train, device).time_s
        return weight[~held] * np.log(time_s / measured[~held])

    low, high = np.log([0.05, 0.5e-6, 0.2]), np.log([16.0, 8e-6, 1.0])
    found = least_squares(
        residual, np.log([0.5, 2e-6, 0.8]), bounds=(low, high), loss="soft_l1", f_scale=1.0, max_nfev=40
    )
    parameters = unpack(found.x)
    predicted = law(bare_segment(parameters), calls, device).time_s
    ratio_low, ratio_high = np.quantile((measured / predicted)[held], [LOW_QUANTILE, HIGH_QUANTILE])
    parameters |= {"low_frac": float(min(ratio_low, 1.0)), "high_frac": float(max(ratio_high, 1.0))}
    ranged = law(bare_segment(parameters), train, device).ranged
    return SegmentFit(
        parameters=parameters,
        arrays={},
        fit_range={name: (float(values.min()), float(values.max())) for name, values in ranged.items()},
        heldout=errors(predicted[held], measured[held]),
        n_rows=len(train),
    )


DEVICES = ("v100_pcie_32gb", "a100_sxm_80gb", "h100_sxm", "a40")


def fit_device(device: Device, rows: Sequence[KernelRow], folder: Path) -> Fit:
    """Both segments of one device."""
    segments = {"gather": gather_segment(rows, device), "rows": rows_segment(device, folder)}
    for name, fit in segments.items():
        held = fit.heldout or {"n_rows": 0.0, "median": float("nan"), "p90": float("nan")}
        sys.stderr.write(
            f"{device.name} embedding {name}: {fit.n_rows} rows, held out {held['n_rows']:.0f}: "
            f"median {held['median']:.3f}, p90 {held['p90']:.3f}\n"
        )
    fit = assemble("embedding", LAW, segments, PROVENANCE)
    return replace(fit, low_frac=min(fit.low_frac, FEW_ROWS_FRAC[0]), high_frac=max(fit.high_frac, FEW_ROWS_FRAC[1]))


def main(arguments: Sequence[str]) -> int:
    """Fits and writes; returns the exit status."""
    if not arguments:
        sys.stderr.write("usage: python -m calibrate.fit_embedding DATA_DIR [DEVICE ...]\n")
        return 2
    folder = Path(arguments[0])
    paths = sorted((folder / "kernels").glob("vidur_mlp_ops_fp16.csv*"))
    rows = [row for path in paths for row in read_rows(path, VECTOR_FORMATS) if row.timed == "emb"]
    for name in tuple(arguments[1:]) or DEVICES:
        device = load_device(name)
        write_fit(db_root() / name, fit_device(device, [row for row in rows if row.device == name], folder))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
