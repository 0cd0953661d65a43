"""Fits transports between hosts from posted nccl-tests tables and writes `kernels_db/_fabrics/network/wire.fit.yaml`.

    python -m calibrate.fit_wire TABLES.csv            errors on tables, and on sizes, that the fit has not seen
    python -m calibrate.fit_wire TABLES.csv --write    the shipped fit

Every table counts alike, however many rows it has. Weak priors hold a transport of few tables near what all have in common.
A fixed share of the cases, by hash, is kept out of every fit.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import click
import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares

from perfmodel.collectives import CollectiveCall, estimate_collective
from perfmodel.collectives.candidates import Candidate
from perfmodel.collectives.group import group_of
from perfmodel.collectives.nccl_tables import Algorithm, Protocol
from perfmodel.collectives.wire import n_hops, n_levels
from perfmodel.db.device import Fit
from perfmodel.db.wire import FAMILY, LAW, WireFit, write_wires
from perfmodel.errors import PerfModelError
from perfmodel.metrics import percentile
from perfmodel.validate.collective_rows import CollectiveRow, is_heldout_collective, read_collectives
from perfmodel.validate.score_collectives import ranks_of, topology_of

Array = NDArray[np.float64]
# Most that an in-switch tree's channel carries between hosts: 144 and 1,440 GB200 over InfiniBand reach 423 and 2 x 214 GB/s
# at 8 GiB with 16 channels (CoreWeave's tables).
CHANNEL_BYTES_PER_S = 26.6e9
_NAMES = ("port_s", "bandwidth_frac", "fill_s", "half_bytes")
# Centre and looseness (log) of the priors: a few us a port, 0.96 of the bandwidth, a fill of 100 us, half at 16 MiB.
_PRIOR = np.log([3e-6, 0.96, 1e-4, 2.0**24])
_LOOSE = np.array([1.0, 0.03, 1.5, 0.5])
_MOST = np.log([1.0, 1.0, 1.0, 2.0**30])  # no transport passes what its links carry
_PRIOR_WEIGHT = 0.2
# A table whose machine is partly assumed counts this much of one that is stated.
_ASSUMED_WEIGHT = 0.3
_SOFT = 0.15  # errors of one size that still count in full
_RANGE_QUANTILES = (0.05, 0.95)
_WIDEST = (0.75, 1.34)  # ten equal runs on 64 H200 differ by 34 % (mlcommons/training_results_v5.0): no band is tighter


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One measured collective between hosts and NCCL's model of it."""

    table: str
    transport: str
    heldout: bool
    latency_s: float
    bandwidth_s: float
    hops: int
    levels: float
    bytes: int
    in_switch_s: float
    measured_s: float


def samples_of(rows: Sequence[CollectiveRow]) -> list[Sample]:
    """Samples of all rows between hosts whose cards reach GPU memory."""
    return [sample(row) for row in rows if row.machine.nodes > 1 and row.machine.typical]


def sample(row: CollectiveRow) -> Sample:
    """NCCL's model of a row by its constants alone, in the parts that the law weighs."""
    topology = topology_of(row.machine, row.version)
    ranks = ranks_of(topology, row)
    call = CollectiveCall(op=row.op, bytes=row.bytes, ranks=ranks, dtype=row.dtype)
    found = estimate_collective(call, topology, fits={})
    group = group_of(topology, ranks)
    if group.inter is None:
        raise RuntimeError(f"{row.system}: one unit")
    modelled = Candidate(
        algorithm=Algorithm(found.algorithm),
        protocol=Protocol(found.protocol),
        latency_s=found.latency_s,
        bandwidth_s=found.bandwidth_s,
        n_channels=found.n_channels,
        bottleneck=found.bottleneck,
    )
    in_switch = found.algorithm == Algorithm.NVLS_TREE.value
    algbw = found.n_channels * CHANNEL_BYTES_PER_S / (1 if group.n_units == 2 else 2)
    return Sample(
        table=row.system,
        transport=group.transport,
        heldout=is_heldout_collective(row.key),
        latency_s=found.latency_s,
        bandwidth_s=found.bandwidth_s,
        hops=n_hops(modelled, row.op, group.n_units),
        levels=n_levels(modelled, group),
        bytes=row.bytes,
        in_switch_s=row.bytes / algbw if in_switch else 0.0,
        measured_s=row.measured_s,
    )


def log_times(p: Array, samples: Sequence[Sample]) -> Array:
    """The law's log times; `p` is the logarithm of the four figures."""
    port, frac, fill, half = np.exp(np.minimum(p, _MOST))
    times = [
        s.latency_s
        + s.hops * port
        + max(s.bandwidth_s / frac, s.in_switch_s)
        + s.levels * fill * s.bytes / (s.bytes + half)
        for s in samples
    ]
    return np.log(times)


def fit_transport(samples: Sequence[Sample], prior: Array = _PRIOR) -> Array:
    """Robust least squares on log times, each table with equal weight."""
    counts = {table: sum(s.table == table for s in samples) for table in {s.table for s in samples}}
    weights = np.sqrt([10.0 / counts[s.table] * (_ASSUMED_WEIGHT if s.table.endswith("*") else 1.0) for s in samples])
    y = np.log([s.measured_s for s in samples])

    def residual(p: Array) -> Array:
        raw = (log_times(p, samples) - y) / _SOFT
        soft = np.sign(raw) * np.sqrt(2 * (np.sqrt(1 + raw**2) - 1))  # pseudo-Huber: a bad machine does not rule
        return np.concatenate([soft * weights * _SOFT, _PRIOR_WEIGHT * (p - prior) / _LOOSE])

    found: Array = least_squares(residual, prior).x
    return found


def fit_all(samples: Sequence[Sample]) -> dict[str, Array]:
    """Every transport, each near what all have in common."""
    common = fit_transport(samples)
    names = sorted({s.transport for s in samples})
    return {name: fit_transport([s for s in samples if s.transport == name], common) for name in names}


def ratios(fits: Mapping[str, Array], samples: Sequence[Sample]) -> list[float]:
    """Measured over predicted."""
    return [s.measured_s / float(np.exp(log_times(fits[s.transport], [s])[0])) for s in samples]


def without_table(samples: Sequence[Sample]) -> dict[str, list[float]]:
    """Measured over predicted of every table, by fits that have not seen it; a transport's only table by what is common."""
    found = {}
    for table in sorted({s.table for s in samples}):
        rest, mine = [s for s in samples if s.table != table], [s for s in samples if s.table == table]
        fits = fit_all(rest)
        common = fit_transport(rest)
        found[table] = ratios({s.transport: fits.get(s.transport, common) for s in mine}, mine)
    return found


def to_fit(fits: Mapping[str, Array], unseen: Mapping[str, Sequence[float]], samples: Sequence[Sample]) -> Fit:
    """What ships: figures and ranges by transport."""
    parameters: dict[str, float] = {}
    for name, p in fits.items():
        mine = [
            r
            for table, rs in unseen.items()
            if any((s.table, s.transport) == (table, name) for s in samples)
            for r in rs
        ]
        low, high = (percentile(mine, q) for q in _RANGE_QUANTILES)
        wire = WireFit(
            **dict(zip(_NAMES, (float(v) for v in np.exp(np.minimum(p, _MOST))), strict=True)),
            channel_bytes_per_s=CHANNEL_BYTES_PER_S,
            low_frac=min(low, _WIDEST[0]),
            high_frac=max(high, _WIDEST[1]),
        )
        parameters |= {f"{name}.{key}": getattr(wire, key) for key in WireFit.__dataclass_fields__}
    kept = [s for s in samples if s.heldout]
    errors = [abs(1 / r - 1) for r in ratios(fits, kept)]
    heldout = {"cases": {"n_rows": float(len(kept)), "median": percentile(errors, 0.5), "p90": percentile(errors, 0.9)}}
    return Fit(
        family=FAMILY,
        law=LAW,
        parameters=parameters,
        heldout=heldout,
        provenance={
            "source": "nccl-tests tables posted by users and vendors; calibrate/fit_wire.py",
            "commit": "none",
            "licence": "facts; sources by table in the data's PROVENANCE",
            "date": "2026-11-30",
            "rows": str(len(samples) - len(kept)),
            "heldout_rows": str(len(kept)),
            "software": "NCCL, versions by table",
        },
    )


def _line(name: str, found: Sequence[float]) -> str:
    errors = [abs(1 / r - 1) for r in found]
    return (
        f"{name:44s}{len(found):5d}{percentile(errors, 0.5):8.1%}{percentile(errors, 0.9):8.1%}"
        f"{1 / percentile(list(found), 0.5) - 1:+8.1%}"
    )


@click.command()
@click.argument("paths", nargs=-1, required=True, type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--write", is_flag=True, help="Write the fit.")
def main(paths: tuple[Path, ...], *, write: bool) -> None:
    """Fit transports from PATHS and print errors on what the fit has not seen."""
    samples = samples_of([row for path in paths for row in read_collectives(path)])
    fits = fit_all([s for s in samples if not s.heldout])
    unseen = without_table(samples)
    click.echo(f"{'tables not seen':44s}{'rows':>5s}{'median':>8s}{'p90':>8s}{'bias':>8s}")
    for table, found in unseen.items():
        click.echo(_line(table, found))
    click.echo("cases not seen, of tables seen")
    for table in unseen:
        mine = [s for s in samples if s.table == table and s.heldout]
        if mine:
            click.echo(_line(table, ratios(fits, mine)))
    click.echo(_line("all", ratios(fits, [s for s in samples if s.heldout])))
    for name, p in fits.items():
        click.echo(f"{name}: " + ", ".join(f"{key} {value:.4g}" for key, value in zip(_NAMES, np.exp(p), strict=True)))
    if write:
        click.echo(str(write_wires(to_fit(fits, unseen, samples))))


if __name__ == "__main__":
    try:
        main()
    except PerfModelError as error:
        sys.exit(str(error))
