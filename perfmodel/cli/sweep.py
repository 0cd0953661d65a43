"""`perfmodel sweep`: every plan of a space in a table."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from perfmodel.cli.completion import MODEL, TOPOLOGY
from perfmodel.cli.console import OUT_FILE, Waiting, note


@click.command(epilog="Example: perfmodel sweep --model gpt2 --topo dgx_h100 --nodes 4 --jobs 8 --out plans.csv")
@click.option("--model", type=MODEL, required=True, help="Shipped name, YAML file, or Hugging Face config.json.")
@click.option("--topo", "topology", type=TOPOLOGY, required=True, help="Shipped name or YAML file of the machine.")
@click.option("--nodes", type=int, help="Use this many nodes of the topology's kind.")
@click.option("--space", type=click.Path(dir_okay=False), help="YAML file: plan keys with the values to combine.")
@click.option("--global-batch", type=int, help="Samples of an iteration over all ranks.")
@click.option("--plans", type=click.IntRange(min=1), help="Only so many plans, evenly spread over the space.")
@click.option(
    "--detail",
    type=click.Choice(["quick", "full"]),
    default="quick",
    show_default=True,
    help="The time of each plan within 0.1 % of its prediction's; or full predictions, with their ranges.",
)
@click.option(
    "--backend",
    type=click.Choice(["loky", "dask", "ray"]),
    default="loky",
    show_default=True,
    help="Processes of this machine, or a Dask or Ray cluster, through joblib.",
)
@click.option("--jobs", type=click.IntRange(min=1), default=1, show_default=True, help="Processes that predict.")
@click.option("--scheduler", help="Address of a running Dask scheduler, such as tcp://host:8786.")
@click.option("--precision", help="fp32, tf32, amp_fp16, amp_bf16, bf16 or fp16, instead of the model file's.")
@click.option("--seq-len", type=int, help="Sequence length, instead of the model file's.")
@click.option("--db", type=click.Path(), help="Device database to use instead of the shipped one.")
@click.option("--out", type=OUT_FILE, required=True, help="Table to write: .csv or .parquet.")
def sweep(model: str, topology: str, **options: Any) -> None:
    """Predict every plan of a space for MODEL on TOPOLOGY into a table.

    A sweep that is broken off goes on where it was when it is started again with the same options. Without --space, the
    space is that of `perfmodel search`. Exit codes: 0 the table is written, 2 wrong usage or input.
    """
    from perfmodel.autotune.front import run_sweep

    out: Path = options.pop("out")
    with Waiting(f"sweeping plans for {model} on {topology}") as waiting:
        rows = run_sweep(
            model,
            topology,
            out,
            progress=lambda done, total: waiting.advance(0, f"{done} of {total} plans"),
            **{name: value for name, value in options.items() if value is not None},
        )
    n_ok = sum(row["status"] == "ok" for row in rows)
    note(f"wrote {out}: {n_ok} plans, {len(rows) - n_ok} refused")
