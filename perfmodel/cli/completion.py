"""`perfmodel completion`: the script that lets a shell complete commands, options and shipped names."""

from __future__ import annotations

import click
from click.shell_completion import CompletionItem, get_completion_class

SHELLS = ("bash", "zsh", "fish")
VARIABLE = "_PERFMODEL_COMPLETE"


@click.command(epilog='Example: eval "$(perfmodel completion bash)"')
@click.argument("shell", type=click.Choice(SHELLS))
def completion(shell: str) -> None:
    """Print the completion script of SHELL; load it in the shell's start-up file."""
    from perfmodel.cli import cli

    kind = get_completion_class(shell)
    if kind is None:
        raise RuntimeError(f"click knows no completion for {shell}")
    # What click's own entry would print; bash's version check is left to the shell that loads it.
    made = kind(cli, {}, "perfmodel", VARIABLE)
    click.echo(made.source_template % made.source_vars())


class Shipped(click.ParamType[str]):
    """A shipped name, or a file: completes the names and lets the shell complete files."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.name = "text"

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        """Shipped names that begin so; files where none does."""
        from perfmodel.config.loading import Kind, list_configs

        kind: Kind = self.kind  # type: ignore[assignment]  # one of Kind by construction
        names = [name for name in list_configs(kind) if name.startswith(incomplete)]
        return [CompletionItem(name) for name in names] or [CompletionItem(incomplete, type="file")]


MODEL, TOPOLOGY, PLAN = Shipped("models"), Shipped("topologies"), Shipped("plans")
