"""What is held while a rank works through a pipeline's schedule: the same account for the peak and for the curve."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from perfmodel.plan.schedule import Step


@dataclass(frozen=True, slots=True, kw_only=True)
class Holding:
    """Activations of a rank by the steps of its schedule, and gradients that are whole for a part of it.

    Attributes:
        steps: what the rank runs, in order.
        kept_bytes: by chunk, what a forward leaves for its backward (with a zero-bubble schedule for its weight pass).
        above_bytes: by chunk, what a pass needs beyond that while it runs.
        summed_bytes: by chunk, gradients that lie there whole from the first backward to the last, after which they are
            scattered; empty where gradients are not divided so.
    """

    steps: Sequence[Step]
    kept_bytes: tuple[int, ...]
    above_bytes: tuple[int, ...]
    summed_bytes: tuple[int, ...] = ()

    @property
    def last_kind(self) -> str:
        """The kind of pass after which a micro-batch holds nothing."""
        return "weight" if any(step.kind == "weight" for step in self.steps) else "backward"

    def peak_bytes(self) -> int:
        """The most that is held during a step."""
        return sum(self.peak())

    def peak(self) -> tuple[int, int]:
        """Activations and whole gradients (bytes) at the first step at which their sum is largest."""
        most = (0, 0)
        held = 0
        last = self.last_kind
        summed = self._summed()
        for number, step in enumerate(self.steps):
            held += self.kept_bytes[step.chunk] * (step.kind == "forward")
            gradients = sum(size for size, begin, end in summed if begin <= number <= end)
            most = max(most, (held + self.above_bytes[step.chunk], gradients), key=sum)
            held -= self.kept_bytes[step.chunk] * (step.kind == last)
        return most

    def _summed(self) -> list[tuple[int, int, int]]:
        """(bytes, first step, last step) of gradients that are whole."""
        found = []
        for chunk, size in enumerate(self.summed_bytes):
            places = [i for i, step in enumerate(self.steps) if step.chunk == chunk and step.kind != "forward"]
            found.append((size, places[0], places[-1]))
        return found

    def lifetimes(self) -> list[tuple[int, int, int]]:
        """(bytes, first step, last step) of everything that is held."""
        begun: dict[tuple[int, int], int] = {}
        found = self._summed()
        last = self.last_kind
        for number, step in enumerate(self.steps):
            found.append((self.above_bytes[step.chunk], number, number))
            if step.kind == "forward":
                begun[step.micro, step.chunk] = number
            elif step.kind == last:
                found.append((self.kept_bytes[step.chunk], begun[step.micro, step.chunk], number))
        return found
