"""Times of the exchanges of sharding modules, each found once for a machine however many placements have it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from perfmodel.collectives import CollectiveCall, estimate_collective
from perfmodel.collectives.exchange import MAX_EXACT_RANKS
from perfmodel.collectives.group import group_of
from perfmodel.config.plan import EmbeddingPlan
from perfmodel.db.fabric import load_fabric
from perfmodel.db.wire import load_wires
from perfmodel.plan.dist import Dist, Matrix
from perfmodel.plan.sharded import BACK, DOMAINS, LENGTHS, OUT, VALUES, instance_of
from perfmodel.sharding.exchanges import Floats, exchange_s, routes_of
from perfmodel.topology import Topology
from perfmodel.units import PS_PER_S

MAX_REMEMBERED = 100_000


@dataclass(frozen=True, slots=True)
class Sizes:
    """An exchange: its operation, members, element type, bytes, and for all_to_all_v what goes from each to each."""

    op: str
    ranks: tuple[int, ...]
    dtype: str
    n_bytes: int
    send: Matrix | None = None


def exchange_sizes(dists: Sequence[Dist], plan: EmbeddingPlan, n_micro: int) -> dict[int, Sizes]:
    """The exchanges whose sizes follow from where parts lie, by instance."""
    found: dict[tuple[int, int], Sizes] = {}
    for number, dist in enumerate(dists):
        if plan.index_exchange:
            found[number, LENGTHS] = _all_to_all(dist.length_bytes(), "int64")
            found[number, VALUES] = _all_to_all(dist.index_bytes(), "int64")
        if dist.kind == "row_wise":
            continue  # what is summed over all ranks does not depend on where parts lie
        if dist.kind == "domain_row_wise":
            found[number, OUT] = _all_to_all(dist.cross_bytes(dist.row_bytes), "float32")
            back = dist.cross_bytes(dist.gradient_bytes)
            for place, domain in enumerate(dist.domains()):
                elems = dist.reduced_elems(domain)
                for side, op in enumerate(("reduce_scatter", "all_gather") if len(domain) > 1 else ()):
                    n_bytes = elems * (dist.gradient_bytes if side else dist.row_bytes)
                    found[number, DOMAINS + 2 * place + side] = Sizes(op, domain, "float32", n_bytes)
        else:
            found[number, OUT] = _all_to_all(dist.rows_bytes(dist.row_bytes), "float32")
            back = dist.rows_bytes(dist.gradient_bytes)
        found[number, BACK] = _all_to_all(tuple(zip(*back, strict=True)), "float32")
    return {instance_of((micro, *key)): sizes for micro in range(n_micro) for key, sizes in found.items()}


def _all_to_all(send: Matrix, dtype: str) -> Sizes:
    return Sizes("all_to_all_v", tuple(range(len(send))), dtype, max(map(sum, send)), send)


class ExchangePrices:
    """Times (ps) of exchanges on one machine."""

    def __init__(self, topology: Topology) -> None:
        self.topology = topology
        self._known: dict[Sizes, int] = {}
        everyone = tuple(range(topology.n_ranks))
        exact = topology.n_ranks <= MAX_EXACT_RANKS and group_of(topology, everyone).n_units == 1
        self._routes = routes_of(topology, everyone) if exact else None
        fit = load_fabric(topology.fabric)
        self._fits = {topology.fabric: fit} if fit is not None else {}
        self._wires = load_wires()

    def price(self, asked: Sequence[Sizes]) -> None:
        """Prices everything asked for and not known."""
        if len(self._known) > MAX_REMEMBERED:
            self._known = {}
        new = list(dict.fromkeys(sizes for sizes in asked if sizes not in self._known))
        together = [sizes for sizes in new if sizes.send is not None and self._routes is not None]
        links_s = self._links_s(together)
        for sizes in new:
            call = CollectiveCall(
                op=sizes.op, bytes=sizes.n_bytes, ranks=sizes.ranks, dtype=sizes.dtype, send_bytes=sizes.send
            )
            if sizes in links_s:
                exchanged = (links_s[sizes], "links of the exchange")
                found = estimate_collective(
                    call, self.topology, fits=self._fits, wires=self._wires, exchanged=exchanged
                )
            else:
                found = estimate_collective(call, self.topology)
            self._known[sizes] = int(np.rint(found.time_s * PS_PER_S))

    def of(self, sizes: Sizes) -> int:
        """Picoseconds of an exchange that was priced."""
        return self._known[sizes]

    def _links_s(self, asked: Sequence[Sizes]) -> dict[Sizes, float]:
        if not asked or self._routes is None:
            return {}
        sent: Floats = np.array([sizes.send for sizes in asked], dtype=np.float64)
        return dict(zip(asked, exchange_s(self._routes, sent).tolist(), strict=True))
