"""The order in which a stage of a pipeline runs the forward and backward passes of micro-batches.

GPipe (Huang et al. 2019, arXiv:1811.06965): all forwards, then all backwards. 1F1B (Narayanan et al. 2019, PipeDream-Flush;
Megatron-LM's default): as many forwards as there are stages behind, then one of each. Interleaved 1F1B (Narayanan et al. 2021,
arXiv:2104.04473): each rank has several chunks of blocks, its micro-batches go through them in groups of as many as stages.
Zero bubble (Qi et al. 2024, arXiv:2401.10241, section 2.3): backward is parted in gradients of inputs, which other stages
wait for, and gradients of weights, which fill the bubble. ZB-H1 has as many micro-batches in flight as 1F1B; ZB-H2 runs
`stage` forwards fewer than twice the stages less one ahead, and so has no bubble but where stages differ.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from perfmodel.errors import InfeasiblePlanError

Schedule = Literal["gpipe", "1f1b", "interleaved", "zero_bubble", "zero_bubble_h2"]
PARTED = ("zero_bubble", "zero_bubble_h2")  # schedules whose backward is in two parts


@dataclass(frozen=True, slots=True)
class Step:
    """One pass of one micro-batch through one chunk of a rank; `weight` is the part of backward that zero bubble puts off."""

    kind: Literal["forward", "backward", "weight"]
    micro: int
    chunk: int = 0


def schedule(kind: Schedule, stage: int, n_stages: int, n_micro: int, n_chunks: int = 1) -> tuple[Step, ...]:
    """Steps of the rank at `stage` of `n_stages`. Raises InfeasiblePlanError for counts the schedule does not take."""
    if n_chunks > 1 and n_micro % n_stages:
        raise InfeasiblePlanError(
            f"pipeline: interleaved 1F1B with {n_micro} micro-batches, allowed a multiple of its {n_stages} stages"
        )
    if kind in PARTED:
        ahead = n_stages - stage - 1 if kind == "zero_bubble" else 2 * (n_stages - stage - 1)
        return _zero_bubble(min(ahead, n_micro), min(_lag(kind, stage, n_stages), n_micro), n_micro)
    total = n_micro * n_chunks
    forwards = [Step("forward", *_of(k, n_stages, n_chunks, n_micro)) for k in range(total)]
    backwards = [_mirrored(*_of(k, n_stages, n_chunks, n_micro), n_chunks) for k in range(total)]
    warm_up = min(_warm_up(kind, stage, n_stages, n_chunks, total), total)
    steps = forwards[:warm_up]
    for k in range(total - warm_up):
        steps += [forwards[warm_up + k], backwards[k]]
    return (*steps, *backwards[total - warm_up :])


def _lag(kind: Schedule, stage: int, n_stages: int) -> int:
    """By how many micro-batches the gradients of a stage's weights lag behind those of its inputs."""
    return stage if kind == "zero_bubble" else 2 * stage


def _zero_bubble(warm_up: int, lag: int, n_micro: int) -> tuple[Step, ...]:
    """`warm_up` forwards, then one of each, the gradients of weights `lag` micro-batches behind those of inputs."""
    steps = [Step("forward", k) for k in range(warm_up)]
    for k in range(n_micro):
        if warm_up + k < n_micro:
            steps.append(Step("forward", warm_up + k))
        steps.append(Step("backward", k))
        if k >= lag:
            steps.append(Step("weight", k - lag))
    return (*steps, *(Step("weight", k) for k in range(n_micro - lag, n_micro)))


def _warm_up(kind: Schedule, stage: int, n_stages: int, n_chunks: int, total: int) -> int:
    """Forwards before the first backward, less the one of the steady state."""
    behind = n_stages - stage - 1
    if kind == "gpipe":
        return total
    if n_chunks == 1:
        return behind
    if total == n_stages * n_chunks:
        return total  # as Megatron-LM does when each chunk sees one group of micro-batches
    return 2 * behind + (n_chunks - 1) * n_stages


def _of(k: int, n_stages: int, n_chunks: int, n_micro: int) -> tuple[int, int]:
    """(micro-batch, chunk) of a rank's k-th forward: groups of `n_stages` micro-batches go through chunk after chunk."""
    if n_chunks == 1:
        return k, 0
    group, within = divmod(k, n_stages * n_chunks)
    chunk, place = divmod(within, n_stages)
    return group * n_stages + place, chunk


def _mirrored(micro: int, chunk: int, n_chunks: int) -> Step:
    return Step("backward", micro, n_chunks - 1 - chunk)


def most_in_flight(steps: tuple[Step, ...], chunk: int = 0) -> int:
    """The largest number of micro-batches of a chunk whose forward is done and whose backward is not (all of it)."""
    alive = most = 0
    ends = "weight" if any(step.kind == "weight" for step in steps) else "backward"
    for step in steps:
        if step.chunk == chunk:
            alive += (step.kind == "forward") - (step.kind == ends)
            most = max(most, alive)
    return most
