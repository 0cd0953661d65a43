"""`perfmodel calibrate`: measure this machine's device or links and fit the laws to what was measured."""

from __future__ import annotations

import time
from importlib import import_module, util
from pathlib import Path
from typing import TYPE_CHECKING

import click

from perfmodel.errors import ConfigError
from perfmodel.units import format_time
from perfmodel.validate.train import pin_threads

if TYPE_CHECKING:
    from calibrate.kernels import Settings

SECONDS_PER_MINUTE = 60.0


class _Group(click.Group):
    """Imports what measures only when it is asked for: it needs torch."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """The two subcommands."""
        return ["collectives", "kernels"]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """`kernels` from here, `collectives` from the measuring code."""
        if cmd_name == "collectives":
            _require_source()
            command: click.Command = import_module("calibrate.collectives").main
            return command
        return kernels if cmd_name == "kernels" else None


@click.group(cls=_Group)
def calibrate() -> None:
    """Measure this machine's device or links and fit the models."""


def _require_source() -> None:
    if util.find_spec("calibrate") is None:
        raise ConfigError(
            "calibrate: the package that measures is not installed; install perfmodel again (pip install .)"
        )


@click.command(epilog="Example: perfmodel calibrate kernels --device cpu --families gemm,norm --minutes 5")
@click.option("--device", "device_name", required=True, help="cpu, cuda, or a device of the database.")
@click.option("--families", default="", help="Kernel families, separated by commas. Default: all.")
@click.option(
    "--minutes", type=click.FloatRange(min=0.0), default=10.0, show_default=True, help="Longest measuring time."
)
@click.option(
    "--share", type=click.FloatRange(min=0.01), default=1.0, show_default=True, help="Share of the case plans."
)
@click.option("--threads", type=click.IntRange(min=1), help="CPU threads. Default: all cores of the device.")
@click.option(
    "--out", type=click.Path(file_okay=False, path_type=Path), help="Where tables and fits go. Default: the database."
)
@click.option("--fit-only", is_flag=True, help="Fit what was measured before; measure nothing.")
@click.option("--plot", type=click.Path(dir_okay=False, path_type=Path), help="Write predicted against measured (PNG).")
def kernels(device_name: str, *, families: str, minutes: float, out: Path | None, **options: object) -> None:
    """Measure kernel families on this machine and fit their laws.

    A run that is killed goes on where it stopped when it is started again with the same options.
    """
    _require_source()
    if device_name != "cuda" and options["threads"] != 1:
        # Before torch is loaded. Two threads that share a core would make every operator look twice as slow.
        pin_threads(1)
    session = import_module("calibrate.run")
    started_s = time.monotonic()
    settings = session.settings_of(
        device_name,
        families=tuple(name.strip() for name in families.split(",") if name.strip()),
        limit_s=minutes * SECONDS_PER_MINUTE,
        out=out,
        share=options["share"],
        n_threads=options["threads"],
    )
    if not options["fit_only"] and not _measure(session, settings):
        click.echo("time is up before every case was measured: start again to go on", err=True)
    measured_s = time.monotonic()
    rows = session.fit(settings, plot=options["plot"])
    click.echo(session.render(rows))
    spent = (measured_s - started_s, time.monotonic() - measured_s)
    click.echo("measuring and choosing cases took {}, fitting {}".format(*map(format_time, spent)), err=True)


def _measure(session: object, settings: Settings) -> bool:
    """Measures under a progress bar on stderr."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("measuring", total=None)

        def progress(done: int, total: int, family: str) -> None:
            bar.update(task, completed=done, total=total, description=family)

        finished: bool = session.measure(settings, progress)  # type: ignore[attr-defined]  # calibrate.run, imported late
        return finished
