"""Suites: CSV files with one measured case a row.

Columns, in any order: `name,model,topology,plan,batch_per_rank,seq_len,precision,mode,phase,measured_s,weight,source,note`.
`model`, `topology` and `plan` name a file beside the suite, or are what `perfmodel predict` takes. An empty cell in `plan`,
`seq_len`, `precision`, `mode`, `phase` or `weight` means ddp, the model's own, the model's own, eager, train and 1.
`amp` in `precision` is `amp_fp16`, which `torch.autocast("cuda")` means where no type is given; types that exist and that no
model here runs in (`fp8`) are read, and their cases fail. Counts may be written as tables of floats write them (`16.0`).
"""

from __future__ import annotations

import csv
import io
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast, get_args

from perfmodel.config import find_config
from perfmodel.config.training import Precision
from perfmodel.errors import ConfigError, suggest

Mode = Literal["eager", "cuda_graph", "compile"]
Phase = Literal["train", "forward_backward", "forward"]

COLUMNS = (
    "name", "model", "topology", "plan", "batch_per_rank", "seq_len", "precision", "mode", "phase", "measured_s", "weight",
    "source", "note",
)  # fmt: skip
_NEEDED = ("name", "model", "topology", "batch_per_rank", "measured_s")
_DEFAULTS = {"plan": "ddp", "mode": "eager", "phase": "train", "weight": "1"}
# Short names of precisions.
_PRECISIONS: Mapping[str, str] = {"amp": "amp_fp16"}
# Precisions of published runs that cannot be predicted yet: a case of one fails, the suite goes on.
UNPREDICTED = ("fp8", "amp_fp8", "amp_fp16+fp8", "bf16+fp8", "mxfp8", "nvfp4", "fp4", "fp64", "int8")
_CHOICES: Mapping[str, tuple[str, ...]] = {
    "precision": (*get_args(Precision), *_PRECISIONS, *UNPREDICTED),
    "mode": get_args(Mode),
    "phase": get_args(Phase),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One measured iteration time (s) and what was run.

    `model`, `topology` and `plan` are paths where the cell named a file beside the suite, else the cell. `seq_len` and
    `precision` are None where the model's own apply. A case of weight 0 is reported and not counted in the means.
    """

    name: str
    model: str
    topology: str
    plan: str
    batch_per_rank: int
    seq_len: int | None
    precision: str | None
    mode: Mode
    phase: Phase
    measured_s: float
    weight: float
    source: str
    note: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Suite:
    """The cases of one file, in its order."""

    name: str
    cases: tuple[Case, ...]


def load_suite(source: str | Path) -> Suite:
    """The suite in a file, or a shipped one by its name. Raises ConfigError with one line for each mistake."""
    path = find_config("suites", source)
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: found a byte that is not UTF-8 at {error.start}, allowed a CSV file") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    return Suite(name=path.stem, cases=parse_suite(text, str(path), path.parent))


def parse_suite(text: str, where: str, folder: Path) -> tuple[Case, ...]:
    """The cases in CSV text; `folder` is where files named in it are looked for first. Raises ConfigError."""
    try:
        rows = list(csv.reader(io.StringIO(text, newline=""), strict=True))
    except csv.Error as error:
        raise ConfigError(f"{where}: not a CSV file: {error}") from None
    header = [cell.strip() for cell in rows[0]] if rows else []
    problems = _header_problems(header, where)
    if problems:
        raise ConfigError(problems)
    cases: list[Case] = []
    named: dict[str, int] = {}
    for line, row in enumerate(rows[1:], start=2):
        if not any(cell.strip() for cell in row):
            continue
        place = f"{where}: row {line}"
        if len(row) != len(header):
            problems.append(f"{place}: found {len(row)} cells, allowed {len(header)} (quote a cell that holds a comma)")
            continue
        cells = dict(zip(header, (cell.strip() for cell in row), strict=True))
        faults = _row_problems(cells, named)
        problems += [f"{place}: {fault}" for fault in faults]
        named.setdefault(cells["name"], line)
        if not faults:
            cases.append(_case(cells, folder))
    if not problems and not cases:
        problems = [f"{where}: found no case, allowed at least one row below the header"]
    if problems:
        raise ConfigError(problems)
    return tuple(cases)


def _header_problems(header: Sequence[str], where: str) -> list[str]:
    if not header:
        return [f"{where}: empty, allowed a header {','.join(COLUMNS)} and one row a case"]
    problems = [f"{where}: missing column {column}" for column in COLUMNS if column not in header]
    problems += [
        f"{where}: unknown column {column!r}{suggest(column, COLUMNS)}" for column in header if column not in COLUMNS
    ]
    twice = sorted({column for column in header if header.count(column) > 1})
    return problems + [f"{where}: column {column} appears {header.count(column)} times" for column in twice]


def _row_problems(cells: Mapping[str, str], named: Mapping[str, int]) -> list[str]:
    problems = [f"{column}: empty, needs a value" for column in _NEEDED if not cells[column]]
    if cells["name"] in named:
        problems.append(f"name: found {cells['name']!r} again (first in row {named[cells['name']]})")
    for column, allowed in _CHOICES.items():
        if cells[column] and cells[column] not in allowed:
            predicted = [word for word in allowed if word not in UNPREDICTED]
            near = suggest(cells[column], predicted)
            problems.append(f"{column}: found {cells[column]!r}, allowed {', '.join(predicted)}{near}")
    for column, read, words in _NUMBERS:
        if cells[column]:
            try:
                read(cells[column])
            except ValueError:
                problems.append(f"{column}: found {cells[column]!r}, allowed {words}")
    return problems


def _count(text: str) -> int:
    value = int(re.sub(r"\.0*$", "", text))  # a column with an empty cell becomes floats in many tools
    if value < 1:
        raise ValueError(text)
    return value


def _seconds(text: str) -> float:
    value = float(text)
    if not math.isfinite(value) or value <= 0:
        raise ValueError(text)
    return value


def _weight(text: str) -> float:
    value = float(text)
    if not math.isfinite(value) or value < 0:
        raise ValueError(text)
    return value


_NUMBERS: tuple[tuple[str, Callable[[str], Any], str], ...] = (
    ("batch_per_rank", _count, "a whole number of samples, at least 1"),
    ("seq_len", _count, "a whole number of tokens, at least 1, or nothing"),
    ("measured_s", _seconds, "seconds, more than 0"),
    ("weight", _weight, "a number, at least 0"),
)


def _case(cells: Mapping[str, str], folder: Path) -> Case:
    full = {column: cells[column] or _DEFAULTS.get(column, "") for column in COLUMNS}
    return Case(
        name=full["name"],
        model=_beside(full["model"], folder),
        topology=_beside(full["topology"], folder),
        plan=_beside(full["plan"], folder),
        batch_per_rank=_count(full["batch_per_rank"]),
        seq_len=_count(full["seq_len"]) if full["seq_len"] else None,
        precision=_PRECISIONS.get(full["precision"], full["precision"]) or None,
        mode=cast(Mode, full["mode"]),
        phase=cast(Phase, full["phase"]),
        measured_s=_seconds(full["measured_s"]),
        weight=_weight(full["weight"]),
        source=full["source"],
        note=full["note"],
    )


def _beside(cell: str, folder: Path) -> str:
    path = folder / cell
    try:
        return str(path) if path.is_file() else cell
    except OSError:  # a cell too long to be a file's name; whoever reads it says what is wrong
        return cell
