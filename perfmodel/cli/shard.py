"""`perfmodel shard`: find and rank embedding-sharding plans."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from perfmodel.cli.completion import MODEL, TOPOLOGY
from perfmodel.cli.console import OUT_FILE

if TYPE_CHECKING:
    from perfmodel.sharding.rank import Ranking

FACTORS = (0.5, 1.0, 2.0)  # of the batch, in a sensitivity


def _shared(command: Any) -> Any:
    for option in reversed(
        (
            click.option(
                "--model", type=MODEL, required=True, help="Shipped name or YAML file of a model with tables."
            ),
            click.option("--topo", "topology", type=TOPOLOGY, required=True, help="Shipped name or YAML file."),
            click.option("--nodes", type=int, help="Use this many nodes of the topology's kind."),
            click.option("--batch", type=int, help="Samples per rank, instead of the model file's."),
            click.option("--db", type=click.Path(), help="Device database to use instead of the shipped one."),
            click.option("--json", "as_json", is_flag=True, help="Print JSON instead of tables."),
        )
    ):
        command = option(command)
    return command


def _searching(command: Any) -> Any:
    for option in reversed(
        (
            click.option("--budget", default="30 s", show_default=True, help="Time for search and simulation."),
            click.option("--top", type=click.IntRange(1), default=10, show_default=True, help="Plans to show."),
            click.option("--seed", type=int, default=0, show_default=True, help="Of the search's random choices."),
            click.option("--kernels", default="fused", show_default=True, help="Kernels to choose from, by comma."),
            click.option("--constraints", type=click.Path(), help="YAML file: what each table may do."),
            click.option("--base", default="ddp", show_default=True, help="Plan with everything but the placement."),
            click.option("--out", type=OUT_FILE, help="Write the best plan: YAML, or JSON for .json."),
        )
    ):
        command = option(command)
    return command


@click.group(invoke_without_command=True, epilog="Example: perfmodel shard --model dlrm --topo dgx --budget 30s")
@click.option("--plans", help="Plan files to rank too, by comma.")
@_searching
@click.option("--model", type=MODEL, help="Shipped name or YAML file of a model with tables.")
@click.option("--topo", "topology", type=TOPOLOGY, help="Shipped name or YAML file of the machine.")
@click.option("--nodes", type=int, help="Use this many nodes of the topology's kind.")
@click.option("--batch", type=int, help="Samples per rank, instead of the model file's.")
@click.option("--db", type=click.Path(), help="Device database to use instead of the shipped one.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of tables.")
@click.pass_context
def shard(context: click.Context, /, plans: str | None, **options: Any) -> None:
    """Find embedding-sharding plans, and rank them by the simulated iteration time of the whole model."""
    if context.invoked_subcommand is not None:
        return
    for name, flag in (("model", "--model"), ("topology", "--topo")):
        if options[name] is None:
            raise click.UsageError(f"missing option '{flag}'", context)
    given = [word.strip() for word in (plans or "").split(",") if word.strip()]
    _show(_ranked(given, options), options)


@shard.command(epilog="Example: perfmodel shard explain plan.yaml --model dlrm --topo dgx")
@click.argument("plan")
@_shared
def explain(plan: str, **options: Any) -> None:
    """Say where each table of PLAN lies, what each rank does, and what bounds the iteration."""
    from perfmodel.report.sharding import plain_ranking, render_plan

    ranking = _simulated([plan], options)
    click.echo(json.dumps(plain_ranking(ranking, 1), indent=2) if options["as_json"] else render_plan(ranking.plans[0]))


@shard.command(epilog="Example: perfmodel shard improve plan.yaml --model dlrm --topo dgx")
@click.argument("plan")
@_shared
@_searching
def improve(plan: str, **options: Any) -> None:
    """Start from PLAN and look for a faster one; PLAN is ranked too."""
    _show(_ranked([plan], options, start=plan), options)


@shard.command(epilog="Example: perfmodel shard sensitivity plan.yaml --model dlrm --topo dgx")
@click.argument("plan")
@_shared
def sensitivity(plan: str, **options: Any) -> None:
    """How PLAN's iteration time follows the batch and the pooling factors."""
    from perfmodel.autotune.sharding import shard_sensitivity
    from perfmodel.units import format_time

    rows = shard_sensitivity(options["model"], options["topology"], plan, factors=FACTORS, **_run_options(options))
    if options["as_json"]:
        click.echo(json.dumps({"schema_version": 1, "rows": rows}, indent=2))
        return
    for row in rows:
        click.echo(f"{row['what']:<16} x{row['factor']:<5g} {format_time(row['iteration_time_s'])}")


def _run_options(options: dict[str, Any]) -> dict[str, Any]:
    return {key: options[key] for key in ("nodes", "batch", "db") if options[key] is not None}


def _simulated(plans: list[str], options: dict[str, Any]) -> Ranking:
    from perfmodel.autotune.sharding import rank_plans

    return rank_plans(options["model"], options["topology"], plans, **_run_options(options))


def _ranked(plans: list[str], options: dict[str, Any], start: str | None = None) -> Ranking:
    from perfmodel.autotune.sharding import rank_sharding
    from perfmodel.sharding.find import read_options

    search = read_options(
        budget=options["budget"],
        top=options["top"],
        seed=options["seed"],
        kernels=options["kernels"],
        constraints=options["constraints"],
        start=start,
    )
    return rank_sharding(
        options["model"], options["topology"], plans, plan=options["base"], search=search, **_run_options(options)
    )


def _show(ranking: Ranking, options: dict[str, Any]) -> None:
    from perfmodel.report.sharding import plain_ranking, render_ranking
    from perfmodel.sharding.plan import write_plan

    if options["out"]:
        write_plan(ranking.plans[0].plan, Path(options["out"]))
    text = (
        json.dumps(plain_ranking(ranking, options["top"]), indent=2)
        if options["as_json"]
        else render_ranking(ranking, options["top"])
    )
    click.echo(text)
