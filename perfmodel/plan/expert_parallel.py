"""Expert parallelism of an extracted graph: each rank of a group has some experts of every layer; rows go there and back.

The dispatch and combine of GShard (Lepikhin et al. 2020, arXiv:2006.16668) as Megatron-Core's all-to-all dispatcher and
torchtitan's do them: rows sorted by expert leave for the ranks of their experts, come back in the order they left, and their
gradients travel the same ways in backward: four all-to-alls a layer of (tokens x experts of each) rows. Without a capacity the
ranks first tell each other how many rows come, and the host waits for that. With one, every expert takes
ceil(factor x rows / experts) rows of each rank, empty places filled, the rest dropped (GShard, section 2.2).

What routing makes of a group's busiest rank is its `imbalance`: rows there over the mean. All ranks wait for it at the
combine, layer by layer, so each rank's work and memory are taken as its.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import partial

from perfmodel.config.plan import ExpertParallel
from perfmodel.errors import InfeasiblePlanError, suggest
from perfmodel.graph import Graph, Op, Parameter, TensorSpec
from perfmodel.plan.layout import Shard, local_spec
from perfmodel.plan.shard_graph import Sharding, Split

GROUPED = "aten._grouped_mm"


@dataclass(frozen=True, slots=True, kw_only=True)
class Region:
    """The experts of one layer: how many there are, rows that a rank's tokens make, and rows that it works on."""

    n_experts: int
    sent: int
    local: int

    @property
    def rows(self) -> Shard:
        """The split of rows that stand at their expert; `local` over `full` is what a rank has for each row it sent."""
        return Shard(dim=0, full=self.sent, local=self.local, kind="expert")


def is_expert_parallel(plan: ExpertParallel, n_ranks: int) -> bool:
    """Whether a plan changes what the experts of a graph do."""
    return n_ranks > 1 or plan.capacity_factor is not None


def expert_parallel(graph: Graph, plan: ExpertParallel, n_ranks: int) -> Graph:
    """The graph of one rank of an expert-parallel group of `n_ranks`.

    Raises InfeasiblePlanError where no module is a set of experts, or the ranks do not divide them.
    """
    if not is_expert_parallel(plan, n_ranks):
        return graph
    parameters = expert_parameters(graph, plan.experts)
    regions = _regions(graph, plan, n_ranks, parameters)
    shards = {
        p.name: Shard(dim=0, full=p.tensor.shape[0], local=p.tensor.shape[0] // n_ranks)
        for found in parameters.values()
        for p in found
    }
    split = Split(group="ep", n_ranks=n_ranks, parameters=shards if n_ranks > 1 else {})
    return _Experts(graph, split, regions, plan).run()


def expert_parameters(graph: Graph, patterns: Sequence[str]) -> Mapping[str, list[Parameter]]:
    """Parameters that are a stack of one matrix an expert, by the path of their module.

    Raises InfeasiblePlanError where none is below a module whose path ends as a pattern says.
    """
    found: dict[str, list[Parameter]] = {}
    for parameter in graph.parameters:
        path = parameter.name.rpartition(".")[0]
        if len(parameter.tensor.shape) == 3 and any(_ends(path, pattern) for pattern in patterns):
            found.setdefault(path, []).append(parameter)
    if not found:
        modules = sorted({p.name.rpartition(".")[0].rpartition(".")[2] for p in graph.parameters})
        raise InfeasiblePlanError(
            f"expert parallel: no module with a stack of matrices, one an expert, matches expert_parallel.experts "
            f"({', '.join(patterns)}); the modules of {graph.model} end in {', '.join(modules[:12])}"
            f"{suggest(patterns[0], modules)}"
        )
    return found


def _ends(path: str, pattern: str) -> bool:
    return fnmatchcase(path, pattern) or fnmatchcase(path, f"*.{pattern}")


def _regions(
    graph: Graph, plan: ExpertParallel, n_ranks: int, parameters: Mapping[str, Sequence[Parameter]]
) -> dict[str, Region]:
    sent = {
        op.module: op.inputs[0].shape[0] for op in graph.ops if op.name == GROUPED and op.phase == "forward"
    }  # fmt: skip
    regions = {}
    for path, stacks in parameters.items():
        n_experts = stacks[0].tensor.shape[0]
        if n_experts % n_ranks:
            raise InfeasiblePlanError(
                f"expert parallel: {path} has {n_experts} experts, allowed a multiple of mesh.ep {n_ranks}"
            )
        if path not in sent:
            raise InfeasiblePlanError(
                f"expert parallel: {path} does not run its experts by torch.nn.functional.grouped_mm, which alone is split"
            )
        rows = sent[path]
        if plan.capacity_factor is not None:
            local = n_experts * math.ceil(plan.capacity_factor * rows / n_experts)
        else:
            local = math.ceil(plan.imbalance * rows)
        if plan.imbalance > n_ranks:
            raise InfeasiblePlanError(
                f"expert_parallel.imbalance: found {plan.imbalance}, allowed at most mesh.ep {n_ranks}: all rows on one rank"
            )
        regions[path] = Region(n_experts=n_experts, sent=rows, local=local)
    return regions


class _Experts(Sharding):
    """Follows rows into the experts' modules and out again; `expert_parallel` is the only user."""

    def __init__(self, graph: Graph, split: Split, regions: Mapping[str, Region], plan: ExpertParallel) -> None:
        super().__init__(graph, split)
        self.regions, self.plan = regions, plan
        self.region_of = {module: self._around(module) for module in {op.module for op in graph.ops}}
        self.counted: set[str] = set()

    def _around(self, module: str) -> str | None:
        return next((path for path in self.regions if module == path or module.startswith(f"{path}.")), None)

    def _step(self, op: Op) -> None:
        path = self.region_of[op.module] if op.phase != "optimizer" else None
        if path is not None:
            region = self.regions[path]
            for spec in op.inputs:
                if len(spec.shape) == 2 and spec.shape[0] == region.sent and self.of(spec) is None:
                    self._dispatch(spec, path)
        else:
            for spec in op.inputs:
                shard = self.of(spec)
                if shard is not None and shard.kind == "expert":
                    self._combine(spec, shard)
        super()._step(op)

    def vocabulary(self, op: Op) -> Shard | None:
        """The split of the stacks of the experts that an op belongs to."""
        path = self.region_of[op.module]
        if path is None or self.split.n_ranks == 1:
            return None
        n = self.regions[path].n_experts
        return Shard(dim=0, full=n, local=n // self.split.n_ranks)

    def _dispatch(self, spec: TensorSpec, path: str) -> None:
        """Rows go to their experts; the first time in a pass after the ranks have told each other how many."""
        region = self.regions[path]
        source = self._local(spec, None)
        if self.plan.capacity_factor is not None:
            source = local_spec(source, region.rows)  # the permutation has filled every expert's places
        if self.split.n_ranks == 1:
            self._put(spec, region.rows)
            return
        if self.plan.capacity_factor is None and (self.op.phase != "backward" or self.op.recompute):
            self._tell_counts(region)
        storage = self._fresh(spec.storage, -(-spec.bytes * region.local // region.sent))
        self.state.moved[spec.storage] = storage
        self._put(spec, region.rows)
        self._emit_rows(source, self._local(spec, region.rows), "to")

    def _combine(self, spec: TensorSpec, shard: Shard) -> None:
        """Rows go back to where they came from."""
        source = self._local(spec, shard)
        if self.split.n_ranks > 1:
            self.state.moved[spec.storage] = self._fresh(spec.storage, spec.bytes)
        for seen in {**self.state.specs.get(spec.storage, {}), spec.id: spec}.values():
            self._put(seen, None)
        if self.split.n_ranks > 1:
            self._emit_rows(source, self._local(spec, None), "back")

    def _emit_rows(self, source: TensorSpec, target: TensorSpec, way: str) -> None:
        what = "rows" if self.op.phase != "backward" or self.op.recompute else "gradients of rows"
        where = "to experts" if way == "to" else "back"
        self._emit("all_to_all", (source,), (target,), source.bytes, f"{what} {where}")
        attrs = {"way": way, "imbalance": 1.0 if self.plan.capacity_factor is not None else self.plan.imbalance}
        self.ops[-1] = replace(self.ops[-1], attrs={**self.ops[-1].attrs, **attrs})

    def _tell_counts(self, region: Region) -> None:
        """How many rows go to each expert: an exchange that the host waits for, since it decides sizes."""
        tensor = partial(TensorSpec, shape=(region.n_experts,), dtype="int64", strides=(1,))
        first, second = (
            tensor(id=self._number(), storage=self._fresh(-1, 8 * region.n_experts)) for _ in range(2)
        )  # fmt: skip
        self._emit("all_to_all", (first,), (second,), first.bytes, "rows of each expert")
        self.ops[-1] = replace(self.ops[-1], attrs={**self.ops[-1].attrs, "host_waits": True})
