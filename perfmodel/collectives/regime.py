"""Which algorithm and protocol runs: NCCL's choice among the candidates, by what its tuner believes of the links."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from perfmodel.collectives import nccl_tables as nccl
from perfmodel.collectives.candidates import Candidate, Setting, candidates
from perfmodel.collectives.group import Group
from perfmodel.collectives.nccl_tables import Algorithm, Generation
from perfmodel.collectives.settings import Settings, read_settings
from perfmodel.db import load_device
from perfmodel.errors import MissingCalibrationError
from perfmodel.topology import Topology

PAIRWISE_OPS = ("all_to_all", "all_to_all_v", "send_recv", "gather", "scatter")
# Largest message to one peer that goes by LL (NCCL_P2P_LL_THRESHOLD, nccl src/enqueue.cc).
P2P_LL_BYTES = 16384
# Unknown to the database: NCCL's middle row. Only latency ceilings depend on it.
DEFAULT_GENERATION = Generation.AMPERE


@lru_cache(maxsize=256)
def generation(device: str) -> Generation:
    """The row of NCCL's tables for a device; Ampere's for one that the database does not know."""
    try:
        return nccl.generation_of(load_device(device).compute_capability)
    except MissingCalibrationError:
        return DEFAULT_GENERATION


def setting_of(op: str, n_bytes: int, topology: Topology, group: Group, settings: Settings) -> Setting:
    """What all candidates of a collective share."""
    node = topology.spec.node_groups[topology.host_kind(topology.ranks[group.units[0][0]].host)][1]
    return Setting(
        op=op,
        n_bytes=n_bytes,
        group=group,
        generation=generation(group.device),
        settings=settings,
        amd_host=node.pcie is not None and node.pcie.inter_socket.startswith("xgmi"),
    )


def believed(setting: Setting, bus_frac: float) -> Setting:
    """The setting with the inner lane as wide as NCCL takes it for."""
    lane = setting.group.intra
    if bus_frac == 1.0 or lane is None:
        return setting
    narrowed = replace(lane, bus_bytes_per_s=lane.bus_bytes_per_s * bus_frac)
    return replace(setting, group=replace(setting.group, intra=narrowed))


def choose(setting: Setting, bus_frac: float = 1.0) -> Candidate | None:
    """The candidate that NCCL's model finds fastest, by its own belief; None if the settings forbid all."""
    found = candidates(believed(setting, bus_frac))
    return min(found, key=lambda candidate: candidate.time_s, default=None)


def pairwise_regime(op: str, n_bytes: float, n_ranks: int) -> str:
    """LL for small messages to a peer, Simple for the rest."""
    per_peer = n_bytes if op == "send_recv" else n_bytes / n_ranks
    return f"{Algorithm.DIRECT}_{'ll' if per_peer <= P2P_LL_BYTES else 'simple'}"


def chosen_regime(op: str, n_bytes: int, topology: Topology, group: Group, bus_frac: float) -> str:
    """`<algorithm>_<protocol>` of a collective with the topology's settings."""
    if op in PAIRWISE_OPS:
        return pairwise_regime(op, n_bytes, group.n_ranks)
    found = choose(setting_of(op, n_bytes, topology, group, read_settings(topology.env)), bus_frac)
    return f"{found.algorithm}_{found.protocol}" if found else "none_none"
