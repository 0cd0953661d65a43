"""Loads the simulator's compiled loops before they are first needed, or beside what runs meanwhile in plain Python."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from threading import Lock, Thread

from perfmodel.sim import steady_slowed
from perfmodel.sim.compile import compile_programs
from perfmodel.sim.engine import simulate_compiled
from perfmodel.sim.loops import Loop, has_numba, is_cached
from perfmodel.sim.order import append_unit, general_order, kahn_loop
from perfmodel.sim.path import critical_rows, walk_loop
from perfmodel.sim.program import Program, Task
from perfmodel.sim.slowed_sweep import HELPERS, settle_rows
from perfmodel.sim.sweep import sweep_loop, warm_up

LOOPS: tuple[tuple[Loop, ...], ...] = ((sweep_loop,), (walk_loop,), (kahn_loop, append_unit), (settle_rows, *HELPERS))
NICENESS = 10  # of the process that compiles: what the user asked for goes first


def warm_up_all() -> bool:
    """Loads them, so that later runs of any size use them; False if numba is not installed.

    Worth it for a process that predicts many times: 0.5 s once from the cache on disk, 5 to 8 s where they are not in it.
    """
    if not has_numba():
        return False
    # Compiled loops are loaded for the types that they are first called with: those of any program.
    compiled = compile_programs([Program(tasks=[Task(stream=1, duration_ps=1)])])
    warm_up()
    general_order(compiled.wiring, numba=True)
    critical_rows(simulate_compiled(compiled), numba=True)
    steady_slowed.warm_up()
    return True


class Warming:
    """`warm_up_all` without anybody waiting for it.

    Machine code from the disk is loaded in a thread. Where the disk has none, another process compiles it first, for numba
    compiles under the interpreter's lock, which would halve the speed of everything else for seconds.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        self._thread: Thread | None = None
        self._child: subprocess.Popen[bytes] | None = None

    def go_on(self) -> None:
        """Starts it, or its next step if the one before is done; returns at once. To be called now and then."""
        with self._lock:
            if not has_numba() or (self._thread is not None and self._child is None):
                return
            if self._child is not None and self._child.poll() is None:
                return
            compiled, self._child = self._child is not None, None
            # Not a daemon: the end of a process waits for half a second of loading, and does not cut it off.
            self._thread = Thread(target=self._load, args=(compiled,), name="perfmodel-warm-up", daemon=False)
            self._thread.start()

    def wait(self) -> None:
        """Waits until what was begun is done."""
        while self._thread is not None and (self._thread.is_alive() or self._child is not None):
            self._thread.join()
            if self._child is not None:
                self._child.wait()
                self.go_on()

    def _load(self, compiled: bool) -> None:
        if compiled or not sys.executable or all(is_cached(*loop) for loop in LOOPS):
            warm_up_all()
            return
        folders = [str(Path(__file__).parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])]
        self._child = subprocess.Popen(
            [sys.executable, "-m", "perfmodel.sim.warm"],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(folders)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )


WARMING = Warming()

if __name__ == "__main__":
    if hasattr(os, "nice"):
        os.nice(NICENESS)
    warm_up_all()
