"""Plans in order of simulated iteration time, with ranges, odds, loads and reasons."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from perfmodel.config.plan import PlanSpec
from perfmodel.errors import InfeasiblePlanError
from perfmodel.pipeline.prediction import Prediction, RankSummary
from perfmodel.pipeline.run import Run
from perfmodel.sharding.tiers import Tier, tiers_of

# Plans closer than this are said to tie. Assumed, not measured on GPUs; on a CPU times repeat to 3 to 16 % (docs/accuracy.md).
TIE_FRAC = 0.005
# What the same plan's iteration time repeats to, as a standard deviation of each plan's own: assumed, the distance of a tie.
REPEAT_FRAC = TIE_FRAC
RANGE_DEVIATIONS = 1.2816  # a range holds the middle 80 % of a normal error: so many standard deviations each way


@dataclass(frozen=True, slots=True, kw_only=True)
class RankLoad:
    """Where one rank's iteration goes (s): kernels of forward and backward, exposed communication, waiting, host."""

    ranks: tuple[int, ...]
    forward_s: float
    backward_s: float
    communication_s: float
    wait_s: float
    host_s: float
    memory_bytes: int
    headroom_bytes: int
    host_bytes: int
    ssd_bytes: int
    tables: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankedPlan:
    """One plan's place in the ranking.

    Attributes:
        plan: what `predict` takes.
        origin: who made it: a search, a baseline's name, a file.
        prediction: the whole model's iteration under it.
        surrogate_s: the search's cost (s); NaN for a plan that it did not make.
        beaten_frac: probability that the first plan is faster than this one.
        ties: whether the two are closer than what iteration times repeat to.
        imbalance: largest over mean time in embedding and dense kernels of the ranks.
        binding_rank: the rank that the others wait for; binding_table: its most expensive table.
        tiers: memory by tier, with its verdict.
        advice: what would help, in words.
    """

    plan: PlanSpec
    origin: str
    prediction: Prediction
    surrogate_s: float
    loads: tuple[RankLoad, ...]
    beaten_frac: float
    ties: bool
    imbalance: float
    binding_rank: int
    binding_table: str
    tiers: tuple[Tier, ...]
    advice: tuple[str, ...]

    @property
    def verdict(self) -> str:
        """`fits`, or `tight` if some tier is."""
        return "tight" if any(tier.verdict == "tight" for tier in self.tiers) else "fits"

    @property
    def iteration_time_s(self) -> float:
        """Simulated time of one iteration (s)."""
        return self.prediction.iteration_time_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """A plan that does not run, and why."""

    name: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A plan to be simulated."""

    plan: PlanSpec
    origin: str
    surrogate_s: float = math.nan


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranking:
    """Plans, fastest first, and those that do not run; how many placements the search priced and simulated."""

    plans: tuple[RankedPlan, ...]
    refused: tuple[Refused, ...]
    n_evaluations: int = 0
    search_s: float = 0.0
    n_simulated: int = 0


def rank_candidates(candidates: Sequence[Candidate], simulate: Callable[[PlanSpec], Run]) -> Ranking:
    """Simulates every candidate and ranks them; equal plans once. Raises InfeasiblePlanError if none runs."""
    runs: list[tuple[Candidate, Run]] = []
    refused = []
    seen: list[object] = []
    for candidate in candidates:
        if candidate.plan.embeddings in seen:
            continue
        seen.append(candidate.plan.embeddings)
        try:
            run = simulate(candidate.plan)
            full = [tier for tier in tiers_of(run.prediction.ranks, run.topology) if tier.verdict == "does not fit"]
            if full:
                refused.append(Refused(name=candidate.plan.name, reason="; ".join(tier.text for tier in full)))
            else:
                runs.append((candidate, run))
        except InfeasiblePlanError as error:
            refused.append(Refused(name=candidate.plan.name, reason=str(error)))
    if not runs:
        listed = "; ".join(f"{one.name}: {one.reason}" for one in refused[:3])
        raise InfeasiblePlanError(f"no plan runs on this machine: {listed}")
    runs.sort(key=lambda pair: pair[1].prediction.iteration_time_s)
    best = runs[0][1].prediction
    return Ranking(plans=tuple(_ranked(c, run, best) for c, run in runs), refused=tuple(refused))


def probability_faster(first: Prediction, second: Prediction) -> float:
    """Probability that the first plan is really faster than the second, from the ranges of what their times are made of.

    Both predictions use the same laws, so the error of a cause on the critical path (a kernel family, an exchange, the host)
    is taken as one relative error in both plans, normal, with the range of the cause as its middle 80 %; errors of different
    causes are independent. What a cause takes in both plans then cancels, and the difference of the two times has the variance
    sum over causes of (relative deviation * difference of the cause's times)^2, and what each plan's own time repeats to.
    What makes one machine differ from another of its kind scales both times and leaves their order.
    """
    mine, theirs = _by_cause(first), _by_cause(second)
    deviations = [REPEAT_FRAC * first.iteration_time_s, REPEAT_FRAC * second.iteration_time_s]
    for cause in sorted({*mine, *theirs}):
        (time_s, spread_s), (other_s, other_spread_s) = mine.get(cause, (0.0, 0.0)), theirs.get(cause, (0.0, 0.0))
        relative = (spread_s + other_spread_s) / max(time_s + other_s, 1e-12)
        deviations.append(relative * (other_s - time_s))
    deviation = math.hypot(*deviations)
    difference = second.iteration_time_s - first.iteration_time_s
    return 0.5 * (1.0 + math.erf(difference / (deviation * math.sqrt(2.0)))) if deviation else 0.5


def _by_cause(prediction: Prediction) -> dict[str, tuple[float, float]]:
    """Seconds on the critical path and their standard deviation, by cause."""
    return {
        part.cause: (part.time_s, 0.5 * (part.below_s + part.above_s) / RANGE_DEVIATIONS)
        for part in prediction.critical_path
    }


def _ranked(candidate: Candidate, run: Run, best: Prediction) -> RankedPlan:
    prediction = run.prediction
    loads = tuple(_load(run, summary) for summary in prediction.ranks)
    busy = [load.forward_s + load.backward_s for load in loads for _ in load.ranks]
    binding = loads[0]
    ratio = prediction.iteration_time_s / best.iteration_time_s
    imbalance = max(busy) / (sum(busy) / len(busy)) if sum(busy) else 1.0
    table = _binding_table(run, binding)
    return RankedPlan(
        plan=candidate.plan,
        origin=candidate.origin,
        prediction=prediction,
        surrogate_s=candidate.surrogate_s,
        loads=loads,
        beaten_frac=probability_faster(best, prediction),
        ties=ratio <= 1.0 + TIE_FRAC,
        imbalance=imbalance,
        binding_rank=binding.ranks[0],
        binding_table=table,
        tiers=tiers_of(prediction.ranks, run.topology),
        advice=_advice(prediction, imbalance, binding, table),
    )


def _load(run: Run, summary: RankSummary) -> RankLoad:
    lowered = next(c for c in run.classes if c.rank_class.ranks == summary.ranks)
    events = lowered.rank_class.events
    spent = {"forward": 0.0, "backward": 0.0}
    for event, category, time_s in zip(
        lowered.tasks.event.tolist(), lowered.tasks.category.tolist(), lowered.tasks.time_s.tolist(), strict=True
    ):
        if category == _KERNEL:
            phase = "forward" if events[event].phase in ("input", "forward", "loss") else "backward"
            spent[phase] += time_s
    parts, memory = summary.breakdown, summary.memory
    return RankLoad(
        ranks=summary.ranks,
        forward_s=spent["forward"],
        backward_s=spent["backward"],
        communication_s=parts.exposed_communication_s,
        wait_s=parts.wait_s,
        host_s=parts.host_bound_s,
        memory_bytes=memory.total_bytes,
        headroom_bytes=summary.memory_capacity_bytes - memory.total_bytes,
        host_bytes=memory.host_bytes,
        ssd_bytes=memory.ssd_bytes,
        tables=summary.tables,
    )


_KERNEL = 2  # pipeline.tasks.CATEGORIES.index("kernel")


def _binding_table(run: Run, binding: RankLoad) -> str:
    """Of the parts on a rank the table with most bytes looked up."""
    lowered = next(c for c in run.classes if c.rank_class.ranks == binding.ranks)
    weight: dict[str, float] = {}
    for event in lowered.rank_class.events:
        if event.op is not None and event.phase == "forward":
            for table in event.op.attrs.get("tables", ()):
                moved = table["pooling_factor"] * table["dim"]
                weight[table["parameter"]] = weight.get(table["parameter"], 0.0) + moved
    if not weight:
        return binding.tables[0] if binding.tables else ""
    return max(weight, key=lambda name: (weight[name], name))


def _advice(prediction: Prediction, imbalance: float, binding: RankLoad, table: str) -> tuple[str, ...]:
    total = prediction.iteration_time_s
    parts: Mapping[str, float] = {
        f"rank {binding.ranks[0]} is host-bound: CUDA graphs, or fewer and larger operators": binding.host_s,
        "exchanges are exposed: embeddings.row_precision bf16, or pipeline sparse_dist": binding.communication_s,
    }
    found = [f"{words} (up to {spent / total:.0%})" for words, spent in parts.items() if spent > 0.1 * total]
    if imbalance > 1.1 and table:
        found.append(
            f"rank {binding.ranks[0]} has {imbalance:.2f} times the mean kernel time: divide {short_name(table)}"
        )
    return tuple(found)


def short_name(parameter: str) -> str:
    """A table's name as plans have it."""
    return parameter.removesuffix(".weight").rpartition(".")[2]
