"""A ranking of sharding plans as text, and as plain values."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from perfmodel.sharding.plan import plain_plan
from perfmodel.sharding.rank import RankedPlan, Ranking, RankLoad, short_name
from perfmodel.units import format_bytes, format_percent, format_time

SCHEMA_VERSION = 1


def render_ranking(ranking: Ranking, top: int) -> str:
    """The ranked table, where the first plan's time goes by rank, and what would help."""
    head = (
        f"{'plan':<24} {'iteration':>10} {'range':>21} {'search cost':>11} {'first wins':>10} {'max/mean':>8} "
        f"{'headroom':>10}  binds"
    )
    lines = [head]
    for place in ranking.plans[:top]:
        lines.append(_row(place))
    best = ranking.plans[0]
    lines += ["", f"{best.plan.name}: where each rank's iteration goes", *_loads(best)]
    lines += [f"memory, {tier.text}" for tier in best.tiers]
    lines += [f"what would help: {words}" for words in best.advice]
    lines += [f"refused: {one.name}: {one.reason}" for one in ranking.refused]
    if ranking.n_evaluations:
        simulated = f", simulated {ranking.n_simulated:,}" if ranking.n_simulated else ""
        lines.append(f"searched {ranking.n_evaluations:,} placements{simulated} in {format_time(ranking.search_s)}")
    return "\n".join(lines)


def _row(place: RankedPlan) -> str:
    p = place.prediction
    low, high = format_time(p.low_s), format_time(p.high_s)
    odds = "tie" if place.ties else format_percent(place.beaten_frac)
    cost = "-" if math.isnan(place.surrogate_s) else format_time(place.surrogate_s)
    headroom = min(load.headroom_bytes for load in place.loads)
    binds = f"rank {place.binding_rank}" + (f", {short_name(place.binding_table)}" if place.binding_table else "")
    note = "" if place.verdict == "fits" else f" ({place.verdict})"
    return (
        f"{place.plan.name[:24]:<24} {format_time(p.iteration_time_s):>10} {low + ' - ' + high:>21} {cost:>11} {odds:>10} "
        f"{place.imbalance:>8.2f} {format_bytes(headroom):>10}{note}  {binds}"
    )


def _loads(place: RankedPlan) -> list[str]:
    lines = [
        f"{'ranks':<10} {'forward':>10} {'backward':>10} {'exposed':>10} {'wait':>10} {'host':>10} {'memory':>10}  tables"
    ]
    for load in sorted(place.loads, key=lambda one: one.ranks):
        lines.append(_load(load))
    return lines


def _load(load: RankLoad) -> str:
    times = (load.forward_s, load.backward_s, load.communication_s, load.wait_s, load.host_s)
    listed = " ".join(f"{format_time(value):>10}" for value in times)
    names = ", ".join(short_name(name) for name in load.tables[:6]) + (" ..." if len(load.tables) > 6 else "")
    elsewhere = f", host {format_bytes(load.host_bytes)}" if load.host_bytes else ""
    elsewhere += f", SSD {format_bytes(load.ssd_bytes)}" if load.ssd_bytes else ""
    return f"{_span(load.ranks):<10} {listed} {format_bytes(load.memory_bytes):>10}{elsewhere}  {names}"


def _span(ranks: Sequence[int]) -> str:
    if len(ranks) > 2 and ranks[-1] - ranks[0] == len(ranks) - 1:
        return f"{ranks[0]}-{ranks[-1]}"
    return ",".join(map(str, ranks[:4])) + ("..." if len(ranks) > 4 else "")


def render_plan(place: RankedPlan) -> str:
    """One plan explained: each table's placement, each rank's load."""
    lines = [_row(place), "", f"{'table':<16} {'sharding':<16} {'kernel':<12} ranks"]
    for name, where in place.plan.embeddings.placement.items():
        ranks = "all" if not where.ranks else ", ".join(map(str, where.ranks))
        widths = f" (columns {' + '.join(map(str, where.widths))})" if where.widths else ""
        lines.append(f"{name:<16} {where.sharding:<16} {where.kernel:<12} {ranks}{widths}")
    lines += ["", *_loads(place), "", "critical path:"]
    lines += [
        f"  {format_time(part.time_s):>10} {format_percent(part.share_frac):>6}  {part.cause}"
        for part in place.prediction.critical_path[:8]
    ]
    return "\n".join(
        [
            *lines,
            *(f"memory, {tier.text}" for tier in place.tiers),
            *(f"what would help: {words}" for words in place.advice),
        ]
    )


def plain_ranking(ranking: Ranking, top: int) -> Mapping[str, Any]:
    """The ranking as plain values, with `schema_version`."""
    return {
        "schema_version": SCHEMA_VERSION,
        "plans": [_plain(place) for place in ranking.plans[:top]],
        "refused": [{"name": one.name, "reason": one.reason} for one in ranking.refused],
        "evaluations": ranking.n_evaluations,
        "simulations": ranking.n_simulated,
        "search_s": ranking.search_s,
    }


def _plain(place: RankedPlan) -> Mapping[str, Any]:
    p = place.prediction
    return {
        **plain_plan(place.plan),
        "origin": place.origin,
        "iteration_time_s": p.iteration_time_s,
        "low_s": p.low_s,
        "high_s": p.high_s,
        "surrogate_s": None if place.surrogate_s != place.surrogate_s else place.surrogate_s,
        "first_wins_frac": place.beaten_frac,
        "ties": place.ties,
        "imbalance": place.imbalance,
        "binding_rank": place.binding_rank,
        "binding_table": place.binding_table,
        "verdict": place.verdict,
        "memory": [
            {
                "tier": tier.name,
                "verdict": tier.verdict,
                "needed_bytes": tier.needed_bytes,
                "capacity_bytes": tier.capacity_bytes or None,
            }
            for tier in place.tiers
        ],
        "advice": list(place.advice),
        "memory_bytes": p.memory_bytes,
    }
