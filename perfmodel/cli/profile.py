"""`perfmodel profile -- python train.py`: profile a few steady steps of a script, and diagnose them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from perfmodel.cli.trace import table_width

if TYPE_CHECKING:
    from perfmodel.profiling.run import StepTimes

_STEPS = click.IntRange(1, 10_000)


@click.command(
    context_settings={"ignore_unknown_options": True},
    epilog="Example: perfmodel profile --out runs/a -- torchrun --nproc-per-node 8 train.py",
)
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
@click.option(
    "--out", "folder", default="perfmodel_profile", show_default=True, help="Folder for traces and diagnosis."
)
@click.option("--warm-up", type=_STEPS, default=10, show_default=True, help="Steps to pass over first.")
@click.option(
    "--plain", type=_STEPS, default=5, show_default=True, help="Steps to time without profiler, before and after."
)
@click.option("--steps", "active", type=_STEPS, default=5, show_default=True, help="Steps to profile.")
@click.option(
    "--rank", "ranks", type=click.IntRange(0), multiple=True, help="Profile this rank; may be repeated. Default: all."
)
@click.option("--stacks", is_flag=True, help="Record modules and stacks (dearer).")
@click.option("--memory", is_flag=True, help="Record allocations (dearer).")
@click.option("--keep-running", is_flag=True, help="Let the script go on behind the window instead of ending it.")
@click.option("--device", help="Device the script runs on, if its trace does not name one of the database.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of text.")
def profile(command: tuple[str, ...], *, device: str | None, as_json: bool, **options: Any) -> None:
    """Run COMMAND (a training script, also under torchrun) and profile a few of its steps once they are steady.

    A step is from one optimizer step to the next. The profiler's own cost is told by steps timed without it. Traces, step
    times and the diagnosis are written into a folder.
    """
    from perfmodel.cli.diagnose import diagnose_traces
    from perfmodel.profiling.run import run_profiled
    from perfmodel.profiling.settings import ProfileSettings
    from perfmodel.report.diagnosis import diagnosis_to_dict, render_diagnosis
    from perfmodel.report.write import write_text

    settings = ProfileSettings(**{**options, "ranks": tuple(options["ranks"])})
    profiled = run_profiled(command, settings)
    found = diagnose_traces(list(profiled.traces), salvage=False, device=device, db=None)
    body = {**diagnosis_to_dict(found), "steps": [_times(row) for row in profiled.times]}
    write_text(Path(settings.folder) / "diagnosis.json", json.dumps(body, indent=2))
    text = "".join(_line(row) for row in profiled.times) + "\n" + render_diagnosis(found, table_width())
    write_text(Path(settings.folder) / "diagnosis.txt", text)
    click.echo(json.dumps(body, indent=2) if as_json else text, nl=as_json)
    click.echo(f"traces: {', '.join(map(str, profiled.traces))}", err=True)


def _times(row: StepTimes) -> dict[str, object]:
    return {
        "rank": row.rank,
        "plain_s": row.plain_s,
        "profiled_s": list(row.profiled_s),
        "before_s": list(row.before_s),
        "after_s": list(row.after_s),
        "overhead_frac": row.overhead_frac,
        "drift_frac": row.drift_frac,
    }


def _line(row: StepTimes) -> str:
    from statistics import median

    from perfmodel.units import format_percent, format_time

    return (
        f"rank {row.rank}: {format_time(row.plain_s)} a step without the profiler, "
        f"{format_time(median(row.profiled_s))} with it "
        f"({format_percent(row.overhead_frac)} overhead; {format_percent(row.drift_frac)} drift from before to after)\n"
    )
