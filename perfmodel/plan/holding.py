"""What is held while a rank works through a pipeline's schedule: the same account for the peak and for the curve."""

from __future__ import annotations

from collections import Counter
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
        sum_group: micro-batches that are summed before gradients are scattered; None: all of them.
        above_by_step: what each step needs beyond what is kept, where that differs between steps of a chunk.
        always_bytes: what is held from the first step to the last.
        outputs_bytes: by chunk, what a forward leaves until the last step.
        joined_bytes: what is made of that after the last step.
    """

    steps: Sequence[Step]
    kept_bytes: tuple[int, ...]
    above_bytes: tuple[int, ...]
    summed_bytes: tuple[int, ...] = ()
    sum_group: int | None = None
    above_by_step: tuple[int, ...] = ()
    always_bytes: int = 0
    outputs_bytes: tuple[int, ...] = ()
    joined_bytes: int = 0

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
        held, gradients = self.always_bytes, 0
        last = self.last_kind
        begins, ends = Counter[int](), Counter[int]()
        for size, begin, end in self._summed():
            begins[begin] += size
            ends[end] += size
        for number, step in enumerate(self.steps):
            held += (self.kept_bytes[step.chunk] + self._output(step.chunk)) * (step.kind == "forward")
            gradients += begins[number]
            most = max(most, (held + self.above(number), gradients), key=sum)
            held -= self.kept_bytes[step.chunk] * (step.kind == last)
            gradients -= ends[number]
        return max(most, (held + self.joined_bytes, sum(self.summed_bytes) if self.joined_bytes else 0), key=sum)

    def above(self, number: int) -> int:
        """What a step needs beyond what is kept (bytes)."""
        return self.above_by_step[number] if self.above_by_step else self.above_bytes[self.steps[number].chunk]

    def _output(self, chunk: int) -> int:
        return self.outputs_bytes[chunk] if self.outputs_bytes else 0

    def _summed(self) -> list[tuple[int, int, int]]:
        """(bytes, first step, last step) of gradients that are whole."""
        if not self.summed_bytes:
            return []
        spans: dict[tuple[int, int], tuple[int, int]] = {}
        for number, step in enumerate(self.steps):
            if step.kind != "forward":
                of = (step.chunk, step.micro // self.sum_group if self.sum_group else 0)
                spans[of] = (spans.get(of, (number, number))[0], number)
        return [(self.summed_bytes[chunk], *span) for (chunk, _), span in spans.items()]

    def lifetimes(self) -> list[tuple[int, int, int]]:
        """(bytes, first step, last step) of everything that is held."""
        begun: dict[tuple[int, int], int] = {}
        found = self._summed()
        last, end = self.last_kind, len(self.steps) - 1
        if self.always_bytes:
            found.append((self.always_bytes, 0, end))
        for number, step in enumerate(self.steps):
            found.append((self.above(number), number, number))
            if step.kind == "forward":
                begun[step.micro, step.chunk] = number
                if self._output(step.chunk):
                    found.append((self._output(step.chunk), number, end))
            elif step.kind == last:
                found.append((self.kept_bytes[step.chunk], begun[step.micro, step.chunk], number))
        return found
