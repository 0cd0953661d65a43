"""The graph of one rank of a tensor-parallel group: every op at its local sizes, with the communication that makes it right.

Given which parameters are split and how, splits are followed through the ops in order (`shard_rules`). Where a rule asks for
a sum or a whole tensor, an op `perfmodel.all_reduce`, `.reduce_scatter` or `.all_gather` is put before it; one gather of a
value serves all ops of a layer that need it whole in the same part of the iteration. Their attribute `group` names the mesh
dimension, `bytes` the size by the nccl-tests convention, `purpose` what moves.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial

from perfmodel.graph import Graph, Op, Parameter, Storage, TensorSpec
from perfmodel.plan.expert_rules import EXPERT_RULES
from perfmodel.plan.fp8_rules import FP8_RULES
from perfmodel.plan.late_sums import LateSum, adds_sum
from perfmodel.plan.layout import Shard, local_size, local_spec, row_major
from perfmodel.plan.resized import resized
from perfmodel.plan.shard_rules import SAME_TENSOR, rule_of
from perfmodel.plan.values import Values, layer_of

FIRST_NEW = 1 << 44  # ids of tensors and storages made here; beyond every id of a graph and of a plan's buckets
_RULES = {**EXPERT_RULES, **FP8_RULES}  # those that are no plain linear algebra's


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenSplit:
    """Sequence parallelism: of the `tokens` tokens of `samples` samples each rank has `local` between parallel regions.

    `tokens_first`: rows run through the samples of a token, then the next token, as in Megatron-LM.
    """

    samples: int
    tokens: int
    local: int
    tokens_first: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """What is split over the `n_ranks` ranks of mesh dimension `group`: parameters by name, and the tokens if given.

    `inputs` splits tensors that are there from the beginning (by id): then every rank has samples or tokens of its own, and
    gradients of parameters stay sums over ranks, which replicas reduce.
    """

    group: str
    n_ranks: int
    parameters: Mapping[str, Shard]
    sequence: TokenSplit | None = None
    inputs: Mapping[int, Shard] = field(default_factory=dict)


def shard_graph(graph: Graph, split: Split) -> Graph:
    """The local graph. Raises InfeasiblePlanError naming the op and module that cannot be split."""
    return Sharding(graph, split).run()


@dataclass(slots=True)
class _State:
    shard: dict[int, Shard] = field(default_factory=dict)  # by tensor id
    partial: set[int] = field(default_factory=set)  # by storage
    specs: dict[int, dict[int, TensorSpec]] = field(default_factory=dict)  # storage -> tensors seen in it
    moved: dict[int, int] = field(default_factory=dict)  # storage -> the storage that holds its contents now
    values: Values = field(default_factory=Values)
    gathered: dict[tuple[int, str, bool, str], int] = field(
        default_factory=dict
    )  # value and where it is whole -> storage
    late: dict[int, LateSum] = field(default_factory=dict)  # by the result's storage
    fraction: dict[int, tuple[int, int]] = field(default_factory=dict)  # storage -> (local, full)


class Sharding:
    """One pass over a graph."""

    def __init__(self, graph: Graph, split: Split) -> None:
        self.graph, self.split = graph, split
        self.state = _State()
        self.ops: list[Op] = []
        self.end_of: list[int] = []  # last new op of each old one
        self.begin_of: list[int] = []
        self.new: list[Storage] = []
        self.op: Op = graph.ops[0]
        self.whole: dict[int, int] = {}  # of the current op: tensor -> gathered storage
        self.local: dict[tuple[int, Shard | None, int], TensorSpec] = {}
        self.next_id = FIRST_NEW
        self.unsummed: dict[int, TensorSpec] = {}  # parameter gradients to be summed after backward
        self.modules: dict[str, Shard] = {}
        self.seeds = dict(split.inputs)
        self.grad_ops = {parameter.grad_op for parameter in graph.parameters}
        self.last_use: dict[int, int] = {}
        self.held: dict[int, int] = {}  # storages read later than in the graph: storage -> new op
        for parameter in graph.parameters:
            shard = split.parameters.get(parameter.name)
            if shard is not None:
                self._put(parameter.tensor, shard)
                self.modules[parameter.name.removesuffix(".weight")] = shard

    def run(self) -> Graph:
        """All ops; then parameters and storages at their local sizes."""
        optimizing = False
        for op in self.graph.ops:
            self.op, self.whole = op, {}
            for spec in op.inputs:
                if spec.id in self.seeds:
                    self._put(spec, self.seeds.pop(spec.id))
            self.begin_of.append(len(self.ops))
            if op.phase == "optimizer" and not optimizing:
                optimizing = True
                self._sum_gradients()
            self._step(op)
            self.end_of.append(len(self.ops) - 1)
        return replace(
            self.graph,
            ops=tuple(op if op.id == i else op.at(i) for i, op in enumerate(self.ops)),
            parameters=tuple(self._parameter(p) for p in self.graph.parameters),
            storages=self._storages(),
        )

    def _step(self, op: Op) -> None:
        if self._comes_late(op):
            return
        if not self._touches_split(op):
            self.ops.append(op)
            return
        if op.name in SAME_TENSOR:
            outputs = [self.of(op.inputs[0])] * len(op.outputs)
        else:
            outputs = list((_RULES.get(op.name) or rule_of(op))(op, self))
        inputs = tuple([self._input(spec) for spec in op.inputs])
        self.state.values.follow(op)
        for spec, shard in zip(op.outputs, outputs, strict=True):
            self._put(spec, shard)
        results = tuple([self._local(spec, self.state.shard.get(spec.id)) for spec in op.outputs])
        local = op if inputs == op.inputs and results == op.outputs else resized(op, inputs, results, len(self.ops))
        if op.name == "aten.addmm" and self.is_partial(op.outputs[0]):
            self._row_parallel(local)
        else:
            self.ops.append(local)

    def _touches_split(self, op: Op) -> bool:
        shard, partial = self.state.shard, self.state.partial
        for spec in op.inputs:
            if spec.id in shard or spec.storage in partial:
                return True
        return op.module in self.modules and bool(op.inputs)

    def _comes_late(self, op: Op) -> bool:
        """Whether an addition waits for further sums; what other ops touch is added now."""
        late = self.state.late
        if adds_sum(op) and op.id not in self.grad_ops and not self.sums_stay():
            for one, other in (op.inputs, op.inputs[::-1]):
                if not self.is_partial(other) or self.is_partial(one) or not self._ends(other, op):
                    continue
                if one.storage in late and other.storage not in late and self._ends(one, op):
                    self._join(late.pop(one.storage), op, other)
                    return True
                if one.storage not in late and self.of(one) == self._completed(other):
                    self._put(op.outputs[0], self.of(one))
                    late[op.outputs[0].storage] = LateSum(op=op, complete=one, partial=other, result=op.outputs[0])
                    return True
        for storage in {spec.storage for spec in (*op.inputs, *op.outputs)}.intersection(late):
            self._settle(late.pop(storage))
        return False

    def _join(self, late: LateSum, op: Op, other: TensorSpec) -> None:
        partial, more = (self._local(spec, self.state.shard.get(spec.id)) for spec in (late.partial, other))
        self.ops.append(late.joined(op, partial, more))
        self.state.partial.discard(other.storage)
        self._put(op.outputs[0], self.state.shard.get(late.result.id))
        self.state.late[op.outputs[0].storage] = replace(late, result=op.outputs[0])

    def _settle(self, late: LateSum) -> None:
        self.complete(late.partial)
        specs = [self._local(s, self.state.shard.get(s.id)) for s in (late.complete, late.partial, late.result)]
        self.ops.append(late.addition(*specs))
        self.held |= dict.fromkeys((late.complete.storage, late.partial.storage), len(self.ops) - 1)

    def _ends(self, spec: TensorSpec, op: Op) -> bool:
        """Whether no later op reads what a tensor holds now."""
        if not self.last_use:
            self.last_use = {s.storage: o.id for o in self.graph.ops for s in o.inputs}
        return spec.storage == op.outputs[0].storage or self.last_use[spec.storage] <= op.id

    def _row_parallel(self, op: Op) -> None:
        """The bias is added once, after the sum over ranks."""
        bias, product = op.inputs[0], op.outputs[0]
        self.ops.append(replace(op, name="aten.mm", inputs=op.inputs[1:], input_names=("self", "mat2")))
        self.complete(self.op.outputs[0])
        product = self._local(self.op.outputs[0], self.state.shard.get(product.id))
        self.ops.append(
            replace(
                op, name="aten.add_", overload="Tensor", inputs=(product, bias), input_names=("self", "other"),
                outputs=(product,), attrs={},
            )
        )  # fmt: skip

    # What rules ask (shard_rules.Splits).

    def of(self, spec: TensorSpec) -> Shard | None:
        """The split of a tensor; none of one gathered for the current op."""
        return None if spec.id in self.whole else self.state.shard.get(spec.id)

    def is_partial(self, spec: TensorSpec) -> bool:
        """Whether the tensor is still to be summed."""
        return spec.storage in self.state.partial

    def sums_stay(self) -> bool:
        """Whether replicas reduce what is left to be summed."""
        return bool(self.split.inputs)

    def mark_partial(self, spec: TensorSpec) -> None:
        """The op leaves this output to be summed."""
        self.state.partial.add(spec.storage)

    def adopt(self, spec: TensorSpec, shard: Shard) -> None:
        """A state tensor turns out to be split."""
        self._put(spec, shard)

    def vocabulary(self, op: Op) -> Shard | None:
        """The split of the embedding weight that the op's module owns."""
        return self.modules.get(op.module)

    def complete(self, spec: TensorSpec, *, rows: bool = False) -> None:
        """Sums a tensor over the group: scattered by tokens with sequence parallelism, whole otherwise.

        `rows`: its first dimension is made of tokens in some order, as that of a mixture's rows is.
        """
        if spec.storage not in self.state.partial:
            return
        self.state.partial.discard(spec.storage)
        sequence = self.split.sequence
        local = self._local(spec, self.state.shard.get(spec.id))
        found = self._completed(spec)
        if rows and sequence is not None:
            outer = 1 if sequence.tokens_first else sequence.samples
            found = Shard(dim=0, full=sequence.tokens, local=sequence.local, outer=outer, kind="sequence")
        if found is None:
            self._emit("all_reduce", (local,), (local,), local.bytes, "partial sums")
            return
        storage = self._fresh(spec.storage, -(-local.bytes * found.local // found.full))
        self.state.moved[spec.storage] = storage
        for seen in {**self.state.specs.get(spec.storage, {}), spec.id: spec}.values():
            self._put(seen, found if rows else self._completed(seen))
        scattered = self._local(spec, self.state.shard.get(spec.id))
        self._emit("reduce_scatter", (local,), (scattered,), local.bytes, "partial sums")

    def _completed(self, spec: TensorSpec) -> Shard | None:
        """The split that a sum over the group has afterwards."""
        return None if self.split.sequence is None else _rows(self.split.sequence, spec)

    def gather(self, spec: TensorSpec, *, keep: bool = False) -> None:
        """Collects a tensor whole for this op and those of its layer in the same part of the iteration (`keep`: of all of it).

        As modules do that gather what goes into them (torch's PrepareModuleInput; Megatron-LM's one product of query, key and
        value), forward and again in backward (Korthikanti et al. 2022, arXiv:2205.05198, section 4.2.2).
        """
        where = ("kept", False, "") if keep else (self.op.phase, self.op.recompute, layer_of(self.op.module))
        key = (self.state.values.of(spec), *where)
        storage = self.state.gathered.get(key)
        shard = self.state.shard[spec.id]
        if storage is None:
            storage = self.state.gathered[key] = self._fresh(spec.storage, spec.bytes)
            whole = replace(spec, strides=row_major(spec.shape), storage=storage)
            self._emit("all_gather", (self._local(spec, shard),), (whole,), spec.bytes, "tokens")
        self.whole[spec.id] = storage

    def exchange_rows(self, spec: TensorSpec, purpose: str) -> None:
        """One fp32 number for each row, summed or maximised over the group."""
        shape = spec.shape[:-1]
        storage = self._fresh(spec.storage, 4 * spec.n_elems // spec.shape[-1])
        rows = TensorSpec(id=self._number(), shape=shape, dtype="float32", strides=row_major(shape), storage=storage)
        source = self._local(spec, self.state.shard.get(spec.id))
        self._emit("all_reduce", (source, rows), (rows, source), rows.bytes, purpose)

    # Bookkeeping.

    def _sum_gradients(self) -> None:
        """Gradients that every rank has a share of (norms and biases under sequence parallelism): one all-reduce."""
        specs = [spec for spec in self._gradients() if spec.storage in self.state.partial]
        if not specs:
            return
        self.state.partial -= {spec.storage for spec in specs}
        if self.split.inputs:
            return
        self._emit("all_reduce", tuple(specs), tuple(specs), sum(s.bytes for s in specs), "gradients of shared weights")

    def _gradients(self) -> list[TensorSpec]:
        found: dict[int, TensorSpec] = {}
        for parameter in self.graph.parameters:
            if parameter.grad_op is not None:
                for spec in self.graph.ops[parameter.grad_op].outputs:
                    found[spec.storage] = spec
        return list(found.values())

    def _emit(
        self, name: str, inputs: tuple[TensorSpec, ...], outputs: tuple[TensorSpec, ...], n_bytes: int, purpose: str
    ) -> None:
        self.ops.append(
            Op(
                id=len(self.ops),
                name=f"perfmodel.{name}",
                inputs=inputs,
                input_names=("self",) * len(inputs),
                outputs=outputs,
                attrs={"group": self.split.group, "bytes": n_bytes, "purpose": purpose},
                module=self.op.module,
                phase="backward" if self.op.phase == "optimizer" else self.op.phase,
                recompute=self.op.recompute,
            )
        )

    def _put(self, spec: TensorSpec, shard: Shard | None) -> None:
        self.state.specs.setdefault(spec.storage, {})[spec.id] = spec
        if shard is None:
            self.state.shard.pop(spec.id, None)
            return
        self.state.shard[spec.id] = shard
        if spec.storage not in self.state.moved:
            size = spec.shape[shard.dim]
            self.state.fraction[spec.storage] = (local_size(shard, size), size)

    def _input(self, spec: TensorSpec) -> TensorSpec:
        whole = self.whole.get(spec.id)
        if whole is not None:
            return replace(spec, storage=whole)
        shard = self.state.shard.get(spec.id)
        return self._local(spec, shard)

    def _local(self, spec: TensorSpec, shard: Shard | None) -> TensorSpec:
        storage = self.state.moved.get(spec.storage, spec.storage)
        if shard is None and storage == spec.storage:
            return spec
        key = (spec.id, shard, storage)
        if key not in self.local:
            found = local_spec(spec, shard)
            self.local[key] = found if storage == found.storage else replace(found, storage=storage)
        return self.local[key]

    def _number(self) -> int:
        self.next_id += 1
        return self.next_id

    def _fresh(self, like: int, n_bytes: int) -> int:
        """A storage born here that dies with the storage it comes from (or with the phase, if that outlives it)."""
        number = self._number()
        self.new.append(Storage(id=number, bytes=n_bytes, born=len(self.ops), dies=like, kind="activation"))
        return number

    def _parameter(self, parameter: Parameter) -> Parameter:
        tensor = self._local(parameter.tensor, self.split.parameters.get(parameter.name))
        grad_op = None if parameter.grad_op is None else self.end_of[parameter.grad_op]
        return replace(parameter, tensor=tensor, grad_op=grad_op)

    def _storages(self) -> tuple[Storage, ...]:
        n_old, n_new = len(self.graph.ops), len(self.ops)

        def moved(op: int) -> int:
            return op if op < 0 else n_new if op >= n_old else self.end_of[op]

        found = []
        for storage in self.graph.storages:
            local, full = self.state.fraction.get(storage.id, (1, 1))
            dies = max(moved(storage.dies), self.held.get(storage.id, -1))
            found.append(replace(storage, bytes=-(-storage.bytes * local // full), born=moved(storage.born), dies=dies))
        last: dict[int, int] = {}
        for number, op in enumerate(self.ops):
            for spec in (*op.inputs, *op.outputs):
                if spec.storage > FIRST_NEW:
                    last[spec.storage] = number
        fresh = [replace(s, dies=last.get(s.id, s.born)) for s in self.new]
        return (*self._ended(found, last), *fresh)

    def _ended(self, storages: list[Storage], last: Mapping[int, int]) -> list[Storage]:
        """Sums that were scattered are free once scattered: what follows reads the scattered part."""
        born = {storage.id: storage.born for storage in self.new}
        return [
            replace(s, dies=born[self.state.moved[s.id]]) if s.id in self.state.moved else s for s in storages
        ]  # fmt: skip


def _rows(sequence: TokenSplit, spec: TensorSpec) -> Shard | None:
    """The split of a tensor by tokens; None if it does not begin with them (or their product)."""
    shape, samples, tokens = spec.shape, sequence.samples, sequence.tokens
    if len(shape) < 2 or shape[-1] == 1:
        return None
    split = partial(Shard, full=tokens, local=sequence.local, kind="sequence")
    if len(shape) > 2:
        dims = {(samples, tokens): 1, (tokens, samples): 0}
        if sequence.tokens_first:
            dims = dict(reversed(dims.items()))  # which of two equal pairs is meant
        found = dims.get((shape[0], shape[1]))
        return None if found is None else split(dim=found)
    outer = 1 if sequence.tokens_first else samples
    merged = [dim for dim, size in enumerate(shape) if size == samples * tokens]
    if spec.is_contiguous and shape[0] != samples * tokens:
        return None  # as many features as tokens
    return split(dim=merged[0], outer=outer) if merged else None
