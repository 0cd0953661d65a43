"""From a graph and a machine to a ranking: the problem, the search, the simulations."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from itertools import zip_longest
from pathlib import Path
from typing import Any, cast, get_args

from perfmodel.config.plan import PlanSpec, load_plan
from perfmodel.config.reading import read_mapping
from perfmodel.config.sharding import Kernel, Sharding
from perfmodel.db.device import Device
from perfmodel.errors import ConfigError, InfeasiblePlanError, suggest
from perfmodel.graph import Graph
from perfmodel.pipeline.run import Run
from perfmodel.plan.facts import facts_of
from perfmodel.plan.memory import dense_memory
from perfmodel.sharding.baselines import BASELINES
from perfmodel.sharding.plan import with_placement
from perfmodel.sharding.problem import SEARCHED, Problem, read_constraints
from perfmodel.sharding.rank import Candidate, Ranking, rank_candidates, short_name
from perfmodel.sharding.refine import refine
from perfmodel.sharding.search import Found, Search
from perfmodel.sharding.simulate import PlanSimulator
from perfmodel.sharding.surrogate import Surrogate
from perfmodel.sharding.tiers import shares_of_hosts
from perfmodel.topology import Topology
from perfmodel.units import parse_seconds

SEARCH_SHARE = 0.4  # of the time budget; then what was found is simulated and improved by the simulator
REFINE_SHARE = 0.75  # of the time budget by the end of that; the rest is for whole predictions of the best
FAMILIES: tuple[tuple[Sharding, ...], ...] = (
    ("table_wise",), ("column_wise",), ("table_wise", "column_wise"), ("row_wise",), SEARCHED
)  # fmt: skip
ALLOCATOR_SHARE = 0.97  # of a device's memory that plans may fill by the search's count: fragments and rounding


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchOptions:
    """How long and how widely to search.

    `top` plans by the search's cost are simulated, with the baselines unless `baselines` is off. `rules` are constraints by
    table as `Constraint` has them; `start` a plan to improve.
    """

    budget_s: float = 30.0
    top: int = 10
    seed: int = 0
    kernels: tuple[Kernel, ...] = ("fused",)
    rules: Mapping[str, Any] = field(default_factory=dict)
    baselines: bool = True
    start: PlanSpec | None = None


def read_options(
    *, budget: str, top: int, seed: int, kernels: str, constraints: str | None, start: str | None = None
) -> SearchOptions:
    """Options from a command line's words. Raises ConfigError, one line for each mistake; tables are checked by the search."""
    known = get_args(Kernel)
    words = [word.strip() for word in kernels.split(",")]
    problems = [f"kernels: found {w!r}, allowed {', '.join(known)}{suggest(w, known)}" for w in words if w not in known]
    try:
        budget_s = parse_seconds(budget)
    except ValueError as error:
        problems.append(f"budget: {error}")
    if problems:
        raise ConfigError(problems)
    rules = read_mapping(Path(constraints)) if constraints else {}
    return SearchOptions(
        budget_s=budget_s,
        top=top,
        seed=seed,
        kernels=tuple(cast(list[Kernel], words)),
        rules=rules,
        start=load_plan(start) if start else None,
    )


def problem_of(
    graph: Graph, topology: Topology, devices: Mapping[str, Device], plan: PlanSpec, options: SearchOptions
) -> Problem:
    """The search problem of a model on a machine: its tables and the memory its dense part leaves.

    Raises InfeasiblePlanError for a model without tables.
    """
    facts = facts_of(graph)
    if not facts.tables:
        raise InfeasiblePlanError(f"model {graph.model} has no embedding tables to place")
    dense = dense_memory(facts, frozenset(facts.tables), plan.n_micro).total_bytes
    names = {name: short_name(name) for name in facts.tables}
    if len(set(names.values())) < len(names):
        names = {name: name for name in names}
    return Problem(
        tables={names[name]: found.table for name, found in facts.tables.items()},
        n_ranks=topology.n_ranks,
        batch=graph.batch_size,
        domains=topology.domains(),
        free_bytes=tuple(
            max(round(devices[place.device].memory_bytes * ALLOCATOR_SHARE) - dense, 0) for place in topology.ranks
        ),
        host_bytes=shares_of_hosts(topology)[0],
        ssd_bytes=shares_of_hosts(topology)[1],
        row_bytes={name: facts.table_row_bytes[name] for name in facts.tables},
        constraints=read_constraints(options.rules, list(names.values())),
        kernels=options.kernels,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What is trained on what: one rank's graph, the machine, its devices by name, and a plan with all but the placement."""

    graph: Graph
    topology: Topology
    devices: Mapping[str, Device]
    plan: PlanSpec


def find_plans(
    question: Question,
    simulate: Callable[[PlanSpec], Run],
    *,
    given: Sequence[PlanSpec] = (),
    options: SearchOptions | None = None,
    simulator: PlanSimulator | None = None,
) -> Ranking:
    """Searches, simulates what was found beside the given plans and the baselines, and ranks all.

    Args:
        question: what is trained on what.
        simulate: the whole model's iteration under a plan.
        given: plans to rank too.
        options: see `SearchOptions`.
        simulator: says iteration times of placements alone; with it what was found is ordered and improved before whole
            predictions are made.

    Raises:
        InfeasiblePlanError: no plan runs.
    """
    chosen = options or SearchOptions()
    graph, topology, devices, plan = question.graph, question.topology, question.devices, question.plan
    begin = time.monotonic()
    problem = problem_of(graph, topology, devices, plan, chosen)
    device = devices[topology.ranks[0].device]
    optimizer = {"adamw": "adam"}.get(
        graph.sparse_optimizer or graph.optimizer, graph.sparse_optimizer or graph.optimizer
    )
    costs = Surrogate(problem, plan.embeddings, device, topology, optimizer)
    end = begin + chosen.budget_s * SEARCH_SHARE
    found, n_evaluations = _searched(problem, costs, chosen, end)
    n_simulated = 0
    if simulator is not None:
        found, n_simulated = _simulated(problem, simulator, found, chosen, begin + chosen.budget_s * REFINE_SHARE)
    searched = time.monotonic() - begin
    candidates = [Candidate(plan=one, origin="given") for one in given]
    candidates += [_candidate(plan, one, number) for number, one in enumerate(found)]
    if chosen.baselines:
        for name, make in BASELINES.items():
            candidates.append(Candidate(plan=with_placement(plan, make(problem, chosen.seed), name), origin="baseline"))
    ranking = rank_candidates(candidates, _within(simulate, begin + chosen.budget_s, len(given) + 1))
    return replace(ranking, n_evaluations=n_evaluations, search_s=searched, n_simulated=n_simulated)


def _simulated(
    problem: Problem, simulator: PlanSimulator, found: Sequence[Found], options: SearchOptions, end: float
) -> tuple[list[Found], int]:
    """The placements by simulated iteration time, the fastest improved by the simulator; and how many were simulated."""
    times = simulator.times([one.placement for one in found])
    runs = [(time_ps, i) for i, time_ps in enumerate(times) if isinstance(time_ps, Fraction)]
    ordered = [found[i] for _, i in sorted(runs)]
    ordered += [one for one, time_ps in zip(found, times, strict=True) if not isinstance(time_ps, Fraction)]
    if not runs:
        return ordered[: options.top], len(times)
    better, _, n_tried = refine(problem, simulator, ordered[0].placement, end, seed=options.seed)
    if better is not ordered[0].placement:
        ordered.insert(0, replace(ordered[0], placement=better, origin="improved by simulation", cost_s=math.nan))
    return ordered[: options.top], len(times) + n_tried


def _candidate(plan: PlanSpec, found: Found, number: int) -> Candidate:
    return Candidate(
        plan=with_placement(plan, found.placement, f"found {number + 1}"), origin=found.origin, surrogate_s=found.cost_s
    )


def _searched(problem: Problem, costs: Surrogate, options: SearchOptions, end: float) -> tuple[list[Found], int]:
    """The best of each family of shardings, in turn, and how many placements were evaluated.

    Every kind of sharding in a plan has exchanges and operators of its own on every rank, whose launches and latencies the
    separable cost does not see: so families with few kinds have searches of their own, and the simulator compares them.
    """
    if options.start is not None:
        search = Search(problem, costs, seed=options.seed)
        return search.improve(options.start.embeddings.placement, end - time.monotonic()), search.n_evaluations
    families: list[list[Found]] = []
    n_evaluations = 0
    for number, shardings in enumerate(FAMILIES):
        if families and time.monotonic() > end:
            break  # laying out a family of many tables and ranks alone takes seconds
        left_s = max(end - time.monotonic(), 0.0) / (len(FAMILIES) - number)
        try:
            search = Search(replace(problem, shardings=shardings), costs, seed=options.seed)
        except InfeasiblePlanError:
            if shardings == SEARCHED:
                raise
            continue
        families.append(search.run(left_s))
        n_evaluations += search.n_evaluations
    found = [one for turn in zip_longest(*families) for one in turn if one is not None]
    return found, n_evaluations


class _TimeUpError(InfeasiblePlanError):
    """A plan was not simulated: the time budget was spent."""


def _within(simulate: Callable[[PlanSpec], Run], deadline: float, at_least: int) -> Callable[[PlanSpec], Run]:
    """`simulate` until the deadline; `at_least` so many plans in any case."""
    done = 0

    def run(plan: PlanSpec) -> Run:
        nonlocal done
        if done >= at_least and time.monotonic() > deadline:
            raise _TimeUpError("not simulated: the time budget was spent")
        done += 1
        return simulate(plan)

    return run
