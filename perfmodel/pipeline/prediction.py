"""Prediction: the answer to one question, as a value that goes to JSON and back."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any

from perfmodel.errors import ConfigError, other_version
from perfmodel.pipeline import shown
from perfmodel.plan.events import MemoryUse

SCHEMA_VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Breakdown:
    """Where one rank's iteration goes; the parts (s) add up to the iteration time.

    Each instant belongs to the first of these that holds: `compute_s`, a kernel runs on the compute stream;
    `exposed_communication_s`, a collective transfers; `exposed_copy_s`, a host-device copy runs; `wait_s`, a collective
    waits for another rank; `host_bound_s`, the device has nothing to do and the host works or a launch is on its way;
    `input_s`, the host waits for the data loader, too; `idle_s`, none of these.
    """

    compute_s: float
    exposed_communication_s: float
    exposed_copy_s: float
    wait_s: float
    host_bound_s: float
    idle_s: float
    input_s: float = 0.0

    @property
    def total_s(self) -> float:
        """Sum of the parts (s): the iteration time."""
        busy_s = self.compute_s + self.exposed_communication_s + self.exposed_copy_s
        return busy_s + self.wait_s + self.host_bound_s + self.input_s + self.idle_s


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSummary:
    """One class of ranks that do the same: who they are, where their time goes (s) and what they hold (bytes)."""

    ranks: tuple[int, ...]
    device: str
    breakdown: Breakdown
    hidden_communication_s: float
    host_busy_s: float
    memory: MemoryUse
    memory_capacity_bytes: int
    tables: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class OpShare:
    """All calls of one op in one phase on the slowest rank: device time (s), share of device-busy time, worst source."""

    name: str
    phase: str
    calls: int
    time_s: float
    share_frac: float
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PathShare:
    """Part of the critical path (s) with one cause: a kernel family, a collective, the host, a launch latency.

    `below_s` and `above_s`: how much less and more (s) it may be by the ranges of its prices.
    """

    cause: str
    time_s: float
    share_frac: float
    below_s: float = 0.0
    above_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """Iteration times (s) that changes of one kind cannot go below, all else as predicted.

    `infinite_network_s`: communication takes no time, ranks still wait for each other. `infinite_host_s`: host work and
    launches take no time. `roofline_s`: neither does, and each kernel runs at the device's datasheet peak rates.
    """

    infinite_network_s: float
    infinite_host_s: float
    roofline_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """Predicted iteration time of a model on a machine, with its range, reasons and provenance.

    Attributes:
        iteration_time_s, low_s, high_s: steady-state time of one training step and its range (s).
        samples_per_s: samples of all ranks per second.
        ranks: one summary per rank class; the first holds the rank that bounds the iteration.
        top_ops: largest device-time consumers on that rank.
        critical_path: the causes along the critical path, largest first; they add up to the iteration time.
        coverage: share (0 to 1) of the priced time by source (`fitted`, `roofline`, ...).
        work_flops, model_flops: FLOPs all ranks execute in an iteration, with and without recomputation.
        notes: approximations and assumptions, in words.
        provenance: fit or datasheet used per kernel family.
        mode: `eager`, `cuda_graph` or `compile`. `conditions`: what else was asked for, such as what-ifs, in words.
        bounds: lower bounds of the iteration time, if asked for.
        percentiles: iteration time (s) by percentile (`p50`, ...) under jitter, if asked for.
        n_replicas: copies of the model with samples of their own, where one copy spans several ranks (0: every rank is one);
            `batch_per_rank` is then the samples of one copy.
    """

    model: str
    topology: str
    plan: str
    precision: str
    n_ranks: int
    batch_per_rank: int
    iteration_time_s: float
    low_s: float
    high_s: float
    ranks: tuple[RankSummary, ...]
    top_ops: tuple[OpShare, ...]
    critical_path: tuple[PathShare, ...]
    coverage: Mapping[str, float]
    work_flops: int
    model_flops: int
    notes: tuple[str, ...] = ()
    provenance: Mapping[str, str] = field(default_factory=dict)
    mode: str = "eager"
    conditions: tuple[str, ...] = ()
    bounds: Bounds | None = None
    percentiles: Mapping[str, float] = field(default_factory=dict)
    n_replicas: int = 0

    @property
    def replicas(self) -> int:
        """Ranks, or groups of ranks that share one copy of the model, with samples of their own."""
        return self.n_replicas or self.n_ranks

    @property
    def samples_per_s(self) -> float:
        """Samples of all ranks per second."""
        return self.batch_per_rank * self.replicas / self.iteration_time_s

    @property
    def breakdown(self) -> Breakdown:
        """Breakdown of the rank that bounds the iteration."""
        return self.ranks[0].breakdown

    @property
    def memory_bytes(self) -> int:
        """Largest peak memory of any rank."""
        return max(rank.memory.total_bytes for rank in self.ranks)

    def to_dict(self) -> dict[str, Any]:
        """The prediction as plain values, with `schema_version` and the derived figures a reader wants."""
        return {
            "schema_version": SCHEMA_VERSION,
            **_plain(self),
            "samples_per_s": self.samples_per_s,
            "memory_bytes": self.memory_bytes,
        }

    def to_pandas(self, table: str = "ranks") -> Any:
        """`ranks`, `top_ops` or `critical_path` as a pandas DataFrame (needs pandas); SI units as in the JSON."""
        return shown.frame(self, table)

    def __str__(self) -> str:
        return shown.plain(self)

    def _repr_html_(self) -> str:
        """What a notebook shows."""
        return shown.html(self)

    def to_json(self) -> str:
        """`to_dict` as indented JSON text with stable key order."""
        return json.dumps(self.to_dict(), indent=2, sort_keys=True)

    @staticmethod
    def from_json(text: str) -> Prediction:
        """Reads a prediction written by `to_json`. Raises ConfigError if it is not one or of another schema version."""
        try:
            return _from_dict(json.loads(text))
        except (KeyError, TypeError, AttributeError, json.JSONDecodeError) as error:
            raise ConfigError(f"not a perfmodel prediction: {type(error).__name__}: {error}") from error


def _plain(value: Any) -> Any:
    """`dataclasses.asdict` without a deep copy of every number: all that a prediction holds is immutable or copied here."""
    if is_dataclass(value):
        return {field.name: _plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, tuple):
        return tuple([_plain(item) for item in value])
    return value


def _from_dict(body: dict[str, Any]) -> Prediction:
    version = body.pop("schema_version")
    if version != SCHEMA_VERSION:
        raise ConfigError(other_version("prediction", version, SCHEMA_VERSION, "predict again"))
    body.pop("samples_per_s")
    body.pop("memory_bytes")
    ranks = tuple(
        RankSummary(
            **{
                **row,
                "ranks": tuple(row["ranks"]),
                "tables": tuple(row["tables"]),
                "breakdown": Breakdown(**row["breakdown"]),
                "memory": MemoryUse(**row["memory"]),
            }
        )
        for row in body.pop("ranks")
    )
    bounds = body.pop("bounds", None)
    return Prediction(
        ranks=ranks,
        bounds=Bounds(**bounds) if bounds else None,
        conditions=tuple(body.pop("conditions", ())),
        top_ops=tuple(OpShare(**row) for row in body.pop("top_ops")),
        critical_path=tuple(PathShare(**row) for row in body.pop("critical_path")),
        notes=tuple(body.pop("notes")),
        **body,
    )
