"""What-ifs in words: `gemm x0.5`, `nvlink x2`, `no host`, `all_reduce x0`.

`<what> x<factor>` multiplies what the word stands for; `no <what>` is `x0`. A kernel family, an op (`aten.mm`), a collective
(`all_reduce`), `compute`, `comm`, `copy` and `host` are times. A kind of link (`nvlink`, `pcie`, `infiniband`, ...) is a
bandwidth: it divides the bandwidth part of every collective that such a link limits. Several apply in order.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from perfmodel.collectives import CollectiveEstimate
from perfmodel.errors import ConfigError, suggest
from perfmodel.pipeline.pricebook import FloatArray
from perfmodel.pipeline.settings import MAX_FACTOR
from perfmodel.pipeline.tasks import CATEGORIES, HOST_FAMILY, Category, LoweredClass
from perfmodel.topology import Topology
from perfmodel.units import PS_PER_S

_FORM = re.compile(r"\s*(?:no\s+(?P<none>\S.*?)|(?P<what>\S.*?)\s+x\s*(?P<factor>\S+))\s*")
LINKS = ("nvlink", "pcie", "infiniband", "roce", "tcp", "socket", "memory", "loopback")
# Words that stand for every task of these categories; what is left of a class's words are families and ops.
_CATEGORY_WORDS: Mapping[str, tuple[Category, ...]] = {
    "compute": ("kernel",),
    "comm": ("collective",),
    "network": ("collective",),
    "copies": ("copy",),
    HOST_FAMILY: ("host", "sync"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class WhatIf:
    """One change: `what` is a word of the module's docstring, `factor` what its time (of a link, its bandwidth) becomes."""

    what: str
    factor: float

    @property
    def is_link(self) -> bool:
        """Whether it changes a bandwidth."""
        return self.what in LINKS


def parse_what_if(text: str) -> WhatIf:
    """Reads one change. Raises ConfigError if it is not of the form, or its factor makes no sense.

    >>> parse_what_if("gemm x0.5")
    WhatIf(what='gemm', factor=0.5)
    """
    found = _FORM.fullmatch(text)
    if found is None:
        raise ConfigError(f"what-if: found {text!r}, allowed '<what> x<factor>' or 'no <what>', such as 'gemm x0.5'")
    what, factor = found["none"] or found["what"], 0.0
    if found["factor"] is not None:
        try:
            factor = float(found["factor"])
        except ValueError:
            factor = math.nan
    if factor != 0 and not 1 / MAX_FACTOR <= factor <= MAX_FACTOR:
        raise ConfigError(
            f"what-if {text!r}: found factor {found['factor']!r}, allowed 0 or a number from {1 / MAX_FACTOR:g} to "
            f"{MAX_FACTOR:g}, such as 0.5"
        )
    change = WhatIf(what=what, factor=factor)
    if change.is_link and factor == 0:
        raise ConfigError(
            f"what-if {text!r}: a link without bandwidth never ends; say 'no network' for free communication"
        )
    return change


def change_links(
    collectives: Mapping[int, CollectiveEstimate], changes: Sequence[WhatIf], topology: Topology
) -> dict[int, CollectiveEstimate]:
    """Collectives with the bandwidth of the links that limit them changed. Raises ConfigError where none is so limited."""
    changed = dict(collectives)
    for change in changes:
        if not change.is_link:
            continue
        kinds = {found.bottleneck: _link_kind(topology, found.bottleneck) for found in changed.values()}
        hit = {i: found for i, found in changed.items() if kinds[found.bottleneck].startswith(change.what)}
        if not hit:
            limits = ", ".join(sorted(set(kinds.values()) - {""})) or "none"
            raise ConfigError(
                f"what-if {change.what}: no collective here is limited by such a link; limits here: {limits}"
            )
        changed |= {i: _faster_link(found, change.factor) for i, found in hit.items()}
    return changed


def _link_kind(topology: Topology, name: str) -> str:
    """Kind of the link called `source>target`; empty if there is no such link."""
    edge = tuple(name.split(">"))
    graph = topology.graph
    return str(graph.edges[edge]["link"].kind.value) if len(edge) == 2 and graph.has_edge(*edge) else ""


def _faster_link(found: CollectiveEstimate, factor: float) -> CollectiveEstimate:
    time_s = found.latency_s + found.bandwidth_s
    if time_s <= 0:
        return found
    scale = (found.latency_s + found.bandwidth_s / factor) / time_s
    return replace(found, estimate=found.estimate.scaled(scale), bandwidth_s=found.bandwidth_s / factor)


def change_times(classes: Sequence[LoweredClass], changes: Sequence[WhatIf]) -> tuple[LoweredClass, ...]:
    """Classes with the times of what the changes name multiplied. Raises ConfigError for a word that names nothing here."""
    times = [change for change in changes if not change.is_link]
    words = {word for lowered in classes for word in _words(lowered)} | set(_CATEGORY_WORDS)
    problems = []
    for change in times:
        if change.what not in words:
            near = suggest(change.what, (*words, *LINKS))
            problems.append(f"what-if: found {change.what!r}, allowed {', '.join(_listed(words))}{near}")
    if problems:
        raise ConfigError(problems)
    return tuple(_changed(lowered, times) for lowered in classes)


def _words(lowered: LoweredClass) -> set[str]:
    used = set(lowered.tasks.family.tolist()) | set(lowered.prices.of_events("label").tolist())
    return {lowered.tasks.names[int(i)] for i in used}


def _listed(words: set[str]) -> list[str]:
    """What an error offers: families and groups; single ops would be too many."""
    return sorted(word for word in (*words, *LINKS) if "." not in word)


def _changed(lowered: LoweredClass, changes: Sequence[WhatIf]) -> LoweredClass:
    factor = np.ones(len(lowered.tasks))
    lag_factor = 1.0
    for change in changes:
        factor *= _factor(lowered, change)
        lag_factor *= change.factor if change.what == HOST_FAMILY else 1.0
    if lag_factor == 1.0 and np.all(factor == 1.0):
        return lowered
    return with_times(lowered, factor, lag_factor)


def _factor(lowered: LoweredClass, change: WhatIf) -> FloatArray:
    tasks = lowered.tasks
    if change.what in _CATEGORY_WORDS:
        codes = [CATEGORIES.index(name) for name in _CATEGORY_WORDS[change.what]]
        hit = np.isin(tasks.category, codes)
    else:
        numbers = [i for i, name in enumerate(tasks.names) if name == change.what]
        device = tasks.category != CATEGORIES.index("host")
        label = lowered.prices.of_events("label")[tasks.event]
        hit = np.isin(tasks.family, numbers) | (device & np.isin(label, numbers))
    return np.where(hit, change.factor, 1.0)


def with_times(lowered: LoweredClass, factor: FloatArray, lag_factor: float = 1.0) -> LoweredClass:
    """The class with the time of each task multiplied, and every launch latency by `lag_factor`."""
    tasks = lowered.tasks
    time_s = tasks.time_s * factor
    program = replace(
        lowered.program,
        duration_ps=np.rint(time_s * PS_PER_S).astype(np.int64),
        dep_lag_ps=np.rint(lowered.program.dep_lag_ps * lag_factor).astype(np.int64),
    )
    changed = replace(
        tasks, time_s=time_s, low_s=tasks.low_s * factor, high_s=tasks.high_s * factor, ideal_s=tasks.ideal_s * factor
    )
    return replace(lowered, program=program, tasks=changed)
