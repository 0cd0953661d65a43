"""Durations + streams + deps + sync groups -> Timeline. Knows no tensors, devices or YAML."""

from perfmodel.sim.compile import Compiled, compile_programs
from perfmodel.sim.engine import simulate, simulate_compiled
from perfmodel.sim.program import COMM, COMPUTE, COPY, HOST, NO_GROUP, ArrayProgram, Program, Task
from perfmodel.sim.timeline import Timeline

__all__ = [
    "COMM",
    "COMPUTE",
    "COPY",
    "HOST",
    "NO_GROUP",
    "ArrayProgram",
    "Compiled",
    "Program",
    "Task",
    "Timeline",
    "compile_programs",
    "simulate",
    "simulate_compiled",
]
