"""Calls by which a module makes the host wait for a GPU: seen where torch has none as well, and they dispatch nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch


class CurrentStream:
    """Stands for the stream that a step runs on, of which a module may wait for the end; it does nothing else."""

    def __init__(self, waits: Callable[[], None]) -> None:
        self._waits = waits

    def synchronize(self) -> None:
        """The host waits for all that was issued on it."""
        self._waits()


@contextmanager
def seen_waits(waits: Callable[[], None]) -> Iterator[None]:
    """Inside, `waits` is told of `torch.cuda.synchronize` and of `synchronize` of the current and the default stream.

    Other uses of streams stay what they are in this torch: one without CUDA refuses them. One with it has streams of its own,
    whose waits are not seen.
    """

    def synchronize(device: Any = None) -> None:
        del device  # a step has one
        waits()

    def stream(device: Any = None) -> CurrentStream:
        del device
        return CurrentStream(waits)

    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(torch.cuda, "synchronize", synchronize))
        for name in () if torch.cuda.is_available() else ("current_stream", "default_stream"):
            stack.enter_context(mock.patch.object(torch.cuda, name, stream))
        yield
