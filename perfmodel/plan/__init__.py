"""How a graph is spread: one graph and one plan -> the events of every rank class, and memory per rank."""

from perfmodel.plan.events import Collective, Event, MemoryUse, Placement, RankClass
from perfmodel.plan.place import RankDevice, place

__all__ = ["Collective", "Event", "MemoryUse", "Placement", "RankClass", "RankDevice", "place"]
