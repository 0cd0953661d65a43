"""Embedding-sharding plans of a model on a machine: found, ranked, asked what they depend on."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from perfmodel.api import Machine, Predictor, RunOptions
from perfmodel.config import PlanSpec, load_model, load_plan
from perfmodel.config.dlrm import DlrmSpec
from perfmodel.config.loading import Source
from perfmodel.db import load_device
from perfmodel.pipeline.run import predict_graph
from perfmodel.plan.tables import scale_pooling
from perfmodel.sharding.find import Question, SearchOptions, find_plans
from perfmodel.sharding.rank import Candidate, Ranking, rank_candidates
from perfmodel.sharding.simulate import PlanSimulator

if TYPE_CHECKING:
    from torch import nn


def rank_sharding(
    model: Source | nn.Module,
    topology: Machine,
    plans: Sequence[Source | PlanSpec] = (),
    *,
    plan: Source | PlanSpec = "ddp",
    search: SearchOptions | None = None,
    **options: Unpack[RunOptions],
) -> Ranking:
    """Finds embedding-sharding plans of a model on a machine and ranks them by simulated iteration time.

    Args:
        model: as in `predict`.
        topology: as in `predict`.
        plans: plans to rank beside those found.
        plan: everything but the placement of tables (precision of rows, pipeline, DDP).
        search: how long and widely to search; without it 30 s.
        **options: see `RunOptions`.

    Returns:
        Plans, fastest first, each as `predict` takes it, with its prediction; and those that do not run, with the reason.

    Raises:
        As `predict`; InfeasiblePlanError if no plan runs.
    """
    options.setdefault("bounds", False)
    db = options.get("db")
    predictor = Predictor(model, topology, **options)
    machine = predictor.topology
    devices = {place.device: load_device(place.device, db) for place in machine.ranks}
    base = plan if isinstance(plan, PlanSpec) else load_plan(plan)
    given = [one if isinstance(one, PlanSpec) else load_plan(one) for one in plans]
    question = Question(graph=predictor.graph(), topology=machine, devices=devices, plan=base)
    simulator = PlanSimulator(predictor.graph(), machine, base, db=db, settings=predictor.settings)
    return find_plans(question, predictor.run, given=given, options=search, simulator=simulator)


def rank_plans(
    model: Source | nn.Module,
    topology: Machine,
    plans: Sequence[Source | PlanSpec],
    **options: Unpack[RunOptions],
) -> Ranking:
    """Ranks given sharding plans by simulated iteration time, without a search.

    Raises as `predict`; InfeasiblePlanError if none runs.
    """
    options.setdefault("bounds", False)
    predictor = Predictor(model, topology, **options)
    given = [one if isinstance(one, PlanSpec) else load_plan(one) for one in plans]
    return rank_candidates([Candidate(plan=one, origin="given") for one in given], predictor.run)


def shard_sensitivity(
    model: Source | nn.Module,
    topology: Machine,
    plan: Source | PlanSpec,
    *,
    factors: Sequence[float],
    **options: Unpack[RunOptions],
) -> list[dict[str, Any]]:
    """Iteration time (s) of one plan where the batch, or every pooling factor, is multiplied by each of `factors`.

    Raises as `predict`.
    """
    options.setdefault("bounds", False)
    predictor = Predictor(model, topology, **options)
    spec = plan if isinstance(plan, PlanSpec) else load_plan(plan)
    graph = predictor.graph()
    denser = _scaled_pooling(model)
    rows: list[dict[str, Any]] = []
    for factor in factors:
        batch = max(round(graph.batch_size * factor), 1)
        time_s = predictor.predict(spec, batch=batch).iteration_time_s
        rows.append({"what": "batch", "factor": factor, "iteration_time_s": time_s})
    for factor in factors:
        if denser is not None:
            time_s = Predictor(denser(factor), predictor.topology, **options).predict(spec).iteration_time_s
        else:
            run = predict_graph(scale_pooling(graph, factor), spec, predictor.topology, db=options.get("db"))
            time_s = run.prediction.iteration_time_s
        rows.append({"what": "pooling factors", "factor": factor, "iteration_time_s": time_s})
    return rows


def _scaled_pooling(model: Source | nn.Module) -> Callable[[float], Mapping[str, Any]] | None:
    """Makes a DLRM's description with every pooling factor multiplied, to be extracted anew; None for any other model."""
    spec = load_model(model) if isinstance(model, str | Path | Mapping) else None
    if not isinstance(spec, DlrmSpec):
        return None

    def scaled(factor: float) -> Mapping[str, Any]:
        tables = tuple(
            table.model_copy(update={"pooling_factor": tuple(mean * factor for mean in table.pooling_factor)})
            for table in spec.expanded_tables
        )
        whole = spec.model_copy(update={"tables": tables})
        return whole.model_dump(mode="json", exclude_defaults=True) | {"kind": spec.kind}

    return scaled
