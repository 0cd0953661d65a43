"""Searching a space of plans for a model on a machine: what `perfmodel.search` and the command line call."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack, cast

from perfmodel.api import Machine, Predictor, RunOptions
from perfmodel.autotune.budget import as_budget
from perfmodel.autotune.judge import Objective, as_objective
from perfmodel.autotune.search import Progress, SearchResult, find_best
from perfmodel.autotune.space import GLOBAL_BATCH, MICRO_BATCH, Candidate, Space, Value, candidates, default_space
from perfmodel.autotune.sweep import Backend, Detail, Row, Subject, Workers, sweep
from perfmodel.config import load_model
from perfmodel.config.entrypoint import EntrypointSpec
from perfmodel.config.loading import Source
from perfmodel.config.reading import read_mapping
from perfmodel.config.transformer import TransformerSpec
from perfmodel.errors import ConfigError
from perfmodel.pipeline.prediction import Prediction
from perfmodel.pipeline.run import Evaluation

if TYPE_CHECKING:
    from torch import nn

SpaceSource = Space | Mapping[str, Sequence[Value]] | str | os.PathLike[str] | None


class PredictorJudge:
    """Evaluations and predictions of candidates by a `Predictor`."""

    def __init__(self, predictor: Predictor) -> None:
        self.predictor = predictor

    def evaluate(self, candidate: Candidate) -> Evaluation:
        """Its iteration time and memory, quickly."""
        return self.predictor.evaluate(candidate.spec(), batch=candidate.micro_batch)

    def predict(self, candidate: Candidate) -> Prediction:
        """Its prediction."""
        return self.predictor.predict(candidate.spec(), batch=candidate.micro_batch)


class SearchOptions(RunOptions, total=False):
    """`RunOptions`, and what a search is.

    Attributes:
        global_batch: samples of an iteration over all ranks; None: the space's, else the model's batch on every rank.
        top: how many plans to rank (10).
        progress: told (stage, done, all) now and then.
    """

    global_batch: int | None
    top: int
    progress: Progress | None


def search(
    model: Source | nn.Module,
    topology: Machine,
    space: SpaceSource = None,
    *,
    objective: str | Objective | Callable[[Prediction], float] = "throughput",
    budget: int | str | None = None,
    **options: Unpack[SearchOptions],
) -> SearchResult:
    """The best plans for a model on a machine, and why each is behind the first.

    Args:
        model: as in `predict`.
        topology: as in `predict`.
        space: plan keys with the values to combine, as a mapping, a `Space` or a YAML file; None: `default_space`.
        objective: `throughput` (seconds a sample, the default), `time`, `memory`, or a function of a prediction; small is
            good.
        budget: most plans to simulate (`64`) or a time (`"30 s"`); None: as many as a proof takes, which are few.
        **options: see `SearchOptions`.

    Returns:
        The ranked plans with their predictions, what was refused and why, and whether the rest is proven to be no better.

    Raises:
        ConfigError: the space, the objective or any option is wrong; one line for each mistake.
        InfeasiblePlanError: no plan of the space works.
        GraphError, MissingCalibrationError: as `predict`.

    >>> found = search("gpt2", "dgx", {"tp": [1, 2], "shard": ["nothing", "optimizer"]}, global_batch=64)
    >>> [row.candidate.plan for row in found.ranked][:1]
    ['ddp,accumulate=8']
    """
    limit = as_budget(budget)
    aim, top, progress = as_objective(objective), options.pop("top", 10), options.pop("progress", None)
    judge, whole = prepared(model, topology, space, options)
    found = candidates(whole, judge.predictor.topology.n_ranks)
    return find_best(found, judge, aim, top=top, budget=limit, progress=progress)


class SweepOptions(RunOptions, total=False):
    """`RunOptions`, and what a sweep is.

    Attributes:
        global_batch: as in `search`.
        space: as in `search`.
        plans: only so many candidates, evenly spread over the space.
        detail: `quick` (the default) or `full`; see `autotune.sweep.Subject`.
        backend: `loky` (the default), `dask` or `ray`; `jobs` processes (1); `scheduler`: address of a Dask scheduler.
    """

    global_batch: int | None
    space: SpaceSource
    plans: int | None
    detail: Detail
    backend: Backend
    jobs: int
    scheduler: str | None


def run_sweep(
    model: Source,
    topology: Source,
    table: Path,
    *,
    progress: Callable[[int, int], None] | None = None,
    **options: Unpack[SweepOptions],
) -> list[Row]:
    """Every candidate of a space in a table (`.csv`, `.parquet`), in the order of the space; resumed if it was broken off.

    Args:
        model: shipped name, file, or mapping.
        topology: shipped name, file, or mapping.
        table: where the table goes; its journal stands beside it while the sweep runs.
        progress: told (done, all) now and then.
        **options: see `SweepOptions`.

    Returns:
        The rows of the table.

    Raises:
        ConfigError: as `search`; or the table, its journal or the backend is wrong.
    """
    workers = Workers(
        backend=options.pop("backend", "loky"),
        n_jobs=options.pop("jobs", 1),
        scheduler=options.pop("scheduler", None),
    )
    detail, n_plans = options.pop("detail", "quick"), options.pop("plans", None)
    space = options.pop("space", None)
    plain = {key: value for key, value in options.items() if key != "global_batch"}
    judge, whole = prepared(model, topology, space, cast(SearchOptions, options))
    found = list(candidates(whole, judge.predictor.topology.n_ranks))
    if n_plans is not None and n_plans < len(found):
        found = [found[i * len(found) // n_plans] for i in range(n_plans)]
    subject = Subject(
        model=_plain(free_to_recompute(model, space)[0]), topology=_plain(topology), options=plain, detail=detail
    )
    return sweep(subject, found, table, workers, progress=progress)


def _plain(source: Any) -> str | Mapping[str, Any]:
    return source if isinstance(source, Mapping) else str(source)


def prepared(
    model: Source | nn.Module, topology: Machine, space: SpaceSource, options: SearchOptions
) -> tuple[PredictorJudge, Space]:
    """A judge for a model on a machine, and the space with all that was left to default. Raises as `search`."""
    global_batch = options.pop("global_batch", None)
    model, recomputes = free_to_recompute(model, space)
    predictor = Predictor(model, topology, **cast(RunOptions, options))
    machine = predictor.topology
    whole = load_space(space, global_batch)
    if whole is None or whole.global_batch < 1:
        batch = global_batch or model_batch(model, options) * machine.n_ranks
        keys = None if whole is None else whole.keys
        made = default_space(
            machine.n_ranks, machine.gpus_per_host, batch, recompute=recomputes, experts=model_experts(model)
        )
        whole = made if keys is None else Space(keys=keys, global_batch=batch)
    return PredictorJudge(predictor), whole


def load_space(source: SpaceSource, global_batch: int | None = None) -> Space | None:
    """A space from any of its forms; its batch is 0 where neither it nor `global_batch` says one. Raises ConfigError."""
    if source is None:
        return None
    if isinstance(source, Space):
        return source if global_batch is None else Space(keys=source.keys, global_batch=global_batch, base=source.base)
    mapping: Mapping[str, Any] = source if isinstance(source, Mapping) else read_mapping(Path(source))
    where = "space" if isinstance(source, Mapping) else str(source)
    keys = {key: values for key, values in mapping.items() if key not in (GLOBAL_BATCH, "base")}
    wrong = [f"{where}: {k}: found {v!r}, allowed a list of values" for k, v in keys.items() if not _is_list(v)]
    given = mapping.get(GLOBAL_BATCH, 0)
    if not isinstance(given, int) or isinstance(given, bool):
        wrong.append(f"{where}: {GLOBAL_BATCH}: found {given!r}, allowed a whole number from 1")
    if wrong:
        raise ConfigError(wrong)
    return Space(
        keys={key: tuple(values) for key, values in keys.items()},
        global_batch=global_batch or given,
        base=str(mapping.get("base", "ddp")),
    )


def _is_list(values: object) -> bool:
    return isinstance(values, Sequence) and not isinstance(values, str)


def model_batch(model: Source | nn.Module, options: RunOptions) -> int:
    """Samples per rank that a model file says. Raises ConfigError for a model that has no batch of its own."""
    batch = options.get("batch")
    if batch is not None:
        return batch
    if isinstance(model, str | os.PathLike | Mapping):
        spec = load_model(Path(model) if isinstance(model, os.PathLike) else model)
        if not isinstance(spec, EntrypointSpec):
            return spec.batch_size
    raise ConfigError(f"{GLOBAL_BATCH}: say it for a model of your own, whose inputs decide its batch")


def model_experts(model: Source | nn.Module) -> int:
    """Experts of a layer that a model file says; 1 of a model without, or of one's own."""
    if not isinstance(model, str | os.PathLike | Mapping):
        return 1
    spec = load_model(Path(model) if isinstance(model, os.PathLike) else model)
    return spec.experts if isinstance(spec, TransformerSpec) and spec.architecture == "mixtral" else 1


def free_to_recompute(model: Source | nn.Module, space: SpaceSource) -> tuple[Source | nn.Module, bool]:
    """The model without checkpointing of its own where plans decide about it, and whether they can."""
    if not isinstance(model, str | os.PathLike | Mapping):
        return model, False
    spec = load_model(Path(model) if isinstance(model, os.PathLike) else model)
    if not hasattr(spec, "gradient_checkpointing"):
        return model, False
    keys = space.keys if isinstance(space, Space) else space
    decides = space is None or (isinstance(keys, Mapping) and "recompute" in keys)
    if decides and spec.gradient_checkpointing:
        return {**spec.model_dump(mode="json", exclude_unset=True), "gradient_checkpointing": False}, True
    return model, True


__all__ = ["MICRO_BATCH", "PredictorJudge", "load_space", "prepared", "run_sweep", "search"]
