"""Rows of an accuracy table: predicted against measured; errors are |predicted / measured - 1|."""

from __future__ import annotations

from perfmodel.units import format_percent
from perfmodel.validate.score_collectives import Score as CollectiveScore
from perfmodel.validate.score_kernels import Score as KernelScore


def kernel_row(score: KernelScore) -> dict[str, str]:
    """Errors of one device and kernel family; `published` is the mean error of the best published model."""
    published = score.published_frac
    return {
        "device": score.device,
        "family": score.family,
        "subset": score.subset,
        **_errors(score),
        "roofline median": format_percent(score.roofline_median),
        "published mean (in / out)": " / ".join(map(format_percent, published)) if published else "-",
    }


def collective_row(score: CollectiveScore) -> dict[str, str]:
    """Errors of one machine and collective."""
    sources = ", ".join(f"{n} {name}" for name, n in score.sources.items())
    return {"machine": score.system, "collective": score.op, **_errors(score), "priced by": sources}


def _errors(score: KernelScore | CollectiveScore) -> dict[str, str]:
    return {
        "rows": str(score.n_rows),
        "median": format_percent(score.median),
        "mean": format_percent(score.mean),
        "p90": format_percent(score.p90),
        "worst": format_percent(score.worst),
        "in range": format_percent(score.inside_frac),
    }
