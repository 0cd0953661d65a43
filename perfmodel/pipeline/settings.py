"""How an iteration is executed, apart from model, plan and machine."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, get_args

from perfmodel.config.training import InputCopies
from perfmodel.errors import ConfigError, suggest
from perfmodel.pipeline.loader import Loader, loader_problems
from perfmodel.sim.perturb import JITTERS

Mode = Literal["eager", "cuda_graph", "compile"]
MAX_FACTOR = 1000.0  # on a duration; beyond it a sum of durations could leave the integer clock (106 days)
MAX_JITTER_FRAC = (
    10.0  # coefficient of variation; the noisiest fabric we know of has 0.154 (MLPerf training v4.0 NCCL logs)
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSettings:
    """Settings of one run.

    Attributes:
        mode: `eager`; `cuda_graph`, where captured stretches are replayed by one launch each; `compile`, where chains of
            pointwise ops and reductions are fused and compiled code issues the kernels.
        input_copies: how a step's batch reaches a GPU; None: as the model file says (`loop.input_copies`). `pinned`: from
            page-locked memory on the compute stream, between the kernels of the step before and its own, while the host goes
            on; `pageable`: there too, and each copy blocks the host until it is done; `prefetch`: the next step's batch is
            copied on another stream during this one.
        what_if: changes in words, each `<what> x<factor>` or `no <what>` (see `pipeline.whatif`).
        bounds: also find the lower bounds (infinite network, infinite host, roofline).
        overlap: compute slows beside communication where the device's factors are known.
        jitter: coefficient of variation of durations by stream kind (`compute`, `comm`, `host`, `copy`), and of `rank`, a
            factor that all tasks of a rank but its communication share in an iteration.
        stragglers: rank -> factor on the time of its kernels, copies and host work (1.1: ten percent slower).
        loader: worker processes that make the batches; None: a batch is there when the step asks for it.
        gradients: operators keep what backward needs; False where nothing runs backward, which costs the host less.
        check_memory: refuse a plan whose tensors do not fit; False predicts as if they did, and says so in a note.
        n_samples, seed: seeded runs behind the percentiles when `jitter` is given.
    """

    mode: Mode = "eager"
    input_copies: InputCopies | None = None
    what_if: Sequence[str] = ()
    bounds: bool = True
    overlap: bool = True
    jitter: Mapping[str, float] = field(default_factory=dict)
    stragglers: Mapping[int, float] = field(default_factory=dict)
    loader: Loader | None = None
    gradients: bool = True
    check_memory: bool = True
    n_samples: int = 100
    seed: int = 0


DEFAULT_SETTINGS = RunSettings()


def check_settings(settings: RunSettings) -> RunSettings:
    """The settings, if their values exist. Raises ConfigError with one line for each that does not."""
    problems = [
        *_known("mode", settings.mode, get_args(Mode)),
        *(_known("input_copies", settings.input_copies, get_args(InputCopies)) if settings.input_copies else ()),
        *(line for name in settings.jitter for line in _known("jitter", name, JITTERS)),
        *(loader_problems(settings.loader) if settings.loader else ()),
    ]
    problems += [
        f"jitter: {name}: found {value}, allowed a fraction from 0 to {MAX_JITTER_FRAC:g}"
        for name, value in settings.jitter.items()
        if not 0 <= value <= MAX_JITTER_FRAC
    ]
    problems += [
        f"stragglers: rank {rank}: found factor {factor}, allowed one above 0 and at most {MAX_FACTOR:g}"
        for rank, factor in settings.stragglers.items()
        if not 0 < factor <= MAX_FACTOR
    ]
    if settings.n_samples < 1:
        problems.append(f"n_samples: found {settings.n_samples}, allowed 1 or more")
    if problems:
        raise ConfigError(problems)
    return settings


def _known(what: str, value: str, allowed: Iterable[str]) -> list[str]:
    names = tuple(allowed)
    if value in names:
        return []
    return [f"{what}: found {value!r}, allowed {', '.join(names)}{suggest(value, names)}"]
