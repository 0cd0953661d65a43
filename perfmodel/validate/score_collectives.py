"""Scores collective prices on files of measured collectives: the engine of `perfmodel db score` for nccl-tests tables."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Literal

from perfmodel.collectives import CollectiveCall, CollectiveEstimate, estimate_collective
from perfmodel.config import load_topology
from perfmodel.db.fabric import FabricFit
from perfmodel.metrics import mean_error, percentile
from perfmodel.topology import Topology, build_topology
from perfmodel.units import parse_bytes_per_s, parse_seconds
from perfmodel.validate.collective_rows import CollectiveRow, is_heldout_collective, read_collectives
from perfmodel.validate.posted_machines import Machine


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveScore:
    """One row and what was predicted for it."""

    row: CollectiveRow
    estimate: CollectiveEstimate

    @property
    def predicted_s(self) -> float:
        """Predicted time (s), with what the measurement adds."""
        return self.estimate.time_s + self.row.added_s

    @property
    def error(self) -> float:
        """|predicted / measured - 1|."""
        return abs(self.predicted_s / self.row.measured_s - 1.0)

    @property
    def inside(self) -> bool:
        """Whether the measurement lies in the estimate's range."""
        return self.estimate.low_s <= self.row.measured_s - self.row.added_s <= self.estimate.high_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """Errors |predicted / measured - 1| (fractions) of one system and operation.

    `inside_frac` is the share of rows between low and high, `roofline_median` the median error of NCCL's constants without a
    fit, `sources` the number of rows by price source.
    """

    system: str
    op: str
    n_rows: int
    median: float
    mean: float
    p90: float
    worst: float
    inside_frac: float
    roofline_median: float
    sources: Mapping[str, int]


@lru_cache(maxsize=256)
def topology_of(machine: Machine, version: str) -> Topology:
    """The machine of a row, with its library version."""
    spec = load_topology(machine.topology)
    if machine.nodes > 1 and machine.nodes != spec.n_nodes:
        spec = spec.with_nodes(machine.nodes)
    if machine.nics is not None and spec.node is not None and spec.node.nics is not None:
        nics = {
            "count": machine.nics.count,
            "kind": machine.nics.kind,
            "bandwidth": parse_bytes_per_s(machine.nics.bandwidth),
            "latency": parse_seconds(machine.nics.latency) if machine.nics.latency else None,
        }
        node = spec.node.model_copy(update={"nics": spec.node.nics.model_copy(update=nics)})
        spec = spec.model_copy(update={"node": node})
    env = {**spec.env, **dict(machine.env), **({"NCCL_VERSION": version} if version else {})}
    return build_topology(spec.model_copy(update={"env": env}))


def ranks_of(topology: Topology, row: CollectiveRow) -> tuple[int, ...]:
    """The first ranks of each node, or the first of all where an NVLink domain is larger than a host."""
    if row.machine.nodes == 1:
        return tuple(range(row.n_ranks))
    chosen = [rank for host in topology.hosts() for rank in host[:: row.machine.every][: row.machine.per_node]]
    return tuple(chosen[: row.n_ranks])


def score_rows(rows: Iterable[CollectiveRow], *, fits: Mapping[str, FabricFit] | None = None) -> list[CollectiveScore]:
    """Every row with its prediction; `fits` by fabric instead of those in the database."""
    scored = []
    for row in rows:
        topology = topology_of(row.machine, row.version)
        call = CollectiveCall(op=row.op, bytes=row.bytes, ranks=ranks_of(topology, row), dtype=row.dtype)
        scored.append(CollectiveScore(row=row, estimate=estimate_collective(call, topology, fits=fits)))
    return scored


def score_collectives(
    files: Sequence[str | Path],
    *,
    only: Literal["heldout", "all"] = "all",
    min_bytes: int = 1024,
    max_bytes: int = 2**29,
) -> list[Score]:
    """Scores every system and operation in `files`, sizes from `min_bytes` to `max_bytes` (1 KiB to 512 MiB).

    Several nodes are scored at every size. With `only="heldout"` only cases that no shipped fit has used. Raises ConfigError
    with one line for a file of no known format or a damaged one.
    """
    rows = [row for file in files for row in read_collectives(Path(file))]
    if only == "heldout":
        rows = [row for row in rows if is_heldout_collective(row.key)]
    kept = [row for row in rows if row.machine.nodes > 1 or min_bytes <= row.bytes <= max_bytes]
    return summarise(score_rows(kept))


def summarise(scored: Iterable[CollectiveScore]) -> list[Score]:
    """Errors by system and operation, sorted by name."""
    groups: dict[tuple[str, str], list[CollectiveScore]] = {}
    for score in scored:
        groups.setdefault((score.row.system, score.row.op), []).append(score)
    return [_summary(key, members) for key, members in sorted(groups.items())]


def _summary(key: tuple[str, str], members: Sequence[CollectiveScore]) -> Score:
    errors = [score.error for score in members]
    names = [score.estimate.source.label for score in members]
    unfitted = [score.error for score in score_rows((score.row for score in members), fits={})]
    return Score(
        system=key[0],
        op=key[1],
        n_rows=len(members),
        median=percentile(errors, 0.5),
        mean=mean_error(errors),
        p90=percentile(errors, 0.9),
        worst=max(errors),
        inside_frac=sum(score.inside for score in members) / len(members),
        roofline_median=percentile(unfitted, 0.5),
        sources={name: names.count(name) for name in sorted(set(names))},
    )
