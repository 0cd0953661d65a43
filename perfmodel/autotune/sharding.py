"""Embedding-sharding plans of a model on a machine: found, ranked, asked what they depend on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Unpack

from perfmodel.api import Machine, Predictor, RunOptions
from perfmodel.config import PlanSpec, load_plan
from perfmodel.config.loading import Source
from perfmodel.db import load_device
from perfmodel.pipeline.run import predict_graph
from perfmodel.plan.tables import scale_pooling
from perfmodel.sharding.find import Question, SearchOptions, find_plans
from perfmodel.sharding.rank import Candidate, Ranking, rank_candidates

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
    return find_plans(question, predictor.run, given=given, options=search)


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
    rows: list[dict[str, Any]] = []
    for factor in factors:
        batch = max(round(graph.batch_size * factor), 1)
        time_s = predictor.predict(spec, batch=batch).iteration_time_s
        rows.append({"what": "batch", "factor": factor, "iteration_time_s": time_s})
    for factor in factors:
        run = predict_graph(scale_pooling(graph, factor), spec, predictor.topology, db=options.get("db"))
        rows.append({"what": "pooling factors", "factor": factor, "iteration_time_s": run.prediction.iteration_time_s})
    return rows
