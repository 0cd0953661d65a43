"""How much a search may do: a number of plans to simulate, or a time."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from perfmodel.errors import ConfigError
from perfmodel.units import parse_seconds

BOUNDING_FRAC = 0.5  # of a budget of time: evaluations take no more, so that the best are simulated


@dataclass(slots=True, kw_only=True)
class Budget:
    """At most `plans` simulations, or `time_s` seconds from its making on; the first plan is looked at in any case."""

    plans: int | None = None
    time_s: float | None = None
    clock: Callable[[], float] = time.monotonic
    begin_s: float = field(init=False)

    def __post_init__(self) -> None:
        """The clock starts."""
        self.begin_s = self.clock()

    def ends_bounding(self, n_bounded: int) -> bool:
        """Whether no more plans are to be evaluated after `n_bounded` of them."""
        return n_bounded > 0 and self.time_s is not None and self._spent_s > BOUNDING_FRAC * self.time_s

    def ends(self, n_simulated: int) -> bool:
        """Whether no more plans are to be simulated after `n_simulated` of them."""
        if self.plans is not None and n_simulated >= self.plans:
            return True
        return n_simulated > 0 and self.time_s is not None and self._spent_s > self.time_s

    @property
    def _spent_s(self) -> float:
        return self.clock() - self.begin_s


def as_budget(budget: int | str | None) -> Budget:
    """`64` (plans), `30s` or `2 min` (time), or no end.

    Raises ConfigError for a number below 1, or text that is neither.
    """
    text = str(budget).strip()
    if budget is None:
        return Budget()
    if text.lstrip("-").isdigit():
        if int(text) < 1:
            raise ConfigError(f"budget: found {text}, allowed 1 or more plans, or a time such as '30 s'")
        return Budget(plans=int(text))
    try:
        time_s = parse_seconds(text)
    except ValueError:
        raise ConfigError(
            f"budget: found {text!r}, allowed a number of plans, or a time such as '30 s' or '2 min'"
        ) from None
    if time_s <= 0:
        raise ConfigError(f"budget: found {text!r}, allowed more than no time")
    return Budget(time_s=time_s)
