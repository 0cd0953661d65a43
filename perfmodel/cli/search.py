"""`perfmodel search`: the best plans for a model on a machine."""

from __future__ import annotations

from typing import Any

import click

from perfmodel.cli.completion import MODEL, TOPOLOGY
from perfmodel.cli.console import Waiting, from_stdin, stdout_color, stdout_width


@click.command(epilog="Example: perfmodel search --model llama3_8b --topo dgx_h100 --nodes 16")
@click.option("--model", type=MODEL, required=True, help="Shipped name, YAML file, or Hugging Face config.json.")
@click.option("--topo", "topology", type=TOPOLOGY, required=True, help="Shipped name or YAML file of the machine.")
@click.option("--nodes", type=int, help="Use this many nodes of the topology's kind.")
@click.option("--space", type=click.Path(dir_okay=False), help="YAML file: plan keys with the values to combine.")
@click.option("--global-batch", type=int, help="Samples of an iteration over all ranks.")
@click.option(
    "--objective",
    type=click.Choice(["throughput", "time", "memory"]),
    default="throughput",
    show_default=True,
    help="What the best plan is best in.",
)
@click.option(
    "--budget", help="Most plans to simulate (64) or a time (30s); as many plans as a proof takes if not given."
)
@click.option("--top", type=click.IntRange(min=1), default=10, show_default=True, help="How many plans to print.")
@click.option("--precision", help="fp32, tf32, amp_fp16, amp_bf16, bf16 or fp16, instead of the model file's.")
@click.option("--seq-len", type=int, help="Sequence length, instead of the model file's.")
@click.option("--db", type=click.Path(), help="Device database to use instead of the shipped one.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of the table.")
def search(model: str, topology: str, *, as_json: bool, **options: Any) -> None:
    """Find the best plans for MODEL on TOPOLOGY, and say of each why it is behind the first.

    Without --space: tensor parallel inside a host, pipeline stages, ZeRO and FSDP, recomputation and micro-batches of 1, 2
    and 4, all at one global batch. A plan that does not fit the memory is refused; what cannot be among the best by its
    lower bound is not simulated. Exit codes: 0 an answer, 2 wrong usage or input, or no plan works.
    """
    from perfmodel.autotune.front import search as find
    from perfmodel.report.search import render_search

    sources = from_stdin({"--model": model, "--topo": topology})
    with Waiting(f"searching plans for {model} on {topology}") as waiting:
        found = find(
            sources["--model"],
            sources["--topo"],
            options.pop("space"),
            objective=options.pop("objective"),
            budget=options.pop("budget"),
            progress=lambda stage, done, total: waiting.advance(0, f"{stage} {done} of {total}"),
            **options,
        )
    if as_json:
        click.echo(found.to_json())
    else:
        click.echo(render_search(found.ranked, found.summary(), width=stdout_width(), color=stdout_color()), nl=False)
