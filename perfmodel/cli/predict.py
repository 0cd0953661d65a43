"""`perfmodel predict`: the main job."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from perfmodel.cli.completion import MODEL, PLAN, TOPOLOGY
from perfmodel.cli.console import OUT_FILE, PICTURE, Waiting, from_stdin, note, stdout_color, stdout_width
from perfmodel.errors import ConfigError

if TYPE_CHECKING:
    from perfmodel.pipeline.run import Run

Key = TypeVar("Key")


@click.command(
    epilog="Example: perfmodel predict --model dlrm.yaml --topo dgx.yaml --json",
)
@click.option("--model", type=MODEL, required=True, help="Shipped name, YAML file, or Hugging Face config.json.")
@click.option("--topo", "topology", type=TOPOLOGY, required=True, help="Shipped name or YAML file of the machine.")
@click.option(
    "--plan",
    type=PLAN,
    default="ddp",
    show_default=True,
    help="Shipped name, YAML file, or text such as ddp,bucket_cap=50MiB.",
)
@click.option("--nodes", type=int, help="Use this many nodes of the topology's kind.")
@click.option("--batch", type=int, help="Samples per rank, instead of the model file's.")
@click.option("--precision", help="fp32, tf32, amp_fp16, amp_bf16, bf16 or fp16, instead of the model file's.")
@click.option("--seq-len", type=int, help="Sequence length, instead of the model file's.")
@click.option(
    "--values",
    type=click.Choice(["meta", "real"]),
    default="meta",
    show_default=True,
    help="Extract on tensors without values, or on real CPU tensors where the model reads values.",
)
@click.option(
    "--mode",
    type=click.Choice(["eager", "cuda_graph", "compile"]),
    default="eager",
    show_default=True,
    help="How the step is issued.",
)
@click.option(
    "--input-copies",
    type=click.Choice(["pinned", "pageable", "prefetch"]),
    help="How a batch reaches the device: behind the kernels, behind them and the host waits, or during the step before. "
    "[default: the model file's loop.input_copies, else pinned]",
)
@click.option("--what-if", multiple=True, help="Such as 'gemm x0.5', 'nvlink x2', 'no host'; may be repeated.")
@click.option(
    "--from-trace",
    multiple=True,
    type=click.Path(),
    help="Kineto traces of a run of this model: its kernels, collectives and host scale the prediction's.",
)
@click.option("--trace-batch", type=int, help="Samples per rank of the traced run, if not those of the prediction.")
@click.option("--trace-topo", help="Machine of the traced run, if not that of the prediction.")
@click.option("--trace-plan", help="Plan of the traced run, if not that of the prediction.")
@click.option("--straggler", "stragglers", multiple=True, help="RANK:FACTOR, such as 3:1.1; may be repeated.")
@click.option("--jitter", multiple=True, help="KIND=FRACTION, such as comm=0.1 (compute, comm, host, copy, rank).")
@click.option("--loader", help="Data loader of a rank, such as 'workers=4,batch=120ms' or with ',prefetch=2'.")
@click.option("--no-overlap-slowdown", is_flag=True, help="Compute and communication do not slow each other.")
@click.option("--db", type=click.Path(), help="Device database to use instead of the shipped one.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of the table.")
@click.option(
    "--trace",
    "trace_path",
    type=OUT_FILE,
    help="Also write a trace that Perfetto opens.",
)
@click.option("--html", "html_path", type=OUT_FILE, help="Also write a page with every picture.")
@click.option(
    "--plot",
    "plot_path",
    type=PICTURE,
    help="Also write the pictures, such as out.svg: out-breakdown.svg, out-timeline.svg and so on.",
)
@click.option("--strict", is_flag=True, help="Fail if any time is not from a calibrated model.")
@click.option("--check", is_flag=True, help="Verify the simulated timeline before answering.")
@click.option("--no-cache", is_flag=True, help="Extract the model anew instead of using the graph cache.")
def predict(model: str, topology: str, plan: str, **options: Any) -> None:
    """Predict the iteration time of MODEL on TOPOLOGY, why it is that long, and how sure the answer is.

    The answer goes to stdout, as a table or with --json. --html, --plot and --trace also write files; a file is written
    whole or not at all. A model, plan or topology is a shipped name (see `perfmodel models`), a YAML file, or - for a YAML
    file on stdin. Exit codes: 0 an answer, 2 wrong usage or input, or a plan that does not fit.
    """
    from perfmodel.api import predict_run
    from perfmodel.pipeline.loader import parse_loader
    from perfmodel.report.table import render_table

    files = {name: options.pop(f"{name}_path") for name in ("trace", "html", "plot")}
    as_json = options.pop("as_json")
    options["stragglers"] = dict(_pair(text, ":", "--straggler", int) for text in options["stragglers"])
    options["jitter"] = dict(_pair(text, "=", "--jitter", str) for text in options["jitter"])
    options["loader"] = parse_loader(options["loader"]) if options["loader"] else None
    options["overlap"] = not options.pop("no_overlap_slowdown")
    from_trace = {key: options.pop(key) for key in ("from_trace", "trace_batch", "trace_topo", "trace_plan")}
    if from_trace["from_trace"]:
        from perfmodel.cli.from_trace import trace_what_ifs

        options["what_if"] = (*trace_what_ifs(model, topology, plan, {**options, **from_trace}), *options["what_if"])
    sources = from_stdin({"--model": model, "--topo": topology, "--plan": plan})
    if options["values"] == "real":
        note("--values real runs a step of the model on this CPU; a large model takes minutes and its size in memory")
    with Waiting(f"predicting {model} on {topology}"):
        run = predict_run(sources["--model"], sources["--topo"], sources["--plan"], **options)
        _write(run, files)
    if as_json:
        click.echo(run.prediction.to_json())
    else:
        click.echo(render_table(run.prediction, width=stdout_width(), color=stdout_color()), nl=False)


def _write(run: Run, files: dict[str, Path | None]) -> None:
    """Writes the files that were asked for."""
    from perfmodel.report.write import write_text

    if files["trace"] is not None:
        from perfmodel.report.trace import render_trace

        write_text(files["trace"], render_trace(run))
    if files["html"] is not None:
        from perfmodel.report.html import render_page

        write_text(files["html"], render_page(run))
    if files["plot"] is not None:
        from perfmodel.report.plot import write_plots

        for path in write_plots(run, files["plot"]):
            note(f"wrote {path}")


def _pair(text: str, sign: str, option: str, kind: Callable[[str], Key]) -> tuple[Key, float]:
    """`3:1.1` -> (3, 1.1). Raises ConfigError."""
    left, found, right = text.partition(sign)
    try:
        if found:
            return kind(left), float(right)
    except ValueError:
        pass
    raise ConfigError(f"{option}: found {text!r}, allowed {'RANK:FACTOR' if sign == ':' else 'KIND=FRACTION'}")
