"""Real training steps on GPUs, timed by events on the device: what one rank of a live case runs, in a process of its own."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from statistics import median
from typing import Any, Protocol

from perfmodel.units import MS_PER_S
from perfmodel.validate.train import MAX_STEPS, MIN_STEPS, WARM_UP_STEPS, Timed, plain_step
from perfmodel.validate.train_ranks import agreed, ddp_step, sharded_step


class Mark(Protocol):
    """A point on a device's stream (torch.cuda.Event)."""

    def record(self) -> None:
        """Marks what has been issued so far."""

    def elapsed_time(self, end: Any) -> float:
        """Milliseconds from this mark to another."""


def measure_on_gpu(
    rank: int, n_ranks: int, store: str, model: Mapping[str, Any], owners: Sequence[int], budget_s: float
) -> Timed:
    """Trains one rank on GPU `rank` for about `budget_s` after warm-up; several ranks join by NCCL."""
    import torch
    from torch import distributed

    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    torch.backends.cudnn.allow_tf32 = (
        False  # products of fp32 models are fp32; torch's default differs for convolutions
    )
    if n_ranks > 1:
        where = f"file://{store}"
        distributed.init_process_group("nccl", init_method=where, rank=rank, world_size=n_ranks, device_id=device)
    try:
        step = gpu_step(model, owners, rank, n_ranks)
        agree = agreed if n_ranks > 1 else lambda n_steps: n_steps
        event: Any = torch.cuda.Event  # torch types its constructor without arguments
        return timed_by_marks(step, budget_s, agree, (partial(event, enable_timing=True), torch.cuda.synchronize))
    finally:
        if n_ranks > 1:
            distributed.destroy_process_group()


def gpu_step(model: Mapping[str, Any], owners: Sequence[int], rank: int, n_ranks: int) -> Callable[[], None]:
    """The training step of one rank, its tensors on its GPU."""
    from perfmodel.config import load_model
    from perfmodel.models.build import on_device

    built = on_device(load_model(model), f"cuda:{rank}")
    if owners:
        return sharded_step(built, owners, rank)
    return ddp_step(built) if n_ranks > 1 else plain_step(built)


def timed_by_marks(
    step: Callable[[], None],
    budget_s: float,
    agree: Callable[[int], int],
    device: tuple[Callable[[], Mark], Callable[[], None]],
) -> Timed:
    """Warms up, then issues steps without a wait between them and reads the device's time from mark to mark.

    `device` makes a mark, and waits until everything issued is done.
    """
    mark, wait = device
    for _ in range(WARM_UP_STEPS - 1):
        step()
    wait()
    start_s = time.perf_counter()
    step()
    wait()
    one_s = max(time.perf_counter() - start_s, 1e-9)
    n_steps = agree(int(min(MAX_STEPS, max(MIN_STEPS, budget_s / one_s))))
    marks = [mark() for _ in range(n_steps + 1)]
    marks[0].record()
    for end in marks[1:]:
        step()
        end.record()
    wait()
    times_s = [a.elapsed_time(b) / MS_PER_S for a, b in pairwise(marks)]
    return Timed(median_s=median(times_s), n_steps=n_steps, n_kept=n_steps)
