"""Real training steps, timed: what one rank of a live case runs. Executed in processes of their own (`spawn`)."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from perfmodel.models.built import BuiltModel

WARM_UP_STEPS = 3
MIN_STEPS, MAX_STEPS = 5, 400


@dataclass(frozen=True, slots=True, kw_only=True)
class Timed:
    """Median step time (s) of one block of steps and how many there were."""

    median_s: float
    n_steps: int


def measure(model: Mapping[str, Any], n_threads: int, budget_s: float) -> Timed:
    """Trains a model (a mapping as in a model file) in this process for about `budget_s` after warm-up."""
    import torch

    torch.set_num_threads(n_threads)
    step = plain_step(real_model(model))
    return timed(step, budget_s)


def real_model(model: Mapping[str, Any]) -> BuiltModel:
    """The model with real tensors on the CPU."""
    from perfmodel.config import load_model
    from perfmodel.models import build, materialize

    return materialize(build(load_model(model)))


def plain_step(built: BuiltModel) -> Callable[[], None]:
    """Forward, loss, backward and optimizer of one process, as training code writes them."""
    import torch

    from perfmodel.models.training import make_optimizers

    optimizers = make_optimizers(built)

    def step() -> None:
        for optimizer in optimizers:
            optimizer.zero_grad(set_to_none=True)
        torch.autograd.backward((built.loss(built.module(*built.args, **built.kwargs)),))
        for optimizer in optimizers:
            optimizer.step()

    return step


def timed(step: Callable[[], None], budget_s: float, agree: Callable[[int], int] = lambda n_steps: n_steps) -> Timed:
    """Warms up, then times whole steps one by one. `agree` lets ranks settle on one number of steps."""
    for _ in range(WARM_UP_STEPS - 1):
        step()
    start_s = time.perf_counter()
    step()
    one_s = time.perf_counter() - start_s
    n_steps = agree(int(min(MAX_STEPS, max(MIN_STEPS, budget_s / one_s))))
    times_s = []
    for _ in range(n_steps):
        start_s = time.perf_counter()
        step()
        times_s.append(time.perf_counter() - start_s)
    return Timed(median_s=median(times_s), n_steps=n_steps)
