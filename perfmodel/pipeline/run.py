"""The path of one prediction from a graph on: place, price, simulate, summarise."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from perfmodel.collectives import CollectiveCall, estimate_collective
from perfmodel.config import PlanSpec
from perfmodel.db import load_device
from perfmodel.db.device import Device
from perfmodel.estimate import Estimate
from perfmodel.graph import Graph
from perfmodel.pipeline.lower import LoweredClass, lower_class, price_events
from perfmodel.pipeline.prediction import Prediction
from perfmodel.pipeline.summary import summarise
from perfmodel.plan import Collective, Placement, RankDevice, place
from perfmodel.sim.steady import Steady, simulate_steady
from perfmodel.topology import Topology


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A prediction with what it was made from: the placed events, their programs and the simulated steady state."""

    prediction: Prediction
    placement: Placement
    classes: tuple[LoweredClass, ...]
    steady: Steady


def predict_graph(graph: Graph, plan: PlanSpec, topology: Topology, *, db: str | None = None) -> Run:
    """Predicts one iteration of `graph` under `plan` on `topology`.

    Args:
        graph: one rank's iteration at its own batch size.
        plan: how it is spread.
        topology: the machine; every rank takes part.
        db: device database to use instead of the shipped one.

    Raises:
        InfeasiblePlanError: the plan does not fit the ranks or their memory.
        MissingCalibrationError: a device of the topology is not in the database.
        TopologyError: two ranks of a group cannot reach each other.
    """
    devices = {name: load_device(name, db) for name in sorted({place.device for place in topology.ranks})}
    ranks = [
        RankDevice(device=place_of.device, memory_bytes=devices[place_of.device].memory_bytes)
        for place_of in topology.ranks
    ]
    placement = place(graph, plan, ranks)
    return run_placement(graph, plan, topology, placement, devices)


def run_placement(
    graph: Graph, plan: PlanSpec, topology: Topology, placement: Placement, devices: Mapping[str, Device]
) -> Run:
    """Prices and simulates what `place` returned."""
    collectives = price_collectives(placement, topology)
    classes = tuple(
        lower_class(
            rank_class,
            devices[rank_class.device],
            price_events(rank_class.events, devices[rank_class.device], collectives),
        )
        for rank_class in placement.classes
    )
    steady = simulate_steady([lowered.program for lowered in classes])
    prediction = summarise(graph, plan.name, topology.name, placement, classes, steady)
    return Run(prediction=prediction, placement=placement, classes=classes, steady=steady)


def price_collectives(placement: Placement, topology: Topology) -> dict[int, Estimate]:
    """The estimate of every collective instance of a placement; equal calls are priced once."""
    by_instance: dict[int, Collective] = {}
    for rank_class in placement.classes:
        for event in rank_class.events:
            if event.collective is not None:
                by_instance.setdefault(event.collective.instance, event.collective)
    priced: dict[CollectiveCall, Estimate] = {}
    for collective in by_instance.values():
        call = _call(collective)
        if call not in priced:
            priced[call] = estimate_collective(call, topology).estimate
    return {instance: priced[_call(collective)] for instance, collective in by_instance.items()}


def _call(collective: Collective) -> CollectiveCall:
    return CollectiveCall(
        op=collective.op,
        bytes=collective.bytes,
        ranks=collective.ranks,
        dtype=collective.dtype,
        send_bytes=collective.send_bytes,
    )
