"""The pictures of a prediction's page, each as SVG text."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from perfmodel.pipeline.prediction import Prediction
from perfmodel.report.evidence import Curve, LinkLoad, Roofline, ShardLoad
from perfmodel.report.svg import (
    BLUE,
    GREEN,
    GREY,
    INK,
    ORANGE,
    PURPLE,
    SERIES,
    SKY,
    VERMILION,
    WIDTH,
    YELLOW,
    Plane,
    picture,
    stacked_bars,
    tag,
    text,
    title,
)  # fmt: skip
from perfmodel.report.table import describe_ranks
from perfmodel.report.topology import MAX_HOSTS_DRAWN, Spot, layout
from perfmodel.topology import NodeKind, Topology
from perfmodel.units import (
    format_bytes,
    format_count,
    format_flops,
    format_flops_per_s,
    format_percent,
    format_rate,
    format_time,
)  # fmt: skip

PARTS = {
    "compute_s": ("compute", BLUE),
    "exposed_communication_s": ("exposed communication", VERMILION),
    "exposed_copy_s": ("copy", PURPLE),
    "wait_s": ("wait for other ranks", GREY),
    "host_bound_s": ("host-bound", ORANGE),
    "input_s": ("data loader", YELLOW),
    "idle_s": ("idle", "#dddddd"),
}
MEMORY_PARTS = {
    "parameters_bytes": ("parameters", BLUE),
    "gradients_bytes": ("gradients", SKY),
    "optimizer_bytes": ("optimizer", GREEN),
    "activations_bytes": ("activations", ORANGE),
    "buffers_bytes": ("buffers", PURPLE),
    "communication_bytes": ("communication", VERMILION),
    "allocator_bytes": ("allocator", GREY),
}
SOURCES = {
    "measured": BLUE, "fitted": SKY, "derived": GREEN, "roofline": ORANGE, "extrapolated": VERMILION, "unmodelled": PURPLE,
}  # fmt: skip
MAX_ROWS = 16
_NODE = {NodeKind.GPU: "#cfe8ff", NodeKind.CPU: "#cfe8ff", NodeKind.NVSWITCH: "#ffe9bf", NodeKind.NIC: "#f3d6e6"}


def breakdown_bars(p: Prediction) -> str:
    """Where each rank class's iteration goes."""
    rows = []
    for rank in p.ranks[:MAX_ROWS]:
        parts = [(name, getattr(rank.breakdown, field), colour) for field, (name, colour) in PARTS.items()]
        rows.append((f"rank {describe_ranks(rank.ranks)}"[:16], parts))
    return stacked_bars(rows, format_time, "Breakdown of the iteration of each class of ranks")


def memory_bars(p: Prediction) -> str:
    """Peak memory of each rank class by what holds it."""
    rows = []
    for rank in p.ranks[:MAX_ROWS]:
        parts = [
            (name, float(getattr(rank.memory, field)), colour)
            for field, (name, colour) in MEMORY_PARTS.items()
            if hasattr(rank.memory, field)
        ]
        rows.append((f"rank {describe_ranks(rank.ranks)}"[:16], parts))
    return stacked_bars(rows, format_bytes, "Peak memory of each class of ranks by what holds it")


def legend(names: Mapping[str, tuple[str, str]]) -> list[tuple[str, str]]:
    """(name, colour) of a picture's parts."""
    return list(names.values())


def coverage_bar(p: Prediction) -> str:
    """Share of the priced time by source; `coverage_legend` has the figures."""
    width, height, x, parts = 640.0, 20.0, 0.0, []
    for name, share in p.coverage.items():
        words = title(f"{name} {format_percent(share)}")
        parts.append(tag("rect", words, x=x, y=0, width=share * width, height=height, fill=SOURCES.get(name, GREY)))
        x += share * width
    return picture(width, height, parts, "Share of the priced time by source of the price")


def coverage_legend(p: Prediction) -> list[tuple[str, str]]:
    """(source and its share, colour)."""
    return [(f"{name} {format_percent(share)}", SOURCES.get(name, GREY)) for name, share in p.coverage.items()]


def path_bars(p: Prediction) -> str:
    """The critical path by cause, largest first, with the range of each."""
    shares = p.critical_path[:MAX_ROWS]
    longest = max((s.time_s + s.above_s for s in shares), default=0.0) or 1.0
    left, right, height, parts = 190.0, 640.0, 24.0, []
    for number, share in enumerate(shares):
        y = number * height
        span = share.time_s / longest * (right - left)
        words = f"{share.cause}: {format_time(share.time_s)}, {format_percent(share.share_frac)}"
        parts.append(text(share.cause[:28], left - 8, y + 16, text_anchor="end", font_size=12))
        parts.append(tag("rect", title(words), x=left, y=y + 4, width=span, height=height - 9, fill=BLUE))
        low = left + (share.time_s - share.below_s) / longest * (right - left)
        high = left + (share.time_s + share.above_s) / longest * (right - left)
        parts.append(
            tag(
                "line",
                title("range of its prices"),
                x1=low,
                x2=high,
                y1=y + 11.5,
                y2=y + 11.5,
                stroke=INK,
                stroke_width=2,
            )
        )
        figure = f"{format_time(share.time_s)}  {format_percent(share.share_frac)}"
        parts.append(text(figure, max(high, left + span) + 8, y + 16, font_size=12))
    return picture(800, max(len(shares), 1) * height, parts, "Causes along the critical path")


def range_bar(p: Prediction) -> str:
    """The prediction within its range, and the lower bounds if known."""
    marks = [("low", p.low_s), ("predicted", p.iteration_time_s), ("high", p.high_s)]
    bounds = []
    if p.bounds is not None:
        bounds = [
            ("no network", p.bounds.infinite_network_s),
            ("no host", p.bounds.infinite_host_s),
            ("roofline", p.bounds.roofline_s),
        ]
    largest = max(time_s for _, time_s in (*marks, *bounds)) or 1.0
    x = {name: 12 + time_s / largest * 600 for name, time_s in (*marks, *bounds)}
    span = max(x["high"] - x["low"], 1.0)
    parts = [
        tag("line", x1=12, x2=612, y1=14, y2=14, stroke="#bbb"),
        tag("rect", title("range"), x=x["low"], y=6, width=span, height=16, fill=SKY),
        tag("rect", title("predicted"), x=x["predicted"] - 2, y=1, width=4, height=26, fill=BLUE),
        text("0", 12, 40, font_size=14, fill="#444"),
    ]
    for number, (name, time_s) in enumerate(sorted(bounds, key=lambda bound: bound[1])):
        y = 44 + 19 * number
        parts.append(tag("line", x1=x[name], x2=x[name], y1=14, y2=y - 4, stroke=VERMILION, stroke_dasharray="3 3"))
        anchor = "end" if x[name] > 320 else "start"
        shift = -5 if anchor == "end" else 5
        parts.append(text(f"{name} {format_time(time_s)}", x[name] + shift, y, text_anchor=anchor, font_size=14))
    return picture(640, 46 + 19 * len(bounds), parts, "The prediction, its range and lower bounds")


def roofline_plot(found: Roofline) -> str:
    """Kernels by FLOPs per byte and FLOP/s, under the device's roofs."""
    if not found.points:
        return ""
    xs = [p.intensity for p in found.points]
    ys = [p.flops_per_s for p in found.points]
    top = max([*found.peaks.values(), *ys])
    ridge = top / found.memory_bytes_per_s
    plane = Plane((min(xs) / 2, max([*xs, ridge]) * 3), (min(ys) / 3, top * 2.5), log=(True, True))
    plane.axes(("FLOPs per byte of device memory traffic", "rate"), (lambda v: f"{v:g}", format_flops_per_s))
    low = min(xs) / 2
    for number, (pipe, peak) in enumerate(sorted(found.peaks.items(), key=lambda item: -item[1])):
        knee = max(peak / found.memory_bytes_per_s, low)
        roof = [(low, min(found.memory_bytes_per_s * low, peak)), (knee, peak), (max([*xs, ridge]) * 3, peak)]
        plane.line(roof, INK if number == 0 else "#777", f"{pipe} {format_flops_per_s(peak)}", stroke_width=1.6)
    families = list(dict.fromkeys(p.family for p in found.points))
    longest = max(p.time_s * p.calls for p in found.points)
    for p in sorted(found.points, key=lambda point: -point.time_s * point.calls):
        kind = families.index(p.family)
        words = (
            f"{p.name} ({p.phase}, {p.family}) x{p.calls}: {format_time(p.time_s)} each, {format_flops(p.flops)}, "
            f"{format_bytes(p.bytes)}, {format_flops_per_s(p.flops_per_s)}"
        )
        radius = 3.5 + 9 * math.sqrt(p.time_s * p.calls / longest)
        plane.dot(
            (p.intensity, p.flops_per_s), radius, SERIES[kind % len(SERIES)], words, _SHAPES[kind // len(SERIES) % 3]
        )
    for pipe, peak in found.peaks.items():
        halo = {"stroke": "#fff", "stroke_width": 4, "paint_order": "stroke"}
        words = f"{pipe} {format_flops_per_s(peak)}"
        plane.note(words, (max([*xs, ridge]) * 2.8, peak), text_anchor="end", dy=-5, **halo)
    return plane.done(f"Roofline of {found.device}: kernels by arithmetic intensity and rate")


_SHAPES = ("circle", "square", "diamond")


def roofline_legend(found: Roofline) -> list[tuple[str, str, str]]:
    """(family, colour, shape)."""
    families = dict.fromkeys(p.family for p in found.points)
    n = len(SERIES)
    return [(family, SERIES[k % n], _SHAPES[k // n % len(_SHAPES)]) for k, family in enumerate(families)]


def memory_plot(curves: Sequence[Curve], iteration_s: float) -> str:
    """Memory in use over the iteration, as steps."""
    if not curves:
        return ""
    top = max(max(curve.bytes) for curve in curves) * 1.1
    plane = Plane((0.0, iteration_s), (0.0, top), size=(WIDTH, 300.0))
    unit = 1024.0 ** int(math.log(top, 1024)) if top else 1.0
    plane.axes(("time in the iteration", "memory in use"), (format_time, format_bytes), unit=(1.0, unit))
    for number, curve in enumerate(curves):
        steps: list[tuple[float, float]] = []
        for time_s, used in zip(curve.time_s, curve.bytes, strict=True):
            at = min(max(time_s, 0.0), iteration_s)
            if steps:
                steps.append((at, steps[-1][1]))
            steps.append((at, float(used)))
        steps.append((iteration_s, steps[-1][1]))
        name = f"rank {describe_ranks(curve.ranks)}: peak {format_bytes(max(curve.bytes))}"
        plane.line(steps, SERIES[number % len(SERIES)], name, stroke_dasharray=_DASHES[number // 2 % len(_DASHES)])
    return plane.done("Memory in use over the iteration")


_DASHES = ("none", "7 4", "2 3", "9 3 2 3")


def memory_legend(curves: Sequence[Curve]) -> list[tuple[str, str]]:
    """(class and its peak, colour)."""
    return [
        (f"rank {describe_ranks(curve.ranks)}: peak {format_bytes(max(curve.bytes))}", SERIES[number % len(SERIES)])
        for number, curve in enumerate(curves)
    ]


def shard_bars(loads: Sequence[ShardLoad], what: str) -> str:
    """One figure of every class of ranks that holds tables: `memory`, `time` or `traffic`."""

    def read(load: ShardLoad) -> list[tuple[str, float, str]]:
        if what == "memory":
            return [("parameters", float(load.parameters_bytes), BLUE)]
        if what == "time":
            return [("embedding kernels", load.embedding_s, GREEN)]
        return [("sent", load.sent_bytes, VERMILION), ("received", load.received_bytes, ORANGE)]

    rows = [(f"rank {describe_ranks(load.ranks)}"[:16], read(load)) for load in loads[:64]]
    return stacked_bars(
        rows, format_time if what == "time" else format_bytes, f"Embedding {what} of each class of ranks"
    )


def imbalance(values: Sequence[tuple[float, int]]) -> float:
    """Largest value over the mean, of (value, number of ranks); 1 is perfect balance, 0 where all are zero."""
    total, n = sum(v * k for v, k in values), sum(k for _, k in values)
    return max((v for v, _ in values), default=0.0) * n / total if total else 0.0


def topology_plot(topology: Topology, loads: Sequence[LinkLoad]) -> str:
    """The machine (first hosts of a large one): a line per link, wider and darker the longer it is busy."""
    spots = layout(topology)
    left, right = min(s.x for s in spots.values()), max(s.x for s in spots.values())
    top, bottom = max(s.y for s in spots.values()), min(s.y for s in spots.values())
    unit = min(max(960 / (right - left + 2), 46.0), 120.0)
    size = ((right - left + 1.6) * unit, (top - bottom + 1.2) * 62 + 26)

    def at(spot: Spot) -> tuple[float, float]:
        return (spot.x - left + 0.8) * unit, (top - spot.y + 0.6) * 62

    busy: dict[frozenset[str], list[LinkLoad]] = {}
    for load in loads:
        busy.setdefault(frozenset((load.source, load.target)), []).append(load)
    most = max((load.busy_frac for load in loads), default=0.0) or 1.0
    parts: list[str] = []
    over: list[str] = []
    for source, target, data in topology.graph.edges(data=True):
        if source >= target or source not in spots or target not in spots:
            continue
        both = busy.get(frozenset((source, target)), [])
        share = max((load.busy_frac for load in both), default=0.0)
        link = data["link"]
        words = f"{source} - {target}, {link.kind} x{link.n_lanes}, {format_rate(link.bandwidth_bytes_per_s)}"
        words += "".join(
            f"; {load.name}: {format_bytes(load.bytes)}, busy {format_percent(load.busy_frac)}" for load in both
        )
        (over if share else parts).append(_link_line(at(spots[source]), at(spots[target]), share, most, words))
    nodes = [_node_box(topology, name, at(spot)) for name, spot in spots.items()]
    n_hosts = len(topology.hosts())
    note = (
        f"first {MAX_HOSTS_DRAWN} of {n_hosts} hosts"
        if n_hosts > MAX_HOSTS_DRAWN
        else f"{n_hosts} host" + "s" * (n_hosts > 1)
    )
    parts += [*over, *nodes, text(note, 6, size[1] - 6, font_size=11, fill="#444")]
    return picture(*size, parts, f"Topology {topology.name} with the load of its links")


def _link_line(a: tuple[float, float], b: tuple[float, float], share: float, most: float, words: str) -> str:
    strength = share / most
    colour = _heat(strength) if share else "#c4c4c4"
    style = {"stroke": colour, "stroke_width": 1.0 + 6 * strength, "fill": "none"}
    if a[1] == b[1]:  # one row: an arc below, so that it does not run through what stands between
        depth = min(20 + abs(b[0] - a[0]) * 0.22, 90)
        middle = (a[0] + b[0]) / 2
        path = f"M{a[0]:.1f},{a[1]:.1f} Q{middle:.1f},{a[1] + 2 * depth:.1f} {b[0]:.1f},{b[1]:.1f}"
        return tag("path", title(words), d=path, **style)
    return tag("line", title(words), x1=a[0], y1=a[1], x2=b[0], y2=b[1], **style)


def _heat(strength: float) -> str:
    """From pale orange to dark red, also darker in grey."""
    pale, dark = (253, 200, 120), (140, 30, 0)
    mixed = [round(p + (d - p) * strength) for p, d in zip(pale, dark, strict=True)]
    return "#{:02x}{:02x}{:02x}".format(*mixed)


def _node_box(topology: Topology, name: str, at: tuple[float, float]) -> str:
    rank_of = {place.node: place.rank for place in topology.ranks}
    short = name.partition("/")[2]
    lines = [short, f"rank {rank_of[name]}"] if name in rank_of else [short]
    width = max(len(line) for line in lines) * 6.2 + 8
    height = 14.0 * len(lines) + 4
    kind = topology.graph.nodes[name]["kind"]
    box = tag("rect", title(name), x=at[0] - width / 2, y=at[1] - height / 2, width=width, height=height, rx=4,
              fill=_NODE.get(kind, "#f2f2f2"), stroke="#555", stroke_width=0.7)  # fmt: skip
    words = [
        text(line, at[0], at[1] - height / 2 + 13 + 14 * row, text_anchor="middle", font_size=10.5)
        for row, line in enumerate(lines)
    ]
    return box + "".join(words)


def figures(p: Prediction) -> list[tuple[str, str, float | int]]:
    """(name, as shown, the value in SI units) of the headline's facts."""
    found: list[tuple[str, str, float | int]] = [
        ("samples per second", format_count(p.samples_per_s), p.samples_per_s),
        ("batch per replica", str(p.batch_per_rank), p.batch_per_rank),
        ("ranks", str(p.n_ranks), p.n_ranks),
        ("largest memory of a rank", format_bytes(p.memory_bytes), p.memory_bytes),
    ]
    if p.work_flops:
        rate = p.work_flops / p.iteration_time_s / p.n_ranks
        found.append(("rate per rank", format_flops_per_s(rate), rate))
    return found
