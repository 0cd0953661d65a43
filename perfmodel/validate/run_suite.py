"""Runs a suite: predicts every case, compares with what was measured, and names the likeliest cause of each error."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean, median

from perfmodel.errors import PerfModelError
from perfmodel.metrics import geomean_error, median_error, percentile, spearman_rho
from perfmodel.pipeline.memory import NOT_FITTING
from perfmodel.pipeline.prediction import PathShare, Prediction
from perfmodel.validate.notes import AS_NOTED
from perfmodel.validate.suite import Case

# What a fault in our own code raises. One bad case must not hide the others: it fails with its reason.
_OWN_FAULTS = (ArithmeticError, AssertionError, LookupError, RuntimeError, TypeError, ValueError, AttributeError)
_P90 = 0.9
_FEWEST_RANKED = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class CaseResult:
    """One case with its prediction (s), or with the reason why there is none.

    `error` is predicted / measured - 1; `cause` the largest named cause of an error of that sign; `remarks` what the
    prediction says of itself beside its time; `noise` the relative spread of repeated measurements, where they are at hand.
    """

    case: Case
    predicted_s: float | None = None
    low_s: float | None = None
    high_s: float | None = None
    cause: PathShare | None = None
    reason: str = ""
    remarks: tuple[str, ...] = ()
    noise: float | None = None

    @property
    def error(self) -> float | None:
        """Predicted / measured - 1, or None without a prediction."""
        return None if self.predicted_s is None else self.predicted_s / self.case.measured_s - 1.0

    @property
    def cause_factor(self) -> float | None:
        """What the cause's time would have to be multiplied by for no error; None without one or if it would be negative."""
        if self.cause is None or self.predicted_s is None or self.cause.time_s <= 0:
            return None
        factor = 1.0 + (self.case.measured_s - self.predicted_s) / self.cause.time_s
        return factor if factor >= 0 else None

    @property
    def width_frac(self) -> float | None:
        """Width of the predicted range as a share of the prediction, or None without one."""
        if self.low_s is None or self.high_s is None or not self.predicted_s:
            return None
        return (self.high_s - self.low_s) / self.predicted_s

    @property
    def inside(self) -> bool:
        """Whether the measured time lies in the predicted range."""
        if self.low_s is None or self.high_s is None:
            return False
        return self.low_s <= self.case.measured_s <= self.high_s


@dataclass(frozen=True, slots=True, kw_only=True)
class SuiteScore:
    """Errors |predicted / measured - 1| over a suite, as fractions; None where no case (for `spearman`: fewer than 3) counts.

    `mean` and `geomean` are weighted by the cases' weights. `inside_frac` is the share of predicted cases whose measured
    time lies in the predicted range; `median_width_frac` the median width of those ranges, as a share of the prediction.
    """

    n_cases: int
    n_failed: int
    mean: float | None
    geomean: float | None
    median: float | None
    p90: float | None
    worst: float | None
    spearman: float | None
    inside_frac: float | None
    median_width_frac: float | None = None

    def passes(self, max_error: float | None) -> bool:
        """No case failed and the mean error, where one is counted, is at most `max_error` (None: any)."""
        if self.n_failed:
            return False
        return max_error is None or self.mean is None or self.mean <= max_error


def run_suite(
    cases: Sequence[Case], predict: Callable[[Case], Prediction], done: Callable[[CaseResult], None] | None = None
) -> tuple[CaseResult, ...]:
    """Predicts every case; `predict` raises where it cannot. `done` hears of each result as it comes."""
    results = []
    for case in cases:
        results.append(run_case(case, predict))
        if done is not None:
            done(results[-1])
    return tuple(results)


def run_case(case: Case, predict: Callable[[Case], Prediction]) -> CaseResult:
    """One case's result; a case that cannot be predicted has its reason in one line."""
    try:
        prediction = predict(case)
        too_long = prediction.iteration_time_s > case.measured_s
        return CaseResult(
            case=case,
            predicted_s=prediction.iteration_time_s,
            low_s=prediction.low_s,
            high_s=prediction.high_s,
            cause=likeliest_cause(prediction, too_long=too_long),
            remarks=tuple(note for note in prediction.notes if NOT_FITTING in note or AS_NOTED in note),
        )
    except PerfModelError as error:
        problems = getattr(error, "problems", (str(error),))
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        return CaseResult(case=case, reason=_one_line(str(problems[0])) + more)
    except _OWN_FAULTS as error:
        return CaseResult(case=case, reason=_one_line(f"fault of perfmodel: {type(error).__name__}: {error}"))


def _rank_correlation(pairs: Sequence[tuple[float, float]]) -> float | None:
    """Spearman correlation of (predicted, measured) pairs, None where it means nothing: fewer than 3, or all equal."""
    predicted = [pair[0] for pair in pairs]
    measured = [pair[1] for pair in pairs]
    if len(pairs) < _FEWEST_RANKED or len(set(predicted)) == 1 or len(set(measured)) == 1:
        return None
    return spearman_rho(predicted, measured)


def _one_line(text: str) -> str:
    return " ".join(text.split())


def likeliest_cause(prediction: Prediction, *, too_long: bool) -> PathShare | None:
    """The part of the critical path whose own range explains most of an error of that sign; None where none has a range."""
    reach = [(part.below_s if too_long else part.above_s, part) for part in prediction.critical_path]
    most_s, found = max(reach, key=lambda pair: (pair[0], pair[1].time_s), default=(0.0, None))
    return found if most_s > 0 else None


def score_suite(results: Sequence[CaseResult]) -> SuiteScore:
    """The figures of a suite. Cases of weight 0 count in the rank correlation and in no error."""
    counted = [(result, abs(result.error)) for result in results if result.error is not None and result.case.weight > 0]
    errors = [error for _, error in counted]
    weights = [result.case.weight for result, _ in counted]
    widths = [width for result, _ in counted if (width := result.width_frac) is not None]
    pairs = [(result.predicted_s, result.case.measured_s) for result in results if result.predicted_s is not None]
    return SuiteScore(
        n_cases=len(results),
        n_failed=sum(result.predicted_s is None for result in results),
        mean=sum(e * w for e, w in zip(errors, weights, strict=True)) / sum(weights) if errors else None,
        geomean=geomean_error(errors, weights=weights) if errors else None,
        median=median_error(errors) if errors else None,
        p90=percentile(errors, _P90) if errors else None,
        worst=max(errors, default=None),
        spearman=_rank_correlation(pairs),
        inside_frac=fmean(result.inside for result, _ in counted) if counted else None,
        median_width_frac=median(widths) if widths else None,
    )
