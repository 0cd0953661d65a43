"""Ten thousand plans of GPT-2 on four DGX H100 into one table, on every core, with a progress bar; start it again to go on.

The same as `perfmodel sweep --space ... --jobs N --out plans.csv`; `backend="dask"` and `backend="ray"` use a cluster instead.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn

from perfmodel.autotune.front import run_sweep

SPACE = {
    "tp": [1, 2, 4],
    "pp": [1, 2, 4],
    "shard": ["nothing", "optimizer", "parameters"],
    "bucket_cap": [f"{size}MiB" for size in (5, 10, 15, 20, 25, 30, 40, 50, 60, 75, 100, 150, 200)],
    "first_bucket": ["1MiB", "2MiB", "4MiB"],
    "sequence": [True, False],
    "schedule": ["1f1b", "gpipe", "zero_bubble", "zero_bubble_h2"],
    "compression": ["none", "bf16"],
    "micro_batch": [1, 2, 4, 8],
}


def main(table: Path, n_plans: int = 10_000, backend: str = "loky", jobs: int = os.cpu_count() or 1) -> int:
    """Writes the table; returns how many plans work."""
    with Progress("sweeping", BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()) as bar:
        task = bar.add_task("plans", total=n_plans)
        rows = run_sweep(
            "gpt2",
            "dgx_h100",
            table,
            nodes=4,
            space=SPACE,
            global_batch=256,
            plans=n_plans,
            backend=backend,
            jobs=jobs,
            progress=lambda done, total: bar.update(task, completed=done, total=total),
        )
    working = [row for row in rows if row["status"] == "ok"]
    best = max(working, key=lambda row: row["samples_per_s"])
    print(f"{len(working)} of {len(rows)} plans work; best {best['plan']}: {best['samples_per_s']:.4g} samples/s")
    return len(working)


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "plans.csv"), *map(int, sys.argv[2:3]))
