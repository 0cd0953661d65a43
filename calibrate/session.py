"""A measuring session that can be killed anywhere: rounds are appended line by line, tables are written whole.

`<out>/rounds/<family>.csv` holds one line per case and round. A line without its end is dropped when it is read again. The
tables `<out>/<family>.csv` and their provenance are made from it.
"""

from __future__ import annotations

import csv
import io
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import yaml

from calibrate.cases.case import Case
from calibrate.measure_cpu import Timing
from perfmodel.graph import Op, TensorSpec

COLUMNS = ("key", "round", "least_s", "quartile_s", "median_s", "n_calls", "failed")
TABLE_COLUMNS = ("name", "state", "threads", "op", "case", "time_s", "next_s", "low_s", "high_s", "repeats", "failed")
# Rounds of one case whose quartiles differ by more than this were disturbed: the row is kept out of fits and counted.
MAX_SPREAD = 1.15


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """One round of one case: its timing, or why it failed."""

    key: str
    number: int
    timing: Timing | None
    failed: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredCase:
    """All rounds of one case put together; `time_s` is None if it failed or was disturbed (`failed` says which).

    `next_s` is the second best round (None with one round): how far it lies from the best is the noise of the row.
    """

    case: Case
    op: Op | None
    time_s: float | None
    low_s: float
    high_s: float
    repeats: int
    failed: str
    next_s: float | None = None


class RoundLog:
    """The appended lines of one family."""

    def __init__(self, out: Path, family: str) -> None:
        self.path = out / "rounds" / f"{family}.csv"
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._drop_unfinished()

    def _drop_unfinished(self) -> None:
        """Cuts a last line that a killed run did not finish."""
        if not self.path.exists():
            return
        content = self.path.read_bytes()
        whole = content[: content.rfind(b"\n") + 1]
        if whole != content:
            with self.path.open("r+b") as file:
                file.truncate(len(whole))

    def read(self) -> list[Round]:
        """All finished rounds, in the order in which they were measured."""
        if not self.path.exists():
            return []
        with self.path.open(newline="", encoding="utf-8") as file:
            return [_round(row) for row in csv.DictReader(file, fieldnames=COLUMNS)]

    @contextmanager
    def appending(self) -> Iterator[_Appender]:
        """Opens the log for more rounds; each is flushed at once and everything is synced at the end."""
        with self.path.open("a", newline="", encoding="utf-8") as file:
            try:
                yield _Appender(file)
            finally:
                file.flush()
                os.fsync(file.fileno())


class OpLog:
    """The op of each measured case, as extraction writes it: `<out>/rounds/<family>.ops.tsv`, one line a case."""

    def __init__(self, out: Path, family: str) -> None:
        self.path = out / "rounds" / f"{family}.ops.tsv"
        self.path.parent.mkdir(parents=True, exist_ok=True)
        text = self.path.read_text(encoding="utf-8") if self.path.exists() else ""
        whole = text[: text.rfind("\n") + 1]
        pairs = (line.split("\t", 1) for line in whole.splitlines())
        self.known = {key: op_from_json(body) for key, body in pairs}
        if whole != text:
            replace_file(self.path, whole)

    def add(self, key: str, op: Op) -> None:
        """Appends one op, past this process's buffers."""
        self.known[key] = op
        with self.path.open("a", encoding="utf-8") as file:
            file.write(f"{key}\t{op_to_json(op)}\n")


class _Appender:
    def __init__(self, file: io.TextIOWrapper) -> None:
        self._file = file

    def write(self, item: Round) -> None:
        """One line, whole, past this process's buffers."""
        text = io.StringIO()
        t = item.timing
        values = (t.least_s, t.quartile_s, t.median_s, t.n_calls) if t else ("", "", "", "")
        csv.writer(text, lineterminator="\n").writerow([item.key, item.number, *values, item.failed])
        self._file.write(text.getvalue())
        self._file.flush()


def _round(row: Mapping[str, str]) -> Round:
    timing = None
    if row["median_s"]:
        timing = Timing(
            least_s=float(row["least_s"]),
            quartile_s=float(row["quartile_s"]),
            median_s=float(row["median_s"]),
            n_calls=int(row["n_calls"]),
        )
    return Round(key=row["key"], number=int(row["round"]), timing=timing, failed=row["failed"] or "")


def combine(case: Case, op: Op | None, rounds: Sequence[Round]) -> MeasuredCase:
    """One row from the rounds of a case: the smallest of the rounds' lower quartiles, for noise only adds time.

    The second smallest must agree with it within MAX_SPREAD, or nothing tells the case from its noise.
    """
    timed = sorted(r.timing.quartile_s for r in rounds if r.timing is not None)
    repeats = sum(r.timing.n_calls for r in rounds if r.timing is not None)
    if not timed:
        reason = next((r.failed for r in rounds if r.failed), "not measured")
        return MeasuredCase(case=case, op=op, time_s=None, low_s=0.0, high_s=0.0, repeats=repeats, failed=reason)
    agrees = len(timed) == 1 or timed[1] <= MAX_SPREAD * timed[0]
    return MeasuredCase(
        case=case,
        op=op,
        time_s=timed[0] if agrees else None,
        low_s=min(r.timing.least_s for r in rounds if r.timing is not None),
        high_s=timed[-1],
        repeats=repeats,
        next_s=timed[1] if len(timed) > 1 else None,
        failed="" if agrees else f"disturbed: rounds differ {timed[1] / timed[0]:.2f} times",
    )


def op_to_json(op: Op) -> str:
    """The op as compact text: name, overload, tensors (shape, dtype, strides, storage), their names, attributes."""
    body = {
        "name": op.name,
        "overload": op.overload,
        "inputs": [[s.shape, s.dtype, s.strides, s.storage] for s in op.inputs],
        "input_names": op.input_names,
        "outputs": [[s.shape, s.dtype, s.strides, s.storage] for s in op.outputs],
        "attrs": dict(op.attrs),
    }
    return json.dumps(body, sort_keys=True, separators=(",", ":"))


def op_from_json(text: str) -> Op:
    """Reads `op_to_json`'s text."""
    body = json.loads(text)
    inputs, outputs = (_specs(body[side]) for side in ("inputs", "outputs"))
    return Op(
        id=0,
        name=body["name"],
        overload=body["overload"],
        inputs=inputs,
        input_names=tuple(body["input_names"]),
        outputs=outputs,
        attrs=body["attrs"],
    )


def _specs(rows: Sequence[Sequence[object]]) -> tuple[TensorSpec, ...]:
    return tuple(
        TensorSpec(id=i, shape=tuple(row[0]), dtype=str(row[1]), strides=tuple(row[2]), storage=int(str(row[3])))  # type: ignore[arg-type]  # lists of integers from our own JSON
        for i, row in enumerate(rows)
    )


def write_table(out: Path, family: str, rows: Sequence[MeasuredCase], n_threads: int) -> tuple[Path, int]:
    """Writes the measured table of a family, whole or not at all, and returns how many rows it has.

    Rows of an earlier plan stay: what was measured is kept.
    """
    path = out / f"{family}.csv"
    mine = {row.case.to_json() for row in rows}
    kept = [row for row in _read_raw(path) if row["case"] not in mine]
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(TABLE_COLUMNS)
    for row in rows:
        name = f"{row.case.op}.{row.case.overload}"
        op = op_to_json(row.op) if row.op else ""
        time_s = "" if row.time_s is None else f"{row.time_s:.6g}"
        next_s = "" if row.next_s is None else f"{row.next_s:.6g}"
        measured = (time_s, next_s, f"{row.low_s:.6g}", f"{row.high_s:.6g}", row.repeats, row.failed)
        writer.writerow([name, row.case.state, n_threads, op, row.case.to_json(), *measured])
    writer.writerows([row.get(column, "") for column in TABLE_COLUMNS] for row in kept)
    replace_file(path, text.getvalue())
    return path, len(rows) + len(kept)


def _read_raw(path: Path) -> list[dict[str, str]]:
    """Rows of a table as text; none if there is no table yet."""
    if not path.exists():
        return []
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def write_provenance(table: Path, facts: Mapping[str, str]) -> None:
    """The provenance of a table, beside it."""
    replace_file(table.with_name(f"{table.name}.yaml"), yaml.safe_dump(dict(facts), sort_keys=True, width=120))


def replace_file(path: Path, text: str) -> None:
    """Writes beside the target, then renames."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_text(text, encoding="utf-8")
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
