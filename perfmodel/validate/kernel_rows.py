"""Reads measured kernel times in the public formats and turns every row into the ops that were timed.

A format is known by its columns. Each reader yields `KernelRow`s: the device, the ops (so that pricing goes through the
registered rules), the measured time and what that time includes. Rows of campaigns side by side count once, with the
median of the campaigns.
"""

from __future__ import annotations

import contextlib
import csv
import gzip
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TextIO

from perfmodel.db.loading import resolve_device
from perfmodel.errors import ConfigError, MissingCalibrationError
from perfmodel.graph import Op, TensorSpec

HELDOUT_FRAC = 0.15  # share of shapes that no fit sees
MIN_SWEEP_ROWS = 100  # fewer rows than this do not span a sweep evenly
_HASH_SPAN = 2**32
EAGER_FLOOR = "measurement_floor_s"  # CUDA events around one eager call include its launch
EAGER_MINIMUM = "measurement_minimum_s"  # and do not end before the host is through with the call
GZIP_MAGIC = b"\x1f\x8b"  # RFC 1952

Row = Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelRow:
    """One measured case.

    `floor` names the measurement floor that `measured_s` includes (an eager call timed with events includes its
    launch): the fit's parameter of that name, or empty if the time is the device's alone; `extra_s` is a floor known
    beforehand. `key` names the shape: equal keys are held out together, on every device. `subset` tells apart what the
    source tells apart (its own test split). `place` (0 to 1) is where in its sweep the row was measured, for sources
    whose floor grows as the sweep goes on; `timed` the op's name in the source, `kernel` that of the device's kernel.
    """

    device: str
    family: str
    ops: tuple[Op, ...]
    measured_s: float
    key: str
    floor: str = ""
    subset: str = ""
    timed: str = ""
    extra_s: float = 0.0
    place: float = 0.5
    kernel: str = ""

    @property
    def heldout(self) -> bool:
        """True for the fixed share of shapes that no fit sees."""
        return is_heldout(self.key)


def is_heldout(key: str) -> bool:
    """A fixed HELDOUT_FRAC of all keys, by hash: the same rows on every machine and in every release."""
    return zlib.crc32(key.encode()) < HELDOUT_FRAC * _HASH_SPAN


def tensor(index: int, shape: Sequence[int], dtype: str, *, transposed: bool = False) -> TensorSpec:
    """A dense tensor: row-major, or with its last two dimensions swapped in memory."""
    strides = [1] * len(shape)
    order = list(range(len(shape)))
    if transposed:
        order[-1], order[-2] = order[-2], order[-1]
    step = 1
    for dim in reversed(order):
        strides[dim] = step
        step *= shape[dim]
    return TensorSpec(id=index, shape=tuple(shape), dtype=dtype, strides=tuple(strides), storage=index)


@dataclass(frozen=True, slots=True)
class Format:
    """How rows with certain columns are read. `prefix` marks columns that exist once per campaign (`us_`)."""

    name: str
    columns: frozenset[str]
    prefix: str
    read: Callable[[str, Row], Iterable[KernelRow]]

    def fits(self, header: Iterable[str]) -> bool:
        """True if all columns of this format are there."""
        names = set(header)
        return self.columns <= names and (not self.prefix or any(name.startswith(self.prefix) for name in names))


def read_rows(path: Path, formats: Sequence[Format]) -> list[KernelRow]:
    """All rows of a CSV file (gzip or plain).

    Raises ConfigError with one line if the file is none of `formats` or is damaged.
    """
    try:
        with _open(path) as lines:
            reader = csv.DictReader(lines)
            header = reader.fieldnames or ()
            known = next((form for form in formats if form.fits(header)), None)
            if known is None:
                raise ConfigError(_unknown(path, header, formats))
            rows = list(_rows(path, reader, known))
    except (OSError, EOFError, UnicodeDecodeError, csv.Error, zlib.error) as error:
        raise ConfigError(f"{path}: cannot be read as CSV: {error}") from error
    if not rows:
        raise ConfigError(f"{path}: found no rows of {known.name} under its header")
    return _placed(rows)


def _rows(path: Path, reader: csv.DictReader[str], form: Format) -> Iterator[KernelRow]:
    devices: dict[str, str] = {}
    for row in reader:
        try:
            for item in form.read(path.name, row):
                if item.device not in devices:
                    devices[item.device] = resolve_device(item.device)
                yield _checked(item, devices[item.device])
        except (ConfigError, MissingCalibrationError) as error:
            raise ConfigError(f"{path}: line {reader.line_num}: {error}") from error
        except (KeyError, ValueError, TypeError) as error:
            raise ConfigError(
                f"{path}: line {reader.line_num}: found {_short(row)}, needs numbers in the columns of {form.name}"
            ) from error


def _checked(item: KernelRow, device: str) -> KernelRow:
    if not 0 < item.measured_s < float("inf"):
        raise ValueError("a time that is not positive")
    return replace(item, device=device)


def _placed(rows: list[KernelRow]) -> list[KernelRow]:
    """Gives every row its place among the rows of its device; a file too short to be a sweep keeps the middle."""
    totals = Counter(row.device for row in rows)
    seen: Counter[str] = Counter()
    placed = []
    for row in rows:
        total = totals[row.device]
        placed.append(replace(row, place=seen[row.device] / total) if total >= MIN_SWEEP_ROWS else row)
        seen[row.device] += 1
    return placed


def _short(row: Row) -> str:
    text = ",".join("" if value is None else str(value) for value in row.values())
    return repr(text if len(text) <= 80 else text[:77] + "...")


def _unknown(path: Path, header: Iterable[str], formats: Sequence[Format]) -> str:
    allowed = "; ".join(f"{form.name} ({', '.join(sorted(form.columns))})" for form in formats)
    return f"{path}: columns: found {', '.join(header) or 'none'}, allowed those of {allowed}"


@contextlib.contextmanager
def _open(path: Path) -> Iterator[TextIO]:
    """The text of a file, unpacked if it starts with gzip's magic number."""
    with path.open("rb") as probe:
        packed = probe.read(2) == GZIP_MAGIC
    with (
        gzip.open(path, "rt", encoding="utf-8", newline="") if packed else path.open(encoding="utf-8", newline="")
    ) as lines:
        yield lines
