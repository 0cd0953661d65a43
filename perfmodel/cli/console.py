"""What every subcommand shares: width and colour of stdout, text from a file or stdin, and a sign of life on stderr."""

from __future__ import annotations

import os
import shutil
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

import click

from perfmodel.errors import ConfigError

if TYPE_CHECKING:
    from perfmodel.config.loading import Source

PIPE_WIDTH = 120  # columns where stdout is no terminal
PATIENCE_S = 2.0  # a command that takes longer says that it works
STDIN = "-"
QUIET = "perfmodel.quiet"


def stdout_width() -> int:
    """Columns of the terminal, or of a page where stdout is none."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else PIPE_WIDTH


def stdout_color() -> bool:
    """Colour on a terminal, unless NO_COLOR says otherwise (no-color.org)."""
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR")


def read_text(path: str | os.PathLike[str]) -> str:
    """Text of a file, or of stdin for `-`. Raises ConfigError."""
    if str(path) == STDIN:
        data = sys.stdin.buffer.read()
    else:
        try:
            data = Path(path).read_bytes()
        except OSError as error:
            raise ConfigError(f"{path}: cannot read: {error.strerror}") from error
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{'stdin' if str(path) == STDIN else path}: found bytes that are no UTF-8 text") from error


def from_stdin(given: Mapping[str, str]) -> dict[str, Source]:
    """Options by name, with `-` replaced by the YAML mapping on stdin. Raises ConfigError where two ask for it."""
    asking = [name for name, value in given.items() if value == STDIN]
    if len(asking) > 1:
        raise ConfigError(f"{' and '.join(asking)}: found - for each, allowed - for one: stdin is read once")
    found: dict[str, Source] = dict(given)
    if asking:
        from perfmodel.config.reading import parse_mapping

        found[asking[0]] = parse_mapping(read_text(STDIN), f"stdin ({asking[0]})")
    return found


class OutFile(click.ParamType[Path]):
    """A file to write: not empty, not a folder, in a folder that exists, with one of the suffixes if there are any."""

    name = "file"

    def __init__(self, suffixes: tuple[str, ...] = ()) -> None:
        self.suffixes = suffixes

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> Path:
        """The path, or a usage error that says what is wrong with it."""
        path = Path(str(value))
        if not str(value).strip():
            self.fail("found an empty name, allowed a file to write", param, ctx)
        if self.suffixes and path.suffix.lower() not in self.suffixes:
            self.fail(f"{path}: found suffix {path.suffix!r}, allowed {', '.join(self.suffixes)}", param, ctx)
        if path.is_dir():
            self.fail(f"{path}: found a folder, allowed a file to write", param, ctx)
        if not path.parent.is_dir():
            self.fail(f"{path}: the folder {path.parent} does not exist", param, ctx)
        return path


OUT_FILE = OutFile()
PICTURE = OutFile((".svg", ".png", ".pdf"))


def is_quiet() -> bool:
    """Whether `--quiet` was given: no progress and no notes on stderr."""
    context = click.get_current_context(silent=True)
    return bool(context and context.find_root().meta.get(QUIET))


def note(words: str) -> None:
    """A line on stderr, unless `--quiet`."""
    if not is_quiet():
        click.echo(f"perfmodel: {words}", err=True)


class Waiting:
    """Shows on stderr what a command is doing once it takes more than two seconds; nothing where stderr is no terminal."""

    def __init__(self, words: str, total: int | None = None, *, patience_s: float = PATIENCE_S) -> None:
        self._words, self._total, self._done = words, total, 0
        self._patience_s, self._over = patience_s, threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Waiting:
        if sys.stderr.isatty() and not is_quiet():
            self._thread = threading.Thread(target=self._show, daemon=True)
            self._thread.start()
        return self

    def advance(self, n: int = 1, words: str | None = None) -> None:
        """So many more of the total are done; `words` replaces what is said."""
        self._done += n
        self._words = words or self._words

    def _show(self) -> None:
        if self._over.wait(self._patience_s):
            return
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

        counted = (BarColumn(), MofNCompleteColumn()) if self._total else ()
        columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), *counted, TimeElapsedColumn())
        with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
            task = progress.add_task(self._words, total=self._total)
            while not self._over.wait(0.2):
                progress.update(task, description=self._words, completed=self._done)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        if self._thread is not None:
            self._thread.join()
