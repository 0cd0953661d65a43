"""Fits the gemm family to public measurements: `python -m calibrate.fit_gemm DATA_DIR [DEVICE ...]`.

Reads `aic_gemm_bf16_*` and `vidur_mlp_ops_fp16` (device times, so no measurement floor) and `neusight_gemm_fp32` (eager
calls timed with events: the floor is fitted with the law) from DATA_DIR, and writes `kernels_db/<device>/gemm.fit.yaml`
with its arrays.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from calibrate.fit_choice import with_choice
from calibrate.fit_ranges import widest
from calibrate.fitting import (
    Bound,
    Rows,
    SegmentFit,
    assemble,
    derived,
    errors,
    fit_law,
    fit_segment,
    predict_s,
    with_heldout,
)
from perfmodel.db.device import Device
from perfmodel.db.fits import write_fit
from perfmodel.db.loading import db_root, load_device
from perfmodel.kernels import calls_of
from perfmodel.kernels.gemm_law import LAW, law
from perfmodel.validate.kernel_formats import FORMATS
from perfmodel.validate.kernel_rows import KernelRow, read_rows

BOUNDS: Mapping[str, Bound] = {
    "floor_s": Bound(start=2.0e-6, low=0.5e-6, high=6e-6),
    "eff": Bound(start=0.8, low=0.2, high=1.1),
    "bw_eff": Bound(start=0.8, low=0.2, high=1.1),
    "half_tile": Bound(start=40.0, low=1.0, high=160.0),
    "prolog_s": Bound(start=0.8e-6, low=1e-9, high=20e-6),
    "sharp": Bound(start=3.0, low=1.2, high=12.0),
    "split_s": Bound(start=1.5e-6, low=0.1e-6, high=40e-6),
    "spread": Bound(start=0.5, low=1e-3, high=1.5),
    "l2_eff": Bound(start=0.5, low=0.02, high=4.0),
    "l2_frac": Bound(start=0.5, low=0.05, high=1.5),
    "hot": Bound(start=0.5, low=0.01, high=0.99),
    "throttle": Bound(start=0.1, low=1e-3, high=1.0),
}
EAGER_FLOOR = Bound(start=30e-6, low=10e-6, high=70e-6)  # NeuSight's smallest values are 24-61 us, by device
ONE_TILE = ((128, 128), (128, 64), (64, 128), (64, 64))  # tiles that cuBLAS may use for all batched fp32 products
# Readings on cards of 70 to 75 W scatter by tens of percent with long tails, as their clock moves. There trees that follow
# the median do better than those that follow the mean: five folds of the fitted rows, linear and bmm, L4 6.1 and 12.3 to 5.5
# and 11.8 %, T4 6.7 and 5.7 to 6.5 and 5.6 %, P4 linear 8.8 to 8.1 % (above 100 us). V100's held-out bmm gets worse with
# them (3.6 for 2.9 %).
POWER_CAPPED = frozenset({"l4", "t4", "p4"})
MEDIAN_TREES: Mapping[str, float | str] = {"loss": "absolute_error", "learning_rate": 0.07, "min_samples_leaf": 15}
# Segments whose correction is told which kernel the library picks (see `fit_choice`), by five folds of the fitted rows.
CHOICE = frozenset({("p4", "linear fp32")})
BETTER_FRAC = 0.003  # a single tile must lower the median error by this to be taken

AIC = {
    "source": "ai-dynamo/aiconfigurator, aic_gemm_bf16 (CUDA graph replay, median of campaigns)",
    "commit": "095f58a51c4ca8e61b66ec108d86f223f8d559ce",
    "licence": "Apache-2.0 (c) NVIDIA CORPORATION & AFFILIATES",
}
NEUSIGHT = {
    "source": "sitar-lab/NeuSight, neusight_gemm_fp32 (torch 2.1.0 cu121, TF32 off, eager calls timed with events)",
    "commit": "6945927d9afcca2b9daf021f8395e53edc5b4eef",
    "licence": "MIT (c) 2025 Georgia Institute of Technology and Microsoft Corporation",
}

VIDUR = {
    "source": "microsoft/vidur, vidur_mlp_ops_fp16 (kernel durations from profiler traces, median of repeats)",
    "commit": "7d47513363ec447a741ac5e47241580b47724fbf",
    "licence": "MIT (c) Microsoft",
}
SOURCES = {"bf16_tensor": AIC, "fp16_tensor": VIDUR, "fp32": NEUSIGHT, "fp32_batched": NEUSIGHT}

# Whose measurements a device's unmeasured segments come from, and whether it is the same silicon (then the correction
# holds as well): the datasheets name the chips (GA100, GH100, AD102 and AD104 of one compute capability).
BORROWED: Mapping[str, Mapping[str, str]] = {
    # Of the two PCIe cards the one with the higher power limit (300 W): the module's 400 W holds clocks up at least as well.
    "a100_sxm_80gb": {"fp32": "a100_pcie_80gb", "fp32_batched": "a100_pcie_80gb"},
    "a100_pcie_40gb": {"bf16_tensor": "a100_sxm_80gb"},
    "a100_pcie_80gb": {"bf16_tensor": "a100_sxm_80gb"},
    "h200_sxm": {"fp32": "h100_sxm", "fp32_batched": "h100_sxm"},
    "l40s": {"fp32": "l4", "fp32_batched": "l4"},
    "l4": {"bf16_tensor": "l40s"},
    "v100_pcie_32gb": {"fp16_tensor": "a100_sxm_80gb"},
    "t4": {"fp16_tensor": "a100_sxm_80gb"},
    "a40": {"fp32": "a100_pcie_40gb", "fp32_batched": "a100_pcie_40gb"},
}
VIDUR_DEVICES = ("a100_sxm_80gb", "h100_sxm", "a40")
AIC_DEVICES = ("a100_sxm_80gb", "h100_sxm", "h200_sxm", "l40s")
NEUSIGHT_DEVICES = (
    "v100_pcie_32gb",
    "p100_pcie_16gb",
    "t4",
    "p4",
    "a100_pcie_40gb",
    "a100_pcie_80gb",
    "h100_sxm",
    "l4",
)


def rows_of(measured: Sequence[KernelRow]) -> Rows:
    """Rows of one segment for fitting."""
    return Rows(
        calls=[calls_of(row.ops[0])[0] for row in measured],
        measured_s=np.array([row.measured_s for row in measured]),
        heldout=np.array([row.heldout for row in measured], dtype=bool),
        place=np.array([row.place for row in measured]),
    )


def fit_tensor(measured: Sequence[KernelRow], device: Device) -> SegmentFit:
    """A 16-bit tensor-core segment of one device, from device times."""
    return fit_segment(rows_of(measured), device, law, BOUNDS, {"clock_hz": device.clock_hz})


def fit_fp32(measured: Sequence[KernelRow], device: Device) -> SegmentFit:
    """An fp32 segment (batched or not) of one device, launch floor included, over the menu or one tile.

    The device's own floor is its datasheet entry: an eager measurement cannot tell it from the launch.
    """
    rows = rows_of(measured)
    bounds = {k: v for k, v in BOUNDS.items() if k != "floor_s"} | {"measurement_floor_s": EAGER_FLOOR}
    batched = rows.calls[0].features["batch"] > 1
    fixed = {
        "floor_s": device.kernel_floor_s,
        "clock_hz": device.clock_hz,
        "forward_only": 0.0 if batched else 1.0,
    }
    tile = _one_tile(rows.where(~rows.heldout), device, bounds, fixed) if batched else {}
    trees = MEDIAN_TREES if device.name in POWER_CAPPED else None
    fit = fit_segment(rows, device, law, bounds, {**fixed, **tile}, trees)
    if (device.name, measured[0].family) in CHOICE:
        fit = with_choice(fit, rows, [row.kernel for row in measured], device, law, MEDIAN_TREES)
    return with_ranges(fit, measured, device)


def with_ranges(fit: SegmentFit, measured: Sequence[KernelRow], device: Device) -> SegmentFit:
    """The fit with ranges that hold for the held-out rows of each of the source's splits."""
    splits = sorted({row.subset for row in measured})
    parts = [rows_of([row for row in measured if row.heldout and row.subset == split]) for split in splits]
    found = [with_heldout(fit, part, device, law).parameters for part in parts if len(part)]
    kept = {name: value for name, value in fit.parameters.items() if not name.startswith("range_")}
    return replace(fit, parameters={**kept, **widest([_only_ranges(parameters) for parameters in found])})


def _only_ranges(parameters: Mapping[str, float]) -> dict[str, float]:
    return {name: value for name, value in parameters.items() if name.startswith("range_")}


def _one_tile(train: Rows, device: Device, bounds: Mapping[str, Bound], fixed: Mapping[str, float]) -> dict[str, float]:
    """`tile_m`, `tile_n` if the law alone with that tile only is better than with the menu; else empty."""
    best: dict[str, float] = {}
    score = _law_error(train, device, bounds, fixed)
    for tile_m, tile_n in ONE_TILE:
        tile = {"tile_m": float(tile_m), "tile_n": float(tile_n)}
        found = _law_error(train, device, bounds, {**fixed, **tile})
        if found < score - BETTER_FRAC:
            best, score = tile, found
    return best


def _law_error(train: Rows, device: Device, bounds: Mapping[str, Bound], fixed: Mapping[str, float]) -> float:
    """Median error of the law alone on the rows it was fitted to."""
    parameters = fit_law(train, device, law, bounds, fixed)
    alone = SegmentFit(parameters=parameters, arrays={}, fit_range={}, heldout={}, n_rows=0)
    return errors(predict_s(alone, train, device, law), train.measured_s)["median"]


def fit_own(data: Path, wanted: Sequence[str]) -> dict[str, dict[str, SegmentFit]]:
    """Every segment that was measured, by device."""
    found: dict[str, dict[str, SegmentFit]] = {}
    for path in sorted(data.glob("aic_gemm_bf16_*.csv*")):
        rows = read_rows(path, FORMATS)
        if rows[0].device in wanted:
            found.setdefault(rows[0].device, {})["bf16_tensor"] = fit_tensor(rows, load_device(rows[0].device))
            _tell(rows[0].device, "bf16_tensor", found[rows[0].device]["bf16_tensor"])
    half = [row for path in sorted(data.glob("vidur_mlp_ops_fp16.csv*")) for row in read_rows(path, FORMATS)]
    for device in VIDUR_DEVICES:
        mine = [row for row in half if row.device == device and row.family == "gemm fp16"]
        if mine and device in wanted:
            found.setdefault(device, {})["fp16_tensor"] = fit_tensor(mine, load_device(device))
            _tell(device, "fp16_tensor", found[device]["fp16_tensor"])
    rows = [row for path in sorted(data.glob("neusight_gemm_fp32.csv*")) for row in read_rows(path, FORMATS)]
    for device in NEUSIGHT_DEVICES:
        for segment, family in (("fp32", "linear fp32"), ("fp32_batched", "bmm fp32")):
            mine = [row for row in rows if row.device == device and row.family == family]
            if mine and device in wanted:
                found.setdefault(device, {})[segment] = fit_fp32(mine, load_device(device))
                _tell(device, segment, found[device][segment])
    return found


def _tell(device: str, segment: str, fit: SegmentFit) -> None:
    held = fit.heldout
    sys.stderr.write(
        f"{device} {segment}: {fit.n_rows} rows, held out {held['n_rows']:.0f}: median {held['median']:.3f}, "
        f"p90 {held['p90']:.3f}\n"
    )


def with_borrowed(own: Mapping[str, Mapping[str, SegmentFit]]) -> dict[str, dict[str, SegmentFit]]:
    """Adds derived segments where a sibling was measured and the device was not."""
    result = {device: dict(segments) for device, segments in own.items()}
    for device, wants in BORROWED.items():
        for segment, donor in wants.items():
            name = "bf16_tensor" if segment == "fp16_tensor" else segment
            if name in own.get(donor, {}) and segment not in result.get(device, {}):
                same = load_device(device).compute_capability == load_device(donor).compute_capability
                result.setdefault(device, {})[segment] = derived(own[donor][name], with_correction=same)
    return result


def main(arguments: Sequence[str]) -> int:
    """Fits and writes; returns the exit status."""
    if not arguments:
        sys.stderr.write("usage: python -m calibrate.fit_gemm DATA_DIR [DEVICE ...]\n")
        return 2
    wanted = tuple(arguments[1:]) or tuple(dict.fromkeys((*AIC_DEVICES, *NEUSIGHT_DEVICES, *VIDUR_DEVICES)))
    for device, segments in with_borrowed(fit_own(Path(arguments[0]), wanted)).items():
        if device in wanted:
            write_fit(db_root() / device, assemble("gemm", LAW, segments, _provenance(device, segments)))
    return 0


def _provenance(device: str, segments: Mapping[str, SegmentFit]) -> dict[str, str]:
    own = [name for name, segment in segments.items() if not segment.parameters.get("derived")]
    sources = [source for source in (AIC, VIDUR, NEUSIGHT) if any(SOURCES[name] is source for name in own)]
    joined = {key: "; ".join(source[key] for source in sources) for key in ("source", "commit", "licence")}
    borrowed = ", ".join(f"{s} from {d}" for s, d in BORROWED.get(device, {}).items() if s in segments)
    return {
        **joined,
        "heldout": "15 % of shapes by CRC-32 of the shape (perfmodel.validate.kernel_rows.is_heldout)",
        **({"derived": borrowed} if borrowed else {}),
    }


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
