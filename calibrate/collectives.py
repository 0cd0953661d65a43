"""Measures collectives on what is there: gloo between processes on this host by wall time, NCCL by kernel duration.

    python -m calibrate.collectives --device cpu --ranks 2,4 --out collectives.csv

One process per rank, one op at a time, sizes in powers of two. A gloo call is timed as it occurs in a training step: every
rank computes for a while of its own length, then calls with newly allocated results; its time runs from the last rank's
arrival to the last rank's end (processes of a host have one clock), the mean of the middle half of the calls. Beside it
stand what the issuing thread spends before it may go on (`issue_us`) and the processor time of a rank while the call is
under way (`cpu_us`). An NCCL time is the median duration of the op's device kernels as the profiler gives it, the fastest
rank's (the last to arrive does not wait), so that host time and rank skew are left out. Rows have the columns of
aiconfigurator's NCCL tables, which is what `calibrate.fit_collectives` reads, and those two.
"""

from __future__ import annotations

import csv
import random
import socket
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import click
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

OPS = ("all_reduce", "all_gather", "reduce_scatter", "alltoall", "broadcast")
HOST_COLUMNS = ("issue_us", "cpu_us")  # of gloo alone
COLUMNS = (
    "system",
    "nccl_dir_version",
    "nccl_version_col",
    "collective",
    "dtype",
    "num_gpus",
    "bytes",
    "repeat",
    "us",
    *HOST_COLUMNS,
)
# Calls of one case: until this much time has gone by, within bounds.
_CASE_S = 0.25
_MIN_CALLS, _MAX_CALLS = 6, 200
_WARM_UP_CALLS = 3
_PAUSE_S = 0.001  # a rank computes for half to one and a half of this before each call
_WIDTH = 96  # of the square matrices that it multiplies
_US_PER_S = 1e6


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What one group of processes measures."""

    backend: str
    n_ranks: int
    port: int
    sizes: tuple[int, ...]
    ops: tuple[str, ...]
    repeats: int


def measure(job: Job) -> list[dict[str, str]]:
    """Rows of all cases of a job, measured by `n_ranks` new processes."""
    context = mp.get_context("spawn")
    queue = context.SimpleQueue()
    processes = [context.Process(target=_worker, args=(rank, job, queue)) for rank in range(job.n_ranks)]
    for process in processes:
        process.start()
    rows: list[dict[str, str]] = queue.get()
    for process in processes:
        process.join()
    if any(process.exitcode for process in processes):
        raise click.ClickException(f"a rank of {job.n_ranks} ended with {[p.exitcode for p in processes]}")
    return rows


def _worker(rank: int, job: Job, queue: mp.SimpleQueue) -> None:  # type: ignore[type-arg]  # torch types it without arguments
    torch.set_num_threads(1)
    device = torch.device("cuda", rank) if job.backend == "nccl" else torch.device("cpu")
    if job.backend == "nccl":
        torch.cuda.set_device(device)
    dist.init_process_group(job.backend, init_method=f"tcp://127.0.0.1:{job.port}", rank=rank, world_size=job.n_ranks)
    try:
        rows = [_row(job, op, n_bytes, repeat, device) for op, n_bytes, repeat in _cases(job)]
        if rank == 0:
            queue.put(rows)
    finally:
        dist.destroy_process_group()


def _cases(job: Job) -> Iterator[tuple[str, int, int]]:
    for repeat in range(job.repeats):
        for op in job.ops:
            for n_bytes in job.sizes:
                yield op, n_bytes, repeat


def _row(job: Job, op: str, n_bytes: int, repeat: int, device: torch.device) -> dict[str, str]:
    call = _call(op, n_bytes, device)
    times_s = [_kernel_time(call)] if job.backend == "nccl" else _times_in_step(call)
    version = ".".join(str(part) for part in torch.cuda.nccl.version()) if job.backend == "nccl" else torch.__version__
    system = "nccl_here" if job.backend == "nccl" else "gloo_loopback"
    values = (system, version, version, op, "float", job.n_ranks, n_bytes, repeat)
    row = {column: str(value) for column, value in zip(COLUMNS, values, strict=False)}
    names = ("us", *HOST_COLUMNS)
    row |= dict.fromkeys(names, "")
    return row | {name: f"{time_s * _US_PER_S:.2f}" for name, time_s in zip(names, times_s, strict=False)}


def _call(op: str, n_bytes: int, device: torch.device) -> Callable[[], dist.Work]:
    """A collective of `n_bytes` by the nccl-tests convention that can be waited for, its results newly allocated."""
    n_ranks = dist.get_world_size()
    n_elems = n_bytes // 4
    whole = torch.ones(n_elems, dtype=torch.float32, device=device)
    part = torch.ones(n_elems // n_ranks, dtype=torch.float32, device=device)
    # torch 2.13 renamed these two; the old names warn there, the new ones are missing before.
    gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
    scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
    calls: dict[str, Callable[[], dist.Work]] = {
        "all_reduce": lambda: dist.all_reduce(whole, async_op=True),
        "all_gather": lambda: gather(torch.empty_like(whole), part, async_op=True),
        "reduce_scatter": lambda: scatter(torch.empty_like(part), whole, async_op=True),
        "alltoall": lambda: dist.all_to_all_single(torch.empty_like(whole), whole, async_op=True),
        "broadcast": lambda: dist.broadcast(whole, src=0, async_op=True),
    }
    return calls[op]


def _n_calls(call: Callable[[], dist.Work]) -> int:
    """How many calls fill the time of a case; the same number on every rank."""
    for _ in range(_WARM_UP_CALLS):
        call().wait()
    dist.barrier()
    start = time.perf_counter()
    call().wait()
    once = torch.tensor([time.perf_counter() - start])
    dist.all_reduce(once, op=dist.ReduceOp.MAX)
    return int(min(max(_CASE_S / max(once.item(), 1e-6), _MIN_CALLS), _MAX_CALLS))


def _times_in_step(call: Callable[[], dist.Work]) -> list[float]:
    """Seconds of a call, of its issue on the calling thread, and of processor time on a rank."""
    n_calls = _n_calls(call)
    draw = random.Random(dist.get_rank())
    x = torch.rand(_WIDTH, _WIDTH)
    stamps = []
    for _ in range(n_calls):
        _compute(x, _PAUSE_S * draw.uniform(0.5, 1.5))
        busy, arrived = time.process_time(), time.perf_counter()
        work = call()
        issued = time.perf_counter()
        work.wait()
        stamps.append([arrived, issued, time.perf_counter(), time.process_time() - busy])
    mine = torch.tensor(stamps, dtype=torch.float64)
    ranks = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(ranks, mine)
    every = torch.stack(ranks)  # rank, call, stamp
    spans = every[:, :, 2].amax(0) - every[:, :, 0].amax(0)
    issues = every[:, :, 1] - every[:, :, 0]
    return [_middle_mean(spans), float(issues.median()), float(every[:, :, 3].mean())]


def _compute(x: torch.Tensor, for_s: float) -> None:
    end = time.perf_counter() + for_s
    while time.perf_counter() < end:
        torch.mm(x, x)


def _middle_mean(values: torch.Tensor) -> float:
    """Mean of the middle half: calls either find their threads awake or wait for a core, so a median would jump."""
    ordered, n = values.sort().values, len(values)
    return float(ordered[n // 4 : n - n // 4].mean())


def _kernel_time(call: Callable[[], dist.Work]) -> float:
    """Median duration of one call's NCCL kernels on the device, the least over ranks."""
    from torch.profiler import ProfilerActivity, profile

    for _ in range(_WARM_UP_CALLS):
        call().wait()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(_MAX_CALLS // 4):
            call().wait()
        torch.cuda.synchronize()
    durations = [
        event.device_time_total / _US_PER_S for event in profiler.events() if event.name.lower().startswith("nccl")
    ]
    if not durations:
        raise click.ClickException("the profiler saw no NCCL kernel: is CUPTI installed and permitted?")
    fastest = torch.tensor([statistics.median(durations)], device="cuda")
    dist.all_reduce(fastest, op=dist.ReduceOp.MIN)
    return float(fastest.item())


def free_port() -> int:
    """A TCP port of the loopback interface that nobody uses now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def write_rows(path: Path, rows: Sequence[dict[str, str]]) -> None:
    """Writes measured rows as CSV, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    staged = path.with_suffix(".tmp")
    with staged.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    staged.replace(path)


def sizes_between(low: int, high: int) -> tuple[int, ...]:
    """Powers of two from `low` to `high` bytes."""
    return tuple(1 << power for power in range(low.bit_length() - 1, high.bit_length()) if low <= 1 << power <= high)


@click.command(epilog="Example: perfmodel calibrate collectives --device cpu --ranks 2,4 --out gloo.csv --no-fit")
@click.option(
    "--device", type=click.Choice(["cpu", "cuda"]), default="cpu", show_default=True, help="cpu: gloo; cuda: NCCL."
)
@click.option("--ranks", default="2,4", show_default=True, help="Group sizes, one after the other.")
@click.option("--min-bytes", default=4096, show_default=True, help="Smallest message.")
@click.option("--max-bytes", default=64 * 2**20, show_default=True, help="Largest message.")
@click.option("--ops", default=",".join(OPS), show_default=True, help="Collectives, separated by commas.")
@click.option("--repeats", default=1, show_default=True, help="Times the whole plan is measured.")
@click.option("--out", "path", type=click.Path(dir_okay=False, path_type=Path), required=True, help="CSV to write.")
@click.option("--fit/--no-fit", default=True, show_default=True, help="Fit what was measured (gloo) and write it.")
@click.option("--db", "root", type=click.Path(file_okay=False, path_type=Path), help="Database that gets the fit.")
def main(*, device: str, ranks: str, ops: str, path: Path, root: Path | None, **options: int) -> None:
    """Measure collectives between this host's processes or GPUs, write a CSV, and fit it."""
    sizes = sizes_between(options["min_bytes"], options["max_bytes"])
    backend = "gloo" if device == "cpu" else "nccl"
    rows: list[dict[str, str]] = []
    for text in ranks.split(","):
        job = Job(
            backend=backend,
            n_ranks=int(text),
            port=free_port(),
            sizes=sizes,
            ops=tuple(ops.split(",")),
            repeats=options["repeats"],
        )
        rows += measure(job)
        click.echo(f"{text} ranks: {len(rows)} rows so far", err=True)
    write_rows(path, rows)
    if options["fit"] and backend == "nccl":
        click.echo("NCCL rows have no shipped topology: name one in validate/collective_rows.py to fit them", err=True)
    elif options["fit"]:
        from calibrate.fit_collectives import write_fits

        for written in write_fits([path], root):
            click.echo(str(written))


if __name__ == "__main__":
    sys.exit(main())
