"""Case plans: per family, generators of operator calls and how many of each a full calibration draws first."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

from calibrate.cases import gemm, heavy, pointwise, rows
from calibrate.cases.case import Case, Generator, Limits, Sizes, TensorArg, tensor_args

__all__ = ["PLANS", "Case", "Limits", "Plan", "Sizes", "TensorArg", "draw_cases", "plan_sha256", "tensor_args"]

SEED = 20261129
Plan = Mapping[str, tuple[Generator, int]]
PLANS: Mapping[str, Plan] = {
    "gemm": gemm.GENERATORS,
    "elementwise": pointwise.FORWARD,
    "optimizer": pointwise.OPTIMIZER,
    "random": pointwise.RANDOM,
    "copy": {**pointwise.FILL, **rows.COPY},
    "reduction": rows.REDUCTION,
    "norm": rows.NORM,
    "softmax": rows.SOFTMAX,
    "loss": {**pointwise.LOSS, **rows.LOSS},
    "index": rows.INDEX,
    "pool": rows.POOL,
    "embedding": heavy.EMBEDDING,
    "conv": heavy.CONV,
    "attention": heavy.ATTENTION,
}


def draw_cases(
    family: str,
    *,
    share: float = 1.0,
    stage: int = 0,
    limits: Limits = Limits(),  # noqa: B008 -- frozen
    more: Plan | None = None,
) -> list[Case]:
    """Distinct cases of one family, the same for the same arguments; `stage` 0 is the first plan, `more` more generators."""
    found: dict[str, Case] = {}
    for name, (generator, count) in {**PLANS[family], **(more or {})}.items():
        seed = int.from_bytes(hashlib.sha256(f"{SEED}/{family}/{name}/{stage}".encode()).digest()[:8], "big")
        draw = Sizes(seed, limits)
        for _ in range(max(round(count * share), 4)):
            case = generator(draw)
            found.setdefault(case.key, case)
    return list(found.values())


def plan_sha256(cases: Sequence[Case]) -> str:
    """Hash of a case plan."""
    return hashlib.sha256("\n".join(sorted(case.to_json() for case in cases)).encode()).hexdigest()
