"""estimate_collective: the one door of this room."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache

from perfmodel.collectives import gloo
from perfmodel.collectives.call import CollectiveCall, CollectiveEstimate, bus_factor, check_call
from perfmodel.collectives.candidates import Candidate
from perfmodel.collectives.group import group_of, likeness_of
from perfmodel.collectives.nccl_tables import Algorithm, Protocol
from perfmodel.collectives.price import Exchanged, Known, Price, price_exchange, price_ring
from perfmodel.collectives.regime import PAIRWISE_OPS
from perfmodel.collectives.settings import read_settings
from perfmodel.db.fabric import FabricFit, load_fabric
from perfmodel.db.wire import WireFits, load_wires
from perfmodel.estimate import Estimate, Source
from perfmodel.topology import Topology

Fits = Mapping[str, FabricFit]
# Bytes of the all_reduce that torch runs for a barrier (one element).
BARRIER_BYTES = 4
MAX_HASHED_RANKS = (
    1024  # whose sizes to each other are looked up among remembered ones: hashing them grows with their square
)
_ALONE = Price(
    candidate=Candidate(
        algorithm=Algorithm.NONE, protocol=Protocol.NONE, latency_s=0.0, bandwidth_s=0.0, n_channels=0, bottleneck=""
    ),
    source=Source.MEASURED,
    range_frac=(1.0, 1.0),
)


def estimate_collective(  # noqa: PLR0913 -- the room's one door
    call: CollectiveCall,
    topology: Topology,
    *,
    fits: Fits | None = None,
    wires: WireFits | None = None,
    algo: str | None = None,
    proto: str | None = None,
    exchanged: Exchanged | None = None,
) -> CollectiveEstimate:
    """How long one collective takes, once its last rank has arrived, with nothing else on the links.

    Args:
        call: what is asked.
        topology: the machine; its NCCL_* variables count.
        fits: fits by fabric instead of those in the database; an empty mapping prices by NCCL's constants alone.
        wires: with `fits`, the figures of transports between hosts; None for NCCL's constants alone.
        algo: ring, tree, nvls or nvls_tree instead of NCCL's choice.
        proto: ll, ll128 or simple instead of NCCL's choice.
        exchanged: with `fits`, what `exchange.exchange_time` says of an exchange of pairs, if the caller knows it.

    Raises:
        ConfigError: an operation, size or setting that does not exist or cannot run.
        TopologyError: ranks that do not exist or have no path.
    """
    if fits is not None:
        return _estimate(call, topology, fits.get(topology.fabric), wires, (algo, proto), exchanged)
    return _named(call, topology) if algo is None and proto is None else _remembered(call, topology, algo, proto)


def estimate_collectives(
    calls: Sequence[CollectiveCall], topology: Topology, *, fits: Fits | None = None
) -> list[CollectiveEstimate]:
    """estimate_collective of every call, in order.

    Rings on groups that differ in names alone are priced once (the replicas of each tensor rank of each stage of a mesh).
    """
    if fits is not None:
        fit = fits.get(topology.fabric)
        return [_estimate(call, topology, fit, None, (None, None)) for call in calls]
    return [_named(call, topology) for call in calls]


@dataclass(frozen=True, slots=True)
class _Alike:
    """A call that is equal to all of its sort: those whose prices differ in the name of a link alone."""

    sort: object
    call: CollectiveCall = field(compare=False)


def _named(call: CollectiveCall, topology: Topology) -> CollectiveEstimate:
    """The estimate of a call's sort with the link of the call's own group that limits it."""
    if call.send_bytes is not None and call.n_ranks > MAX_HASHED_RANKS:
        return _estimate(call, topology, load_fabric(topology.fabric), load_wires(), (None, None))
    check_call(call, topology)
    twin, found = _first_of_sort(_Alike(_sort_of(call, topology), call), topology)
    return _renamed(found, twin, call, topology)


@lru_cache(maxsize=65536)
def _first_of_sort(alike: _Alike, topology: Topology) -> tuple[CollectiveCall, CollectiveEstimate]:
    """The first call of its sort that was asked for, and its estimate."""
    estimate = _estimate(alike.call, topology, load_fabric(topology.fabric), load_wires(), (None, None))
    return alike.call, estimate


def _sort_of(call: CollectiveCall, topology: Topology) -> object:
    """Of a ring or tree what its price follows from; an exchange of pairs is of its own sort."""
    if call.op in PAIRWISE_OPS or call.n_ranks == 1:
        return call
    return call.op, call.bytes, call.dtype, likeness_of(topology, call.ranks)


def _renamed(
    found: CollectiveEstimate, twin: CollectiveCall, call: CollectiveCall, topology: Topology
) -> CollectiveEstimate:
    if twin.ranks == call.ranks:
        return found
    theirs, own = (group_of(topology, each.ranks) for each in (twin, call))
    for lane, same in ((theirs.intra, own.intra), (theirs.inter, own.inter)):
        if lane is not None and same is not None and found.bottleneck == lane.link.name:
            return replace(found, bottleneck=same.link.name)
    return found


@lru_cache(maxsize=65536)
def _remembered(call: CollectiveCall, topology: Topology, algo: str | None, proto: str | None) -> CollectiveEstimate:
    return _estimate(call, topology, load_fabric(topology.fabric), load_wires(), (algo, proto))


def _estimate(
    call: CollectiveCall,
    topology: Topology,
    fit: FabricFit | None,
    wires: WireFits | None,
    forced: tuple[str | None, str | None],
    exchanged: Exchanged | None = None,
) -> CollectiveEstimate:
    check_call(call, topology)
    if call.op == "barrier":
        found = _estimate(replace(call, op="all_reduce", bytes=BARRIER_BYTES), topology, fit, wires, forced)
        return replace(found, algbw_bytes_per_s=0.0, busbw_bytes_per_s=0.0)
    found = _answer(call, _price(call, topology, Known(fit=fit, wires=wires, exchanged=exchanged), forced))
    on_cpu = call.n_ranks > 1 and is_cpu(topology, call.ranks[0])
    return gloo.with_host_costs(found, call, fit) if on_cpu else found


def _price(
    call: CollectiveCall,
    topology: Topology,
    known: Known,
    forced: tuple[str | None, str | None],
) -> Price:
    if call.n_ranks == 1:
        return _ALONE
    group = group_of(topology, call.ranks)
    if is_cpu(topology, call.ranks[0]):
        return gloo.price(call, group, known.fit)
    settings = read_settings(topology.env, *forced)
    if call.op in PAIRWISE_OPS:
        return price_exchange(call, topology, group, settings, known)
    return price_ring(call, topology, group, settings, known)


def is_cpu(topology: Topology, rank: int) -> bool:
    """Whether a rank is a process on a CPU, so that gloo carries its collectives."""
    kind = topology.host_kind(topology.ranks[rank].host)
    return topology.spec.node_groups[kind][1].cpus is not None


def _answer(call: CollectiveCall, price: Price) -> CollectiveEstimate:
    found, (low, high) = price.candidate, price.range_frac
    time_s = found.time_s
    algbw = call.bytes / time_s if time_s > 0 else 0.0
    return CollectiveEstimate(
        estimate=Estimate(time_s=time_s, low_s=time_s * low, high_s=time_s * high, source=price.source),
        algorithm=found.algorithm.value,
        protocol=found.protocol.value,
        n_channels=found.n_channels,
        latency_s=found.latency_s,
        bandwidth_s=found.bandwidth_s,
        bottleneck=found.bottleneck,
        algbw_bytes_per_s=algbw,
        busbw_bytes_per_s=algbw * bus_factor(call.op, call.n_ranks),
    )
