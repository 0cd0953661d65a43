"""Harder questions to the laws than random held-out shapes: `python -m calibrate.hard_splits DATA_DIR [QUESTION ...]`.

Prints a Markdown table of errors when (devices) a device was never seen and its datasheet and another device's fit are all
there is, (ranges) whole sizes or a whole range were never seen, (sweep) only the sweep of NeuSight was seen and its authors'
own test shapes are asked, which is how that predictor's published errors were made, (fp32-devices) fp32 products of devices
without a sweep. Without a QUESTION, all four.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from calibrate.fit_gemm import AIC_DEVICES, BOUNDS, NEUSIGHT_DEVICES, fit_fp32, rows_of
from calibrate.fitting import Rows, SegmentFit, assemble, errors, fit_segment, predict_s
from perfmodel.db.device import Device, Fit
from perfmodel.db.loading import load_device
from perfmodel.kernels import price_calls, roofline
from perfmodel.kernels.gemm_law import LAW, law
from perfmodel.validate.kernel_formats import FORMATS
from perfmodel.validate.kernel_rows import KernelRow, read_rows

HELD_SIZES = (768.0, 2560.0, 5120.0, 12288.0)  # hidden sizes of GPT-2 small, GPT-3 2.7B, Llama 13B and GPT-3 175B
HELD_ROWS = 8192.0  # tokens from which products count as long
TIMED_S = 100e-6  # below it an eager measurement is mostly launch
# Mean errors published for NeuSight out of its training distribution (the public data's README).
NEUSIGHT_MEAN = {"bmm fp32": 0.138, "linear fp32": 0.139}


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One line of the table."""

    question: str
    device: str
    family: str
    found: Mapping[str, float]
    roofline: Mapping[str, float]
    published_mean: float | None = None


def by_ranges(rows: Rows, device: Device) -> Iterator[tuple[str, Rows]]:
    """The two splits by ranges of a device's bf16 rows: sizes never seen, and lengths beyond those seen."""
    m, n, k = (np.array([call.features[name] for call in rows.calls]) for name in ("m", "n", "k"))
    yield "sizes never seen", with_heldout(rows, np.isin(n, HELD_SIZES) | np.isin(k, HELD_SIZES))
    yield f"m >= {HELD_ROWS:.0f} never seen", with_heldout(rows, m >= HELD_ROWS)


def with_heldout(rows: Rows, mask: NDArray[np.bool_]) -> Rows:
    """The same rows with another held-out share."""
    return replace(rows, heldout=mask)


def range_lines(path: Path) -> Iterator[Line]:
    """Splits by ranges of one bf16 table."""
    measured = read_rows(path, FORMATS)
    device = load_device(measured[0].device)
    for question, rows in by_ranges(rows_of(measured), device):
        fit = fit_segment(rows, device, law, BOUNDS, {})
        held = rows.where(rows.heldout)
        yield Line(
            question=question,
            device=device.name,
            family="gemm bf16",
            found=errors(predict_s(fit, held, device, law), held.measured_s),
            roofline=roofline_errors(held, device),
        )


def roofline_errors(rows: Rows, device: Device, floor_s: float = 0.0) -> Mapping[str, float]:
    """Errors of the datasheet roofline plus a measurement floor."""
    times = np.array([estimate.time_s for estimate in roofline(rows.calls, device)])
    return errors(times + floor_s, rows.measured_s)


def sweep_to_test_lines(measured: Sequence[KernelRow]) -> Iterator[Line]:
    """Fit on NeuSight's sweep, ask its test split, above 100 us."""
    for name in NEUSIGHT_DEVICES:
        for family in ("linear fp32", "bmm fp32"):
            mine = [row for row in measured if row.device == name and row.family == family]
            sweep = [row for row in mine if row.subset != "test"]
            asked = [row for row in mine if row.subset == "test" and row.measured_s >= TIMED_S]
            if sweep and asked:
                device = load_device(name)
                fit, rows = fit_fp32(sweep, device), rows_of(asked)
                yield Line(
                    question="sweep seen, test split asked",
                    device=name,
                    family=family,
                    found=errors(predict_s(fit, rows, device, law), rows.measured_s),
                    roofline=roofline_errors(rows, device, fit.parameters["measurement_floor_s"]),
                    published_mean=NEUSIGHT_MEAN[family],
                )


def device_lines(tables: Mapping[str, Sequence[KernelRow]]) -> Iterator[Line]:
    """bf16 products of each device by the law and datasheet, with another device's fit."""
    for donor, asked in (
        ("h200_sxm", "h100_sxm"),
        ("a100_sxm_80gb", "h100_sxm"),
        ("l40s", "h100_sxm"),
        ("h100_sxm", "h200_sxm"),
        ("h100_sxm", "a100_sxm_80gb"),
        ("a100_sxm_80gb", "l40s"),
    ):
        if donor in tables and asked in tables:
            fit = load_device(donor).fits["gemm"]
            yield _other_device(rows_of(tables[asked]), load_device(asked), fit, donor)


def _other_device(rows: Rows, device: Device, fit: Fit, donor: str) -> Line:
    """`device` priced with the `donor`'s bf16 segment only."""
    only = {k: v for k, v in fit.parameters.items() if k.startswith("bf16_tensor.")}
    stranger = replace(device, fits={"gemm": replace(fit, parameters=only)})
    found = np.array([estimate.time_s for estimate in price_calls(rows.calls, stranger)])
    return Line(
        question=f"device never seen, fit of {donor}",
        device=device.name,
        family="gemm bf16",
        found=errors(found, rows.measured_s),
        roofline=roofline_errors(rows, device),
    )


def unseen_fp32_lines(measured: Sequence[KernelRow], fits: Mapping[str, Mapping[str, SegmentFit]]) -> Iterator[Line]:
    """fp32 products of devices that NeuSight has no sweep of, from the nearest swept device and the datasheet."""
    for donor, asked in (("a100_pcie_40gb", "a100_pcie_80gb"), ("a100_pcie_40gb", "h100_sxm"), ("t4", "l4")):
        device = load_device(asked)
        for segment, family in (("fp32", "linear fp32"), ("fp32_batched", "bmm fp32")):
            chosen = [r for r in measured if r.device == asked and r.family == family and r.measured_s >= TIMED_S]
            rows, fit = rows_of(chosen), fits[donor][segment]
            lent = assemble("gemm", LAW, {segment: fit}, {})
            times = np.array([e.time_s for e in price_calls(rows.calls, replace(device, fits={"gemm": lent}))])
            floor_s = fit.parameters["measurement_floor_s"]
            yield Line(
                question=f"device never seen, fit of {donor}",
                device=asked,
                family=family,
                found=errors(times + floor_s, rows.measured_s),
                roofline=roofline_errors(rows, device, floor_s),
                published_mean=NEUSIGHT_MEAN[family],
            )


def _bf16_tables(data: Path) -> dict[str, Sequence[KernelRow]]:
    tables: dict[str, Sequence[KernelRow]] = {}
    for path in sorted(data.glob("aic_gemm_bf16_*.csv*")):
        rows = read_rows(path, FORMATS)
        if rows[0].device in AIC_DEVICES:
            tables[rows[0].device] = rows
    return tables


def _fp32_rows(data: Path) -> list[KernelRow]:
    return [row for path in sorted(data.glob("neusight_gemm_fp32.csv*")) for row in read_rows(path, FORMATS)]


def _ranges(data: Path) -> Iterator[Line]:
    for path in sorted(data.glob("aic_gemm_bf16_*.csv*")):
        yield from range_lines(path)


def _fp32_devices(data: Path) -> Iterator[Line]:
    measured = _fp32_rows(data)
    donors = {
        name: {
            segment: fit_fp32([r for r in measured if r.device == name and r.family == family], load_device(name))
            for segment, family in (("fp32", "linear fp32"), ("fp32_batched", "bmm fp32"))
        }
        for name in ("a100_pcie_40gb", "t4")
    }
    yield from unseen_fp32_lines(measured, donors)


QUESTIONS: Mapping[str, Callable[[Path], Iterator[Line]]] = {
    "devices": lambda data: device_lines(_bf16_tables(data)),
    "ranges": _ranges,
    "sweep": lambda data: sweep_to_test_lines(_fp32_rows(data)),
    "fp32-devices": _fp32_devices,
}


def main(arguments: Sequence[str]) -> int:
    """Prints the table; returns the exit status."""
    asked = tuple(arguments[1:]) or tuple(QUESTIONS)
    if not arguments or not set(asked) <= set(QUESTIONS):
        sys.stderr.write(f"usage: python -m calibrate.hard_splits DATA_DIR [{' | '.join(QUESTIONS)} ...]\n")
        return 2
    out = sys.stdout.write
    out("| question | device | family | rows | median | mean | p90 | roofline median | published mean |\n")
    out("| --- | --- | --- | --- | --- | --- | --- | --- | --- |\n")
    for line in (line for question in asked for line in QUESTIONS[question](Path(arguments[0]))):
        found = line.found
        published = f"{line.published_mean:.1%}" if line.published_mean else ""
        out(
            f"| {line.question} | {line.device} | {line.family} | {found['n_rows']:.0f} | {found['median']:.1%} "
            f"| {found['mean']:.1%} | {found['p90']:.1%} | {line.roofline['median']:.1%} | {published} |\n"
        )
        sys.stdout.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
