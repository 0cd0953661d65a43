"""How well live rankings of sharding plans held, as a table, Markdown or JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from statistics import fmean

from perfmodel.report.listing import render_rows
from perfmodel.units import format_percent, format_time
from perfmodel.validate.live_sharding import RankingScore

SCHEMA_VERSION = 1
COLUMNS = ("model", "plans", "chosen", "fastest", "slowest", "regret", "noise", "first holds", "Kendall tau")


def render_ranking(scores: Sequence[RankingScore], *, markdown: bool = False, as_json: bool = False) -> str:
    """One line a model, then the figures over all."""
    if as_json:
        return json.dumps({"schema_version": SCHEMA_VERSION, **figures(scores), "models": [asdict(s) for s in scores]})
    rows = [_cells(score) for score in scores]
    if markdown:
        lines = [_markdown(COLUMNS), _markdown(["---"] * len(COLUMNS)), *map(_markdown, rows)]
    else:
        lines = [render_rows([dict(zip(COLUMNS, row, strict=True)) for row in rows])]
    found = figures(scores)
    return "\n".join(
        (
            *lines,
            "",
            f"{len(scores)} models: the plan ranked first is the fastest or within noise of it in "
            f"{format_percent(found['top1_frac'])}, mean regret {format_percent(found['mean_regret_frac'])}, "
            f"mean Kendall tau {found['mean_tau']:.3f}",
            "",
        )
    )


def figures(scores: Sequence[RankingScore]) -> dict[str, float]:
    """Share of models whose first plan holds, mean regret, mean Kendall tau."""
    return {
        "top1_frac": fmean(score.is_best for score in scores),
        "mean_regret_frac": fmean(score.regret_frac for score in scores),
        "mean_tau": fmean(score.tau for score in scores),
    }


def _cells(score: RankingScore) -> list[str]:
    chosen = min(range(len(score.predicted_s)), key=score.predicted_s.__getitem__)
    return [
        score.name,
        str(len(score.measured_s)),
        format_time(score.measured_s[chosen]),
        format_time(min(score.measured_s)),
        format_time(max(score.measured_s)),
        format_percent(score.regret_frac),
        format_percent(score.noise_frac),
        "yes" if score.is_best else "no",
        f"{score.tau:.2f}",
    ]


def _markdown(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
