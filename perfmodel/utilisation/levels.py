"""The levels of utilisation of a trace's steps: whole, by phase, by module and by kernel family (docs/utilisation.md)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from perfmodel.db.device import Device
from perfmodel.sim.intervals import Spans, clip, total, union
from perfmodel.traces.explain import SYNC_CALLS, spans_of
from perfmodel.traces.link import LinkedWork, Links, ancestors, find_steps, link, main_thread
from perfmodel.traces.spans import HostSpan, KinetoTrace, Step
from perfmodel.units import PS_PER_S, ps_to_seconds
from perfmodel.utilisation.families import family_of, pipe_of
from perfmodel.utilisation.occupancy import WARP_THREADS, residency
from perfmodel.utilisation.work import op_work

SCHEDULERS_PER_SM = 4  # warp schedulers, each issues one instruction a cycle (Volta and later whitepapers)
FLOPS_PER_FMA = 2
LEVELS = (
    "device_busy",
    "sm_activity",
    "occupancy",
    "wave_efficiency",
    "issue_slots",
    "fp32_pipe",
    "tensor_pipe",
    "memory_bandwidth",
    "host_link",
    "main_thread",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """Device work of one kernel, copy or collective: when (s), of which group it is, and what it does."""

    start_s: float
    end_s: float
    family: str
    phase: str
    module: str
    flops: int = 0
    bytes: int = 0
    pipe: str = ""
    known: bool = False
    occupancy_frac: float | None = None
    wave_frac: float | None = None
    sm_active_frac: float | None = None
    link_bytes: int = 0

    @property
    def time_s(self) -> float:
        """Length."""
        return self.end_s - self.start_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Level:
    """One row: a group of work and how well it uses each level (fractions; None where nothing says).

    `window_s` is the time the row is about: the steps for the whole, the group's own device time otherwise. `known_frac` is
    the share of the group's kernel time whose FLOPs and bytes are known; pipes and bandwidth are means over that share.
    """

    kind: str
    name: str
    window_s: float
    share_frac: float
    known_frac: float
    levels: Mapping[str, float | None]
    link_bytes_per_s: float = 0.0
    n_kernels: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Utilisation:
    """Rows for the whole and for each phase, module and family, of the steps of one rank."""

    rank: int
    device: str
    step_s: float
    n_steps: int
    rows: tuple[Level, ...]
    counted: tuple[str, ...] = ()


def utilisation_of(trace: KinetoTrace, device: Device, module_depth: int = 2) -> Utilisation:
    """Utilisation of the steps of one rank's trace that hold device work, on a device of the database."""
    links = link(trace)
    steps = _whole_steps(trace)
    work = [piece for piece in device_work(trace, links, device) if _inside(piece, steps)]
    window_s = sum(step.duration_s for step in steps)
    rows = [_whole(trace, work, steps, device)]
    for kind, groups in (
        ("phase", _grouped(work, lambda piece: piece.phase)),
        ("module", _grouped(work, lambda piece: ".".join(piece.module.split(".")[:module_depth]))),
        ("family", _grouped(work, lambda piece: piece.family)),
    ):
        if kind == "module" and set(groups) <= {""}:
            continue
        made = [_group(kind, name, pieces, window_s, device) for name, pieces in groups.items()]
        rows += sorted(made, key=lambda row: -row.share_frac)
    return Utilisation(
        rank=trace.rank, device=device.name, step_s=window_s / len(steps), n_steps=len(steps), rows=tuple(rows)
    )


def _whole_steps(trace: KinetoTrace) -> tuple[Step, ...]:
    """The steps; of our own traces the middle ones, since work of the first and last lies partly outside."""
    steps, _ = find_steps(trace)
    return steps[1:-1] if "perfmodel" in trace.info and len(steps) > 2 else steps


def _inside(piece: Work, steps: Sequence[Step]) -> bool:
    return any(step.start_s <= piece.start_s < step.end_s for step in steps)


def device_work(trace: KinetoTrace, links: Links, device: Device) -> list[Work]:
    """Device work with its group and what it does; on a CPU the ops that no other op surrounds."""
    if not trace.device:
        return [_host_work(op, links.op_modules[i]) for i, op in enumerate(trace.ops) if _runs(trace, links, i)]
    shares = _op_shares(trace, links)
    return [_piece(trace, work, device, shares.get(number)) for number, work in enumerate(links.work)]


def _runs(trace: KinetoTrace, links: Links, index: int) -> bool:
    op = trace.ops[index]
    return op.kind == "op" and not any(
        trace.ops[a].kind == "op" for a in ancestors(links.parents[index], links.parents)
    )


def _host_work(op: HostSpan, module: str) -> Work:
    found = op_work(op)
    return Work(
        start_s=op.start_s,
        end_s=op.end_s,
        family=op.name.removeprefix("aten::"),
        phase="backward" if op.name.startswith("autograd::") else "forward",
        module=module,
        flops=found.flops if found else 0,
        bytes=found.bytes if found else 0,
        pipe="fp32",
        known=found is not None,
    )


def _op_shares(trace: KinetoTrace, links: Links) -> dict[int, tuple[int, int, str]]:
    """(FLOPs, bytes, dtype) of each piece of device work: its op's, divided by time among the kernels of the op."""
    by_op: dict[int, list[int]] = {}
    for number, work in enumerate(links.work):
        if work.op >= 0 and work.span.kind == "kernel" and not work.span.is_collective and work.span.work is None:
            by_op.setdefault(work.op, []).append(number)
    found = {}
    for op, numbers in by_op.items():
        done = next((w for a in ancestors(op, links.parents) if (w := op_work(trace.ops[a])) is not None), None)
        if done is None:
            continue
        time_s = sum(links.work[number].span.duration_s for number in numbers)
        for number in numbers:
            share = links.work[number].span.duration_s / time_s if time_s > 0 else 1 / len(numbers)
            found[number] = (round(done.flops * share), round(done.bytes * share), done.dtype)
    return found


def _piece(trace: KinetoTrace, work: LinkedWork, device: Device, share: tuple[int, int, str] | None) -> Work:
    span = work.span
    launch = span.launch
    held = (
        residency(launch, device.n_sms, device.compute_capability, device.smem_per_sm_bytes)
        if launch is not None
        else None
    )
    given = span.work
    is_kernel = span.kind == "kernel" and not span.is_collective
    flops, n_bytes, pipe = 0, 0, ""
    if given is not None:
        flops, n_bytes, pipe = given.flops, given.bytes, given.pipe
    elif share is not None:
        flops, n_bytes, pipe = share[0], share[1], pipe_of(span.name, share[2])
    return Work(
        start_s=span.start_s,
        end_s=span.end_s,
        family=family_of(span, trace.ops[work.op].name if work.op >= 0 else ""),
        phase=work.phase,
        module=work.module,
        flops=flops,
        bytes=n_bytes,
        pipe=pipe,
        known=is_kernel and (given is not None or share is not None),
        occupancy_frac=(launch.occupancy_frac if launch and launch.occupancy_frac else None)
        or (held.occupancy_frac if held else None),
        wave_frac=held.wave_frac if held else None,
        sm_active_frac=held.sm_active_frac if held else None,
        link_bytes=_link_bytes(span.name, span.bytes, span.collective.bytes if span.collective else 0),
    )


def _link_bytes(name: str, copied: int, sent: int) -> int:
    """Bytes over a link: of a copy between host and device, or a collective's message."""
    return sent or (copied if "HtoD" in name or "DtoH" in name else 0)


def _grouped(work: Iterable[Work], key: Callable[[Work], str]) -> dict[str, list[Work]]:
    groups: dict[str, list[Work]] = {}
    for piece in work:
        groups.setdefault(key(piece), []).append(piece)
    return groups


def _weighted(pieces: Sequence[Work], name: str) -> float | None:
    """Mean over time of an attribute, over the pieces that have it."""
    pairs = [(value, piece.time_s) for piece in pieces if (value := getattr(piece, name)) is not None]
    time_s = sum(weight for _, weight in pairs)
    return sum(value * weight for value, weight in pairs) / time_s if time_s > 0 else None


def _arithmetic(pieces: Sequence[Work], device: Device) -> dict[str, float | None]:
    """Pipes, issue slots and memory bandwidth, as means over the time of the pieces whose work is known."""
    known = [piece for piece in pieces if piece.known]
    time_s = sum(piece.time_s for piece in known)
    if time_s <= 0:
        return dict.fromkeys(("fp32_pipe", "tensor_pipe", "issue_slots", "memory_bandwidth"))
    peak = device.peak_flops_per_s
    tensor_s = sum(p.flops / peak[p.pipe] for p in known if p.pipe in peak and p.pipe.endswith("_tensor"))
    vector_s = sum(p.flops / peak[p.pipe] for p in known if p.pipe in peak and not p.pipe.endswith("_tensor"))
    vector_flops = sum(p.flops for p in known if not p.pipe.endswith("_tensor"))
    n_bytes = sum(p.bytes for p in known)
    slots: float | None = None
    if device.kind == "cuda":
        # At least one instruction for 32 FMAs, and one for each 128 bytes moved in 4-byte words.
        instructions = vector_flops / (FLOPS_PER_FMA * WARP_THREADS) + n_bytes / (4 * WARP_THREADS)
        slots = instructions / (device.n_sms * SCHEDULERS_PER_SM * device.clock_hz * time_s)
    return {
        "fp32_pipe": vector_s / time_s,
        "tensor_pipe": tensor_s / time_s if any(pipe.endswith("_tensor") for pipe in peak) else None,
        "issue_slots": slots,
        "memory_bandwidth": n_bytes / (device.memory_bytes_per_s * time_s),
    }


def _group(kind: str, name: str, pieces: Sequence[Work], window_s: float, device: Device) -> Level:
    time_s = sum(piece.time_s for piece in pieces)
    known_s = sum(piece.time_s for piece in pieces if piece.known)
    sent = sum(piece.link_bytes for piece in pieces)
    levels: dict[str, float | None] = dict.fromkeys(LEVELS)
    levels |= {
        "sm_activity": _weighted(pieces, "sm_active_frac"),
        "occupancy": _weighted(pieces, "occupancy_frac"),
        "wave_efficiency": _weighted(pieces, "wave_frac"),
        **_arithmetic(pieces, device),
    }
    copies = [piece for piece in pieces if piece.family == "transfer"]
    copied_s = sum(piece.time_s for piece in copies)
    if copied_s > 0:
        levels["host_link"] = sum(p.link_bytes for p in copies) / (device.host_link_bytes_per_s * copied_s)
    return Level(
        kind=kind,
        name=name or "(no module)",
        window_s=time_s,
        share_frac=time_s / window_s if window_s > 0 else 0.0,
        known_frac=known_s / time_s if time_s > 0 else 0.0,
        levels=levels,
        link_bytes_per_s=sent / time_s if time_s > 0 else 0.0,
        n_kernels=len(pieces),
    )


def _whole(trace: KinetoTrace, work: Sequence[Work], steps: Sequence[Step], device: Device) -> Level:
    """The row of whole steps: each level's mean over all of their time, in which what does not run uses nothing."""
    row = _group("whole", "whole step", work, sum(step.duration_s for step in steps), device)
    busy_s = _covered((union(spans_of(trace.device)) if trace.device else union(_ops(trace))), steps)
    time_s = row.window_s
    window_s = sum(step.duration_s for step in steps)
    if window_s <= 0:
        return row
    scale = time_s / window_s
    levels = {name: None if value is None else value * scale for name, value in row.levels.items()}
    known_scale = scale * row.known_frac
    for name in ("fp32_pipe", "tensor_pipe", "issue_slots", "memory_bandwidth"):
        value = row.levels[name]
        levels[name] = None if value is None else value * known_scale
    copied = sum(piece.link_bytes for piece in work if piece.family == "transfer")
    active = levels["sm_activity"]
    if active is not None:  # kernels of two streams share SMs
        levels["sm_activity"] = min(active, busy_s / window_s)
    levels |= {
        "device_busy": busy_s / window_s,
        "host_link": copied / (device.host_link_bytes_per_s * window_s),
        "main_thread": _covered(union(_main_thread(trace)), steps) / window_s,
    }
    for name in ("occupancy", "wave_efficiency"):
        levels[name] = row.levels[name]  # properties of kernels: means while they run
    sent = sum(piece.link_bytes for piece in work)
    return replace(
        row,
        window_s=window_s,
        share_frac=1.0,
        levels=levels,
        link_bytes_per_s=sent / window_s,
        known_frac=row.known_frac,
    )


def _ops(trace: KinetoTrace) -> Spans:
    return spans_of([op for op in trace.ops if op.kind == "op"])


def _main_thread(trace: KinetoTrace) -> Spans:
    """Ops and calls of the main thread, without those that only wait for the device."""
    thread = main_thread(trace)
    calls = [c for c in trace.calls if c.thread == thread and not c.name.startswith(SYNC_CALLS)]
    return spans_of([*(op for op in trace.ops if op.thread == thread and op.kind == "op"), *calls])


def _covered(spans: Spans, steps: Sequence[Step]) -> float:
    covered = 0
    for step in steps:
        covered += total(clip(spans, round(step.start_s * PS_PER_S), round(step.end_s * PS_PER_S)))
    return ps_to_seconds(covered)
