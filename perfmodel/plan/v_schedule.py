"""ZB-V: a pipeline without a bubble and with 1F1B's memory, whose ranks have two chunks each, in a V.

Qi et al. 2024 (arXiv:2401.10241, section 6; arXiv:2405.15362 calls it V-ZB). Virtual stage v of 2 p lies on rank v where v < p
and on rank 2 p - 1 - v else, so the first rank has the model's first and last part and the loss is next to the embedding.
Where a forward and the two parts of a backward take as long, no rank waits between its first pass and its last.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Literal

Kind = Literal["forward", "backward", "weight"]


@dataclass(frozen=True, slots=True)
class Step:
    """One pass of one micro-batch through one chunk of a rank; `weight` is the part of backward that zero bubble puts off."""

    kind: Kind
    micro: int
    chunk: int = 0


Part = tuple[Kind, int]  # kind and chunk
DOWN: Part = ("forward", 0)
UP: Part = ("forward", 1)
FIRST: tuple[Part, Part] = (("backward", 0), ("weight", 0))  # both parts of the backward of each chunk
SECOND: tuple[Part, Part] = (("backward", 1), ("weight", 1))


@dataclass(slots=True)
class _Passes:
    """Passes in order; each kind and chunk takes micro-batch after micro-batch."""

    steps: list[Step] = field(default_factory=list)
    done: Counter[Part] = field(default_factory=Counter)

    def run(self, *what: Part) -> None:
        """The next micro-batch of each of these kinds and chunks."""
        for kind, chunk in what:
            self.steps.append(Step(kind, self.done[kind, chunk], chunk))
            self.done[kind, chunk] += 1


def zero_bubble_v(stage: int, n_stages: int, n_micro: int) -> tuple[Step, ...]:
    """Steps of the rank at `stage`. It is laid out for 2 p - 1 micro-batches or more; of fewer, those there are run."""
    n = max(n_micro, 2 * n_stages - 1)
    passes = _Passes()
    for _ in range(2 * (n_stages - stage) - 1):
        passes.run(DOWN)
    for _ in range(stage):
        passes.run(UP, DOWN)
    for _ in range(n_stages - stage):
        passes.run(UP, *SECOND)
    while passes.done[UP] < passes.done[DOWN] or passes.done[DOWN] < n:
        if passes.done[DOWN] < n:
            passes.run(DOWN)
        passes.run(*FIRST, UP, *SECOND)
    for _ in range(stage):  # the last gradients of inputs come first, for other ranks wait for them
        passes.run(FIRST[0], SECOND[0])
    for _ in range(n_stages - stage):
        passes.run(*FIRST)
    for gradients, weights in (SECOND, FIRST):
        while passes.done[weights] < passes.done[gradients]:
            passes.run(weights)
    return tuple(step for step in passes.steps if step.micro < n_micro)


def rank_of(virtual: int, n_stages: int) -> int:
    """The rank on which a virtual stage lies."""
    return min(virtual, 2 * n_stages - 1 - virtual)


def virtual_of(stage: int, chunk: int, n_stages: int) -> int:
    """The virtual stage that is a rank's chunk."""
    return 2 * n_stages - 1 - stage if chunk else stage
