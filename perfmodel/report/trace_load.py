"""What loading traces found, as text: what each rank holds, where its steps go, who is late, what was dropped or guessed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from perfmodel.report.listing import render_rows
from perfmodel.traces.execution_trace import ExecutionTrace, is_collective
from perfmodel.traces.explain import PARTS, Lateness, StepParts
from perfmodel.traces.ranks import Job
from perfmodel.traces.spans import KinetoTrace, Note
from perfmodel.units import format_bytes, format_percent, format_time

LATE_ROWS = 8
TOP_OPS = 8


def text_table(head: Sequence[str], rows: Sequence[Sequence[str]], width: int) -> str:
    """Rows under a head as a plain text table."""
    return render_rows([dict(zip(head, row, strict=True)) for row in rows], width)


def load_to_dict(job: Job, steps: Sequence[StepParts], late: Sequence[Lateness]) -> dict[str, object]:
    """The same as plain values for JSON; times in seconds."""
    return {
        "schema_version": 1,
        "ranks": [_rank_dict(job, trace) for trace in job.traces],
        "steps": [
            {
                "rank": row.rank,
                "name": row.step.name,
                "duration_s": row.step.duration_s,
                "device_busy_frac": row.busy_frac if row.device_known else None,
                "parts_s": dict(row.parts) if row.device_known else None,
            }
            for row in steps
        ],
        "late": [
            {
                "step": row.step,
                "collective": row.collective.info.op,
                "bytes": row.collective.info.bytes,
                "transfer_s": row.collective.transfer_s,
                "late_rank": row.rank,
                "lateness_s": row.collective.lateness_s,
                "waited_s": row.waited_s,
                "waits_s": {str(m.rank): row.collective.wait_s(m.rank) for m in row.collective.members},
                "cause": row.cause,
                "cause_s": row.cause_s,
            }
            for row in late
        ],
        "notes": [{"kind": n.kind, "count": n.count, "text": n.text} for n in job.notes],
    }


def _rank_dict(job: Job, trace: KinetoTrace) -> dict[str, object]:
    return {
        "rank": trace.rank,
        "world_size": trace.world_size,
        "path": trace.path,
        "events": trace.n_events,
        "ops": len(trace.ops),
        "calls": len(trace.calls),
        "kernels": sum(span.kind == "kernel" for span in trace.device),
        "copies": sum(span.kind != "kernel" for span in trace.device),
        "collectives": len(trace.collectives),
        "clock_skew_s": job.skew_s[trace.rank],
        "notes": [{"kind": n.kind, "count": n.count, "text": n.text} for n in trace.notes],
    }


def render_load(job: Job, steps: Sequence[StepParts], late: Sequence[Lateness], width: int) -> str:
    """The whole answer of `perfmodel trace load`."""
    blocks = [
        text_table(
            ("rank", "events", "ops", "calls", "kernels", "copies", "collectives", "threads", "clock skew"),
            [_rank_row(job, trace) for trace in job.traces],
            width=width,
        ),
        _steps_text(steps, width),
    ]
    if late:
        blocks.append(_late_text(job, late, width))
    notes = [line for trace in job.traces for line in _note_lines(f"rank {trace.rank}: ", trace.notes)]
    notes += list(_note_lines("", job.notes))
    if notes:
        blocks.append("\n".join(_merged(notes)) + "\n")
    return "\n".join(blocks)


def _rank_row(job: Job, trace: KinetoTrace) -> tuple[str, ...]:
    kernels = sum(span.kind == "kernel" for span in trace.device)
    counts = (trace.n_events, len(trace.ops), len(trace.calls), kernels, len(trace.device) - kernels)
    return (
        f"{trace.rank} of {trace.world_size}",
        *map(str, counts),
        str(len(trace.collectives)),
        str(len({op.thread for op in trace.ops})),
        format_time(job.skew_s[trace.rank]) if len(job.traces) > 1 else "-",
    )


def _steps_text(steps: Sequence[StepParts], width: int) -> str:
    rows = []
    for row in steps:
        if row.device_known:
            parts = [format_time(row.parts[name]) for name in PARTS]
            rows.append(
                (
                    str(row.rank),
                    row.step.name,
                    format_time(row.step.duration_s, 4),
                    format_percent(row.busy_frac),
                    *parts,
                )
            )
        else:
            unknown = ["not known"] + ["-"] * len(PARTS)
            rows.append((str(row.rank), row.step.name, format_time(row.step.duration_s, 4), *unknown))
    return text_table(("rank", "step", "time", "device busy", *PARTS), rows, width=width)


def _late_text(job: Job, late: Sequence[Lateness], width: int) -> str:
    worst = sorted(late, key=lambda row: -row.waited_s)[:LATE_ROWS]
    rows = [
        (
            f"{row.collective.info.op} {format_bytes(row.collective.info.bytes)}",
            row.step,
            str(row.rank),
            format_time(row.collective.lateness_s),
            format_time(row.waited_s),
            format_time(row.collective.transfer_s),
            f"{row.cause}: +{format_time(row.cause_s)} over the mean of the others",
        )
        for row in worst
    ]
    by_rank: dict[int, float] = {}
    for row in late:
        by_rank[row.rank] = by_rank.get(row.rank, 0.0) + row.waited_s
    first = max(by_rank, key=lambda rank: by_rank[rank])
    total = sum(by_rank.values())
    line = (
        f"rank {first} is late most: {format_percent(by_rank[first] / total)} of the {format_time(total)} that "
        f"{len(job.traces)} ranks wait for each other; most of it because of {worst[0].cause}\n"
    )
    head = ("collective", "step", "last rank", "after the first", "others wait", "transfer", "why")
    return text_table(head, rows, width=width) + line


def _note_lines(prefix: str, notes: Sequence[Note]) -> list[str]:
    return [f"{note.kind}: {prefix}{note.count} {note.text}" for note in notes]


def _merged(lines: Sequence[str]) -> list[str]:
    """Equal lines of many ranks as one."""
    found: dict[str, int] = {}
    for line in lines:
        plain = line if ": rank " not in line else f"{line.split(':', 1)[0]}: {line.split(': ', 2)[2]}"
        found[plain] = found.get(plain, 0) + 1
    return [line if count == 1 else f"{line} ({count} ranks)" for line, count in found.items()]


def execution_trace_to_dict(trace: ExecutionTrace) -> dict[str, object]:
    """What an execution trace holds, as plain values."""
    names = Counter(node.name for node in trace.nodes if "::" in node.name)
    return {
        "schema_version": 1,
        "path": trace.path,
        "schema": trace.schema,
        "nodes": len(trace.nodes),
        "ops": trace.n_ops,
        "collectives": sum(is_collective(node) for node in trace.nodes),
        "threads": len({node.thread for node in trace.nodes}),
        "top_ops": dict(names.most_common(TOP_OPS)),
        "notes": [{"kind": n.kind, "count": n.count, "text": n.text} for n in trace.notes],
    }


def render_execution_trace(trace: ExecutionTrace) -> str:
    """The same in words."""
    found = execution_trace_to_dict(trace)
    top = ", ".join(f"{name} x{count}" for name, count in found["top_ops"].items())  # type: ignore[attr-defined] # a dict, as above
    lines = [
        f"{trace.path}: execution trace, schema {trace.schema or 'not named'}: {found['nodes']} nodes, {found['ops']} ops, "
        f"{found['collectives']} collectives, {found['threads']} threads",
        f"most frequent: {top}",
        *_note_lines("", trace.notes),
    ]
    return "\n".join(lines)
