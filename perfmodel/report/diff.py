"""What changed between two predictions, and how much of the difference each cause contributes."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from io import StringIO

from perfmodel.pipeline.prediction import Prediction
from perfmodel.units import format_bytes, format_percent, format_time

SCHEMA_VERSION = 1
ROUNDING = "rounding"
# What a prediction was asked for: fields compared as they are.
ASKED = ("model", "topology", "plan", "precision", "n_ranks", "batch_per_rank", "mode", "conditions")


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """Something that differs, as text on either side."""

    what: str
    before: str
    after: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Contribution:
    """Time (s) of one cause on the critical path before and after, and their difference."""

    cause: str
    before_s: float
    after_s: float
    difference_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """What `diff_predictions` finds. `contributions` add up to `difference_s` exactly, in the order given."""

    before_s: float
    after_s: float
    difference_s: float
    changes: tuple[Change, ...]
    contributions: tuple[Contribution, ...]
    before_memory_bytes: int
    after_memory_bytes: int

    def to_json(self) -> str:
        """The difference as indented JSON text with `schema_version`."""
        return json.dumps({"schema_version": SCHEMA_VERSION, **asdict(self)}, indent=2, sort_keys=True)


def diff_predictions(before: Prediction, after: Prediction) -> Difference:
    """Compares two predictions by what lies on their critical paths.

    The critical path of a prediction is made of stretches with one cause each that add up to the iteration time, so the
    differences by cause add up to the difference of the iteration times. Contributions come largest first.
    """
    times = [{part.cause: part.time_s for part in p.critical_path} for p in (before, after)]
    rows = []
    for cause in {**times[0], **times[1]}:
        a, b = times[0].get(cause, 0.0), times[1].get(cause, 0.0)
        if a != b:
            rows.append(Contribution(cause=cause, before_s=a, after_s=b, difference_s=b - a))
    rows.sort(key=lambda row: (-abs(row.difference_s), row.cause))
    difference_s = after.iteration_time_s - before.iteration_time_s
    return Difference(
        before_s=before.iteration_time_s,
        after_s=after.iteration_time_s,
        difference_s=difference_s,
        changes=tuple(_changes(before, after)),
        contributions=(*rows, *_rounding(rows, difference_s)),
        before_memory_bytes=before.memory_bytes,
        after_memory_bytes=after.memory_bytes,
    )


def _rounding(rows: list[Contribution], difference_s: float) -> list[Contribution]:
    """What floating-point sums lose, as a row of its own; below a picosecond."""
    total_s = 0.0
    for row in rows:
        total_s += row.difference_s
    lost_s = difference_s - total_s
    if total_s == difference_s or total_s + lost_s != difference_s:
        return []
    return [Contribution(cause=ROUNDING, before_s=0.0, after_s=lost_s, difference_s=lost_s)]


def _changes(before: Prediction, after: Prediction) -> list[Change]:
    found = []
    for name in ASKED:
        a, b = getattr(before, name), getattr(after, name)
        if a != b:
            found.append(Change(what=name.replace("_", " "), before=_text(a), after=_text(b)))
    for name in sorted({*before.provenance, *after.provenance}):
        a, b = before.provenance.get(name, "not used"), after.provenance.get(name, "not used")
        if a != b:
            found.append(Change(what=f"price of {name}", before=a, after=b))
    return found


def _text(value: object) -> str:
    return "; ".join(value) or "none" if isinstance(value, tuple) else str(value)


def render_diff(difference: Difference, *, width: int = 120) -> str:
    """The difference as a text report."""
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    buffer = StringIO()
    console = Console(file=buffer, width=width, no_color=True, highlight=False)
    d = difference
    ratio = f" ({signed_percent(d.difference_s / d.before_s)})" if d.before_s else ""
    console.print(
        f"iteration time {format_time(d.before_s)} -> {format_time(d.after_s)}: {signed_time(d.difference_s)}{ratio}",
        markup=False,
    )
    if d.before_memory_bytes != d.after_memory_bytes:
        console.print(
            f"memory {format_bytes(d.before_memory_bytes)} -> {format_bytes(d.after_memory_bytes)}", markup=False
        )
    asked = [change for change in d.changes if not change.what.startswith("price of ")]
    for change in asked:
        console.print(f"  {change.what}: {change.before} -> {change.after}", markup=False)
    if len(d.changes) > len(asked):
        console.print(f"  {len(d.changes) - len(asked)} kernel families are priced from other data")
    table = Table(title="What the difference is made of", title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("cause on the critical path")
    for name in ("before", "after", "difference", "share"):
        table.add_column(name, justify="right")
    for row in d.contributions:
        if row.cause == ROUNDING:
            continue
        share = format_percent(row.difference_s / d.difference_s) if d.difference_s else "-"
        table.add_row(
            row.cause, format_time(row.before_s), format_time(row.after_s), signed_time(row.difference_s), share
        )
    console.print(table)
    return buffer.getvalue()


def signed_time(time_s: float) -> str:
    """`+1.20 ms`, `-3.00 us`."""
    return ("+" if time_s >= 0 else "-") + format_time(abs(time_s))


def signed_percent(fraction: float) -> str:
    """`+12.0%`, `-3.0%`."""
    return ("+" if fraction >= 0 else "-") + format_percent(abs(fraction))
