"""More cases where the law fits worst: what a second, smaller plan of a family measures.

Candidates are fresh draws of the family's generators that belong to the cases to be fitted: what is held out stays a fair
draw of the first plan. Each is expected to err as the measured cases do that are most like it (same operator; sizes compared
by logarithms) under a fit that has not seen them. The worst are taken one by one; whoever resembles one already taken counts
less, so that a bad corner is covered and not hit again and again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np

from calibrate.cases import PLANS, Case, draw_cases, tensor_args
from calibrate.cases.case import TensorArg, case_from_json
from calibrate.fit_cpu import is_heldout
from calibrate.session import replace_file
from perfmodel.kernels.correction import Floats

EXTRA_SHARE = 0.1  # of a family's first plan: a full calibration of a CPU has ten minutes
CANDIDATE_STAGES = (1, 2, 3)  # of the generators' seeds
NEIGHBOURS = 4
SAME_OCTAVES = 1.0  # cases whose sizes differ by less than a factor of two together are much alike
STATE_OCTAVES = 2.0  # what a difference in state or layout counts

Draw = Callable[[str, int], Iterable[Case]]  # the cases of a family at a stage of its generators


def _on_cpu(family: str, stage: int) -> Iterable[Case]:
    return draw_cases(family, stage=stage)


def path_of(out: Path, family: str) -> Path:
    """Where the chosen cases of a family lie, one a line."""
    return out / "rounds" / f"{family}.more.jsonl"


def chosen(out: Path, family: str) -> list[Case]:
    """Cases that an earlier run chose; none before the first choice."""
    path = path_of(out, family)
    if not path.exists():
        return []
    return [case_from_json(line) for line in path.read_text(encoding="utf-8").splitlines()]


def choose(family: str, errors: Mapping[str, float], n_cases: int, draw: Draw = _on_cpu) -> list[Case]:
    """`n_cases` candidates of the family; `errors` are |log(predicted / measured)| of measured cases by their text.

    `draw` makes the candidates: the plan for a CPU, or what it becomes on a GPU.
    """
    known = [(case_from_json(text), error) for text, error in errors.items()]
    pool: dict[str, Case] = {}
    for stage in CANDIDATE_STAGES:
        drawn = ((case, case.to_json()) for case in draw(family, stage))
        pool |= {case.key: case for case, text in drawn if text not in errors and not is_heldout(text)}
    candidates = list(pool.values())
    score = np.array([expected_error(case, known) for case in candidates])
    return [candidates[index] for index in spread(candidates, score, min(n_cases, len(candidates)))]


def expected_error(case: Case, known: Sequence[tuple[Case, float]]) -> float:
    """Mean error of the most similar measured cases of the same operator; 0 if there is none."""
    alike = [(distance(case, other), error) for other, error in known if other.op == case.op]
    if not alike:
        return 0.0
    nearest = sorted(alike)[:NEIGHBOURS]
    weight = np.array([1.0 / (SAME_OCTAVES + far) for far, _ in nearest])
    return float(weight @ np.array([error for _, error in nearest]) / weight.sum())


def spread(cases: Sequence[Case], score: Floats, n_cases: int) -> list[int]:
    """Indices of the cases with the largest scores; a case near one already taken loses most of its score."""
    left = np.array(score, dtype=np.float64)
    taken: list[int] = []
    for _ in range(n_cases):
        best = int(np.argmax(left))
        taken.append(best)
        for index, case in enumerate(cases):
            if case.op == cases[best].op:
                left[index] *= 1.0 - np.exp(-distance(case, cases[best]) / SAME_OCTAVES)
        left[best] = -1.0
    return taken


def distance(a: Case, b: Case) -> float:
    """How unlike two cases of one operator are, in octaves of their sizes."""
    mine, other = tensor_args(a.args), tensor_args(b.args)
    sizes = sum(_octaves(x, y) for x, y in zip(mine, other, strict=False))
    layout = sum(x.order != y.order or x.dtype != y.dtype for x, y in zip(mine, other, strict=False))
    return sizes / max(len(mine), 1) + STATE_OCTAVES * (layout > 0) + STATE_OCTAVES * (a.state != b.state)


def _octaves(a: TensorArg, b: TensorArg) -> float:
    length = max(len(a.shape), len(b.shape))
    first, second = ((*arg.shape, *[1] * (length - len(arg.shape))) for arg in (a, b))
    return float(np.abs(np.log2(np.array(first) / np.array(second))).sum())


def extend(out: Path, family: str, errors: Mapping[str, float], draw: Draw = _on_cpu) -> int:
    """Chooses once and writes the choice whole; returns how many cases it has. A second call changes nothing.

    A family without a fit is not extended: its file is empty.
    """
    path = path_of(out, family)
    if not path.exists():
        total = sum(count for _, count in PLANS[family].values())
        cases = choose(family, errors, round(EXTRA_SHARE * total), draw) if errors else []
        replace_file(path, "".join(f"{case.to_json()}\n" for case in cases))
    return len(chosen(out, family))
