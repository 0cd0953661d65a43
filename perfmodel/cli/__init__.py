"""The `perfmodel` command. One file a subcommand; each parses, calls one API function and renders."""

from __future__ import annotations

import atexit
import gc
import sys
from importlib import import_module
from typing import Any

import click

from perfmodel.errors import PerfModelError, suggest

QUIET = "perfmodel.quiet"  # in the context's meta: see cli.console
# A command makes many objects that live to its end (modules, configs, operators) and few cycles; Python's usual 700 new
# objects between collections cost a sixth of a short command's time, looking through all of them again and again.
NEW_OBJECTS_BEFORE_COLLECTION = 50_000
# Commands that are over in seconds and drop what they made by ending: they collect nothing at all.
UNCOLLECTED = frozenset({"predict", "diff", "compare", "collective", "models", "topologies", "devices", "completion"})
# Subcommand -> (module, attribute). Modules are imported when their command runs, so that --help stays fast.
COMMANDS = {
    "predict": ("perfmodel.cli.predict", "predict"),
    "diff": ("perfmodel.cli.diff", "diff"),
    "compare": ("perfmodel.cli.diff", "diff"),
    "report": ("perfmodel.cli.report", "report"),
    "search": ("perfmodel.cli.search", "search"),
    "shard": ("perfmodel.cli.shard", "shard"),
    "sweep": ("perfmodel.cli.sweep", "sweep"),
    "models": ("perfmodel.cli.listings", "models"),
    "topologies": ("perfmodel.cli.listings", "topologies"),
    "devices": ("perfmodel.cli.devices", "devices"),
    "topo": ("perfmodel.cli.topo", "topo"),
    "collective": ("perfmodel.cli.collective", "collective"),
    "validate": ("perfmodel.cli.validate", "validate"),
    "db": ("perfmodel.cli.db", "db"),
    "calibrate": ("perfmodel.cli.calibrate", "calibrate"),
    "trace": ("perfmodel.cli.trace", "trace"),
    "diagnose": ("perfmodel.cli.diagnose", "diagnose"),
    "profile": ("perfmodel.cli.profile", "profile"),
    "doctor": ("perfmodel.cli.doctor", "doctor"),
    "completion": ("perfmodel.cli.completion", "completion"),
}
SUMMARIES = {
    "predict": "Predict the iteration time of a model on a topology.",
    "diff": "Say what changed between two predictions.",
    "compare": "The same as diff.",
    "report": "Show a table of many predictions as a page.",
    "search": "Find the best plans for a model on a topology, and why the others lose.",
    "shard": "Find and rank embedding-sharding plans; explain or improve one.",
    "sweep": "Predict every plan of a space into a table; resumable, on many processes.",
    "models": "List the shipped models.",
    "topologies": "List the shipped topologies.",
    "devices": "List the known devices, or add one from its datasheet.",
    "topo": "Import, show and draw topologies.",
    "collective": "Predict collectives, printed as nccl-tests prints them.",
    "validate": "Compare predictions with measured cases, published or live.",
    "db": "Check the device database; score its fits against measured rows.",
    "calibrate": "Measure this machine's device or links and fit the models.",
    "trace": "Read profiler traces; explain them; make them from predictions.",
    "profile": "Run a training script under the profiler for a few steps, and diagnose them.",
    "diagnose": "Find causes of low utilisation in traces or a model, and what mending them gains.",
    "doctor": "Say what is installed, what is calibrated, and what would help.",
    "completion": "Print a shell's completion script.",
}


class LazyGroup(click.Group):
    """A click group that imports a subcommand only when it is used."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Names in the order of COMMANDS."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Imports and returns one subcommand; None if there is none of that name."""
        if cmd_name not in COMMANDS:
            return None
        module, attribute = COMMANDS[cmd_name]
        command: click.Command = getattr(import_module(module), attribute)
        _add_quiet(command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Writes the command list from SUMMARIES, without importing any of them."""
        with formatter.section("Commands"):
            formatter.write_dl(list(SUMMARIES.items()))

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """As click's, but an unknown name is answered with the nearest one."""
        if args and args[0] not in COMMANDS and not args[0].startswith("-"):
            ctx.fail(f"no such command '{args[0]}'{suggest(args[0], COMMANDS)}")
        return super().resolve_command(ctx, args)


def _add_quiet(command: click.Command) -> None:
    """Gives a command and those below it `-q/--quiet`."""
    if isinstance(command, click.Group):
        for part in command.commands.values():
            _add_quiet(part)
    elif not any(isinstance(p, click.Option) and "--quiet" in p.opts for p in command.params):
        option = click.Option(
            ["-q", "--quiet"],
            is_flag=True,
            expose_value=False,
            callback=_set_quiet,
            help="No progress or notes on stderr.",
        )
        command.params.append(option)


def _set_quiet(context: click.Context, _: click.Parameter, value: bool) -> None:
    if value:
        context.find_root().meta[QUIET] = True


@click.group(
    cls=LazyGroup,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog="Example: perfmodel predict --model dlrm.yaml --topo dgx.yaml",
)
@click.version_option(package_name="perfmodel")
def cli() -> None:
    """Predict how fast a PyTorch model trains on many GPUs, before anyone rents them."""


def main(argv: list[str] | None = None) -> Any:
    """Runs the command line. Errors of the user's input are one line each on stderr and exit code 2."""
    gc.set_threshold(NEW_OBJECTS_BEFORE_COLLECTION)
    if argv is None:
        _spare_collections()
    try:
        return cli.main(args=argv, prog_name="perfmodel", standalone_mode=True)
    except PerfModelError as error:
        lines = getattr(error, "problems", (str(error),))
        for line in lines:
            click.echo(f"perfmodel: {' '.join(str(line).split())}", err=True)
        sys.exit(2)


def _spare_collections() -> None:
    """Of a process that runs one command: no collection during a short one, and none of what is left when it ends.

    Walking all ops of a large model once more, only to end, takes a tenth of a prediction.
    """
    if sys.argv[1:2] and sys.argv[1] in UNCOLLECTED:
        gc.disable()
    atexit.register(gc.freeze)
