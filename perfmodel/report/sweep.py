"""Tables of many predictions: heat maps, Pareto fronts and costs, as one page."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from perfmodel.config import load_topology
from perfmodel.config.reading import read_mapping
from perfmodel.errors import ConfigError, PerfModelError, suggest
from perfmodel.report.html import render
from perfmodel.report.svg import GREY, INK, VERMILION, WIDTH, Plane, picture, tag, text, title
from perfmodel.topology import build_topology
from perfmodel.units import SECONDS_PER_HOUR, format_bytes, format_count, format_time

Row = Mapping[str, Any]
COST_PER_HOUR, COST_PER_ITERATION = "cost_per_hour", "cost_per_iteration"
MAX_TABLE_ROWS = 200
MAX_CELLS = 40  # of one axis of a heat map


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepChoice:
    """What a page shows: `value` over the axes `x` and `y`, and `value` against `against`; both are better when smaller.

    `larger` names those of the two that are better when larger.
    """

    x: str
    y: str
    value: str = "iteration_time_s"
    against: str = "memory_bytes"
    larger: tuple[str, ...] = ()


def read_table(path: Path, words: str | None = None) -> list[dict[str, Any]]:
    """Rows of a CSV, JSON (list, or an object with `rows`) or Parquet table; `words` is its text if already read.

    Raises ConfigError: the file cannot be read, or has no rows.
    """
    if path.suffix == ".parquet":
        rows = _read_parquet(path)
    else:
        if words is None:
            try:
                words = path.read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError) as error:
                raise ConfigError(f"{path}: cannot be read: {error}") from error
        rows = _read_json(words, path) if words.lstrip()[:1] in ("{", "[") else _read_csv(words)
    if not rows:
        raise ConfigError(f"{path}: found no rows, allowed a table with a header and one row a prediction")
    return [with_plan_columns(row) for row in rows]


def with_plan_columns(row: Row) -> dict[str, Any]:
    """The row with a column for every `key=value` of its inline plan, so that they can be axes.

    >>> with_plan_columns({"plan": "zero1,tp=2"})
    {'plan': 'zero1,tp=2', 'tp': 2.0}
    """
    words = str(row.get("plan") or "").split(",")
    parts = {key.strip(): _number(value.strip()) for key, sign, value in (w.partition("=") for w in words) if sign}
    return {**row, **{key: value for key, value in parts.items() if key not in row}}


def _read_csv(words: str) -> list[dict[str, Any]]:
    lines = [line for line in words.splitlines(keepends=True) if not line.startswith("#")]
    return [{k: _number(v) for k, v in row.items() if k} for row in csv.DictReader(io.StringIO("".join(lines)))]


def _read_json(words: str, path: Path) -> list[dict[str, Any]]:
    try:
        body = json.loads(words)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{path}: not valid JSON: {error}") from error
    rows = body.get("rows") if isinstance(body, dict) else body
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise ConfigError(f"{path}: found no list of rows, allowed a JSON list of objects, or an object with `rows`")
    return rows


def _read_parquet(path: Path) -> list[dict[str, Any]]:
    try:
        import pandas
    except ImportError as error:
        raise ConfigError("Parquet tables need pandas: pip install 'perfmodel[report]'") from error
    try:
        frame = pandas.read_parquet(path)
    except ImportError as error:
        raise ConfigError(f"{path}: Parquet needs pyarrow: pip install pyarrow, or write the table as CSV") from error
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from error
    return [{str(k): v for k, v in row.items()} for row in frame.to_dict(orient="records")]


def _number(words: str | None) -> Any:
    try:
        return float(words) if words else None
    except ValueError:
        return words


def with_costs(rows: Sequence[Row], prices_path: Path) -> list[dict[str, Any]]:
    """The rows with `cost_per_hour` and, where `iteration_time_s` is known, `cost_per_iteration`.

    The price list is YAML: `per_hour: {<device or topology>: price}`; a device's price is for one rank, a topology's for one
    node of it. Rows name their `topology` (and `nodes`), or a `device` and `n_ranks`. Raises ConfigError.
    """
    body = read_mapping(prices_path)
    listed = body.get("per_hour")
    if not isinstance(listed, Mapping) or not all(isinstance(v, int | float) and v >= 0 for v in listed.values()):
        raise ConfigError(f"{prices_path}: per_hour: found {listed!r}, allowed a price for each device or topology")
    found = []
    for row in rows:
        cost = _cost_per_hour(row, listed, prices_path)
        time_s = row.get("iteration_time_s")
        per_iteration = cost * time_s / SECONDS_PER_HOUR if isinstance(time_s, int | float) else None
        found.append({**row, COST_PER_HOUR: cost, COST_PER_ITERATION: per_iteration})
    return found


def _cost_per_hour(row: Row, prices: Mapping[str, float], path: Path) -> float:
    topology, device = row.get("topology"), row.get("device")
    if topology in prices:
        return float(prices[str(topology)]) * float(row.get("nodes") or 1)
    if device in prices and row.get("n_ranks"):
        return float(prices[str(device)]) * float(row["n_ranks"])
    if topology:
        try:
            spec = load_topology(str(topology))
            nodes = int(row["nodes"]) if row.get("nodes") else None
            machine = build_topology(spec if nodes is None else spec.with_nodes(nodes))
        except PerfModelError as error:
            raise ConfigError(f"{path}: no price for topology {topology!r}, and it is not known: {error}") from error
        unknown = sorted({place.device for place in machine.ranks} - set(prices))
        if not unknown:
            return float(sum(prices[place.device] for place in machine.ranks))
        device = unknown[0]
    raise ConfigError(f"{path}: per_hour: no price for {device or topology!r}, which the table has")


def pareto_front(rows: Sequence[Row], choice: SweepChoice) -> list[int]:
    """Indices of the rows that no other row beats in one of the two figures without losing in the other, by `against`.

    >>> rows = [{"t": 1, "m": 9}, {"t": 2, "m": 3}, {"t": 3, "m": 4}]
    >>> pareto_front(rows, SweepChoice(x="t", y="m", value="t", against="m"))
    [1, 0]
    """
    points = []
    for index, row in enumerate(rows):
        pair = _signed(row, choice.against, choice), _signed(row, choice.value, choice)
        if pair[0] is not None and pair[1] is not None:
            points.append((pair[0], pair[1], index))
    front, best = [], math.inf
    for _, value, index in sorted(points):
        if value < best:
            front.append(index)
            best = value
    return front


def _signed(row: Row, name: str, choice: SweepChoice) -> float | None:
    value = row.get(name)
    if not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return -float(value) if name in choice.larger else float(value)


def render_sweep_page(name: str, rows: Sequence[Row], choice: SweepChoice) -> str:
    """The page of a table. Raises ConfigError where a column that the choice names is not in it."""
    columns = list(dict.fromkeys(key for row in rows for key in row))
    wanted = {"--x": choice.x, "--y": choice.y, "--value": choice.value, "--against": choice.against}
    problems = [
        f"{option}: found {column!r}, allowed a column of {name}: {', '.join(columns)}{suggest(column, columns)}"
        for option, column in wanted.items()
        if column not in columns
    ]
    if problems:
        raise ConfigError(problems)
    front = pareto_front(rows, choice)
    shown = sorted(range(len(rows)), key=lambda i: _order(rows[i], choice))[:MAX_TABLE_ROWS]
    return render(
        "sweep.html.j2",
        {
            "title": f"{name}: {choice.value} over {choice.x} and {choice.y}",
            "name": name,
            "choice": choice,
            "n_rows": len(rows),
            "columns": columns,
            "rows": [[_cell(rows[i].get(c), c) for c in columns] for i in shown],
            "front": [[_cell(rows[i].get(c), c) for c in columns] for i in front],
            "left_out": len(rows) - len(shown),
            "charts": {"heat": heat_map(rows, choice), "pareto": pareto_plot(rows, choice, front)},
            "data": [dict(row) for row in rows],
        },
    )


def _order(row: Row, choice: SweepChoice) -> float:
    value = _signed(row, choice.value, choice)
    return math.inf if value is None else value


def show(value: object, column: str) -> str:
    """A value as its column's suffix says: `_s` a time, `_bytes` a size."""
    if not isinstance(value, int | float):
        return "-" if value is None else str(value)
    if column.endswith("_per_s"):
        return format_count(value)
    if column.endswith("_s"):
        return format_time(value)
    if column.endswith("_bytes"):
        return format_bytes(value)
    return f"{value:.4g}" if isinstance(value, float) and not value.is_integer() else f"{int(value)}"


def _cell(value: object, column: str) -> Any:
    if isinstance(value, int | float) and math.isfinite(value):
        return {"value": value, "text": show(value, column)}
    return show(value, column)


def heat_map(rows: Sequence[Row], choice: SweepChoice) -> str:
    """The best value of every pair of axis values, darker the worse; the best of all is framed."""
    best: dict[tuple[object, object], float] = {}
    for row in rows:
        value = _signed(row, choice.value, choice)
        if value is not None:
            key = row.get(choice.x), row.get(choice.y)
            best[key] = min(value, best.get(key, math.inf))
    if not best:
        return ""
    xs, ys = (_axis_values(best, axis) for axis in (0, 1))
    low, high = min(best.values()), max(best.values())
    left, top = 150.0, 10.0
    wide, tall = min((WIDTH - left) / len(xs), 120.0), 34.0
    parts = []
    for j, y in enumerate(ys):
        parts.append(text(show(y, choice.y)[:22], left - 8, top + j * tall + 21, text_anchor="end", font_size=12))
        for i, x in enumerate(xs):
            value = best.get((x, y))
            place = {"x": left + i * wide, "y": top + j * tall, "width": wide - 2, "height": tall - 2}
            if value is None:
                parts.append(
                    tag("rect", title("no answer"), fill="#fff", stroke="#bbb", stroke_dasharray="3 3", **place)
                )
                continue
            share = (value - low) / (high - low) if high > low else 0.0
            words = show(abs(value) if choice.value in choice.larger else value, choice.value)
            frame = {"stroke": "#000", "stroke_width": 2.5} if value == low else {"stroke": "none"}
            tip = f"{choice.x} {show(x, choice.x)}, {choice.y} {show(y, choice.y)}: {choice.value} {words}"
            parts.append(tag("rect", title(tip), fill=_shade(share), **frame, **place))
            ink = "#fff" if share > 0.45 else "#000"
            middle = left + i * wide + wide / 2 - 1
            parts.append(text(words, middle, top + j * tall + 21, text_anchor="middle", font_size=11, fill=ink))
    bottom = top + len(ys) * tall
    parts += [
        text(show(x, choice.x)[:14], left + i * wide + wide / 2, bottom + 16, text_anchor="middle", font_size=12)
        for i, x in enumerate(xs)
    ]
    parts.append(text(choice.x, left + len(xs) * wide / 2, bottom + 36, text_anchor="middle", font_size=12, fill=INK))
    parts.append(text(choice.y, 4, top + 12, font_size=12, fill=INK))
    return picture(WIDTH, bottom + 44, parts, f"{choice.value} over {choice.x} and {choice.y}")


def _axis_values(best: Mapping[tuple[object, object], float], axis: int) -> list[object]:
    """The values of an axis in order; of more than MAX_CELLS those with the best cells."""
    by_merit = sorted(best, key=lambda key: best[key])
    found = list(dict.fromkeys(key[axis] for key in by_merit))[:MAX_CELLS]
    return sorted(found, key=lambda v: (0, v, "") if isinstance(v, int | float) else (1, 0, str(v)))


def _shade(share: float) -> str:
    """From pale to dark blue: one hue, so that lightness alone tells the order (cividis-like ends)."""
    pale, dark = (255, 244, 200), (0, 50, 110)
    return "#{:02x}{:02x}{:02x}".format(*(round(p + (d - p) * share) for p, d in zip(pale, dark, strict=True)))


def pareto_plot(rows: Sequence[Row], choice: SweepChoice, front: Sequence[int]) -> str:
    """Every row by its two figures; the front joined by steps."""
    pairs = [(row.get(choice.against), row.get(choice.value)) for row in rows]
    points = [
        (float(a), float(b), i)
        for i, (a, b) in enumerate(pairs)
        if isinstance(a, int | float) and isinstance(b, int | float) and math.isfinite(a) and math.isfinite(b)
    ]
    if not points:
        return ""
    xs, ys = [a for a, _, _ in points], [b for _, b, _ in points]
    plane = Plane((0.0, (max(xs) or 1.0) * 1.08), (0.0, (max(ys) or 1.0) * 1.08))
    plane.axes((choice.against, choice.value), (lambda v: show(v, choice.against), lambda v: show(v, choice.value)))
    best = set(front)
    plane.line([(float(rows[i][choice.against]), float(rows[i][choice.value])) for i in front], VERMILION)
    for a, b, i in sorted(points, key=lambda point: point[2] in best):
        words = ", ".join(f"{key} {show(value, key)}" for key, value in list(rows[i].items())[:8])
        plane.dot(
            (a, b),
            6.0 if i in best else 4.0,
            VERMILION if i in best else GREY,
            words,
            "diamond" if i in best else "circle",
        )
    return plane.done(f"{choice.value} against {choice.against}; diamonds are the Pareto front")
