"""A prediction as one self-contained page."""

from __future__ import annotations

from functools import cache
from importlib.metadata import version
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from perfmodel.errors import ConfigError
from perfmodel.pipeline.prediction import Prediction, RankSummary
from perfmodel.pipeline.run import Run
from perfmodel.report import charts, evidence
from perfmodel.report.svg import BLUE, ORANGE, PURPLE, VERMILION
from perfmodel.report.table import describe_ranks
from perfmodel.units import format_bytes, format_flops, format_flops_per_s, format_percent, format_rate, format_time

if TYPE_CHECKING:
    from jinja2 import Environment

MAX_RANK_ROWS = 32
MAX_LINK_ROWS = 12
KIND_KEYS = [
    ("kernel", BLUE), ("collective", VERMILION), ("copy", PURPLE), ("host", ORANGE), ("host waits for the device", "#8a5a00"),
    ("framed and underlined: critical path", "#000"),
]  # fmt: skip


@cache
def environment() -> Environment:
    """The templates of this package, escaping what they are given. Raises ConfigError without jinja2."""
    try:
        from jinja2 import Environment, PackageLoader, StrictUndefined
    except ImportError as error:
        raise ConfigError("pages need jinja2: pip install 'perfmodel[report]'") from error
    return Environment(
        loader=PackageLoader("perfmodel.report", "page"), autoescape=True, undefined=StrictUndefined,
        trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip


def asset(name: str) -> str:
    """Text of a file that pages carry inside them."""
    return files("perfmodel.report").joinpath("page", name).read_text(encoding="utf-8")


def render(template: str, context: dict[str, Any]) -> str:
    """A page from a template of this package."""
    shared = {
        "style": asset("style.css"), "version": version("perfmodel"), "time": format_time, "rate": format_rate,
        "percent": format_percent, "ranks_text": lambda ranks: describe_ranks(tuple(ranks)),
    }  # fmt: skip
    return environment().get_template(template).render(**shared, **context)


def render_page(run: Run) -> str:
    """The page of a run: the same figures as its JSON, which it carries, with pictures. Same input, same bytes."""
    p = run.prediction
    context = {
        "title": f"{p.model} on {p.topology}: {format_time(p.iteration_time_s)} per iteration",
        "p": p,
        "prediction": p.to_dict(),
        "facts": charts.figures(p),
        "timelines": evidence.timelines(run),
        "script": asset("timeline.js"),
        "kind_keys": KIND_KEYS,
        "part_keys": charts.legend(charts.PARTS),
        "memory_keys": charts.legend(charts.MEMORY_PARTS),
        "source_keys": charts.coverage_legend(p),
        "price_rows": sorted(p.provenance.items()),
        "assumptions": [*p.conditions, *p.notes],
        **_ranks(p),
        **_ops(p),
    }
    pictures = {
        "range": charts.range_bar(p),
        "coverage": charts.coverage_bar(p),
        "breakdown": charts.breakdown_bars(p),
        "path": charts.path_bars(p),
        "memory_bars": charts.memory_bars(p),
    }
    for part in (_roofline(run), _links(run), _memory(run), _shards(run)):
        pictures |= part.pop("charts")
        context |= part
    context["charts"] = pictures
    context["sections"] = _sections(context)
    return render("prediction.html.j2", context)


def _sections(context: dict[str, Any]) -> list[tuple[str, str]]:
    names = {
        "breakdown": "Breakdown", "timeline": "Timeline", "path": "Critical path", "roofline": "Roofline",
        "topology": "Topology", "memory": "Memory", "sharding": "Embedding tables", "prices": "Prices",
        "assumptions": "Assumptions",
    }  # fmt: skip
    absent = {"roofline": not context["charts"]["roofline"], "sharding": not context["shards"]}
    return [(key, name) for key, name in names.items() if not absent.get(key)]


def _cell(value: float, words: str) -> dict[str, Any]:
    return {"value": value, "text": words}


def _time(value_s: float) -> dict[str, Any]:
    return _cell(value_s, format_time(value_s) if value_s else "-")


def _ranks(p: Prediction) -> dict[str, Any]:
    loads = any(rank.breakdown.input_s for rank in p.ranks)
    header = (
        "ranks", "compute", "exposed comm", "copy", "wait", "host-bound", *(("loader",) if loads else ()), "idle",
        "hidden comm", "memory", "of",
    )  # fmt: skip
    return {
        "rank_header": header,
        "rank_rows": [_rank_row(rank, loads=loads) for rank in p.ranks[:MAX_RANK_ROWS]],
        "ranks_left_out": max(len(p.ranks) - MAX_RANK_ROWS, 0),
    }


def _rank_row(rank: RankSummary, *, loads: bool) -> list[Any]:
    b = rank.breakdown
    times = (
        b.compute_s, b.exposed_communication_s, b.exposed_copy_s, b.wait_s, b.host_bound_s,
        *((b.input_s,) if loads else ()), b.idle_s,
        rank.hidden_communication_s,
    )  # fmt: skip
    memory = rank.memory.total_bytes
    return [
        describe_ranks(rank.ranks), *map(_time, times), _cell(memory, format_bytes(memory)),
        format_bytes(rank.memory_capacity_bytes),
    ]  # fmt: skip


def _ops(p: Prediction) -> dict[str, Any]:
    rows = [
        [op.name, op.phase, op.calls, _time(op.time_s), format_percent(op.share_frac), op.source] for op in p.top_ops
    ]
    return {"op_header": ("op", "phase", "calls", "time", "share", "price"), "op_rows": rows}


def _roofline(run: Run) -> dict[str, Any]:
    found = evidence.roofline(run)
    rows = [
        [
            point.name, point.phase, point.family, point.calls, _time(point.time_s), format_flops(point.flops),
            format_bytes(point.bytes), _cell(point.flops_per_s, format_flops_per_s(point.flops_per_s)),
        ]
        for point in found.points[:60]
    ]  # fmt: skip
    return {
        "charts": {"roofline": charts.roofline_plot(found)},
        "roofline": found,
        "roofline_keys": charts.roofline_legend(found),
        "roofline_header": ("op", "phase", "family", "calls", "time each", "FLOPs each", "bytes each", "rate"),
        "roofline_rows": rows,
    }


def _links(run: Run) -> dict[str, Any]:
    loads = evidence.link_loads(run)
    rows = [
        [
            load.name, f"{load.kind} x{load.n_lanes}", _cell(load.bytes, format_bytes(load.bytes)),
            format_rate(load.bandwidth_bytes_per_s), _cell(load.busy_frac, format_percent(load.busy_frac)),
        ]
        for load in loads[:MAX_LINK_ROWS]
    ]  # fmt: skip
    alone = run.prediction.n_ranks == 1
    return {
        "charts": {"topology": charts.topology_plot(run.topology, loads)},
        "link_header": ("link", "kind", "bytes", "bandwidth", "busy"),
        "link_rows": rows,
        "no_load": "One rank: no link carries a collective."
        if alone
        else "No link load: there is no collective, or a group is too large to follow pair by pair.",
    }


def _memory(run: Run) -> dict[str, Any]:
    curves = evidence.memory_curves(run)
    bases = [format_bytes(base) for base in sorted({curve.base_bytes for curve in curves})]
    return {
        "charts": {"memory": charts.memory_plot(curves, run.prediction.iteration_time_s)},
        "curve_keys": charts.memory_legend(curves),
        "memory_base": " to ".join(dict.fromkeys((bases[0], bases[-1]))) if bases else "",
    }


def _shards(run: Run) -> dict[str, Any]:
    loads = evidence.shard_loads(run)
    shown = {f"shard_{what}": charts.shard_bars(loads, what) if loads else "" for what in ("time", "memory", "traffic")}
    weighed = {
        "kernel time": [(load.embedding_s, len(load.ranks)) for load in loads],
        "parameters": [(float(load.parameters_bytes), len(load.ranks)) for load in loads],
        "bytes sent": [(load.sent_bytes, len(load.ranks)) for load in loads],
    }
    return {
        "charts": shown,
        "shards": loads,
        "shard_rows": [(describe_ranks(load.ranks), ", ".join(load.tables) or "none") for load in loads],
        "imbalances": [(name, charts.imbalance(values)) for name, values in weighed.items()],
    }
