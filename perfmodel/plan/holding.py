"""What activations hold while a rank works through a pipeline's schedule: the same account for the peak and for the curve."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from perfmodel.plan.schedule import Step


@dataclass(frozen=True, slots=True, kw_only=True)
class Holding:
    """Activations of a rank by the steps of its schedule.

    Attributes:
        steps: what the rank runs, in order.
        kept_bytes: by chunk, what a forward leaves for its backward (with a zero-bubble schedule for its weight pass).
        above_bytes: by chunk, what a pass needs beyond that while it runs.
    """

    steps: Sequence[Step]
    kept_bytes: tuple[int, ...]
    above_bytes: tuple[int, ...]

    @property
    def last_kind(self) -> str:
        """The kind of pass after which a micro-batch holds nothing."""
        return "weight" if any(step.kind == "weight" for step in self.steps) else "backward"

    def peak_bytes(self) -> int:
        """The most that is held during a step."""
        most = held = 0
        last = self.last_kind
        for step in self.steps:
            held += self.kept_bytes[step.chunk] * (step.kind == "forward")
            most = max(most, held + self.above_bytes[step.chunk])
            held -= self.kept_bytes[step.chunk] * (step.kind == last)
        return most

    def lifetimes(self) -> list[tuple[int, int, int]]:
        """(bytes, first step, last step) of everything that is held."""
        begun: dict[tuple[int, int], int] = {}
        found = []
        last = self.last_kind
        for number, step in enumerate(self.steps):
            found.append((self.above_bytes[step.chunk], number, number))
            if step.kind == "forward":
                begun[step.micro, step.chunk] = number
            elif step.kind == last:
                found.append((self.kept_bytes[step.chunk], begun[step.micro, step.chunk], number))
        return found
