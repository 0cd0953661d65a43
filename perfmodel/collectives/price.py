"""Prices: NCCL's model of a collective on the machine's links, and where a fabric was measured its fit.

A fit prices what runs inside one unit. An operation or regime that the fabric's tables do not have takes NCCL's model times
the ratio of fit to model of the nearest one they do have; a machine with other links than the measured one scales the
bandwidth part. Both are marked as derived.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from perfmodel.collectives import exchange, fitted
from perfmodel.collectives import nccl_tables as nccl
from perfmodel.collectives.call import CollectiveCall
from perfmodel.collectives.candidates import Candidate, Setting, candidates, hop_s, n_channels
from perfmodel.collectives.group import Group, group_of
from perfmodel.collectives.nccl_tables import Algorithm, Protocol
from perfmodel.collectives.regime import choose, pairwise_regime, setting_of
from perfmodel.collectives.sent import Matrix, Sent
from perfmodel.collectives.settings import Settings
from perfmodel.collectives.wire import over_wire, wire_of
from perfmodel.db.fabric import FabricFit
from perfmodel.db.wire import WireFits
from perfmodel.errors import ConfigError
from perfmodel.estimate import Source
from perfmodel.topology import Topology

# Range of an uncalibrated collective. Inside a node: NCCL's constants against nccl-tests tables of 7 fabrics. Between nodes:
# equal runs alone spread by 15 % (64 H200 over RoCE, ten runs, mlcommons/training_results_v5.0).
INTRA_RANGE = (0.75, 1.35)
INTER_RANGE = (0.75, 1.4)
# A derived price is this much less certain than the fit that it comes from, each way.
DERIVED_WIDENING = 1.25
# Links within this share of the measured machine's count as the same.
SAME_LINKS_FRAC = 0.02
# A send_recv over the two-GPU all_to_all with as many bytes on the wire, which also copies its own half: median of Vidur's
# send_recv (8 KiB to 64 MiB, DGX A100 and H100) over our all_to_all there.
SEND_RECV_FRAC = 0.66
# Ranks whose exchanges are matrices; of more, rows that are alike are one row.
MAX_MATRIX_RANKS = 1024
# Whose regime stands in for an operation that no table has.
_STAND_IN = {"broadcast": "all_gather", "reduce": "reduce_scatter"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Price:
    """A candidate with its time, where that came from, and the (low, high) multipliers of its range."""

    candidate: Candidate
    source: Source
    range_frac: tuple[float, float]


Exchanged = tuple[float, str]  # seconds that links need for all pairs of an exchange, and the busiest link's name


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """What was measured: the fit of the machine's fabric, and of the transports between hosts.

    `exchanged` is what `exchange.exchange_time` would say, where the caller has found it already.
    """

    fit: FabricFit | None
    wires: WireFits | None
    exchanged: Exchanged | None = None


def price_ring(call: CollectiveCall, topology: Topology, group: Group, settings: Settings, known: Known) -> Price:
    """all_reduce, all_gather, reduce_scatter, broadcast and reduce. Raises ConfigError if the settings forbid all ways."""
    fit = known.fit
    setting = setting_of(call.op, call.bytes, topology, group, settings)
    chosen = choose(setting, fit.tuner_bus_frac if fit else 1.0)
    if chosen is None:
        raise ConfigError(
            f"{call.op} on {call.n_ranks} ranks: found algorithms {', '.join(sorted(settings.algorithms)) or 'none'} with "
            f"protocols {', '.join(sorted(settings.protocols)) or 'none'}, none of which can run it here"
        )
    modelled = next(c for c in candidates(setting) if (c.algorithm, c.protocol) == (chosen.algorithm, chosen.protocol))
    if fit is None or group.n_units > 1:
        return _modelled(modelled, setting, known.wires)
    return _fitted_ring(call, setting, modelled, fit)


def _modelled(candidate: Candidate, setting: Setting, wires: WireFits | None) -> Price:
    """NCCL's constants; between hosts corrected by the transport's own figures where it has them."""
    group = setting.group
    wire = wire_of(group, wires)
    if wire is not None:
        moved = over_wire(candidate, setting.op, float(setting.n_bytes), group, wire)
        return Price(candidate=moved, source=Source.DERIVED, range_frac=(wire.low_frac, wire.high_frac))
    inter = group.inter is not None
    return Price(candidate=candidate, source=Source.ROOFLINE, range_frac=INTER_RANGE if inter else INTRA_RANGE)


def _fitted_ring(call: CollectiveCall, setting: Setting, modelled: Candidate, fit: FabricFit) -> Price:
    key = (call.op, f"{modelled.algorithm}_{modelled.protocol}")
    ask = _question(call, setting, fit)
    if key in fit.regimes:
        return fitted_price(modelled, fitted.regime_time(fit, key, ask), fit, key[0], ask)
    found = _nearest_regime(call, setting, modelled, fit)
    if found is None:
        return _modelled(modelled, setting, None)
    stand_in, reference = found
    known = fitted.regime_time(fit, stand_in, ask)
    ratio_latency = known.latency_s / reference.latency_s if reference.latency_s else 1.0
    ratio_bandwidth = known.bandwidth_s / reference.bandwidth_s if reference.bandwidth_s else 1.0
    candidate = replace(
        modelled,
        latency_s=modelled.latency_s * ratio_latency,
        bandwidth_s=modelled.bandwidth_s * ratio_bandwidth,
    )
    low, high = fit.range_frac[stand_in[0]]
    return Price(
        candidate=candidate, source=Source.DERIVED, range_frac=(low / DERIVED_WIDENING, high * DERIVED_WIDENING)
    )


def _nearest_regime(
    call: CollectiveCall, setting: Setting, modelled: Candidate, fit: FabricFit
) -> tuple[tuple[str, str], Candidate] | None:
    """A fitted regime of the same operation or its stand-in, and NCCL's model of that very regime."""
    op = _STAND_IN.get(call.op, call.op)
    options = {f"{c.algorithm}_{c.protocol}": c for c in candidates(replace(setting, op=op))}
    known = [name for (key_op, name) in fit.regimes if key_op == op and name in options]
    same = f"{modelled.algorithm}_{modelled.protocol}"
    if same in known:
        return (op, same), options[same]
    by_protocol = [name for name in known if name.endswith(f"_{modelled.protocol}")]
    pool = by_protocol or known
    if not pool:
        return None
    name = min(pool, key=lambda name: (options[name].time_s, name))
    return (op, name), options[name]


def _question(call: CollectiveCall, setting: Setting, fit: FabricFit) -> fitted.Question:
    lane = setting.group.intra
    scale = fitted.reference_bus(fit, call.n_ranks) / lane.bus_bytes_per_s if lane else 1.0
    return fitted.Question(
        n_ranks=call.n_ranks,
        n_bytes=float(call.bytes),
        dtype=call.dtype,
        version=setting.settings.version,
        link_scale=1.0 if abs(scale - 1) <= SAME_LINKS_FRAC else scale,
        bus_bytes_per_s=lane.bus_bytes_per_s if lane else math.inf,
    )


def fitted_price(modelled: Candidate, found: fitted.Fitted, fit: FabricFit, op: str, ask: fitted.Question) -> Price:
    """The price of a fitted regime: fitted, or derived or extrapolated where the question leaves what was measured."""
    low, high = fit.range_frac[op]
    measured = ask.n_ranks in fit.group_sizes
    between = fit.group_sizes[0] <= ask.n_ranks <= fit.group_sizes[-1]
    source = Source.FITTED
    if ask.link_scale != 1.0 or not measured:
        source, low, high = Source.DERIVED, low / DERIVED_WIDENING, high * DERIVED_WIDENING
    if not found.inside or not between:
        source = Source.EXTRAPOLATED
    return Price(
        candidate=replace(modelled, latency_s=found.latency_s, bandwidth_s=found.bandwidth_s),
        source=source,
        range_frac=(low, high),
    )


def price_exchange(call: CollectiveCall, topology: Topology, group: Group, settings: Settings, known: Known) -> Price:
    """all_to_all(_v), send_recv, gather and scatter: pairs at once.

    Where the fabric's all_to_all was measured, an exchange costs what the uniform all_to_all costs that loads its busiest
    link as much.
    """
    fit = known.fit
    bandwidth_s, link = known.exchanged or exchange.exchange_time(topology, group, call.ranks, _sent(call))
    setting = setting_of(call.op, call.bytes, topology, group, settings)
    regime = pairwise_regime(call.op, call.bytes, call.n_ranks)
    hop = max(hop_s(lane, Algorithm.RING, Protocol.LL) for lane in (group.intra, group.inter))
    modelled = Candidate(
        algorithm=Algorithm.DIRECT,
        protocol=Protocol(regime.rpartition("_")[2]),
        latency_s=nccl.BASE_S[Algorithm.RING][Protocol.LL] + hop,
        bandwidth_s=bandwidth_s,
        n_channels=n_channels(setting),
        bottleneck=link,
    )
    if fit is None or group.n_units > 1:
        return _modelled(modelled, setting, known.wires)
    share = fit.fit.parameters.get("exchange_frac")
    if share is not None:
        slowed = replace(modelled, bandwidth_s=modelled.bandwidth_s / share)
        return Price(candidate=slowed, source=Source.DERIVED, range_frac=(fit.fit.low_frac, fit.fit.high_frac))
    pair = ("send_recv", regime)
    if call.op == "send_recv" and pair in fit.regimes:
        ask = replace(_question(call, setting, fit), n_ranks=2, n_bytes=bandwidth_s * fitted.reference_bus(fit, 2))
        return fitted_price(modelled, fitted.regime_time(fit, pair, ask), fit, "send_recv", ask)
    if ("all_to_all", regime) not in fit.regimes:
        return _modelled(modelled, setting, known.wires)
    return _like_all_to_all(call, topology, setting, modelled, fit)


def _like_all_to_all(
    call: CollectiveCall, topology: Topology, setting: Setting, modelled: Candidate, fit: FabricFit
) -> Price:
    """An exchange by the fitted all_to_all that loads its busiest link as much."""
    key = ("all_to_all", f"{modelled.algorithm}_{modelled.protocol}")
    ask = _question(call, setting, fit)
    if call.op != "all_to_all":
        ask = replace(ask, n_bytes=modelled.bandwidth_s / _s_per_byte(topology, call.ranks))
    found = fitted.regime_time(fit, key, ask)
    if call.op == "send_recv":
        found = replace(
            found,
            latency_s=found.latency_s * SEND_RECV_FRAC,
            bandwidth_s=max(found.bandwidth_s * SEND_RECV_FRAC, modelled.bandwidth_s),
        )
    price = fitted_price(modelled, found, fit, "all_to_all", ask)
    derived = call.op not in ("all_to_all", "all_to_all_v") and price.source is Source.FITTED
    return replace(price, source=Source.DERIVED) if derived else price


@lru_cache(maxsize=1024)
def _s_per_byte(topology: Topology, ranks: tuple[int, ...]) -> float:
    """Seconds that the uniform all_to_all of a one-byte buffer keeps the busiest link."""
    return exchange.exchange_time(topology, group_of(topology, ranks), ranks, exchange.uniform(len(ranks), 1.0))[0]


def _sent(call: CollectiveCall) -> Sent:
    """`send_matrix`, and without the matrix where thousands of ranks send alike."""
    n_ranks = call.n_ranks
    if n_ranks <= MAX_MATRIX_RANKS:
        return Sent.of_matrix(send_matrix(call))
    if call.send_bytes is not None:
        return Sent.of_tuples(call.send_bytes)
    if call.op == "all_to_all":
        return Sent(rows=np.full((1, n_ranks), call.bytes / n_ranks), row_of=np.zeros(n_ranks, dtype=np.int64))
    return Sent.of_matrix(send_matrix(call))


def send_matrix(call: CollectiveCall) -> Matrix:
    """Bytes from each member to each other."""
    if call.send_bytes is not None:
        matrix = np.array(call.send_bytes, dtype=float)
        np.fill_diagonal(matrix, 0.0)
        return matrix
    if call.op == "all_to_all":
        return exchange.uniform(call.n_ranks, call.bytes)
    if call.op == "send_recv":
        return exchange.shift(call.n_ranks, call.bytes)
    return exchange.rooted(call.n_ranks, call.bytes, gather=call.op == "gather")
