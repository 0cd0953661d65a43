"""Every error perfmodel raises on purpose.

::

    PerfModelError
    ├── ConfigError              (ValueError)   a file or argument is wrong; carries every problem found
    ├── GraphError               (ValueError)   a model cannot be extracted, or a graph is malformed
    ├── TopologyError            (ValueError)   links, ranks or groups do not make a usable machine
    ├── UnknownOpError           (LookupError)  --strict and an operator has no rule
    ├── MissingCalibrationError  (LookupError)  a device or fit that was asked for does not exist
    └── InfeasiblePlanError      (ValueError)   a plan does not fit the model, the ranks or the memory

A message says where (file and key path), what was found, what is allowed, and the nearest right spelling.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from difflib import get_close_matches


class PerfModelError(Exception):
    """Base of every error that perfmodel raises on purpose."""


class ConfigError(PerfModelError, ValueError):
    """One or more mistakes in files or arguments; `problems` holds one line for each."""

    def __init__(self, problems: str | Sequence[str]) -> None:
        self.problems: tuple[str, ...] = (problems,) if isinstance(problems, str) else tuple(problems)
        super().__init__("\n".join(self.problems))


class GraphError(PerfModelError, ValueError):
    """A model cannot be extracted, or a graph is malformed."""


class TopologyError(PerfModelError, ValueError):
    """Links, ranks or groups do not make a usable machine."""


class UnknownOpError(PerfModelError, LookupError):
    """An operator has no kernel rule and the caller asked for strictness."""


class MissingCalibrationError(PerfModelError, LookupError):
    """A device or fit that was asked for does not exist."""


class InfeasiblePlanError(PerfModelError, ValueError):
    """A plan does not fit the model, the ranks or the memory."""


def other_version(what: str, found: object, reads: int, again: str) -> str:
    """Message for a file of another schema version, with what to do about it.

    >>> other_version("graph", 2, 1, "extract it again")
    'graph schema_version 2, this perfmodel reads 1: a newer perfmodel wrote it; upgrade perfmodel, or extract it again'
    >>> other_version("graph", 0, 1, "extract it again")
    'graph schema_version 0, this perfmodel reads 1: extract it again'
    """
    newer = isinstance(found, int) and found > reads
    remedy = f"a newer perfmodel wrote it; upgrade perfmodel, or {again}" if newer else again
    return f"{what} schema_version {found}, this perfmodel reads {reads}: {remedy}"


def suggest(name: str, allowed: Iterable[str]) -> str:
    """Returns `; did you mean 'x'?` for the nearest allowed name, or an empty string.

    >>> suggest("dgx_a10", ["dgx_a100", "dgx_h100"])
    "; did you mean 'dgx_a100'?"
    >>> suggest("zzz", ["dgx_a100"])
    ''
    """
    close = get_close_matches(name, list(allowed), n=1, cutoff=0.5)
    return f"; did you mean '{close[0]}'?" if close else ""
