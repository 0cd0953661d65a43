"""The garbage collector, while graphs pile up that are kept anyway."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def uncollected() -> Iterator[None]:
    """No cyclic garbage collection inside: walking millions of ops that stay takes a third of the time of a search.

    What was made inside goes to the oldest generation at the end, as if it had been collected before: else the collector
    would walk all of it as soon as it is on again.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            if gc.get_freeze_count() == 0:  # what others froze stays frozen
                gc.freeze()
                gc.unfreeze()
            gc.enable()
