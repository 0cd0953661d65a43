"""The best plans of a space, proven: what cannot be among them is never simulated.

Every candidate is evaluated in a fraction of the time of a simulation, which gives a floor that its value cannot be below (the
evaluation less what it may be wrong by: `pipeline.run.TOLERANCE_FRAC`); candidates that do not fit the memory are refused
there. Then candidates are simulated in the order of their floors until so many as were asked for are at most as large as the
next floor: what follows cannot be among the best (branch and bound with one level; Land and Doig 1960).
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from perfmodel.autotune.budget import Budget
from perfmodel.autotune.judge import Judge, Objective
from perfmodel.autotune.space import Candidate, Refused
from perfmodel.errors import ConfigError, InfeasiblePlanError, PerfModelError
from perfmodel.heap import uncollected
from perfmodel.pipeline.prediction import Breakdown, Prediction
from perfmodel.pipeline.run import Evaluation
from perfmodel.plan.memory import MemoryShortfallError
from perfmodel.units import format_bytes, format_time

SCHEMA_VERSION = 1
Progress = Callable[[str, int, int], None]  # stage, done, all
_PARTS = {
    "compute_s": "compute",
    "exposed_communication_s": "exposed communication",
    "exposed_copy_s": "exposed copies",
    "wait_s": "waiting for other ranks",
    "host_bound_s": "host",
    "input_s": "the data loader",
    "idle_s": "idle",
}
N_REASONS = 3
WORTH_FRAC = 0.01  # parts of the difference to the first that are smaller than this share of it are not named


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranked:
    """A plan among the best: its value by the objective, its prediction, and why it is behind the first (empty: it is)."""

    candidate: Candidate
    value: float
    prediction: Prediction
    why: str

    @property
    def label(self) -> str:
        """The plan and its micro-batch in one line."""
        return self.candidate.label.removeprefix("ddp,")


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchResult:
    """What a search found.

    Attributes:
        objective: its name.
        ranked: the best, best first.
        refused: what is no plan, or does not work or fit, with the reason.
        n_plans: candidates that do.
        n_unseen: candidates that the budget left no time to look at.
        n_simulated: of those, how many were simulated; the floors of the others rule them out.
        is_proven: False if the budget ended the search before the rest was ruled out.
    """

    objective: str
    ranked: tuple[Ranked, ...]
    refused: tuple[Refused, ...]
    n_plans: int
    n_simulated: int
    is_proven: bool
    n_unseen: int = 0

    @property
    def best(self) -> Ranked:
        """The first."""
        return self.ranked[0]

    def reasons(self) -> list[tuple[str, int]]:
        """Why candidates were refused and how often, most frequent first; figures of single plans left out."""
        counts = Counter(_kind(refused.reason) for refused in self.refused)
        return sorted(counts.items(), key=lambda item: (-item[1], item[0]))

    def summary(self) -> list[str]:
        """What was looked at, in lines."""
        ruled_out = self.n_plans - self.n_simulated
        proof = (
            f"the other {ruled_out} cannot be among the best" if self.is_proven else f"{ruled_out} left by the budget"
        )
        lines = [f"{self.n_plans} plans work; {self.n_simulated} simulated, {proof}"]
        if self.n_unseen:
            lines.append(f"{self.n_unseen} more combinations were not looked at: the time budget was spent")
        if self.refused:
            kinds = "; ".join(f"{count} x {kind}" for kind, count in self.reasons()[:N_REASONS])
            lines.append(f"{len(self.refused)} combinations refused: {kinds}")
        return lines

    def to_json(self) -> str:
        """The result as indented JSON text; `Prediction.from_json` reads each `prediction`."""
        body = {
            "schema_version": SCHEMA_VERSION,
            "objective": self.objective,
            "n_plans": self.n_plans,
            "n_simulated": self.n_simulated,
            "is_proven": self.is_proven,
            "n_unseen": self.n_unseen,
            "ranked": [
                {
                    "plan": row.candidate.plan,
                    "micro_batch": row.candidate.micro_batch,
                    "value": row.value,
                    "why": row.why,
                    "prediction": row.prediction.to_dict(),
                }
                for row in self.ranked
            ],
            "refused": [{"candidate": row.label, "reason": row.reason} for row in self.refused],
        }
        return json.dumps(body, indent=2, sort_keys=True)


def find_best(
    found: Iterable[Candidate | Refused],
    judge: Judge,
    objective: Objective,
    *,
    top: int = 10,
    budget: Budget | None = None,
    progress: Progress | None = None,
) -> SearchResult:
    """The `top` best candidates by the objective, ties in the order of their labels.

    Args:
        found: candidates, and what was refused before.
        judge: gives evaluations and predictions.
        objective: what is to be small.
        top: how many to rank.
        budget: how much may be done; None: as much as a proof takes.
        progress: told (stage, done, all) now and then.

    Raises:
        ConfigError: `top` below 1.
        InfeasiblePlanError: no candidate works; the message names the most frequent reasons.
    """
    if top < 1:
        raise ConfigError(f"top: found {top}, allowed 1 or more")
    limit = budget or Budget()
    rows = list(found)
    refused = [row for row in rows if isinstance(row, Refused)]
    nearest = _Nearest()
    given = [row for row in rows if isinstance(row, Candidate)]
    with uncollected():
        bounded, n_unseen = _bounded(given, (judge, objective), (refused, nearest), limit, progress)
    best: list[tuple[float, str, Candidate, Prediction]] = []
    n_simulated = 0
    proven = not n_unseen
    for floor, label, candidate in bounded:
        if len(best) >= top and floor > best[top - 1][0]:
            break
        if limit.ends(n_simulated):
            proven = False
            break
        if progress is not None:
            progress("simulating", n_simulated, min(len(bounded), top))
        n_simulated += 1
        try:
            prediction = judge.predict(candidate)
        except PerfModelError as error:
            refused.append(Refused(label=label, reason=_line(error)))
            continue
        best.append((objective.value(prediction), label, candidate, prediction))
        best.sort(key=lambda row: row[:2])
    if not best:
        raise InfeasiblePlanError(_nothing(refused) + nearest.advice(judge))
    first = best[0][3]
    return SearchResult(
        objective=objective.name,
        ranked=tuple(
            Ranked(candidate=c, value=value, prediction=p, why=why_behind(first, p) if p is not first else "")
            for value, _, c, p in best[:top]
        ),
        refused=tuple(refused),
        n_plans=len(bounded),
        n_simulated=n_simulated,
        is_proven=proven,
        n_unseen=n_unseen,
    )


@dataclass(slots=True)
class _Nearest:
    """Of the candidates that do not fit, the one that is short by least."""

    candidate: Candidate | None = None
    shortfall_bytes: int = 0

    def see(self, candidate: Candidate, error: PerfModelError) -> None:
        """A candidate was refused."""
        short = error.shortfall_bytes if isinstance(error, MemoryShortfallError) else 0
        if short and (self.candidate is None or short < self.shortfall_bytes):
            self.candidate, self.shortfall_bytes = candidate, short

    def advice(self, judge: Judge) -> str:
        """Its refusal with what would make it fit; empty if all were refused for other reasons."""
        if self.candidate is None:
            return ""
        try:
            judge.predict(self.candidate)
        except PerfModelError as error:
            return f"; the nearest is {self.candidate.label}: {_line(error)}"
        return ""


def _bounded(
    candidates: Sequence[Candidate],
    by: tuple[Judge, Objective],
    others: tuple[list[Refused], _Nearest],
    limit: Budget,
    progress: Progress | None,
) -> tuple[list[tuple[float, str, Candidate]], int]:
    """(floor, label, candidate) of those that work, by floor, and how many were not looked at; others are refused."""
    judge, objective = by
    refused, nearest = others
    rows: list[tuple[float, str, Candidate]] = []
    n_unseen = 0
    for number, candidate in enumerate(candidates):
        if limit.ends_bounding(len(rows)):
            n_unseen = len(candidates) - number
            break
        if progress is not None:
            progress("evaluating", number, len(candidates))
        try:
            evaluation: Evaluation = judge.evaluate(candidate)
        except PerfModelError as error:
            refused.append(Refused(label=candidate.label, reason=_line(error)))
            nearest.see(candidate, error)
            continue
        rows.append((objective.floor(evaluation) if objective.floor else -math.inf, candidate.label, candidate))
    return sorted(rows, key=lambda row: row[:2]), n_unseen


def why_behind(first: Prediction, other: Prediction) -> str:
    """What of a sample's time the other plan spends more on than the first, in words; times are an iteration's.

    The parts of the rank that bounds the iteration add up to the iteration time, so their differences add up to the
    difference. Where the plan is as fast, what it needs more.
    """
    scale = first.batch_per_rank * first.replicas / (other.batch_per_rank * other.replicas)
    late_s = other.iteration_time_s * scale - first.iteration_time_s
    words = []
    for name, word in _PARTS.items():
        more_s = getattr(_parts(other), name) * scale - getattr(_parts(first), name)
        if abs(more_s) > WORTH_FRAC * abs(late_s) and more_s:
            words.append((more_s, f"{'+' if more_s > 0 else '-'}{format_time(abs(more_s))} {word}"))
    words.sort(key=lambda row: (-row[0], row[1]))
    named = [text for more_s, text in words if more_s > 0][:N_REASONS]
    saved = [text for more_s, text in reversed(words) if more_s < 0][:1]
    if named or saved:
        return ", ".join((*named, *saved))
    more_bytes = other.memory_bytes - first.memory_bytes
    return f"as fast, {format_bytes(abs(more_bytes))} {'more' if more_bytes > 0 else 'less'} memory"


def _parts(prediction: Prediction) -> Breakdown:
    return prediction.breakdown


def _nothing(refused: Sequence[Refused]) -> str:
    if not refused:
        return "search: the space has no plans"
    counts = Counter(_kind(row.reason) for row in refused).most_common(3)
    return "search: no plan works; " + "; ".join(f"{count} x {reason}" for reason, count in counts)


def _kind(reason: str) -> str:
    """A reason without what differs from plan to plan."""
    if " needs " in reason and "short by" in reason:
        return "does not fit the memory"
    if "do not divide the global batch" in reason:
        return "replicas do not divide the global batch"
    return reason


def _line(error: Exception) -> str:
    return " ".join(str(getattr(error, "problems", (error,))[0]).split())
