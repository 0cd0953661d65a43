"""The main pictures of a prediction as PNG or SVG files, drawn by matplotlib."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from perfmodel.errors import ConfigError
from perfmodel.pipeline.run import Run
from perfmodel.report import evidence
from perfmodel.report.charts import MEMORY_PARTS, PARTS
from perfmodel.report.svg import BLUE, ORANGE, PURPLE, SERIES, VERMILION
from perfmodel.report.table import describe_ranks
from perfmodel.report.topology import FIGURE_SUFFIXES, draw_topology, matplotlib_figure, save
from perfmodel.units import GIBI, MS_PER_S, PS_PER_S

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PICTURES = ("breakdown", "timeline", "path", "roofline", "memory", "topology")
MAX_ROWS = 16
_KINDS = {"host": ORANGE, "sync": ORANGE, "kernel": BLUE, "copy": PURPLE, "collective": VERMILION}
_PS_PER_MS = PS_PER_S // MS_PER_S


def write_plots(run: Run, path: Path) -> list[Path]:
    """Writes `<stem>-<picture><suffix>` beside `path` for every picture the run has, and returns the files.

    Raises:
        ConfigError: matplotlib is not installed, the suffix is none it can write, or the place cannot be written.
    """
    if path.suffix.lower() not in FIGURE_SUFFIXES:
        raise ConfigError(f"{path}: found suffix {path.suffix!r}, allowed {', '.join(FIGURE_SUFFIXES)}")
    figure_class = matplotlib_figure()
    drawers: dict[str, Callable[[Axes, Run], bool]] = {
        "breakdown": _breakdown, "timeline": _timeline, "path": _path, "roofline": _roofline, "memory": _memory,
    }  # fmt: skip
    written = []
    for name, draw in drawers.items():
        figure = figure_class(figsize=(9.0, 4.2), layout="constrained")
        if draw(figure.add_subplot(), run):
            written.append(path.with_name(f"{path.stem}-{name}{path.suffix}"))
            save(figure, written[-1])
    written.append(path.with_name(f"{path.stem}-topology{path.suffix}"))
    draw_topology(run.topology, written[-1])
    return written


def _title(axes: Axes, run: Run, what: str) -> None:
    p = run.prediction
    axes.set_title(
        f"{what}: {p.model} on {p.topology}, plan {p.plan}, {p.iteration_time_s * MS_PER_S:.4g} ms", fontsize=10
    )


def _breakdown(axes: Axes, run: Run) -> bool:
    ranks = run.prediction.ranks[:MAX_ROWS]
    names = [f"rank {describe_ranks(rank.ranks)}"[:20] for rank in ranks]
    left = [0.0] * len(ranks)
    for field, (name, colour) in PARTS.items():
        parts = [getattr(rank.breakdown, field) * MS_PER_S for rank in ranks]
        axes.barh(names, parts, left=left, color=colour, label=name, edgecolor="white")
        left = [a + b for a, b in zip(left, parts, strict=True)]
    axes.invert_yaxis()
    axes.set_xlabel("ms")
    axes.legend(fontsize=8, ncols=3, loc="upper center", bbox_to_anchor=(0.5, -0.14), frameon=False)
    _title(axes, run, "Breakdown")
    return True


def _timeline(axes: Axes, run: Run) -> bool:
    found = evidence.timelines(run)[0]
    row_of = {stream["id"]: number for number, stream in enumerate(found["streams"])}
    for kind, colour in _KINDS.items():
        code = found["kinds"].index(kind)
        for stream, row in row_of.items():
            mine = [i for i, k in enumerate(found["kind"]) if k == code and found["stream"][i] == stream]
            spans = [(found["start"][i] / _PS_PER_MS, found["length"][i] / _PS_PER_MS) for i in mine]
            axes.broken_barh(spans, (row - 0.3, 0.6), color=colour, linewidth=0)
            path = [span for span, i in zip(spans, mine, strict=True) if found["critical"][i]]
            axes.broken_barh(path, (row + 0.3, 0.08), color="black", linewidth=0)
    axes.set_yticks(list(row_of.values()), [stream["name"] for stream in found["streams"]], fontsize=8)
    axes.invert_yaxis()
    axes.set_xlabel("ms; black under a span: critical path")
    _title(axes, run, f"Timeline of rank {describe_ranks(tuple(found['ranks']))}")
    return True


def _path(axes: Axes, run: Run) -> bool:
    shares = run.prediction.critical_path[:MAX_ROWS]
    spans = [[s.below_s * MS_PER_S for s in shares], [s.above_s * MS_PER_S for s in shares]]
    axes.barh([s.cause for s in shares], [s.time_s * MS_PER_S for s in shares], xerr=spans, color=BLUE, ecolor="black")
    axes.invert_yaxis()
    axes.set_xlabel("ms on the critical path, with the range of the prices")
    _title(axes, run, "Critical path")
    return True


def _roofline(axes: Axes, run: Run) -> bool:
    found = evidence.roofline(run)
    if not found.points:
        return False
    longest = max(p.time_s * p.calls for p in found.points)
    for number, family in enumerate(dict.fromkeys(p.family for p in found.points)):
        mine = [p for p in found.points if p.family == family]
        sizes = [12 + 160 * p.time_s * p.calls / longest for p in mine]
        axes.scatter(
            [p.intensity for p in mine], [p.flops_per_s for p in mine], s=sizes, alpha=0.7, label=family,
            color=SERIES[number % len(SERIES)], marker="os^D"[number // len(SERIES) % 4],
        )  # fmt: skip
    low = min(p.intensity for p in found.points) / 2
    high = (
        max(*(p.intensity for p in found.points), *(peak / found.memory_bytes_per_s for peak in found.peaks.values()))
        * 3
    )
    for pipe, peak in found.peaks.items():
        knee = peak / found.memory_bytes_per_s
        axes.plot([low, knee, high], [low * found.memory_bytes_per_s, peak, peak], color="black", linewidth=1)
        axes.annotate(pipe, (high, peak), ha="right", va="bottom", fontsize=8)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("FLOPs per byte of device memory traffic")
    axes.set_ylabel("FLOP/s")
    axes.legend(fontsize=7, loc="lower right", frameon=False)
    _title(axes, run, f"Roofline of {found.device}")
    return True


def _memory(axes: Axes, run: Run) -> bool:
    curves = evidence.memory_curves(run)
    for number, curve in enumerate(curves):
        axes.step(
            [t * MS_PER_S for t in curve.time_s], [b / GIBI for b in curve.bytes], where="post",
            label=f"rank {describe_ranks(curve.ranks)}", color=SERIES[number % len(SERIES)],
        )  # fmt: skip
    if not curves:  # no curve follows this plan: the peaks by what holds them
        ranks = run.prediction.ranks[:MAX_ROWS]
        left = [0.0] * len(ranks)
        for field, (name, colour) in MEMORY_PARTS.items():
            parts = [getattr(rank.memory, field) / GIBI for rank in ranks]
            axes.barh(
                [f"rank {describe_ranks(r.ranks)}"[:20] for r in ranks], parts, left=left, color=colour, label=name
            )
            left = [a + b for a, b in zip(left, parts, strict=True)]
        axes.invert_yaxis()
        axes.set_xlabel("GiB at the peak")
    else:
        axes.set_ylim(bottom=0)
        axes.set_xlabel("ms")
        axes.set_ylabel("GiB in use")
    axes.legend(fontsize=8, ncols=4, loc="upper center", bbox_to_anchor=(0.5, -0.14), frameon=False)
    _title(axes, run, "Memory")
    return True
