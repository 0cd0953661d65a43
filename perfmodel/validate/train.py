"""Real training steps, timed: what one rank of a live case runs. Executed in processes of their own (`spawn`)."""

from __future__ import annotations

import itertools
import os
import resource
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

    from perfmodel.models.built import BuiltModel

Batch = tuple[tuple[Any, ...], Callable[[Any], "Tensor"]]  # arguments of the module, and the loss of its output

N_BATCHES = 8  # a live DLRM touches 10 to 90 MB of rows a batch: no cache holds them until their turn comes again
WARM_UP_STEPS = 3
INITIALIZER_RANGE = 0.02  # standard deviation in the config.json of GPT-2, BERT, OPT and LLaMA (OPT: init_std)
MIN_STEPS, MAX_STEPS = 5, 400


@dataclass(frozen=True, slots=True, kw_only=True)
class Timed:
    """Median step time (s) of one block of steps, how many steps there were and how many the median is of."""

    median_s: float
    n_steps: int
    n_kept: int


def measure(model: Mapping[str, Any], n_threads: int, budget_s: float) -> Timed:
    """Trains a model (a mapping as in a model file) in this process for about `budget_s` after warm-up."""
    set_up(n_threads)
    return timed(plain_step(real_model(model), batches(model)), budget_s)


def pin_threads(n_ranks: int) -> None:
    """Gives each thread of a process that has the machine for itself a core of its own, before torch is loaded.

    Left to itself the kernel now and then puts both on one core, where each waits for the other through whole time slices.
    """
    if n_ranks == 1:
        os.environ |= {"OMP_PROC_BIND": "true", "OMP_PLACES": "cores"}
        # The OpenMP runtime that loads first takes the cores and leaves the next one the first core alone: scikit-learn's
        # copy before torch's would put both of torch's threads there.
        import torch  # noqa: F401


def set_up(n_threads: int) -> None:
    """Threads of this process; and torch's check of sparse tensors, off by default, is said to be off, or it warns."""
    import torch

    torch.set_num_threads(n_threads)
    check: Any = torch.sparse.check_sparse_tensor_invariants
    check.disable()


def real_model(model: Mapping[str, Any]) -> BuiltModel:
    """The model with real tensors on the CPU, a transformer's with the usual first values (`start_small`)."""
    from perfmodel.config import load_model
    from perfmodel.config.transformer import TransformerSpec
    from perfmodel.models import build, materialize

    spec = load_model(model)
    built = materialize(build(spec))
    if isinstance(spec, TransformerSpec):
        start_small(built)
    return built


def start_small(built: BuiltModel) -> None:
    """First values of a transformer's matrices as GPT-2, BERT, OPT and LLaMA draw them: `initializer_range` 0.02.

    With torch's own (standard normal embeddings) the first losses are tens of nats, most probabilities below 1e-19 and a fifth
    of Adam's squares denormal, of which a core takes the root 70 times more slowly.
    """
    import torch

    draw = torch.Generator().manual_seed(0)  # the same on every rank
    with torch.no_grad():
        for parameter in built.module.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, INITIALIZER_RANGE, generator=draw)


def batches(model: Mapping[str, Any]) -> tuple[Batch, ...]:
    """Batches of other rows than the built model's own, for a model that looks rows up; else none.

    A training run asks for other rows at every step. With one batch for all steps, what should come from memory would come
    from the caches.
    """
    from perfmodel.config import load_model
    from perfmodel.config.dlrm import DlrmSpec

    spec = load_model(model)
    if not isinstance(spec, DlrmSpec):
        return ()
    from perfmodel.models.dlrm import click_loss, draw_batch

    drawn = (draw_batch(spec, "cpu", seed) for seed in range(1, N_BATCHES + 1))
    return tuple((args, click_loss(target)) for args, target in drawn)


def plain_step(built: BuiltModel, others: Sequence[Batch] = ()) -> Callable[[], None]:
    """Forward, loss, backward and optimizer of one process, as training code writes them.

    Steps take `others` in turn, or the built model's own batch again and again if there are none.
    """
    import torch

    from perfmodel.models.training import make_optimizers

    optimizers = make_optimizers(built)
    turns = itertools.cycle(others or ((built.args, built.loss),))

    def step() -> None:
        args, loss = next(turns)
        for optimizer in optimizers:
            optimizer.zero_grad(set_to_none=True)
        torch.autograd.backward((loss(built.module(*args, **built.kwargs)),))
        for optimizer in optimizers:
            optimizer.step()

    return step


def timed(step: Callable[[], None], budget_s: float, agree: Callable[[int], int] = lambda n_steps: n_steps) -> Timed:
    """Warms up, then times whole steps one by one. `agree` lets ranks settle on one number of steps.

    Where other programs take the cores away, steps tell it by involuntary context switches: the median is that of the
    steps with the fewest, at least a third of all.
    """
    for _ in range(WARM_UP_STEPS - 1):
        step()
    start_s = time.perf_counter()
    step()
    one_s = time.perf_counter() - start_s
    n_steps = agree(int(min(MAX_STEPS, max(MIN_STEPS, budget_s / one_s))))
    found: list[tuple[int, float]] = []
    for _ in range(n_steps):
        switches = _preemptions()
        start_s = time.perf_counter()
        step()
        spent_s = time.perf_counter() - start_s
        found.append((_preemptions() - switches, spent_s))
    kept = _least_disturbed(found)
    return Timed(median_s=median(kept), n_steps=n_steps, n_kept=len(kept))


def _preemptions() -> int:
    """How often any thread of this process was made to wait for a core so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw


def _least_disturbed(steps: Sequence[tuple[int, float]]) -> list[float]:
    """Times of the steps with as few preemptions as the best third has."""
    limit = sorted(switches for switches, _ in steps)[(len(steps) - 1) // 3]
    return [time_s for switches, time_s in steps if switches <= limit]
