"""`perfmodel trace ...`: real traces in, explained; predictions out in the same form."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from perfmodel.utilisation.levels import Utilisation

PIPE_WIDTH = 160  # columns of tables where stdout is no terminal

_FILES = click.argument("files", nargs=-1, required=True, type=click.Path(path_type=Path))
_SALVAGE = click.option("--salvage", is_flag=True, help="Keep whole events of a file that is cut off or damaged.")
_JSON = click.option("--json", "as_json", is_flag=True, help="Print JSON instead of tables.")


def table_width() -> int:
    """Columns for tables."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else PIPE_WIDTH


@click.group()
def trace() -> None:
    """Read profiler traces; explain them; make them from predictions."""


@trace.command(epilog="Example: perfmodel trace load rank*.json.gz")
@_FILES
@_SALVAGE
@_JSON
def load(files: tuple[Path, ...], *, salvage: bool, as_json: bool) -> None:
    """Load FILES (Kineto traces of one or more ranks, or execution traces) and say where their steps' time goes."""
    from perfmodel.report.trace_load import load_to_dict, render_load
    from perfmodel.traces.explain import explain_lateness, explain_steps
    from perfmodel.traces.ranks import load_job

    executed, timed = _split(files)
    for path in executed:
        _show_execution_trace(path, salvage=salvage, as_json=as_json)
    if not timed:
        return
    job = load_job(timed, salvage=salvage)
    steps, late = explain_steps(job), explain_lateness(job)
    if as_json:
        click.echo(json.dumps(load_to_dict(job, steps, late), indent=2))
    else:
        click.echo(render_load(job, steps, late, table_width()), nl=False)


@trace.command(
    epilog="Example: perfmodel trace export --model gpt2 --topo dgx_a100 --out gpt2.json --chakra gpt2.et.json"
)
@click.option("--model", required=True, help="Shipped name, YAML file, or Hugging Face config.json.")
@click.option("--topo", "topology", required=True, help="Shipped name or YAML file of the machine.")
@click.option("--plan", default="ddp", show_default=True, help="Shipped name, YAML file or text.")
@click.option("--batch", type=int, help="Samples per rank, instead of the model file's.")
@click.option("--steps", type=click.IntRange(1, 100), default=3, show_default=True, help="Iterations in the trace.")
@click.option(
    "--out", "out_path", type=click.Path(path_type=Path), help="Kineto JSON; {rank} in it for several rank classes."
)
@click.option("--chakra", "chakra_path", type=click.Path(path_type=Path), help="Chakra execution trace, as JSON.")
@click.option("--db", type=click.Path(), help="Device database to use instead of the shipped one.")
def export(
    model: str,
    topology: str,
    plan: str,
    *,
    steps: int,
    out_path: Path | None,
    chakra_path: Path | None,
    **options: object,
) -> None:
    """Write a prediction as traces that profiler tools (and this program) read: one file for each class of ranks."""
    from perfmodel.api import predict_run
    from perfmodel.report.write import write_text
    from perfmodel.traces.execution_trace import chakra_document, chakra_json
    from perfmodel.traces.export import kineto_documents, kineto_json

    if out_path is None and chakra_path is None:
        raise click.UsageError("--out or --chakra is needed")
    run = predict_run(model, topology, plan, **{key: value for key, value in options.items() if value is not None})  # type: ignore[arg-type] # click checked the types
    ranks = [lowered.rank_class.representative for lowered in run.classes]
    if out_path is not None:
        for rank, document in zip(ranks, kineto_documents(run, steps), strict=True):
            write_text(_path_of(out_path, rank, len(ranks)), kineto_json(document))
    if chakra_path is not None:
        for index, rank in enumerate(ranks):
            write_text(_path_of(chakra_path, rank, len(ranks)), chakra_json(chakra_document(run, index)))


def _path_of(path: Path, rank: int, n_classes: int) -> Path:
    if "{rank}" in path.name:
        return path.with_name(path.name.replace("{rank}", str(rank)))
    return path if n_classes == 1 or rank == 0 else path.with_name(f"rank{rank}_{path.name}")


def _split(files: Sequence[Path]) -> tuple[list[Path], list[Path]]:
    """Execution traces, and the others."""
    from perfmodel.traces.json_stream import list_key_of

    executed = [path for path in files if list_key_of(path, ("traceEvents", "nodes")) == "nodes"]
    return executed, [path for path in files if path not in executed]


def _show_execution_trace(path: Path, *, salvage: bool, as_json: bool) -> None:
    from perfmodel.report.trace_load import execution_trace_to_dict, render_execution_trace
    from perfmodel.traces.execution_trace import read_execution_trace

    found = read_execution_trace(path, salvage=salvage)
    click.echo(json.dumps(execution_trace_to_dict(found), indent=2) if as_json else render_execution_trace(found))


@trace.command(epilog="Example: perfmodel trace utilisation rank0.json.gz --picture utilisation.png")
@_FILES
@_SALVAGE
@_JSON
@click.option("--device", help="Device of the database, if the trace does not name one that is in it.")
@click.option("--db", type=click.Path(), help="Device database to use instead of the shipped one.")
@click.option(
    "--counters", multiple=True, type=click.Path(path_type=Path), help="ncu --csv, dcgmi or nvidia-smi dmon log."
)
@click.option("--picture", type=click.Path(dir_okay=False, path_type=Path), help="Also write the table as a PNG.")
def utilisation(
    files: tuple[Path, ...], *, salvage: bool, as_json: bool, device: str | None, db: str | None, **more: object
) -> None:
    """Say how well the steps in FILES use each level of the machine: whole, by phase, by module, by kernel family."""
    from perfmodel.traces.ranks import load_job
    from perfmodel.utilisation.devices import device_of
    from perfmodel.utilisation.levels import utilisation_of

    job = load_job(files, salvage=salvage)
    show_utilisation([utilisation_of(t, device_of(t, device, db)) for t in job.traces], as_json=as_json, **more)


def show_utilisation(found: Sequence[Utilisation], *, as_json: bool, **more: object) -> None:
    """Prints utilisation of some ranks; `counters` and `picture` as in the command."""
    from perfmodel.report.utilisation import render_utilisation, utilisation_to_dict, write_picture
    from perfmodel.utilisation.counters import read_counters, with_counters

    paths: Any = more.get("counters") or ()
    picture: Any = more.get("picture")
    rows = [with_counters(row, [read_counters(path) for path in paths]) for row in found]
    if picture is not None:
        write_picture(rows[0], picture)
    if as_json:
        click.echo(json.dumps([utilisation_to_dict(row) for row in rows], indent=2))
        return
    for row in rows:
        click.echo(render_utilisation(row, table_width()))


@trace.command(
    epilog="Example: perfmodel trace calibrate rank*.json.gz --out my_db && perfmodel predict ... --db my_db"
)
@_FILES
@_SALVAGE
@click.option(
    "--out", required=True, type=click.Path(path_type=Path), help="New folder: a device database with this machine."
)
@click.option("--device", help="Device of the database, if the trace does not name one that is in it.")
@click.option("--db", type=click.Path(), help="Device database to start from instead of the shipped one.")
def calibrate(files: tuple[Path, ...], *, salvage: bool, out: Path, device: str | None, db: str | None) -> None:
    """Write the host overheads, kernel times and collective times in FILES as a device database of its own."""
    from perfmodel.traces.overlay import write_overlay
    from perfmodel.traces.ranks import load_job
    from perfmodel.units import format_time
    from perfmodel.utilisation.devices import device_of

    job = load_job(files, salvage=salvage)
    base = device_of(job.traces[0], device, db)
    found = write_overlay(job, base, out, db)
    for name in ("op_dispatch_s", "backward_op_s", "launch_s", "launch_latency_s", "sync_s"):
        before, after = getattr(base.host, name), getattr(found.host, name)
        click.echo(f"{name.removesuffix('_s'):<16}{format_time(after):>10}   (before {format_time(before)})")
    click.echo(f"written: {out} (device {found.name}); use it with --db {out}")
