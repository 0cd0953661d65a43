"""What gloo's collectives cost the processors of a host's ranks: asking for one, and moving its bytes.

From the columns that `calibrate.collectives` adds to its rows. Both are a constant and a cost of each byte, by operation and
group size: the median of small messages, and the median of what large ones take beyond it.
"""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median

from perfmodel.units import KIBI, MEBI, US_PER_S

_OPS = {"alltoall": "all_to_all"}
_COLUMNS = frozenset({"collective", "num_gpus", "bytes", "us", "issue_us", "cpu_us"})
SMALL_BYTES, LARGE_BYTES = 256 * KIBI, 4 * MEBI
Case = tuple[str, str]  # operation, number of ranks
Points = dict[Case, list[tuple[int, float]]]  # bytes and seconds


def host_parameters(paths: Sequence[Path]) -> dict[str, float]:
    """Parameters `issue_s` and `busy_s`, each `.<operation>.n<ranks>`, and the same with `_per_byte`.

    None from tables without those columns.
    """
    points: dict[str, Points] = {"issue_s": {}, "busy_s": {}}
    for row in _rows(paths):
        case = _OPS.get(row["collective"], row["collective"]), row["num_gpus"]
        for name, column in (("issue_s", "issue_us"), ("busy_s", "cpu_us")):
            points[name].setdefault(case, []).append((int(row["bytes"]), float(row[column]) / US_PER_S))
    found: dict[str, float] = {}
    for name, by_case in points.items():
        for (op, n), measured in by_case.items():
            constant, per_byte = line(measured)
            found |= {f"{name}.{op}.n{n}": constant, f"{name}_per_byte.{op}.n{n}": per_byte}
    return dict(sorted(found.items()))


def line(measured: Sequence[tuple[int, float]]) -> tuple[float, float]:
    """The constant (s) and the cost of a byte (s) of (bytes, seconds).

    >>> line([(1024, 2.0), (4 * 2**20, 6.0)]) == (2.0, 4.0 / (4 * 2**20))
    True
    """
    smallest = min(size for size, _ in measured)
    constant = median(s for size, s in measured if size <= max(SMALL_BYTES, smallest))
    beyond = [(s - constant) / size for size, s in measured if size >= LARGE_BYTES]
    return constant, max(median(beyond), 0.0) if beyond else 0.0


def _rows(paths: Sequence[Path]) -> list[Mapping[str, str]]:
    found: list[Mapping[str, str]] = []
    for path in paths:
        if path.suffix == ".csv":
            with path.open(encoding="utf-8", newline="") as file:
                reader = csv.DictReader(file)
                if set(reader.fieldnames or ()) >= _COLUMNS:
                    found += [row for row in reader if row["issue_us"]]
    return found
