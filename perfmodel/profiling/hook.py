"""Runs inside the user's script: counts optimizer steps, times them, and profiles a window of them.

A step ends when the optimizer that stepped first steps again (torch's global post-step hook), so a script with several
optimizers, or with accumulation, has the steps one would expect. Calls that often interrupt training (`torch.save`,
TensorBoard's `add_scalar`) are annotated while the window is open, so that their time has a name.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

from perfmodel.profiling.settings import ProfileSettings

_ANNOTATED = (("torch", "save", "torch.save"),)


class StepWatcher:
    """What happens at the end of each step, by its number."""

    def __init__(self, settings: ProfileSettings, rank: int) -> None:
        self.settings, self.rank = settings, rank
        self.first: int | None = None  # identity of the optimizer that marks steps
        self.number = 0
        self.ends_s: list[float] = []
        self.profiler: Any = None
        self.mark: Any = None
        self.undo: list[Callable[[], None]] = []

    def stepped(self, optimizer: object) -> None:
        """Called after each optimizer's step."""
        if self.first is None:
            self.first = id(optimizer)
        if id(optimizer) != self.first:
            return
        settings = self.settings
        begin = settings.warm_up + settings.plain
        if self.mark is not None:
            self.mark.__exit__(None, None, None)
            self.mark = None
        self.ends_s.append(time.perf_counter())
        self.number += 1
        if self.number == settings.warm_up:
            self._rehearse()
        if self.number == begin:
            self._open()
        if self.profiler is not None:
            if self.number == begin + settings.active:
                self._close()
            else:
                self._mark()
        if self.number == begin + settings.active + 1 + settings.plain:
            self._finish()

    def _rehearse(self) -> None:
        """Starts a profiler once, so that its one-time set-up lies before all that is timed."""
        from torch.profiler import profile

        with profile():
            pass
        self.ends_s[-1] = time.perf_counter()

    def _mark(self) -> None:
        from torch.profiler import record_function

        self.mark = record_function(f"ProfilerStep#{self.number}")
        self.mark.__enter__()

    def _open(self) -> None:
        import torch
        from torch.profiler import ProfilerActivity, profile

        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(ProfilerActivity.CUDA)
        settings = self.settings
        self.profiler = profile(
            activities=activities,
            record_shapes=settings.shapes,
            with_stack=settings.stacks,
            with_modules=settings.stacks,
            profile_memory=settings.memory,
        )
        self._annotate()
        self.profiler.start()
        # The profiler's own start is no part of a step.
        self.ends_s[-1] = time.perf_counter()

    def _close(self) -> None:
        profiler, self.profiler = self.profiler, None
        profiler.stop()
        for undo in self.undo:
            undo()
        path = self.settings.trace_path(self.rank)
        temporary = path.with_name(f".{path.name}")
        plain = temporary.with_suffix("")
        profiler.export_chrome_trace(str(plain))
        _compress(str(plain), str(temporary))
        os.replace(temporary, path)
        self.ends_s.append(time.perf_counter())  # writing the trace lies between two steps

    def _annotate(self) -> None:
        from torch.profiler import record_function

        for module_name, attribute, label in _ANNOTATED:
            module = sys.modules[module_name]
            plain = getattr(module, attribute)
            setattr(module, attribute, _named(plain, label, record_function))
            self.undo.append(lambda module=module, attribute=attribute, plain=plain: setattr(module, attribute, plain))  # type: ignore[misc] # bound now

    def _finish(self) -> None:
        settings = self.settings
        begin = settings.warm_up + settings.plain
        steps = [after - before for before, after in zip(self.ends_s, self.ends_s[1:], strict=False)]
        body = {
            "schema_version": 1,
            "rank": self.rank,
            "before_s": steps[settings.warm_up - 1 : begin - 1],
            "profiled_s": steps[begin - 1 : begin - 1 + settings.active],
            "after_s": steps[begin + 1 + settings.active :],
        }
        path = settings.times_path(self.rank)
        temporary = path.with_name(f".{path.name}")
        temporary.write_text(json.dumps(body), encoding="utf-8")
        os.replace(temporary, path)
        self.first = -1
        if not settings.keep_running:
            sys.stdout.flush()
            raise SystemExit(0)


def _named(call: Callable[..., Any], label: str, record: Callable[[str], Any]) -> Callable[..., Any]:
    def named(*args: Any, **kwargs: Any) -> Any:
        with record(label):
            return call(*args, **kwargs)

    return named


def _compress(source: str, target: str) -> None:
    import gzip
    import shutil

    with open(source, "rb") as plain, gzip.open(target, "wb", compresslevel=3) as packed:
        shutil.copyfileobj(plain, packed)
    os.remove(source)


def install(settings: ProfileSettings) -> None:
    """Watches the steps of this process, if its rank is wanted. Called when the script has imported torch."""
    from torch.optim.optimizer import register_optimizer_step_post_hook

    rank = int(os.environ.get("RANK", "0"))
    if settings.ranks and rank not in settings.ranks:
        return
    watcher = StepWatcher(settings, rank)
    register_optimizer_step_post_hook(lambda optimizer, args, kwargs: watcher.stepped(optimizer))
