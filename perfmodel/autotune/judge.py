"""What a search asks of whoever predicts, and what it is looking for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from perfmodel.autotune.space import Candidate
from perfmodel.errors import ConfigError, suggest
from perfmodel.pipeline.prediction import Prediction
from perfmodel.pipeline.run import Evaluation


class Judge(Protocol):
    """Judges candidates. Both raise PerfModelError for a candidate that does not work."""

    def evaluate(self, candidate: Candidate) -> Evaluation:
        """Its iteration time and memory, quickly."""

    def predict(self, candidate: Candidate) -> Prediction:
        """Its prediction."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Objective:
    """What is to be small.

    Attributes:
        name: as users write it.
        value: of a prediction.
        floor: what the value cannot be below, from an evaluation; None where that says nothing.
    """

    name: str
    value: Callable[[Prediction], float]
    floor: Callable[[Evaluation], float] | None = None


OBJECTIVES: Mapping[str, Objective] = {
    "throughput": Objective(
        name="throughput",
        value=lambda prediction: 1.0 / prediction.samples_per_s,
        floor=lambda evaluation: evaluation.least_s / evaluation.samples,
    ),
    "time": Objective(
        name="time",
        value=lambda prediction: prediction.iteration_time_s,
        floor=lambda evaluation: evaluation.least_s,
    ),
    "memory": Objective(
        name="memory",
        value=lambda prediction: float(prediction.memory_bytes),
        floor=lambda evaluation: float(evaluation.memory_bytes),
    ),
}


def as_objective(given: str | Objective | Callable[[Prediction], float]) -> Objective:
    """An objective from its name, from itself, or from what it makes of a prediction. Raises ConfigError."""
    if isinstance(given, Objective):
        return given
    if isinstance(given, str):
        if given not in OBJECTIVES:
            near = suggest(given, OBJECTIVES)
            raise ConfigError(f"objective: found {given!r}, allowed {', '.join(OBJECTIVES)} or a function{near}")
        return OBJECTIVES[given]
    return Objective(name=getattr(given, "__name__", "objective"), value=given)
