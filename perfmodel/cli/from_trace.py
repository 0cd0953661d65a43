"""What `predict --from-trace` adds to a prediction: factors from a profiled run, as what-ifs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from perfmodel.pipeline.run import Run
    from perfmodel.utilisation.from_trace import Factors

_RUN_ONLY = ("what_if", "stragglers", "jitter", "loader", "check", "strict", "nodes", "mode")


def trace_what_ifs(model: str, topology: str, plan: str, options: Mapping[str, Any]) -> tuple[str, ...]:
    """The what-ifs that traces give; `options` are those of `predict`, with `from_trace`, `trace_batch` and so on.

    The traced configuration is predicted (the model at --trace-batch on --trace-topo under --trace-plan, each as in the
    prediction unless given) and compared; words that the new configuration has not are left out.
    """
    from perfmodel.api import predict_run
    from perfmodel.traces.ranks import load_job
    from perfmodel.utilisation.from_trace import find_factors

    own = ("from_trace", "trace_batch", "trace_topo", "trace_plan")
    known = {key: value for key, value in options.items() if key not in (*own, *_RUN_ONLY)}
    traced = {**known, "batch": options["trace_batch"] or options.get("batch"), "mode": options.get("mode", "eager")}
    job = load_job([Path(path) for path in options["from_trace"]])
    where = options["trace_topo"] or topology
    factors = find_factors(job, predict_run(model, where, options["trace_plan"] or plan, **traced))
    new = predict_run(
        model, topology, plan, **{**known, "mode": options.get("mode", "eager"), "nodes": options.get("nodes")}
    )
    used = _words(new)
    _say(factors, [word for word in factors.by_word if word not in used])
    return tuple(f"{word} x{factor:.6g}" for word, factor in factors.by_word.items() if word in used)


def _words(run: Run) -> set[str]:
    """Families, ops and collectives of a prediction, and the host of a CUDA one."""
    found: set[str] = set()
    for lowered in run.classes:
        numbers = {*lowered.tasks.family.tolist(), *lowered.prices.of_events("label").tolist()}
        found |= {lowered.tasks.names[int(number)] for number in numbers}
    return found


def _say(factors: Factors, unused: Sequence[str]) -> None:
    from perfmodel.units import format_time

    click.echo(
        f"from trace: {format_time(factors.measured_step_s, 4)} a step measured, {format_time(factors.predicted_step_s, 4)} "
        f"predicted; factors {', '.join(factors.what_ifs())}",
        err=True,
    )
    if factors.unmatched:
        click.echo(f"from trace: on one side only, and left as predicted: {', '.join(factors.unmatched)}", err=True)
    if unused:
        click.echo(f"from trace: not part of this prediction: {', '.join(unused)}", err=True)
