"""Iteration times of many placements of one model on one machine, a few hundred to a few thousand a second.

Placements with the same structure (the same sharding modules, the same kernels on each rank) have the same program: it is
placed, lowered and wired once, by the path that `predict` takes, and for every further placement only the durations of
lookups, updates and exchanges are filled in. The time equals `predict`'s to the picosecond. What cannot be refilled (tables by
the model's own operators, a CPU) takes the whole path; `n_whole` counts those.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

import numpy as np

from perfmodel.config.plan import PlanSpec
from perfmodel.errors import InfeasiblePlanError
from perfmodel.graph import Graph
from perfmodel.pipeline.contention import overlap_model
from perfmodel.pipeline.refill import Wires, with_empty_kernels
from perfmodel.pipeline.run import PriceBooks, Run, predict_graph
from perfmodel.pipeline.settings import DEFAULT_SETTINGS, RunSettings
from perfmodel.pipeline.tasks import CATEGORIES, LoweredClass
from perfmodel.plan.events import MemoryUse
from perfmodel.plan.memory import added, check_memory
from perfmodel.sharding.plan import Placements, with_placement
from perfmodel.sharding.slots import MEMORY_PARTS, Laid, Slots, memory_use
from perfmodel.sim.compile import Compiled
from perfmodel.sim.program import IntArray
from perfmodel.sim.rivals import OverlapModel
from perfmodel.topology import Topology
from perfmodel.units import ps_to_seconds

VARIABLE_OPS = (
    "perfmodel.permute_sparse_features", "perfmodel.batched_embedding", "perfmodel.batched_embedding_backward",
    "perfmodel.dense_table_update",
)  # fmt: skip
BACKWARD_OP = "perfmodel.batched_embedding_backward"
DEVICE_WORK = [CATEGORIES.index(name) for name in ("kernel", "copy", "collective")]
MAX_TEMPLATES = 64
MAX_AT_ONCE = 256  # placements laid together: enough to price in columns, few enough to stay in caches
N_DEVICE = MEMORY_PARTS.index("host_bytes")  # the parts before lie on the device


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Template:
    """A wired structure: where durations go, position by position, and the memory that every rank has beside its parts.

    `kernels`, `launches` (host tasks of sorts) and `exchanges` are task indices; `instances` the collective of each
    exchange. Without `wires` the structure cannot be refilled.
    """

    wires: Wires | None
    kernels: IntArray
    launches: IntArray
    exchanges: IntArray
    instances: tuple[int, ...]
    memory: MemoryUse


class PlanSimulator:
    """Simulates placements of a model's tables; everything else is as in `base`.

    Args:
        graph: one rank's iteration.
        topology: the machine.
        base: everything but the placement.
        db: device database to use instead of the shipped one.
        settings: how the iteration is executed.
        books: prices of other runs to use and add to.
    """

    def __init__(
        self,
        graph: Graph,
        topology: Topology,
        base: PlanSpec,
        *,
        db: str | None = None,
        settings: RunSettings = DEFAULT_SETTINGS,
        books: PriceBooks | None = None,
    ) -> None:
        self.graph, self.topology, self.base, self.settings = graph, topology, base, settings
        self._db, self._books = db, books or PriceBooks()
        self.n_whole = 0
        devices = {place.device: self._books.device(place.device, db) for place in topology.ranks}
        cuda = all(device.kind == "cuda" for device in devices.values())
        plain = (
            settings.mode == "eager"
            and not settings.what_if
            and not settings.stragglers
            and not base.is_mesh
            and graph.target == "cuda"
        )
        self._slots = Slots(graph, topology, base, devices) if cuda and plain else None
        self._templates: dict[object, _Template] = {}

    def iteration_s(self, placement: Placements) -> float:
        """Seconds of one iteration under a placement, infinite if it does not run."""
        found = self.times([placement])[0]
        return float("inf") if isinstance(found, InfeasiblePlanError) else ps_to_seconds(float(found))

    def times(self, placements: Sequence[Placements]) -> list[Fraction | InfeasiblePlanError]:
        """Picoseconds of one iteration under each placement, or why it does not run."""
        if len(placements) > MAX_AT_ONCE:
            parts = [placements[i : i + MAX_AT_ONCE] for i in range(0, len(placements), MAX_AT_ONCE)]
            return [found for part in parts for found in self.times(part)]
        found: list[Fraction | InfeasiblePlanError] = [Fraction(0)] * len(placements)
        waiting: dict[int, tuple[_Template, list[tuple[int, Laid]]]] = {}
        laid = self._laid(placements)
        for number, (placement, one) in enumerate(zip(placements, laid, strict=True)):
            if isinstance(one, InfeasiblePlanError):
                found[number] = one
                continue
            template = self._template(one, placement) if one is not None else None
            if isinstance(template, InfeasiblePlanError):
                found[number] = template
            elif one is None or template is None or template.wires is None:
                found[number] = self._whole(placement)
            elif (refusal := self._refusal(template, one)) is not None:
                found[number] = refusal
            else:
                waiting.setdefault(id(template), (template, []))[1].append((number, one))
        for template, members in waiting.values():
            for (number, _), time in zip(members, self._run(template, [one for _, one in members]), strict=True):
                found[number] = time
        return found

    def _laid(self, placements: Sequence[Placements]) -> Sequence[Laid | InfeasiblePlanError | None]:
        return [None] * len(placements) if self._slots is None else self._slots.lay(placements)

    def _whole(self, placement: Placements) -> Fraction | InfeasiblePlanError:
        self.n_whole += 1
        try:
            return self._predicted(placement).steady.iteration_ps
        except InfeasiblePlanError as error:
            return error

    def _predicted(self, placement: Placements) -> Run:
        plan = with_placement(self.base, placement)
        return predict_graph(
            self.graph,
            plan,
            self.topology,
            db=self._db,
            settings=replace(self.settings, bounds=False),
            books=self._books,
        )

    def _template(self, laid: Laid, placement: Placements) -> _Template | InfeasiblePlanError:
        known = self._templates.get(laid.structure)
        if known is None:
            if len(self._templates) >= MAX_TEMPLATES:
                self._templates.pop(next(iter(self._templates)))
            try:
                known = self._made(laid, self._predicted(placement))
            except InfeasiblePlanError as error:
                return error
            self._templates[laid.structure] = known
        return known

    def _made(self, laid: Laid, run: Run) -> _Template:
        """The template of a structure from the run of one of its placements; without wires if filling it in goes wrong."""
        number = {rank: i for i, lowered in enumerate(run.classes) for rank in lowered.rank_class.ranks}
        classes = [number[rank] for rank in laid.order]
        sorts = [laid.sorts[one.rank_class.ranks[0]] for one in run.classes]
        lowered = [_with_empty(one, mine) for one, mine in zip(run.classes, sorts, strict=True)]
        wires = Wires(lowered, classes, lambda chosen, compiled: self._shares(chosen, compiled, run))
        offsets = wires.compiled.wiring.offsets.tolist()
        kernels: list[int] = []
        launches: list[int] = []
        exchanges: list[int] = []
        instances: list[int] = []
        for place, cls in enumerate(classes):
            launches += [offsets[place] + task for task in _sort_launches(lowered[cls], sorts[cls])]
            mine, met, named = _variable(lowered[cls], frozenset(laid.exchanges_ps))
            kernels += [offsets[place] + task for task in mine]
            exchanges += [offsets[place] + task for task in met]
            instances += named
        memory = run.classes[classes[0]].rank_class.memory
        own = dict(zip(MEMORY_PARTS, laid.memory[laid.order[0]], strict=True))
        template = _Template(
            wires=wires,
            kernels=np.array(kernels, dtype=np.int64),
            launches=np.array(launches, dtype=np.int64),
            exchanges=np.array(exchanges, dtype=np.int64),
            instances=tuple(instances),
            memory=replace(
                memory, allocator_bytes=0, **{name: getattr(memory, name) - n_bytes for name, n_bytes in own.items()}
            ),
        )
        same = self._fits(template, laid) and np.array_equal(
            self._filled(template, wires, [laid])[0], wires.duration_ps
        )
        return template if same else replace(template, wires=None)

    def _shares(self, chosen: Sequence[LoweredClass], compiled: Compiled, run: Run) -> OverlapModel | None:
        """How compute and communication slow each other: the same for every placement of a structure."""
        return overlap_model(chosen, compiled, run.collectives, self.topology) if self.settings.overlap else None

    @staticmethod
    def _fits(template: _Template, laid: Laid) -> bool:
        counts = len(laid.kernels_ps) == len(template.kernels) and len(laid.launches_ps) == len(template.launches)
        return counts and set(template.instances) == set(laid.exchanges_ps)

    @staticmethod
    def _filled(template: _Template, wires: Wires, members: Sequence[Laid]) -> IntArray:
        durations = np.tile(wires.duration_ps, (len(members), 1))
        durations[:, template.kernels] = [laid.kernels_ps for laid in members]
        durations[:, template.launches] = [laid.launches_ps for laid in members]
        durations[:, template.exchanges] = [
            [laid.exchanges_ps[instance] for instance in template.instances] for laid in members
        ]
        return durations

    def _run(self, template: _Template, members: Sequence[Laid]) -> list[Fraction]:
        if template.wires is None:
            raise RuntimeError("a template without wires cannot run")
        return template.wires.iteration_ps(self._filled(template, template.wires, members))

    def _refusal(self, template: _Template, laid: Laid) -> InfeasiblePlanError | None:
        beside = template.memory.total_bytes
        for rank, own in enumerate(laid.memory):
            capacity = self._books.device(self.topology.ranks[rank].device, self._db).memory_bytes
            if beside + sum(own[:N_DEVICE]) > capacity:
                try:
                    check_memory(rank, added(template.memory, memory_use(own)), capacity)
                except InfeasiblePlanError as error:
                    return error
        return None


def _backwards(lowered: LoweredClass) -> list[int]:
    """The first device task of each backward operator of tables, micro-batch after micro-batch."""
    found: dict[int, int] = {}
    for task in np.flatnonzero(np.isin(lowered.tasks.category, DEVICE_WORK)).tolist():
        event = int(lowered.tasks.event[task])
        op = lowered.rank_class.events[event].op
        if op is not None and op.name == BACKWARD_OP:
            found.setdefault(event, task)
    return list(found.values())


def _with_empty(lowered: LoweredClass, sorts: Sequence[tuple[int, int]]) -> LoweredClass:
    """The class with empty kernels behind the first one of each backward operator of tables."""
    after = {task: sorts[number % len(sorts)][0] for number, task in enumerate(_backwards(lowered))}
    return with_empty_kernels(lowered, after) if any(after.values()) else lowered


def _sort_launches(lowered: LoweredClass, sorts: Sequence[tuple[int, int]]) -> list[int]:
    """Host tasks of the passes of each sort: those behind the first kernel, each before its device task."""
    firsts = enumerate(_backwards(lowered))
    return [task + 2 * k - 1 for number, task in firsts for k in range(1, sorts[number % len(sorts)][1] + 1)]


def _variable(lowered: LoweredClass, known: frozenset[int]) -> tuple[list[int], list[int], list[int]]:
    """Tasks of a class that placements change: of table operators, and of the exchanges `known` with their instances."""
    events = lowered.rank_class.events
    tasks = lowered.tasks
    on_device = np.isin(tasks.category, DEVICE_WORK)
    kernels: list[int] = []
    exchanges: list[int] = []
    instances: list[int] = []
    for task in np.flatnonzero(on_device).tolist():
        event = events[int(tasks.event[task])]
        if event.op is not None and event.op.name in VARIABLE_OPS:
            kernels.append(task)
        elif event.collective is not None and event.collective.instance in known:
            exchanges.append(task)
            instances.append(event.collective.instance)
    return kernels, exchanges, instances
