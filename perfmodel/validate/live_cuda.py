"""Live comparison on this machine's GPUs: what there is, the topology it makes, and measuring on it."""

from __future__ import annotations

import subprocess
import tempfile
from concurrent.futures import Executor
from dataclasses import dataclass
from pathlib import Path

from perfmodel.config import TopologySpec, load_topology
from perfmodel.db import resolve_device
from perfmodel.errors import ConfigError
from perfmodel.pipeline.prediction import Prediction
from perfmodel.topology.import_smi import import_smi
from perfmodel.validate.live import LiveSettings, table_owners
from perfmodel.validate.live_cases import LiveCase
from perfmodel.validate.train_cuda import measure_on_gpu

SMI = ("nvidia-smi", "topo", "-m")
SMI_LIMIT_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpus:
    """This machine's GPUs: how many, and their name in the device database."""

    count: int
    device: str


def find_gpus(db: str | None = None) -> Gpus:
    """This machine's GPUs. Raises ConfigError where torch sees none, MissingCalibrationError for an unknown model."""
    import torch

    if not torch.cuda.is_available():
        raise ConfigError(
            f"--device cuda: found no GPU that torch {torch.__version__} can use on this machine, needs one "
            "(--device cpu trains on its processor)"
        )
    return Gpus(count=torch.cuda.device_count(), device=resolve_device(torch.cuda.get_device_name(0), db))


def gpu_topology(gpus: Gpus, n_ranks: int) -> TopologySpec:
    """One GPU, or all of this machine's as `nvidia-smi topo -m` joins them. Raises ConfigError for another number."""
    if n_ranks == 1:
        return load_topology({"name": f"1x{gpus.device}", "node": {"gpus": {"count": 1, "device": gpus.device}}})
    if n_ranks != gpus.count:
        raise ConfigError(f"--ranks: found {n_ranks}, allowed 1 or {gpus.count}: all of this machine's GPUs")
    try:
        found = subprocess.run(SMI, capture_output=True, text=True, timeout=SMI_LIMIT_S, check=True)  # noqa: S603 -- fixed words
    except (OSError, subprocess.SubprocessError) as error:
        raise ConfigError(f"{' '.join(SMI)}: cannot be read: {error}") from error
    return import_smi(found.stdout, device=gpus.device, name=f"{n_ranks}x{gpus.device}").spec


def measure_gpu_case(case: LiveCase, settings: LiveSettings, prediction: Prediction, pool: Executor) -> float:
    """Median step time (s) of one block, of the slowest rank; `pool` has a process for each GPU."""
    n_ranks = settings.n_ranks
    owners = table_owners(prediction) if n_ranks > 1 else ()
    with tempfile.TemporaryDirectory() as folder:
        given = (n_ranks, str(Path(folder) / "store"), case.model, owners, settings.block_s)
        running = [pool.submit(measure_on_gpu, rank, *given) for rank in range(n_ranks)]
        return max(found.result().median_s for found in running)
