"""Fits fused attention forward to public measurements: `python -m calibrate.fit_attention DATA_DIR [DEVICE ...]`.

Reads `aic_attention_fwd_bf16` (device times of several frameworks' kernels, one segment each) from DATA_DIR and writes
`kernels_db/<device>/attention.fit.yaml` with its arrays. Backward has no data: the law derives it.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from calibrate.fit_gemm import rows_of
from calibrate.fitting import Bound, SegmentFit, assemble, fit_segment
from perfmodel.db.fits import write_fit
from perfmodel.db.loading import db_root, load_device
from perfmodel.kernels.attention_law import LAW, law
from perfmodel.validate.kernel_formats import FORMATS
from perfmodel.validate.kernel_rows import KernelRow, read_rows

BOUNDS: Mapping[str, Bound] = {
    "floor_s": Bound(start=8e-6, low=1e-6, high=30e-6),
    "eff": Bound(start=0.7, low=0.1, high=1.1),
    "half_dim": Bound(start=8.0, low=0.1, high=200.0),
    "exp_share": Bound(start=0.3, low=1e-3, high=3.0),
    "tail": Bound(start=0.5, low=0.01, high=1.0),
    "l2_eff": Bound(start=0.5, low=0.02, high=4.0),
    "bw_eff": Bound(start=0.8, low=0.2, high=1.1),
    "sharp": Bound(start=3.0, low=1.2, high=12.0),
    "prolog_s": Bound(start=1e-6, low=1e-9, high=20e-6),
    "throttle": Bound(start=0.1, low=1e-3, high=1.0),
}
PROVENANCE = {
    "source": "ai-dynamo/aiconfigurator, aic_attention_fwd_bf16 (CUDA graph replay; context kernels may write the KV cache)",
    "commit": "095f58a51c4ca8e61b66ec108d86f223f8d559ce",
    "licence": "Apache-2.0 (c) NVIDIA CORPORATION & AFFILIATES",
    "heldout": "15 % of shapes by CRC-32 of the shape (perfmodel.validate.kernel_rows.is_heldout)",
}
MIN_ROWS = 500  # a kernel seen on fewer shapes than that is priced by its nearest relative


def fit_device(measured: Sequence[KernelRow], name: str) -> dict[str, SegmentFit]:
    """One segment per kernel implementation measured on the device."""
    device = load_device(name)
    groups: dict[str, list[KernelRow]] = {}
    for row in measured:
        groups.setdefault(row.subset, []).append(row)
    found = {}
    for implementation, rows in sorted(groups.items()):
        if len(rows) >= MIN_ROWS and implementation != "auto":
            fit = fit_segment(rows_of(rows), device, law, BOUNDS, {})
            found[implementation] = fit
            held = fit.heldout
            sys.stderr.write(
                f"{name} {implementation}: {fit.n_rows} rows, held out {held['n_rows']:.0f}: "
                f"median {held['median']:.3f}, p90 {held['p90']:.3f}\n"
            )
    return found


def main(arguments: Sequence[str]) -> int:
    """Fits and writes; returns the exit status."""
    if not arguments:
        sys.stderr.write("usage: python -m calibrate.fit_attention DATA_DIR [DEVICE ...]\n")
        return 2
    paths = sorted(Path(arguments[0]).glob("aic_attention_fwd_bf16.csv*"))
    rows = [row for path in paths for row in read_rows(path, FORMATS)]
    wanted = tuple(arguments[1:]) or tuple(sorted({row.device for row in rows}))
    for device in wanted:
        segments = fit_device([row for row in rows if row.device == device], device)
        write_fit(db_root() / device, assemble("attention", LAW, segments, PROVENANCE))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
