"""Fits fp32 convolution forward to public measurements: `python -m calibrate.fit_conv DATA_DIR [DEVICE ...]`.

Reads `neusight_conv_fp32` (eager calls timed with events, cudnn.benchmark on, Winograd allowed) from DATA_DIR and writes
`kernels_db/<device>/conv.fit.yaml` with its arrays. The launch floor of the measurement is fitted with the law.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from calibrate.fit_gemm import NEUSIGHT, rows_of
from calibrate.fitting import Bound, assemble, fit_segment
from perfmodel.db.fits import write_fit
from perfmodel.db.loading import db_root, load_device
from perfmodel.kernels.conv_law import LAW, law
from perfmodel.validate.kernel_formats import FORMATS
from perfmodel.validate.kernel_rows import read_rows

BOUNDS: Mapping[str, Bound] = {
    "eff": Bound(start=0.7, low=0.2, high=1.1),
    "winograd_2_eff": Bound(start=0.6, low=0.05, high=1.1),
    "winograd_4_eff": Bound(start=0.6, low=0.05, high=1.1),
    "transform": Bound(start=0.5, low=1e-3, high=4.0),
    "half_tile": Bound(start=30.0, low=1.0, high=160.0),
    "prolog_s": Bound(start=1e-6, low=1e-9, high=40e-6),
    "bw_eff": Bound(start=0.8, low=0.2, high=1.1),
    "sharp": Bound(start=3.0, low=1.2, high=12.0),
    "throttle": Bound(start=0.1, low=1e-3, high=1.0),
    "measurement_floor_s": Bound(start=40e-6, low=10e-6, high=150e-6),
    # cudnn.benchmark's record of known shapes grows during the sweep: the smallest values rise from 60-110 us in the first
    # tenth of each device's rows to 360-860 us in the last.
    "floor_growth_s": Bound(start=100e-6, low=1e-6, high=1e-3),
    "floor_growth_square_s": Bound(start=100e-6, low=1e-6, high=1e-3),
}
# The sweep has 3 x 3 filters only. In the profiler trace of ResNet-50 on a V100 (pytorch/kineto tb_plugin sample, batch 32,
# fp32) the 214 kernels of 1 x 1 convolutions, forward and backward, take 89.9 ms where the law fitted to the sweep says
# 67.3 ms; its 3 x 3 and 7 x 7 ones agree within 4 % in sum (44.3 to 45.6 ms).
POINTWISE_SLOWDOWN = 89.9 / 67.3
PROVENANCE = {
    **NEUSIGHT,
    "source": "sitar-lab/NeuSight, neusight_conv_fp32 (torch 2.1.0 cu121, cudnn 8.9.2 benchmark, TF32 off, eager calls)",
    "pointwise_slowdown": "pytorch/kineto sample trace of ResNet-50 on V100 @041e7ce99f1562dd81232ee58b7c454ef16bfae2",
    "heldout": "15 % of shapes by CRC-32 of the shape (perfmodel.validate.kernel_rows.is_heldout)",
}


def main(arguments: Sequence[str]) -> int:
    """Fits and writes; returns the exit status."""
    if not arguments:
        sys.stderr.write("usage: python -m calibrate.fit_conv DATA_DIR [DEVICE ...]\n")
        return 2
    paths = sorted(Path(arguments[0]).glob("neusight_conv_fp32.csv*"))
    rows = [row for path in paths for row in read_rows(path, FORMATS)]
    for name in tuple(arguments[1:]) or tuple(sorted({row.device for row in rows})):
        device = load_device(name)
        mine = rows_of([row for row in rows if row.device == name])
        fit = fit_segment(
            mine, device, law, BOUNDS, {"floor_s": device.kernel_floor_s, "pointwise_slowdown": POINTWISE_SLOWDOWN}
        )
        held = fit.heldout
        sys.stderr.write(
            f"{name} conv fp32: {fit.n_rows} rows, held out {held['n_rows']:.0f}: median {held['median']:.3f}, "
            f"p90 {held['p90']:.3f}\n"
        )
        write_fit(db_root() / name, assemble("conv", LAW, {"fp32": fit}, PROVENANCE))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
