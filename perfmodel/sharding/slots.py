"""What a placement changes in a program of known structure: kernel times of table operators, exchanges, memory of parts.

Operators are listed for each rank in the order in which `plan.sharded` issues them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import cast

from perfmodel.config.plan import PlanSpec
from perfmodel.config.sharding import TablePlacement
from perfmodel.db.device import Device
from perfmodel.errors import InfeasiblePlanError
from perfmodel.graph import Graph
from perfmodel.kernels.embedding import distinct_rows
from perfmodel.kernels.table_batch import Placement, TableBatch
from perfmodel.kernels.table_columns import LOOKUPS, UNIQUE, Floats, part_terms
from perfmodel.plan.assign import assign_explicit
from perfmodel.plan.dist import Dist, dists_of
from perfmodel.plan.events import MemoryUse
from perfmodel.plan.facts import facts_of
from perfmodel.plan.place import FUSED_TABLES
from perfmodel.plan.shard_memory import shard_memory
from perfmodel.plan.sharded_ops import PLACEMENT, ShardedTables, optimizer_of, unpooled_tables
from perfmodel.plan.shards import TableShard, shards_of
from perfmodel.sharding.exchange_prices import ExchangePrices, Sizes, exchange_sizes
from perfmodel.sharding.op_prices import Group, OpPrices, sort_passes
from perfmodel.sharding.plan import Placements
from perfmodel.topology import Topology
from perfmodel.units import PS_PER_S

MEMORY_PARTS = (
    "parameters_bytes", "gradients_bytes", "optimizer_bytes", "communication_bytes", "host_bytes", "ssd_bytes"
)  # fmt: skip
PREPARE, PREFETCH, LOOKUP, BACKWARD, UPDATE = range(5)  # operators of a group, for signatures
BUCKETED = ("row_wise", "domain_row_wise")
CACHED = ("uvm_caching", "key_value")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Laid:
    """What one placement puts into its structure.

    Attributes:
        structure: equal for placements with the same program.
        order: ranks in the order of the structure's programs.
        kernels_ps: times of the table operators' kernels, rank after rank in that order.
        exchanges_ps: time of each exchange by its instance.
        memory: bytes of each rank's parts, as MEMORY_PARTS.
        launches_ps: host times of the launches of sorts, likewise.
        sorts: for each rank and each of its backward operators, in order, kernels of the structure's sort that take no time,
            and passes of that sort (both 0 for operators that are priced by rule).
    """

    structure: object
    order: tuple[int, ...]
    kernels_ps: Sequence[int]
    exchanges_ps: Mapping[int, int]
    memory: Sequence[Sequence[int]]
    launches_ps: Sequence[int]
    sorts: Sequence[Sequence[tuple[int, int]]]


def memory_use(parts: Sequence[int]) -> MemoryUse:
    """Bytes by MEMORY_PARTS as a MemoryUse."""
    return MemoryUse(**dict(zip(MEMORY_PARTS, parts, strict=True)))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Part:
    shard: TableShard
    terms: Floats
    memory: tuple[int, ...]


@dataclass(slots=True, eq=False)
class _Slot:
    """One operator of a rank: what it is, and where its times come from (keys of OpPrices; one column of a group).

    `empty` kernels that take no time stand behind its first one, so that sorts of all lengths have one structure.
    """

    code: tuple[int, int, int]
    keys: tuple[object, ...]
    group: int = -1
    empty: int = 0

    @property
    def n_passes(self) -> int:
        """Passes of the structure's sort in a backward operator that is priced in columns."""
        return self.code[2] if self.group >= 0 and self.code[1] == BACKWARD else 0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Draft:
    structure: object
    order: tuple[int, ...]
    slots: Sequence[Sequence[_Slot]]
    sizes: Mapping[int, Sizes]
    memory: Sequence[Sequence[int]]


class Slots:
    """Lays placements of one model on one machine; fields of the plan other than the placement are `base`'s."""

    def __init__(self, graph: Graph, topology: Topology, base: PlanSpec, devices: Mapping[str, Device]) -> None:
        self.facts, self.base, self.topology = facts_of(graph), base, topology
        self.n_ranks, self.batch = topology.n_ranks, graph.batch_size
        self.accesses = [found.table for found in self.facts.tables.values()]
        self.unpooled = unpooled_tables(graph, self.facts.tables)
        self.optimizer = optimizer_of(graph)
        self.fused = FUSED_TABLES in graph.rewrites
        trains = any(op.phase == "backward" for op in graph.ops)
        self.usable = trains and len({place.device for place in topology.ranks}) == 1 and self.n_ranks > 1
        device = devices[topology.ranks[0].device]
        self.prices, self.launch_ps = OpPrices(device, PS_PER_S), round(device.host.launch_s * PS_PER_S)
        self.exchanges = ExchangePrices(topology)
        self.n_passes = sort_passes(sum(table.rows for table in self.accesses))
        self._parts: dict[tuple[str, TablePlacement], tuple[_Part, ...]] = {}
        self._groups: list[Group] = []
        self._names: dict[tuple[str, ...], tuple[str, ...]] = {}

    def lay(self, placements: Sequence[Placements]) -> list[Laid | InfeasiblePlanError | None]:
        """What each placement changes; why it does not run; or None for one that cannot be laid."""
        self._groups = []
        drafts = [self._drafted(placement) for placement in placements]
        self.prices.price()
        lookup, update = (times.tolist() for times in self.prices.groups(self._groups))
        made = [draft for draft in drafts if isinstance(draft, _Draft)]
        self.exchanges.price([one for draft in made for one in draft.sizes.values()])
        return [self._laid(draft, lookup, update) if isinstance(draft, _Draft) else draft for draft in drafts]

    def _laid(self, draft: _Draft, lookup: Sequence[int], update: Sequence[int]) -> Laid:
        kernels: list[int] = []
        launches: list[int] = []
        for rank in draft.order:
            mine: list[int] = []
            issued = [
                time
                for slot in draft.slots[rank]
                if slot.n_passes
                for time in [0] * slot.empty + [self.launch_ps] * (slot.n_passes - slot.empty)
            ]
            launches += issued * self.base.n_micro
            for slot in draft.slots[rank]:
                begin = len(mine) + 1
                for key in slot.keys:
                    mine += self.prices.of(key)
                mine[begin:begin] = [0] * slot.empty
                if slot.group >= 0:
                    mine.append(lookup[slot.group] if slot.code[1] == LOOKUP else update[slot.group])
            kernels += mine * self.base.n_micro
        return Laid(
            structure=draft.structure,
            order=draft.order,
            kernels_ps=kernels,
            exchanges_ps={instance: self.exchanges.of(sizes) for instance, sizes in draft.sizes.items()},
            memory=draft.memory,
            launches_ps=launches,
            sorts=[[(slot.empty, slot.n_passes) for slot in mine if slot.code[1] == BACKWARD] for mine in draft.slots],
        )

    def _drafted(self, placement: Placements) -> _Draft | InfeasiblePlanError | None:
        try:
            placed = self._named(placement)
            parts = [part for name, where in placed.items() for part in self._parts_of(name, where)]
        except InfeasiblePlanError as error:
            return error
        if not self.usable or any(part.shard.placement.kernel == "own" for part in parts):
            return None
        known = {id(part.shard): part for part in parts}
        dists = dists_of(
            [part.shard for part in parts],
            self.base.embeddings,
            (self.n_ranks, self.batch),
            self.unpooled,
            distinct_rows if self.base.embeddings.dedup else None,
        )
        copies = [part for part in parts if part.shard.placement.sharding == "data_parallel"]
        slots = self._slots_of(dists, known, copies)
        if slots is None:
            return None
        return self._draft(dists, copies, slots, parts)

    def _draft(
        self, dists: Sequence[Dist], copies: Sequence[_Part], slots: Sequence[Sequence[_Slot]], parts: Sequence[_Part]
    ) -> _Draft:
        domains = [dist.domains() if dist.kind == "domain_row_wise" else () for dist in dists]
        marks = [
            (
                tuple((i, j) for i, found in enumerate(domains) for j, one in enumerate(found) if rank in one),
                tuple(slot.code for slot in slots[rank]),
            )
            for rank in range(self.n_ranks)
        ]
        order = tuple(sorted(range(self.n_ranks), key=marks.__getitem__))
        memory = [[0] * len(MEMORY_PARTS) for _ in range(self.n_ranks)]
        for part in parts:
            held = memory[part.shard.rank]
            for i, n_bytes in enumerate(part.memory):
                held[i] += n_bytes
        return _Draft(
            structure=(
                tuple((dist.kind, frozenset(dist.tables), found) for dist, found in zip(dists, domains, strict=True)),
                frozenset(part.shard.name for part in copies),
                tuple(marks[rank] for rank in order),
            ),
            order=order,
            slots=slots,
            sizes=exchange_sizes(dists, self.base.embeddings, self.base.n_micro),
            memory=memory,
        )

    def _named(self, placement: Placements) -> Mapping[str, TablePlacement]:
        """The placement by parameter name, checked by `assign_explicit` the first time its names are seen."""
        names = tuple(placement)
        known = self._names.get(names)
        if known is None or any(where.ranks and max(where.ranks) >= self.n_ranks for where in placement.values()):
            found = assign_explicit(self.accesses, placement, self.n_ranks)
            self._names[names] = tuple(found)
            return found
        return dict(zip(known, placement.values(), strict=True))

    def _parts_of(self, name: str, where: TablePlacement) -> tuple[_Part, ...]:
        known = self._parts.get((name, where))
        if known is None:
            fused = where.model_copy(update={"kernel": "fused"}) if self.fused and where.kernel == "own" else where
            shards = shards_of(self.facts.tables[name].table, fused, self.n_ranks)
            known = self._parts[name, where] = tuple(self._part(shard) for shard in shards)
        return known

    def _part(self, shard: TableShard) -> _Part:
        copied = shard.placement.sharding == "data_parallel"
        size = (self.n_ranks, self.batch)
        alone = ShardedTables(
            facts=self.facts,
            tables=self.facts.tables,
            dists=dists_of(
                [shard],
                self.base.embeddings,
                size,
                self.unpooled,
                distinct_rows if self.base.embeddings.dedup else None,
            ),
            plan=self.base.embeddings,
            n_ranks=self.n_ranks,
            replicated=(shard,) if copied else (),
        )
        use = shard_memory(alone, shard.rank)
        batch = self._batch([shard], self.batch * (1 if copied else self.n_ranks))
        return _Part(shard=shard, terms=part_terms(batch), memory=tuple(getattr(use, name) for name in MEMORY_PARTS))

    def _batch(self, members: Sequence[TableShard], batch: int, part: str = "all") -> TableBatch:
        where = members[0].placement
        return TableBatch(
            tables=tuple(shard.access for shard in members),
            batch=batch,
            placement=cast(Placement, PLACEMENT.get(where.kernel, "hbm")),
            cache_load_factor=where.cache_load_factor,
            optimizer=self.optimizer,
            pooled=members[0].name not in self.unpooled,
            dense=where.kernel == "dense",
            part="lookup" if part == "lookup" else "prefetch" if part == "prefetch" else "all",
            storage_bytes_per_s=self.base.embeddings.ssd,
        )

    def _slots_of(
        self, dists: Sequence[Dist], known: Mapping[int, _Part], copies: Sequence[_Part]
    ) -> list[list[_Slot]] | None:
        """Operators of each rank in order: of forward, then of backward; None if a group has next to no lookups."""
        forward: list[list[_Slot]] = [[] for _ in range(self.n_ranks)]
        backward: list[list[_Slot]] = [[] for _ in range(self.n_ranks)]
        for number, dist in enumerate(dists):
            held: list[list[_Part]] = [[] for _ in range(self.n_ranks)]
            for shard in dist.shards:
                held[shard.rank].append(known[id(shard)])
            for rank, mine in enumerate(held):
                if not mine:
                    continue
                n_lookups = sum(dist.lookups(part.shard) for part in mine) * self.n_ranks
                bags = dist.batch * self.n_ranks * len(mine)
                key = self.prices.permute(n_lookups, bags, bucketed=dist.kind in BUCKETED)
                code = (number, PREPARE, 7 if dist.kind in BUCKETED else 4)
                forward[rank].append(_Slot(code, (key,)))
                if not self._batched(number, mine, dist.batch * self.n_ranks, (forward[rank], backward[rank])):
                    return None
        for rank in range(self.n_ranks) if copies else ():
            mine = [part for part in copies if part.shard.rank == rank]
            if not self._batched(len(dists), mine, self.batch, (forward[rank], backward[rank])):
                return None
            update = self.prices.batch("update", self._batch([part.shard for part in mine], self.batch))
            backward[rank].append(_Slot((len(dists), UPDATE, 1), (update,)))
        return [first + second for first, second in zip(forward, backward, strict=True)]

    def _batched(self, number: int, held: Sequence[_Part], batch: int, slots: tuple[list[_Slot], list[_Slot]]) -> bool:
        """Adds the operators of a rank's parts in one module to its forward and backward; see `plan.sharded`."""
        groups: dict[tuple[object, ...], list[_Part]] = {}
        for part in held:
            where = part.shard.placement
            cached = where.cache_load_factor if where.kernel in CACHED else 0.0
            kind = (where.kernel, part.shard.access.itemsize_bytes, cached, part.shard.name in self.unpooled)
            groups.setdefault(kind, []).append(part)
        for (kernel, *_, unpooled), members in sorted(groups.items(), key=lambda item: str(item[0])):
            group = Group(
                tuple(part.terms for part in members),
                sum(float(part.terms[LOOKUPS]) for part in members),
                sum(part.shard.access.rows for part in members),
                sum(float(part.terms[UNIQUE]) for part in members),
            )
            if group.lookups < 1:
                return False
            if kernel == "fused" and not unpooled and self.prices.in_columns:
                self._in_columns(number, group, slots)
            else:
                self._by_rule(number, members, batch, slots)
        return True

    def _in_columns(self, number: int, group: Group, slots: tuple[list[_Slot], list[_Slot]]) -> None:
        check, ordered, runs = self.prices.fixed(group)
        n_passes = max(group.n_passes, self.n_passes)
        slots[0].append(_Slot((number, LOOKUP, 0), (check,), len(self._groups)))
        slots[1].append(
            _Slot((number, BACKWARD, n_passes), (ordered, runs), len(self._groups), n_passes - group.n_passes)
        )
        self._groups.append(group)

    def _by_rule(
        self, number: int, members: Sequence[_Part], batch: int, slots: tuple[list[_Slot], list[_Slot]]
    ) -> None:
        shards = [part.shard for part in members]
        where = shards[0].placement

        def slot(code: int, kind: str, part: str) -> _Slot:
            key = self.prices.batch(kind, self._batch(shards, batch, part))
            return _Slot((number, code, self.prices.n_kernels(key)), (key,))

        if where.kernel in CACHED:
            slots[0].append(slot(PREFETCH, "forward", "prefetch"))
        slots[0].append(slot(LOOKUP, "forward", "lookup"))
        slots[1].append(slot(BACKWARD, "backward", "all"))
        if where.kernel == "dense" and where.sharding != "data_parallel":
            slots[1].append(slot(UPDATE, "update", "all"))
