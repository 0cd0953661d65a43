"""A prediction as text that a person reads in ten seconds."""

from __future__ import annotations

from io import StringIO
from typing import TYPE_CHECKING

from perfmodel.pipeline.prediction import Prediction, RankSummary
from perfmodel.units import format_bytes, format_count, format_flops_per_s, format_percent, format_time

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

MAX_RANK_ROWS = 8
MAX_OP_ROWS = 8
MAX_CAUSES = 6


def render_table(prediction: Prediction, *, width: int = 120, color: bool = False) -> str:
    """The prediction as a text report: headline, time per rank, top ops, critical path, memory, coverage, notes."""
    from rich.console import Console

    buffer = StringIO()
    console = Console(file=buffer, width=width, force_terminal=color, no_color=not color, highlight=False)
    _headline(console, prediction)
    console.print(_rank_table(prediction))
    console.print(_op_table(prediction))
    _footer(console, prediction)
    return buffer.getvalue()


def _headline(console: Console, p: Prediction) -> None:
    ranks = f"{p.n_ranks} rank" + ("s" if p.n_ranks > 1 else "")
    mode = f", {p.mode}" if p.mode != "eager" else ""
    console.print(f"[bold]{p.model}[/bold] on [bold]{p.topology}[/bold] ({ranks}, plan {p.plan}, {p.precision}{mode})")
    console.print(
        f"  iteration time [bold]{format_time(p.iteration_time_s)}[/bold]"
        f"  (range {format_time(p.low_s)} to {format_time(p.high_s)})"
        f"   {format_count(p.samples_per_s)} samples/s"
        f"   batch {p.batch_per_rank} x {p.replicas}"
    )
    if p.conditions:
        console.print(f"  assuming: {'; '.join(p.conditions)}")
    if p.percentiles:
        console.print("  percentiles: " + "   ".join(f"{name} {format_time(t)}" for name, t in p.percentiles.items()))
    if p.bounds is not None:
        network, host, roofline = (
            format_time(t) for t in (p.bounds.infinite_network_s, p.bounds.infinite_host_s, p.bounds.roofline_s)
        )
        console.print(
            f"  cannot go below: {network} with an infinite network, {host} with an infinite host, {roofline} at the roofline"
        )
    if p.work_flops:
        rate = p.work_flops / p.iteration_time_s / p.n_ranks
        console.print(f"  {format_flops_per_s(rate)} per rank while training")
    console.print()


def _table(title: str, columns: tuple[tuple[str, str], ...]) -> Table:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(title=title, title_justify="left", title_style="bold", box=SIMPLE_HEAD, pad_edge=False)
    for name, justify in columns:
        table.add_column(name, justify="left" if justify == "left" else "right", no_wrap=name != "op")
    return table


def _rank_table(p: Prediction) -> Table:
    loads = any(rank.breakdown.input_s for rank in p.ranks)
    names = (
        "ranks", "compute", "exposed comm", "copy", "wait", "host-bound", *(("loader",) if loads else ()), "idle",
        "hidden comm", "memory",
    )  # fmt: skip
    table = _table("Where each rank's iteration goes", tuple((n, "left" if n == "ranks" else "right") for n in names))
    ranks_of: dict[tuple[str, ...], tuple[int, ...]] = {}
    for rank in p.ranks:
        cells = _rank_cells(rank, loads=loads)
        ranks_of[cells] = (*ranks_of.get(cells, ()), *rank.ranks)
    for cells, ranks in list(ranks_of.items())[:MAX_RANK_ROWS]:
        table.add_row(describe_ranks(ranks), *cells)
    hidden = len(ranks_of) - MAX_RANK_ROWS
    if hidden > 0:
        table.add_row(f"... {hidden} more", *[""] * (len(names) - 1))
    return table


def _rank_cells(rank: RankSummary, *, loads: bool) -> tuple[str, ...]:
    """What a row says besides its ranks; ranks with the same cells share a row. `loads`: some wait for a data loader."""
    b = rank.breakdown
    used = f"{format_bytes(rank.memory.total_bytes)} of {format_bytes(rank.memory_capacity_bytes)}"
    times = (
        b.compute_s,
        b.exposed_communication_s,
        b.exposed_copy_s,
        b.wait_s,
        b.host_bound_s,
        *((b.input_s,) if loads else ()),
        b.idle_s,
        rank.hidden_communication_s,
    )
    return (*(format_time(t) if t else "-" for t in times), used)


def describe_ranks(ranks: tuple[int, ...]) -> str:
    """`0-3,7` for (0, 1, 2, 3, 7).

    >>> describe_ranks((0, 1, 2, 3, 7))
    '0-3,7'
    """
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


def _op_table(p: Prediction) -> Table:
    columns = (
        ("op", "left"), ("phase", "left"), ("calls", "right"), ("time", "right"), ("share", "right"), ("price", "left")
    )  # fmt: skip
    table = _table(f"Largest device times on rank {p.ranks[0].ranks[0]}", columns)
    for op in p.top_ops[:MAX_OP_ROWS]:
        cells = (op.name, op.phase, str(op.calls), format_time(op.time_s), format_percent(op.share_frac), op.source)
        table.add_row(*cells)
    return table


def _footer(console: Console, p: Prediction) -> None:
    shown = p.critical_path[:MAX_CAUSES]
    path = [f"{part.cause} {format_time(part.time_s)} ({format_percent(part.share_frac)})" for part in shown]
    rest_s = sum(part.time_s for part in p.critical_path[MAX_CAUSES:])
    if rest_s > 0:
        path.append(f"{len(p.critical_path) - MAX_CAUSES} more {format_time(rest_s)}")
    console.print("Critical path: " + ", ".join(path))
    shares = sorted(p.coverage.items(), key=lambda item: -item[1])
    console.print("Priced by:     " + ", ".join(f"{name} {format_percent(share)}" for name, share in shares))
    for note in p.notes:
        console.print(f"Note: {note}", style="dim")
