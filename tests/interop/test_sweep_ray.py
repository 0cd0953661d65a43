"""A sweep on the real Ray writes the table that one process does; skipped where Ray is not installed."""

from __future__ import annotations

from pathlib import Path

import pytest

from perfmodel.autotune.front import run_sweep

pytest.importorskip("ray", reason="Ray is not installed here: pip install 'perfmodel[ray]'", exc_type=ImportError)
pytestmark = pytest.mark.filterwarnings("default")

SPACE = {"tp": [1, 2], "pp": [1, 2], "shard": ["nothing", "optimizer"], "micro_batch": [1, 2]}


def test_a_ray_cluster_writes_the_table_that_one_process_does(tmp_path: Path) -> None:
    import ray

    run_sweep("gpt2", "dgx_h100", tmp_path / "one.csv", backend="sequential", space=SPACE, global_batch=32)
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    try:
        run_sweep("gpt2", "dgx_h100", tmp_path / "ray.csv", backend="ray", jobs=2, space=SPACE, global_batch=32)
    finally:
        ray.shutdown()
    assert (tmp_path / "ray.csv").read_bytes() == (tmp_path / "one.csv").read_bytes()
