"""The path of one prediction from a graph on: place, price, simulate, summarise."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from perfmodel.collectives import CollectiveEstimate
from perfmodel.config import PlanSpec
from perfmodel.config.plan import MESH_DIMS
from perfmodel.db import load_shared
from perfmodel.db.device import Device, Pace, paced
from perfmodel.graph import Graph
from perfmodel.heap import uncollected
from perfmodel.kernels.cpu_heap import keeps_pages
from perfmodel.kernels.embedding import distinct_rows
from perfmodel.pipeline.bounds import find_bounds
from perfmodel.pipeline.collective_prices import CollectivePrices
from perfmodel.pipeline.contention import overlap_model, with_slowdown
from perfmodel.pipeline.copies import fed_ahead, fed_by
from perfmodel.pipeline.crowding import share_cores
from perfmodel.pipeline.fuse import fuse_graph
from perfmodel.pipeline.loader import loader_note, with_loader
from perfmodel.pipeline.lower import lower_classes
from perfmodel.pipeline.memory import allocator_overhead, with_allocator
from perfmodel.pipeline.pace import Paces
from perfmodel.pipeline.prediction import Prediction
from perfmodel.pipeline.pricebook import PriceBook
from perfmodel.pipeline.programs import compile_classes, recompile_classes
from perfmodel.pipeline.script import NotSegmentedError
from perfmodel.pipeline.settings import DEFAULT_SETTINGS, RunSettings
from perfmodel.pipeline.spread import sample_percentiles, split_stragglers
from perfmodel.pipeline.summary import Subject, summarise
from perfmodel.pipeline.tasks import LoweredClass
from perfmodel.pipeline.whatif import change_links, change_times, parse_what_if
from perfmodel.plan import Placement, RankDevice, place
from perfmodel.plan.facts import facts_of
from perfmodel.plan.frames import Frames
from perfmodel.plan.recompute import recomputed
from perfmodel.sim.steady import Steady
from perfmodel.sim.steady_slowed import simulate_slowed
from perfmodel.topology import Topology
from perfmodel.units import ps_to_seconds

MAX_PLACEMENTS = 32
# Evaluations differ from predictions by 0.055 % at most on the 255 plans of bench/test_predictor.py; not twice that.
TOLERANCE_FRAC = 1e-3
Ranks = tuple[tuple[RankDevice, int], ...]  # devices in rank order, and how many follow each other


UNBOUNDED_BYTES = 2**62  # memory of a device where plans are not refused for want of it


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A prediction with what it was made from: the placed events, their programs and the simulated steady state.

    `graph` is what was placed (fused where the mode fuses), `topology` the machine, `collectives` the estimates by instance.
    """

    prediction: Prediction
    graph: Graph
    topology: Topology
    collectives: Mapping[int, CollectiveEstimate]
    placement: Placement
    classes: tuple[LoweredClass, ...]
    steady: Steady


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """What a search asks of a plan, without a prediction's explanations.

    Attributes:
        iteration_time_s: with `is_exact` that of the prediction; else within `TOLERANCE_FRAC` of it.
        compute_s, host_bound_s, wait_s: what of it the rank that waits least runs kernels (slowed by collectives beside them),
            waits for its host thread, and for communication, copies and other ranks.
        memory_bytes: the largest peak of a rank.
        samples: of an iteration, over all ranks.
    """

    iteration_time_s: float
    compute_s: float
    host_bound_s: float
    wait_s: float
    memory_bytes: int
    samples: int
    is_exact: bool

    @property
    def least_s(self) -> float:
        """What the prediction's iteration takes at least."""
        return self.iteration_time_s * (1.0 if self.is_exact else 1.0 - TOLERANCE_FRAC)


def evaluation_of(prediction: Prediction) -> Evaluation:
    """What a prediction says of that."""
    parts = prediction.breakdown
    return Evaluation(
        iteration_time_s=prediction.iteration_time_s,
        compute_s=parts.compute_s,
        host_bound_s=parts.host_bound_s,
        wait_s=prediction.iteration_time_s - parts.compute_s - parts.host_bound_s,
        memory_bytes=prediction.memory_bytes,
        samples=prediction.batch_per_rank * prediction.replicas,
        is_exact=True,
    )


class PriceBooks:
    """What runs have in common: the price book of each device, and graphs as compiled code runs them."""

    def __init__(self) -> None:
        self.collectives = CollectivePrices()
        self.frames = Frames()
        self.paces = Paces(self.collectives)
        self._processes: dict[str, dict[str, int]] = {}
        self._placements: dict[tuple[int, str, Ranks], tuple[Graph, Placement]] = {}
        self._devices: dict[tuple[str, str | None, int, bool, Pace], Device] = {}
        self._books: dict[str, PriceBook] = {}
        self._fused: dict[int, tuple[Graph, Graph]] = {}  # by identity; holds the graph, so that none is reused
        self._late: dict[int, tuple[Graph, Graph]] = {}
        self._overheads: dict[tuple[int, frozenset[str]], tuple[Graph, tuple[int, int]]] = {}

    def device(
        self,
        name: str,
        db: str | None,
        n_processes: int = 1,
        env: Mapping[str, str] | None = None,
        pace: Pace = Pace(),  # noqa: B008 -- frozen
    ) -> Device:
        """A device of the database, as it was when first asked for; a CPU as each of `n_processes` on it sees it."""
        keeps = keeps_pages(env or {})
        key = (name, db, n_processes, keeps, pace)
        if key not in self._devices:
            self._devices[key] = paced(replace(load_shared(name, db, n_processes), keeps_pages=keeps), pace)
        return self._devices[key]

    def processes(self, topology: Topology) -> dict[str, int]:
        """By device of a machine, most ranks that one host has of it; on a CPU they share its cores."""
        known = self._processes.get(topology.fingerprint)
        if known is None:
            counts = Counter((place.device, place.host) for place in topology.ranks)
            known = self._processes[topology.fingerprint] = {
                name: max(n for (device, _), n in counts.items() if device == name)
                for name in sorted({place.device for place in topology.ranks})
            }
        return known

    def placed(
        self, graph: Graph, plan: PlanSpec, ranks: Sequence[RankDevice], make: Callable[[], Placement]
    ) -> Placement:
        """The placement of a plan on such ranks, made once while it is among the last `MAX_PLACEMENTS`."""
        on = tuple((rank, len(list(same))) for rank, same in groupby(ranks))
        key = (id(graph), plan.model_dump_json(), on)
        known = self._placements.get(key)
        if known is None:
            made = make()
            if len(self._placements) >= MAX_PLACEMENTS:
                self._placements = {}
            known = self._placements[key] = (graph, made)
        return known[1]

    def fused(self, graph: Graph) -> Graph:
        """The graph as compiled code runs it, found once."""
        if id(graph) not in self._fused:
            self._fused[id(graph)] = (graph, fuse_graph(graph))
        return self._fused[id(graph)][1]

    def fused_late(self, graph: Graph) -> Graph:
        """The graph as one to be split over ranks and cut into stages before it is compiled: fused chains do not split."""
        if id(graph) not in self._late:
            self._late[id(graph)] = (graph, replace(graph))
        late = self._late[id(graph)][1]
        facts_of(late).compiler = fuse_graph
        return late

    def overhead(self, graph: Graph, sharded: frozenset[str]) -> tuple[int, int]:
        """`allocator_overhead`, found once for a graph without the tables `sharded`."""
        key = (id(graph), sharded)
        if key not in self._overheads:
            self._overheads[key] = (graph, allocator_overhead(graph, sharded))
        return self._overheads[key][1]

    def of(self, device: Device) -> PriceBook:
        """The book of a device; a new one where the database has changed since."""
        book = self._books.get(device.name)
        if book is None or book.device is not device:
            book = self._books[device.name] = PriceBook(device)
        return book


def _trains(graph: Graph) -> bool:
    return any(op.phase == "backward" for op in reversed(graph.ops))


@uncollected()
def predict_graph(
    graph: Graph,
    plan: PlanSpec,
    topology: Topology,
    *,
    db: str | None = None,
    settings: RunSettings = DEFAULT_SETTINGS,
    books: PriceBooks | None = None,
) -> Run:
    """Predicts one iteration of `graph` under `plan` on `topology`.

    Args:
        graph: one rank's iteration at its own batch size.
        plan: how it is spread.
        topology: the machine; every rank takes part.
        db: device database to use instead of the shipped one.
        settings: how the iteration is executed.
        books: prices of earlier runs to use and add to.

    Raises:
        ConfigError: settings that the device or the model does not allow.
        InfeasiblePlanError: the plan does not fit the ranks or their memory.
        MissingCalibrationError: a device of the topology is not in the database.
        TopologyError: two ranks of a group cannot reach each other.
    """
    books = books or PriceBooks()
    settings = replace(settings, gradients=_trains(graph))
    graph, placement, devices = _placed(graph, plan, topology, (db, settings, books), advise=True)
    changes = [parse_what_if(text) for text in settings.what_if]
    collectives = books.collectives.of_placement(placement, topology)
    if changes:
        collectives = change_links(collectives, changes, topology)
    classes = lower_placement(placement, devices, collectives, settings, books)
    if changes:
        classes = change_times(classes, changes)
    if settings.stragglers:
        classes = split_stragglers(classes, settings.stragglers)
    if settings.loader:
        classes = with_loader(classes, settings.loader)
    changed = bool(changes or settings.stragglers or settings.loader)
    compiled, carry = compile_classes(classes) if changed else recompile_classes(classes, settings)
    compiled = share_cores(
        classes,
        compiled,
        carry,
        collectives,
        lambda alone: lower_placement(placement, alone, collectives, settings, books),
    )
    model = overlap_model(classes, compiled, collectives, topology) if settings.overlap else None
    slowed = simulate_slowed(compiled, carry, model)
    steady = slowed.steady
    subject = Subject(graph=graph, plan=plan.name, topology=topology.name, settings=settings)
    prediction = with_slowdown(summarise(subject, placement, classes, steady), classes, slowed)
    if settings.loader:
        note = loader_note(settings.loader, prediction.iteration_time_s)
        prediction = replace(prediction, notes=(*prediction.notes, note))
    if settings.bounds:
        prediction = replace(
            prediction, bounds=find_bounds(classes, compiled, carry, model, prediction.iteration_time_s)
        )
    if settings.jitter:
        prediction = replace(prediction, percentiles=sample_percentiles(classes, steady, carry, settings))
    return Run(
        prediction=prediction,
        graph=graph,
        topology=topology,
        collectives=collectives,
        placement=placement,
        classes=classes,
        steady=steady,
    )


@uncollected()
def evaluate_graph(
    graph: Graph, plan: PlanSpec, topology: Topology, *, db: str | None, settings: RunSettings, books: PriceBooks
) -> Evaluation | None:
    """A plan's iteration time and memory in a fraction of a run's time; None where they do not follow from segments.

    Raises as `predict_graph`; a plan that does not fit is refused without advice.
    """
    graph, placement, devices = _placed(graph, plan, topology, (db, settings, books), advise=False)
    cuda = all(device.kind == "cuda" for device in devices.values())
    usual = replace(settings, bounds=False, overlap=True) == replace(DEFAULT_SETTINGS, bounds=False)
    if not cuda or not usual or not _trains(graph) or fed_ahead(graph):
        return None
    by_name = {name: books.of(device) for name, device in devices.items()}
    try:
        pace = books.paces.of(placement, topology, by_name, overlap=settings.overlap)
    except NotSegmentedError:
        return None
    if pace is None:
        return None
    busiest = min(pace.classes, key=lambda cls: cls.wait_ps)
    return Evaluation(
        iteration_time_s=ps_to_seconds(float(pace.iteration_ps)),
        compute_s=ps_to_seconds(busiest.compute_ps),
        host_bound_s=ps_to_seconds(busiest.host_ps),
        wait_s=ps_to_seconds(busiest.wait_ps),
        memory_bytes=max(rank_class.memory.total_bytes for rank_class in placement.classes),
        samples=graph.batch_size * placement.n_micro * (placement.n_replicas or placement.n_ranks),
        is_exact=pace.is_exact,
    )


def _placed(
    graph: Graph,
    plan: PlanSpec,
    topology: Topology,
    given: tuple[str | None, RunSettings, PriceBooks],
    *,
    advise: bool,
) -> tuple[Graph, Placement, dict[str, Device]]:
    """The graph as it is executed, its placement and the devices by name; `given` are database, settings and books."""
    db, settings, books = given
    devices = {
        name: books.device(name, db, n, topology.env, pace_on(topology, name))
        for name, n in books.processes(topology).items()
    }
    enough = {
        name: device.memory_bytes if settings.check_memory else UNBOUNDED_BYTES for name, device in devices.items()
    }
    kinds = {name: RankDevice(device=name, memory_bytes=n_bytes) for name, n_bytes in enough.items()}
    ranks = [kinds[p.device] for p in topology.ranks]
    source, smaller = graph, facts_of(graph).smaller

    def executed(of: PlanSpec, parts: int) -> Graph:
        whole = source if parts == 1 or smaller is None else smaller(parts)
        again = recomputed(fed_by(whole, settings.input_copies), of.recompute)
        if settings.mode != "compile":
            return again
        split = any(of.size(dim) > 1 for dim in MESH_DIMS if dim != "dp")
        return books.fused_late(again) if split else books.fused(again)

    graph = executed(plan, 1)
    facts_of(graph).smaller, facts_of(graph).executed = smaller, executed

    def make() -> Placement:
        placement = place(graph, plan, ranks, advise=advise, distinct=distinct_rows, frames=books.frames)
        return with_allocator(placement, graph, books.overhead, devices)

    # A predictor asked for the same plan on another machine of such devices has placed it before; floors are asked once.
    return graph, books.placed(graph, plan, ranks, make) if advise else make(), devices


def pace_on(topology: Topology, device: str) -> Pace:
    """The pace that a machine's CPUs of this name have now; of any other device, as calibrated."""
    paces = [node.cpus.pace for _, node in topology.spec.node_groups if node.cpus and node.cpus.device == device]
    return Pace(**paces[0].model_dump()) if paces else Pace()


def lower_placement(
    placement: Placement,
    devices: Mapping[str, Device],
    collectives: Mapping[int, CollectiveEstimate],
    settings: RunSettings,
    books: PriceBooks,
) -> tuple[LoweredClass, ...]:
    """The priced program of every rank class."""
    estimates = {instance: found.estimate for instance, found in collectives.items()}
    issue_s = {instance: found.issue_s for instance, found in collectives.items() if found.issue_s}
    together: dict[object, list[int]] = {}  # classes by device; on a CPU one by one
    for number, rank_class in enumerate(placement.classes):
        alone = devices[rank_class.device].kind == "cpu"
        together.setdefault(number if alone else rank_class.device, []).append(number)
    found: dict[int, LoweredClass] = {}
    for numbers in together.values():
        rank_classes = [placement.classes[number] for number in numbers]
        device = devices[rank_classes[0].device]
        events = [rank_class.events for rank_class in rank_classes]
        priced = books.of(device).prices_of(events, estimates, issue_s, remember=True)
        found |= zip(numbers, lower_classes(rank_classes, device, priced, settings, numbers), strict=True)
    return tuple(found[number] for number in range(len(placement.classes)))
