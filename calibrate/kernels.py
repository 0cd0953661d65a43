"""Calibrates kernel families on this machine's device: plan, measure in rounds, write tables, fit, report.

Measuring is interleaved: every round visits every case once, so that a disturbance of seconds hits few rounds of each. The
command line is `perfmodel calibrate kernels`.
"""

from __future__ import annotations

import dataclasses
import datetime
import hashlib
import platform
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from calibrate import adaptive
from calibrate.cases import PLANS, Case, draw_cases, plan_sha256
from calibrate.session import MeasuredCase, OpLog, Round, RoundLog, combine, write_provenance, write_table
from perfmodel.db.device import Device
from perfmodel.errors import ConfigError
from perfmodel.extract.rewrites.tf32 import tf32
from perfmodel.graph import Op

N_ROUNDS = 3
BUDGET_S = 0.004  # of one round of one case; at least four calls are made
# Cold cases rotate over twice this much memory: from 80 MiB on nothing is found in the last-level cache (see cpu_features).
CPU_CACHE_BYTES = 40 * 2**20
STATISTIC = "smallest lower quartile of the rounds; a case whose two best rounds differ by 1.15 times is kept out"


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What a session measures: families, how much of each plan, for how long (s) and where its files go.

    `plan_s` is the time that the plan of a GPU is made for: a session that goes on plans as the first one did.
    """

    device: Device
    families: tuple[str, ...]
    out: Path
    share: float = 1.0
    stages: tuple[int, ...] = (0,)
    limit_s: float = 600.0
    plan_s: float = 600.0
    n_threads: int = 2
    rounds: int = N_ROUNDS


Progress = Callable[[int, int, str], None]


def check_families(names: Sequence[str]) -> tuple[str, ...]:
    """The families asked for, all of them if none. Raises ConfigError that names those that exist."""
    unknown = [name for name in names if name not in PLANS]
    if unknown:
        raise ConfigError([f"--families: found {name!r}, allowed {', '.join(PLANS)}" for name in unknown])
    return tuple(names) or tuple(PLANS)


def plan(settings: Settings) -> dict[str, list[Case]]:
    """Cases per family: the first plan's, and those that were chosen where the law fits worst."""
    first = _gpu_plan(settings) if settings.device.kind == "cuda" else _cpu_plan(settings)
    found: dict[str, list[Case]] = {}
    for family, cases in first.items():
        members = {case.key: case for case in (*cases, *adaptive.chosen(settings.out, family))}
        found[family] = list(members.values())
    return found


def _cpu_plan(settings: Settings) -> dict[str, list[Case]]:
    """The cases of all stages."""
    return {
        family: [case for stage in settings.stages for case in draw_cases(family, share=settings.share, stage=stage)]
        for family in settings.families
    }


def _gpu_plan(settings: Settings) -> Mapping[str, Sequence[Case]]:
    """As many cases as the time allows."""
    from calibrate.plan_cuda import first_plan

    return first_plan(
        settings.families,
        settings.device,
        share=settings.share,
        limit_s=settings.plan_s,
        rounds=settings.rounds,
        budget_s=BUDGET_S,
    )


def measure(settings: Settings, progress: Progress) -> bool:
    """Measures what is missing, round by round; False if the time limit came first."""
    from calibrate.measure_cpu import set_threads

    set_threads(settings.n_threads)
    cases = plan(settings)
    started = time.monotonic()
    total = settings.rounds * sum(map(len, cases.values()))
    done = 0
    for number in range(settings.rounds):
        for family, members in cases.items():
            log, ops = RoundLog(settings.out, family), OpLog(settings.out, family)
            known = {(item.key, item.number) for item in log.read()}
            with log.appending() as append:
                for case in members:
                    done += 1
                    if (case.key, number) in known:
                        continue
                    if time.monotonic() - started > settings.limit_s:
                        return False
                    append.write(_one(case, number, settings, ops))
                    progress(done, total, family)
    return True


def _one(case: Case, number: int, settings: Settings, ops: OpLog) -> Round:
    """One round of one case; an operator that refuses the case is a row with its reason."""
    try:
        if settings.device.kind == "cuda":
            from calibrate import measure_cuda

            timing = measure_cuda.time_case(case, budget_s=BUDGET_S, cache_bytes=settings.device.l2_bytes)
        else:
            from calibrate import measure_cpu

            timing = measure_cpu.time_case(case, budget_s=BUDGET_S, cache_bytes=CPU_CACHE_BYTES)
    except (RuntimeError, TypeError, ValueError, IndexError) as error:
        return Round(key=case.key, number=number, timing=None, failed=" ".join(str(error).split())[:200])
    _op_of(case, ops, settings)
    return Round(key=case.key, number=number, timing=timing)


def tables(settings: Settings) -> dict[str, list[MeasuredCase]]:
    """Puts rounds together and writes `<family>.csv` with provenance for every family that has rounds."""
    found: dict[str, list[MeasuredCase]] = {}
    common = facts(settings, STATISTIC)
    for family, members in plan(settings).items():
        rounds: dict[str, list[Round]] = {}
        for item in RoundLog(settings.out, family).read():
            rounds.setdefault(item.key, []).append(item)
        ops = OpLog(settings.out, family)
        rows = []
        for case in members:
            if case.key in rounds:
                failed = all(item.timing is None for item in rounds[case.key])
                op = None if failed else _op_of(case, ops, settings)
                rows.append(combine(case, op, rounds[case.key]))
        if rows:
            table, n_rows = write_table(settings.out, family, rows, settings.n_threads)
            kept_out = sum(1 for row in rows if row.failed)
            own = {"rows": str(n_rows), "kept_out": str(kept_out), "plan_sha256": plan_sha256(members)}
            write_provenance(table, common | own)
            found[family] = rows
    return found


def _op_of(case: Case, log: OpLog, settings: Settings) -> Op:
    """The op of a case, recorded at its first measurement."""
    from calibrate.build import prepare, recorded_op

    if case.key not in log.known:
        device = "cuda" if settings.device.kind == "cuda" else "cpu"
        one_set = dataclasses.replace(case, state="warm")
        op = recorded_op(case, prepare(one_set, device, 0), settings.device.kind)
        if device == "cuda":
            # torch lets convolutions in fp32 run as TF32 unless told otherwise, and nothing here tells it.
            (op,) = tf32([op], "fp32")
        log.add(case.key, op)
    return log.known[case.key]


def facts(settings: Settings, statistic: str) -> dict[str, str]:
    """Provenance of a table measured now (STYLE section 6), rows and plan apart."""
    import torch

    on_gpu = settings.device.kind == "cuda"
    return {
        "device": device_title(settings.device.kind),
        "driver": _driver() if on_gpu else "none",
        "cuda": str(torch.version.cuda) if on_gpu else "none",
        "torch": str(torch.__version__),
        "clocks": "not fixed",
        "date": datetime.datetime.now(tz=datetime.UTC).date().isoformat(),
        "commit": "none",
        "script_sha256": _script_sha256(),
        "plan_sha256": plan_sha256([case for cases in plan(settings).values() for case in cases]),
        "rows": "as in the table",
        "repeats": f"{settings.rounds} rounds of 4 to 200 calls",
        "statistic": statistic,
        "threads": str(settings.n_threads),
    }


def device_title(kind: str) -> str:
    """The device as its driver or the kernel names it."""
    if kind == "cuda":
        import torch

        return torch.cuda.get_device_name()
    text = Path("/proc/cpuinfo").read_text(encoding="utf-8") if Path("/proc/cpuinfo").exists() else ""
    names = [line.partition(":")[2].strip() for line in text.splitlines() if line.startswith("model name")]
    return f"{names[0] if names else platform.processor()}, {len(names)} cores"


def _driver() -> str:
    """Version of the display driver, as nvidia-smi reports it."""
    query = ("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    try:
        found = subprocess.run(query, capture_output=True, text=True, check=True, timeout=20)  # noqa: S603 -- a constant command
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return found.stdout.split("\n")[0].strip()


def _script_sha256() -> str:
    """Hash of the measuring code: every Python file of this package, in order."""
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()
