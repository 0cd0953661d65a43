"""`perfmodel diagnose`: causes of low utilisation in a trace or a model, with fixes and their gains."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from perfmodel.cli.trace import table_width
from perfmodel.errors import ConfigError

if TYPE_CHECKING:
    from perfmodel.diagnose.finding import Finding
    from perfmodel.pipeline.run import Run

_TRACE_SUFFIXES = (".json", ".json.gz", ".gz")


@click.command(
    epilog="Example: perfmodel diagnose rank*.json.gz    or: perfmodel diagnose gpt2 --topo dgx_a100 --batch 1"
)
@click.argument("targets", nargs=-1)
@click.option("--topo", "topology", help="Machine of a model: shipped name or YAML file.")
@click.option("--plan", default="ddp", show_default=True, help="Plan of a model: shipped name, YAML file or text.")
@click.option("--nodes", type=int, help="Nodes of the machine.")
@click.option("--batch", type=int, help="Samples per rank, instead of the model file's.")
@click.option("--precision", help="fp32, tf32, amp_fp16, amp_bf16, bf16 or fp16, instead of the model file's.")
@click.option("--mode", type=click.Choice(["eager", "cuda_graph", "compile"]), help="How a model's step is issued.")
@click.option("--device", help="Device of a trace, if it does not name one of the database.")
@click.option("--db", type=click.Path(), help="Device database to use instead of the shipped one.")
@click.option("--salvage", is_flag=True, help="Keep whole events of a trace that is cut off or damaged.")
@click.option(
    "--live", is_flag=True, help="Instead: make known mistakes on this CPU, mend them, compare gains. TARGETS: cases."
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of text.")
def diagnose(targets: tuple[str, ...], *, as_json: bool, **options: Any) -> None:
    """Find what keeps TARGETS (traces of the ranks of one run, or one model) slow, and what mending it gains.

    Exit code 0 with or without findings.
    """
    salvage, device = options.pop("salvage"), options.pop("device")
    if options.pop("live"):
        _live(targets, as_json=as_json)
        return
    if not targets:
        raise click.UsageError("missing TARGETS: traces of one run, or a model")
    given = {key: value for key, value in options.items() if value is not None}
    paths = [Path(target) for target in targets]
    if "topology" not in given and all(path.name.endswith(_TRACE_SUFFIXES) and path.exists() for path in paths):
        show(diagnose_traces(paths, salvage=salvage, device=device, db=given.get("db")), as_json=as_json)
        return
    if len(targets) > 1:
        missing = [str(path) for path in paths if not path.exists()]
        raise ConfigError([f"{name}: no such file" for name in missing] or "found several targets, allowed one model")
    if "topology" not in given:
        raise ConfigError(
            f"{targets[0]}: no such trace; a model needs --topo NAME (perfmodel topologies lists the shipped ones)"
        )
    show(_of_model(targets[0], given), as_json=as_json)


def diagnose_traces(paths: Sequence[Path], *, salvage: bool, device: str | None, db: str | None) -> tuple[Finding, ...]:
    """Findings of the traces of one run."""
    from perfmodel.diagnose.diagnose import diagnose as find
    from perfmodel.traces.ranks import load_job
    from perfmodel.utilisation.devices import device_of

    job = load_job(paths, salvage=salvage)
    return find(job, device_of(job.traces[0], device, db))


def show(found: Sequence[Finding], *, as_json: bool) -> None:
    """Prints findings."""
    from perfmodel.report.diagnosis import diagnosis_to_dict, render_diagnosis

    if as_json:
        click.echo(json.dumps(diagnosis_to_dict(found), indent=2))
    else:
        click.echo(render_diagnosis(found, table_width()), nl=False)


def _of_model(model: str, options: Mapping[str, Any]) -> tuple[Finding, ...]:
    from perfmodel.api import predict_run
    from perfmodel.diagnose.model import diagnose_run

    known = dict(options)
    topology, plan = known.pop("topology"), known.pop("plan")

    def again(changed: Mapping[str, Any]) -> Run:
        return predict_run(model, topology, plan, **{**known, **changed})

    return diagnose_run(again({}), again)


def _live(names: Sequence[str], *, as_json: bool) -> None:
    from perfmodel.diagnose.live import run_fixes
    from perfmodel.errors import suggest
    from perfmodel.profiling.live_cases import CASES
    from perfmodel.report.diagnosis import fixes_to_dict, render_fixes

    unknown = [name for name in names if name not in CASES]
    if unknown:
        raise ConfigError(
            [f"--live: found {name!r}, allowed {', '.join(CASES)}{suggest(name, CASES)}" for name in unknown]
        )
    found = run_fixes(names or tuple(CASES), lambda text: click.echo(text, err=True))
    click.echo(
        json.dumps(fixes_to_dict(found), indent=2) if as_json else render_fixes(found, table_width()), nl=as_json
    )
