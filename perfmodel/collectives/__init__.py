"""Collectives: what a group of ranks pays to exchange bytes on a machine."""

from perfmodel.collectives.call import OPS, CollectiveCall, CollectiveEstimate, bus_factor
from perfmodel.collectives.concurrent import estimate_concurrent
from perfmodel.collectives.estimate import estimate_collective, estimate_collectives

__all__ = [
    "OPS",
    "CollectiveCall",
    "CollectiveEstimate",
    "bus_factor",
    "estimate_collective",
    "estimate_collectives",
    "estimate_concurrent",
]
