"""The order in which a stage of a pipeline runs the forward and backward passes of micro-batches.

GPipe (Huang et al. 2019, arXiv:1811.06965): all forwards, then all backwards. 1F1B (Narayanan et al. 2019, PipeDream-Flush;
Megatron-LM's default): as many forwards as there are stages behind, then one of each. Interleaved 1F1B (Narayanan et al. 2021,
arXiv:2104.04473): each rank has several chunks of blocks, its micro-batches go through them in groups, of as many as stages or
of a size of its own (Dubey et al. 2024, arXiv:2407.21783, section 3.3.2; Megatron-Core's `get_schedule_table`).
Zero bubble (Qi et al. 2024, arXiv:2401.10241, section 2.3): backward is parted in gradients of inputs, which other stages
wait for, and gradients of weights, which fill the bubble. ZB-H1 has as many micro-batches in flight as 1F1B; ZB-H2 runs
`stage` forwards fewer than twice the stages less one ahead, and so has no bubble but where stages differ. ZB-V (section 6
there; `v_schedule.py`) has none with the memory of 1F1B: each rank has two chunks, the model goes down and up in a V.
"""

from __future__ import annotations

from typing import Literal

from perfmodel.errors import InfeasiblePlanError
from perfmodel.plan.v_schedule import Step, zero_bubble_v

Schedule = Literal["gpipe", "1f1b", "interleaved", "zero_bubble", "zero_bubble_h2", "zero_bubble_v"]
PARTED = ("zero_bubble", "zero_bubble_h2", "zero_bubble_v")  # schedules whose backward is in two parts

__all__ = ["PARTED", "Schedule", "Step", "most_in_flight", "schedule"]


def schedule(
    kind: Schedule, stage: int, n_stages: int, n_micro: int, n_chunks: int = 1, group: int | None = None
) -> tuple[Step, ...]:
    """Steps of the rank at `stage` of `n_stages`.

    `group`: micro-batches that go through one chunk before the next one's turn; without it as many as stages, and with as
    many micro-batches as stages all forwards then run first, as in Megatron-LM before it had the setting.

    Raises InfeasiblePlanError for counts the schedule does not take.
    """
    if kind == "zero_bubble_v":
        return zero_bubble_v(stage, n_stages, n_micro)
    if n_chunks > 1:
        _check_group(n_stages, n_micro, group)
    if kind in PARTED:
        ahead = n_stages - stage - 1 if kind == "zero_bubble" else 2 * (n_stages - stage - 1)
        return _zero_bubble(min(ahead, n_micro), min(_lag(kind, stage, n_stages), n_micro), n_micro)
    total = n_micro * n_chunks
    order = _order(n_micro, n_chunks, group or n_stages)
    forwards = [Step("forward", micro, chunk) for micro, chunk in order]
    backwards = [Step("backward", micro, n_chunks - 1 - chunk) for micro, chunk in order]
    warm_up = min(_warm_up(kind, n_stages - stage - 1, n_chunks, total, group or n_stages), total)
    if group is None and n_chunks > 1 and n_micro == n_stages:
        warm_up = total  # as Megatron-LM does when each chunk sees one group of micro-batches
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


def _warm_up(kind: Schedule, behind: int, n_chunks: int, total: int, group: int) -> int:
    """Forwards before the first backward, less the one of the steady state, of a rank with `behind` stages after its own."""
    if kind == "gpipe":
        return total
    if n_chunks == 1:
        return behind
    return 2 * behind + (n_chunks - 1) * group


def _order(n_micro: int, n_chunks: int, group: int) -> list[tuple[int, int]]:
    """(micro-batch, chunk) of a rank's forwards: groups of micro-batches go through chunk after chunk, the rest last."""
    firsts = range(0, n_micro, group) if n_chunks > 1 else (0,)
    size = group if n_chunks > 1 else n_micro
    return [
        (micro, chunk)
        for first in firsts
        for chunk in range(n_chunks)
        for micro in range(first, min(first + size, n_micro))
    ]


def _check_group(n_stages: int, n_micro: int, group: int | None) -> None:
    """What Megatron-Core asks of its groups; one group of fewer micro-batches than stages works too, as torch allows."""
    if group is None:
        if n_micro % n_stages:
            raise InfeasiblePlanError(
                f"pipeline: interleaved 1F1B with {n_micro} micro-batches, allowed a multiple of its {n_stages} stages, or "
                "groups of another size: pipeline.group_size"
            )
        return
    found = f"pipeline.group_size: found {group} with {n_stages} stages and {n_micro} micro-batches, allowed"
    if group > n_micro or (group < n_stages and group != n_micro):
        least = min(n_stages, n_micro)
        raise InfeasiblePlanError(
            f"{found} {least} to {n_micro}: with fewer than stages ranks would wait for each other"
        )
    rest = n_micro % group
    if 0 < rest < n_stages:
        raise InfeasiblePlanError(
            f"{found} sizes that leave a last group of none or of {n_stages} or more, not of {rest}"
        )


def most_in_flight(steps: tuple[Step, ...], chunk: int = 0) -> int:
    """The largest number of micro-batches of a chunk whose forward is done and whose backward is not (all of it)."""
    alive = most = 0
    ends = "weight" if any(step.kind == "weight" for step in steps) else "backward"
    for step in steps:
        if step.chunk == chunk:
            alive += (step.kind == "forward") - (step.kind == ends)
            most = max(most, alive)
    return most
