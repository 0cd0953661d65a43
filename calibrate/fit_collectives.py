"""Fits collectives per fabric from nccl-tests tables and writes `kernels_db/_fabrics/<fabric>/collectives.fit.yaml`.

    python -m calibrate.fit_collectives TABLE.csv.gz --cross-validate     errors on rows not used, seven folds
    python -m calibrate.fit_collectives TABLE.csv.gz --leave-out-gpus 4   predicts the 4-GPU rows from the others
    python -m calibrate.fit_collectives TABLE.csv.gz --write              the shipped fits, without the held-out cases

A case is held out with all its repeats, element types and library versions; folds go by the hash of its name. The shipped fits
leave out a fixed share of the cases (`perfmodel db score FILE --heldout` scores these); their ranges come from the folds.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import click
import numpy as np
from numpy.typing import NDArray

from calibrate.collective_laws import (
    GLOO,
    MIN_BYTES,
    N_FOLDS,
    SHARED_SYSTEMS,
    TUNER_BUS_FRAC,
    Point,
    RegimeLaw,
    family_key,
    features,
    fit_law,
    fold_of,
    kernel_of,
    law_log_times,
    machine,
    points_of,
)
from calibrate.fit_gloo import host_parameters
from calibrate.residuals import Residuals, fit_residuals
from perfmodel.collectives.group import group_of
from perfmodel.db.device import Fit
from perfmodel.db.fabric import (
    FIRST_LOG2_BYTES,
    LAST_LOG2_BYTES,
    LAW,
    MAX_CORRECTION,
    to_fabric,
    write_fabric,
)
from perfmodel.errors import PerfModelError
from perfmodel.metrics import percentile
from perfmodel.validate.collective_rows import AIC_TOPOLOGIES, CollectiveRow, is_heldout_collective, read_collectives
from perfmodel.validate.score_collectives import CollectiveScore, score_rows

Array = NDArray[np.float64]
FamilyKey = tuple[int, str, str]
# A correction is asked for at most this many octaves beyond the sizes that a regime ran at.
_MARGIN_OCTAVES = 1
_MAX_RANKS = 8  # of one measured node
_RANGE_QUANTILES = (0.05, 0.95)
_NO_RANGE = (0.8, 1.25)
AIC_PROVENANCE = {
    "source": "ai-dynamo/aiconfigurator, aic-core/src/aiconfigurator_core/systems/data/*/comm/nccl (nccl-tests); "
    "send_recv: microsoft/vidur @7d475133, data/profiling/network (MIT)",
    "commit": "095f58a51c4ca8e61b66ec108d86f223f8d559ce",
    "licence": "Apache-2.0",
    "date": "2026-11-29",
}
VIDUR_SYSTEMS = {"vidur_a100_dgx": "a100_sxm", "vidur_h100_dgx": "h100_sxm"}
GLOO_PROVENANCE = {
    "source": "calibrate/collectives.py on this project's CPU host; collectives.csv beside this file",
    "commit": "none",
    "licence": "Apache-2.0",
    "date": "2026-11-29",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """What was fitted together: one regime of sister fabrics."""

    points: tuple[Point, ...]
    law: RegimeLaw
    residuals: Residuals
    versions: tuple[str, ...]


def as_system(row: CollectiveRow) -> CollectiveRow | None:
    """Vidur's send_recv inside a node stands with the aiconfigurator system of its GPU; its other rows are not fitted."""
    if not row.system.startswith("vidur_"):
        return row
    system = VIDUR_SYSTEMS.get(row.system)
    return replace(row, system=system) if system and row.op == "send_recv" else None


def fit_families(rows: Iterable[CollectiveRow]) -> dict[FamilyKey, Family]:
    """Laws and residual models of all regimes."""
    groups: dict[FamilyKey, list[Point]] = {}
    for point in points_of(row for row in rows if row.bytes >= MIN_BYTES):
        groups.setdefault(family_key(point), []).append(point)
    return {key: _fit_family(key, points) for key, points in groups.items()}


def _fit_family(key: FamilyKey, points: Sequence[Point]) -> Family:
    law = fit_law(points)
    versions = tuple(sorted({point.version for point in points if point.version}))
    left = np.array([point.log_time for point in points]) - law_log_times(law, points)
    return Family(
        points=tuple(points),
        law=law,
        residuals=fit_residuals(features(points, versions), left, kernel_of(key)),
        versions=versions,
    )


def fabric_fits(
    families: Mapping[FamilyKey, Family], ranges: Mapping[tuple[str, str], tuple[float, float]]
) -> dict[str, Fit]:
    """One fit per system, keyed by its fabric."""
    systems = sorted({point.system for family in families.values() for point in family.points})
    return {machine(AIC_TOPOLOGIES[name]).fabric: _fabric_fit(name, families, ranges) for name in systems}


def _fabric_fit(
    system: str, families: Mapping[FamilyKey, Family], ranges: Mapping[tuple[str, str], tuple[float, float]]
) -> Fit:
    mine = [point for family in families.values() for point in family.points if point.system == system]
    sizes = sorted({point.n_ranks for point in mine})
    parameters: dict[str, float] = {
        "tuner_bus_frac": TUNER_BUS_FRAC.get(system, 1.0),
        "power_law": float(system in SHARED_SYSTEMS),
        **{f"rows.n{n}": float(sum(point.n_ranks == n for point in mine)) for n in sizes},
        **{f"bus_bytes_per_s.n{n}": _bus(system, n) for n in range(2, _n_ranks(system) + 1)},
    }
    arrays: dict[str, Array] = {}
    fit_range: dict[str, tuple[float, float]] = {}
    for (_, _, regime), family in sorted(families.items()):
        for op in sorted({point.op for point in family.points if point.system == system}):
            stem = f"{op}.{regime}"
            names = ("base_s", "step_s", "s_per_byte", "n_slope")
            parameters |= {
                f"{stem}.{key}": value for key, value in zip(names, family.law.parts(system, op), strict=True)
            }
            own = [np.log2(p.bytes) for p in family.points if (p.system, p.op) == (system, op)]
            fit_range[f"{stem}.log2_bytes"] = (float(min(own)), float(max(own)))
            arrays |= _tables(family, system, op, regime, sizes)
    for op in sorted({point.op for point in mine}):
        low, high = ranges.get((system, op), _NO_RANGE)
        parameters |= {f"{op}.low_frac": low, f"{op}.high_frac": high}
    rows = {"rows": str(len(mine)), "heldout_rows": "a fixed 15 % of cases, by hash; errors by seven folds in heldout"}
    versions = sorted({point.version for point in mine if point.version})
    return Fit(
        family="collectives",
        law=LAW,
        parameters=parameters,
        arrays=arrays,
        fit_range=fit_range,
        low_frac=_NO_RANGE[0],
        high_frac=_NO_RANGE[1],
        provenance={
            **(GLOO_PROVENANCE if system == GLOO else AIC_PROVENANCE),
            **rows,
            "software": f"{'torch' if system == GLOO else 'NCCL'} {', '.join(versions)}",
            "system": system,
        },
    )


def _n_ranks(system: str) -> int:
    """Ranks of one measured node."""
    return min(_MAX_RANKS, machine(AIC_TOPOLOGIES[system]).n_ranks)


def _bus(system: str, n_ranks: int) -> float:
    lane = group_of(machine(AIC_TOPOLOGIES[system]), tuple(range(n_ranks))).intra
    if lane is None:
        raise RuntimeError(f"{system}: {n_ranks} ranks are not on one node")
    return lane.bus_bytes_per_s


def _tables(family: Family, system: str, op: str, regime: str, sizes: Sequence[int]) -> dict[str, Array]:
    """The correction on its grid, without a version and then what each version of this system adds."""
    stem = f"{op}.{regime}"
    grid = np.arange(FIRST_LOG2_BYTES, LAST_LOG2_BYTES + 1)
    tables = {
        f"correction.{stem}": np.stack(
            [[_posterior(family, (system, op, regime), n, narrow, "") for n in sizes] for narrow in (False, True)]
        )
    }
    for version in sorted({p.version for p in family.points if (p.system, p.op) == (system, op) and p.version}):
        with_it = np.stack([_posterior(family, (system, op, regime), n, False, version) for n in sizes])
        added = with_it - tables[f"correction.{stem}"][0]
        tables[f"version.{stem}.{version.replace('.', '_')}"] = added
    return {
        key: np.clip(table, -MAX_CORRECTION, MAX_CORRECTION).reshape(*table.shape[:-1], len(grid))
        for key, table in tables.items()
    }


def _posterior(family: Family, name: tuple[str, str, str], n_ranks: int, narrow: bool, version: str) -> Array:
    """Expected log residual at every size of the grid, of the measured number of ranks that is nearest to `n_ranks`.

    Beyond the measured sizes it is that of the last one asked for.
    """
    system, op, regime = name
    seen = sorted({p.n_ranks for p in family.points if (p.system, p.op) == (system, op)})
    n_ranks = min(seen, key=lambda n: (abs(np.log2(n / n_ranks)), n))
    own = [np.log2(p.bytes) for p in family.points if (p.system, p.op, p.n_ranks) == (system, op, n_ranks)]
    asked = np.clip(
        np.arange(FIRST_LOG2_BYTES, LAST_LOG2_BYTES + 1), min(own) - _MARGIN_OCTAVES, max(own) + _MARGIN_OCTAVES
    )
    points = [
        Point(
            system=system,
            op=op,
            regime=regime,
            n_ranks=n_ranks,
            bytes=round(2.0**size),
            narrow=narrow,
            version=version,
            log_time=0.0,
        )
        for size in asked
    ]
    return family.residuals.mean(features(points, family.versions))


def predict_rows(train: Sequence[CollectiveRow], test: Sequence[CollectiveRow]) -> list[CollectiveScore]:
    """Fits on `train` and scores `test` through the ordinary path, with these fits instead of the shipped ones."""
    fits = {name: to_fabric(name, fit) for name, fit in fabric_fits(fit_families(train), {}).items()}
    return score_rows(test, fits=fits)


def cross_validate(rows: Sequence[CollectiveRow]) -> list[CollectiveScore]:
    """Every row predicted by fits that have not seen its case."""
    scored: list[CollectiveScore] = []
    for fold in range(N_FOLDS):
        train = [row for row in rows if fold_of(row.key) != fold]
        scored += predict_rows(train, [row for row in rows if fold_of(row.key) == fold])
    return scored


def heldout_ranges(scored: Sequence[CollectiveScore]) -> dict[tuple[str, str], tuple[float, float]]:
    """Per system and operation the multipliers between which nine tenths of held-out measurements lie."""
    ratios: dict[tuple[str, str], list[float]] = {}
    for score in scored:
        ratios.setdefault((score.row.system, score.row.op), []).append(score.row.measured_s / score.predicted_s)
    return {
        key: (min(percentile(values, _RANGE_QUANTILES[0]), 0.99), max(percentile(values, _RANGE_QUANTILES[1]), 1.01))
        for key, values in ratios.items()
    }


def table(scored: Sequence[CollectiveScore], min_bytes: int = 1024, max_bytes: int = 2**29) -> str:
    """Errors by system and operation, and over all, as text."""
    groups: dict[tuple[str, str], list[float]] = {}
    for score in scored:
        if min_bytes <= score.row.bytes <= max_bytes:
            groups.setdefault((score.row.system, score.row.op), []).append(score.error)
    lines = [f"{'system':22s}{'operation':16s}{'rows':>6s}{'median':>9s}{'p90':>9s}"]
    everything = [error for errors in groups.values() for error in errors]
    for (system, op), errors in [*sorted(groups.items()), (("all", ""), everything)]:
        lines.append(
            f"{system:22s}{op:16s}{len(errors):6d}{percentile(errors, 0.5):9.1%}{percentile(errors, 0.9):9.1%}"
        )
    return "\n".join(lines)


@click.command()
@click.argument("paths", nargs=-1, required=True, type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--cross-validate", "mode", flag_value="folds", help="Errors on rows not used in the fit, seven folds.")
@click.option("--leave-out-gpus", type=int, help="Fit without the rows of this many GPUs and predict them.")
@click.option("--write", "mode", flag_value="write", help="Write the fits, without the held-out cases.")
def main(paths: tuple[Path, ...], mode: str | None, leave_out_gpus: int | None) -> None:
    """Fit collectives from PATHS: aiconfigurator's NCCL tables, ours of gloo, and send_recv of Vidur's network tables."""
    rows = _read(paths)
    if leave_out_gpus is not None:
        train = [row for row in rows if row.n_ranks != leave_out_gpus]
        click.echo(table(predict_rows(train, [row for row in rows if row.n_ranks == leave_out_gpus])))
        return
    if mode == "write":
        for written in write_fits(paths, None):
            click.echo(str(written))
        return
    click.echo(table(cross_validate(rows)))


def write_fits(paths: Sequence[Path], root: Path | None) -> list[Path]:
    """Fits every fabric of the tables in `paths` and writes them to the database at `root`."""
    rows = _read(paths)
    fits = _with_heldout(rows, cross_validate(rows))
    host = host_parameters(paths)
    for name, fit in fits.items():
        if fit.provenance["system"] == GLOO:
            fits[name] = replace(fit, parameters={**fit.parameters, **host})
    return [write_fabric(name, fit, root) for name, fit in fits.items()]


def _read(paths: Sequence[Path]) -> list[CollectiveRow]:
    return [row for path in paths for row in map(as_system, read_collectives(path)) if row is not None]


def _with_heldout(rows: Sequence[CollectiveRow], scored: Sequence[CollectiveScore]) -> dict[str, Fit]:
    used = [row for row in rows if not is_heldout_collective(row.key)]
    fits = fabric_fits(fit_families(used), heldout_ranges(scored))
    found = {}
    for name, fit in fits.items():
        system = fit.provenance["system"]
        errors: dict[str, list[float]] = {}
        for score in scored:
            if score.row.system == system and score.row.bytes >= 1024:
                errors.setdefault(score.row.op, []).append(score.error)
        heldout = {
            op: {"n_rows": float(len(v)), "median": percentile(v, 0.5), "p90": percentile(v, 0.9)}
            for op, v in errors.items()
        }
        found[name] = replace(fit, heldout=heldout)
    return found


if __name__ == "__main__":
    try:
        main()
    except PerfModelError as error:
        sys.exit(str(error))
