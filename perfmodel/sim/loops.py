"""Whether and how the simulator's inner loops run compiled: plain Python on lists, or numba on arrays, from one source."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from functools import cache
from pathlib import Path
from threading import Lock
from typing import Any

# Tasks from which loading numba and cached machine code (about 0.4 s) costs less than the plain loops need.
COMPILED_FROM_TASKS = 200_000
# The same once a loop is loaded: below this, lists are as fast as the round trip through arrays.
LOADED_FROM_TASKS = 200

Loop = Callable[..., Any]
_LOADED: dict[
    Loop, Loop
] = {}  # registry of the loops made in this process; those without signatures wait for their machine code
_LOCK = Lock()


def use_numba(loop: Loop, n_tasks: int) -> bool:
    """Whether a run of this many tasks is worth loading the compiled loop, if numba is installed at all."""
    made = _LOADED.get(loop)
    if made is not None and made.signatures:  # type: ignore[attr-defined]  # numba's dispatcher, which has no types
        return n_tasks >= LOADED_FROM_TASKS
    return n_tasks >= COMPILED_FROM_TASKS and has_numba()


@cache
def has_numba() -> bool:
    """True if numba can be imported."""
    return importlib.util.find_spec("numba") is not None


def compiled_loop(loop: Loop, *helpers: Loop) -> Loop:
    """`loop` compiled by numba, its machine code cached on disk; `helpers` are what it calls, each before its callers.

    The plain functions stay as they are. Loop and helpers must stand in one file, whose change makes the cache stale.
    """
    with _LOCK:
        if loop not in _LOADED:
            from numba import njit
            from numba.extending import register_jitable

            for helper in helpers:
                register_jitable(helper)
            try:
                _LOADED[loop] = njit(cache=True)(loop)
            except RuntimeError:  # numba finds no folder it may write its cache to: compile in this process (1 to 4 s)
                _LOADED[loop] = njit()(loop)
        return _LOADED[loop]


def is_cached(loop: Loop, *helpers: Loop) -> bool:
    """Whether the disk holds machine code of `compiled_loop` that is not older than its source."""
    made: Any = compiled_loop(loop, *helpers)
    source = Path(loop.__code__.co_filename)
    folder = made.stats.cache_path
    found = Path(folder).glob(f"*.{loop.__name__}-*.nbi") if folder else ()
    return any(index.stat().st_mtime >= source.stat().st_mtime for index in found)
