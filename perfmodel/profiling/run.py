"""Starts a script with the hook in its environment, and reads back what was measured."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from perfmodel.errors import ConfigError
from perfmodel.profiling.settings import ENVIRONMENT_KEY, ProfileSettings

_INJECT = Path(__file__).parent / "inject"


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimes:
    """Step times (s) of one rank: without the profiler before and after the window, and with it."""

    rank: int
    before_s: tuple[float, ...]
    profiled_s: tuple[float, ...]
    after_s: tuple[float, ...]

    @property
    def plain_s(self) -> float:
        """Median step without the profiler."""
        return median((*self.before_s, *self.after_s))

    @property
    def overhead_frac(self) -> float:
        """How much longer the median profiled step is."""
        return median(self.profiled_s) / self.plain_s - 1.0

    @property
    def drift_frac(self) -> float:
        """Median step after the window over that before it, less 1: what changes by itself."""
        return median(self.after_s) / median(self.before_s) - 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Profiled:
    """What profiling left: traces and step times of each rank, and how the script ended."""

    traces: tuple[Path, ...]
    times: tuple[StepTimes, ...]
    exit_code: int


def run_profiled(command: Sequence[str], settings: ProfileSettings) -> Profiled:
    """Runs a command with its training steps watched, and returns what they left in the settings' folder.

    Raises:
        ConfigError: the command cannot be started, or ended before its window of steps was over.
    """
    folder = Path(settings.folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{folder}: cannot write: {error.strerror or error}") from error
    old = [*folder.glob("rank*.json.gz"), *folder.glob("rank*.steps.json")]
    for path in old:
        path.unlink()
    parts = [str(_INJECT), str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(part for part in parts if part),
        ENVIRONMENT_KEY: settings.to_text(),
    }
    try:
        exit_code = subprocess.run(list(command), env=environment, check=False).returncode  # noqa: S603 -- the user's own script
    except OSError as error:
        raise ConfigError(f"{command[0]}: cannot start: {error.strerror or error}") from error
    times = tuple(_read(path) for path in sorted(folder.glob("rank*.steps.json")))
    traces = tuple(sorted(folder.glob("rank*.json.gz")))
    if not traces or not times:
        wanted = settings.warm_up + 2 * settings.plain + settings.active + 1
        raise ConfigError(
            f"{' '.join(command)}: ended with exit code {exit_code} before {wanted} optimizer steps (warm-up "
            f"{settings.warm_up}, {settings.plain} plain, {settings.active} profiled, {settings.plain} plain); ask for fewer"
        )
    return Profiled(traces=traces, times=times, exit_code=exit_code)


def _read(path: Path) -> StepTimes:
    body = json.loads(path.read_text(encoding="utf-8"))
    return StepTimes(
        rank=body["rank"],
        before_s=tuple(body["before_s"]),
        profiled_s=tuple(body["profiled_s"]),
        after_s=tuple(body["after_s"]),
    )
