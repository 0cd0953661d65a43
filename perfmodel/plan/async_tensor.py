"""Asynchronous tensor parallelism: products cut by rows, so that what comes or goes travels while the next piece is computed.

As torch's `fused_all_gather_matmul` and `fused_matmul_reduce_scatter` do (torch.distributed._symmetric_memory; Wang et al.
2023, ASPLOS, "Overlap Communication with Dependent Computation via Decomposition"): of `n` ranks each begins with the rows
that it has while the next ones arrive; of a product that is to be scattered each piece leaves for its rank while the next is
computed, and what arrived is summed at the end. (n - 1) / n of the bytes move, as by the collectives that they replace. All
products of one gathered matrix are computed piece by piece together, and come before what stood between them (the op takes a
list of right factors, and torch._inductor.fx_passes.micro_pipeline_tp raises what these need above it); what else reads the
gathered matrix follows. A collective without such a product beside it stays as it is.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from perfmodel.graph import Graph, Op, Storage, TensorSpec
from perfmodel.plan.layout import row_major

FIRST_PIECE = 1 << 50  # ids and storages of pieces; beyond every other id of a local graph
_VIEWS = frozenset({"aten.view", "aten._unsafe_view", "aten.reshape", "aten.t", "aten.transpose", "aten.detach"})
_PRODUCTS = frozenset({"aten.mm", "aten.addmm"})
_EARLY = _VIEWS | {"aten._to_copy"}  # what may come before a gather: views and casts of weights


def overlapped(graph: Graph, n_ranks: int) -> Graph:
    """The local graph of a tensor-parallel rank with gathers and scatters beside products taken apart."""
    return _Apart(graph, n_ranks).graph()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Match:
    """A collective at `place` with its products (places); with a gather also what these need and comes before it."""

    place: int
    products: tuple[int, ...]
    before: tuple[int, ...] = ()


class _Apart:
    """One pass over a graph; `overlapped` is the only user."""

    def __init__(self, graph: Graph, n_ranks: int) -> None:
        self.source, self.n = graph, n_ranks
        self.next_id = FIRST_PIECE
        self.last_use = _last_uses(graph.ops)

    def graph(self) -> Graph:
        """All ops; places of gradients and lifetimes move along."""
        ops: list[Op] = []
        source = self.source.ops
        end: list[int] = [-1] * len(source)
        sums: dict[int, Op] = {}  # in place of scatters
        for at, op in enumerate(source):
            if end[at] >= 0:
                continue  # it stands beside a gather before
            gathered, scattered = self._gathered(at), self._scattered(at)
            together: tuple[int, ...] = (at,)
            if gathered is not None:
                ops += [*[source[i] for i in gathered.before], *self._gather(gathered)]
                together = (at, *gathered.before, *gathered.products)
            elif scattered is not None:
                pieces, sums[scattered.place] = self._scatter(at, scattered)
                ops += pieces
            else:
                ops.append(sums.get(at, op))
            for i in together:
                end[i] = len(ops) - 1
        return replace(
            self.source,
            ops=tuple(replace(op, id=i) for i, op in enumerate(ops)),
            parameters=tuple(
                p if p.grad_op is None else replace(p, grad_op=end[p.grad_op]) for p in self.source.parameters
            ),
            storages=self._storages(ops, end),
        )

    def _storages(self, ops: Sequence[Op], end: Sequence[int]) -> tuple[Storage, ...]:
        """Where an op that ended a storage now comes before others that read it, the last of these ends it."""
        n_old, n_new = len(end), len(ops)
        last = _last_uses(ops)

        def moved(op: int) -> int:
            return op if op < 0 else n_new if op >= n_old else end[op]

        found = []
        for storage in self.source.storages:
            dies = moved(storage.dies)
            if 0 <= storage.dies < n_old:
                dies = max(dies, last.get(storage.id, dies))
            found.append(replace(storage, born=moved(storage.born), dies=dies))
        return tuple(found)

    def _gathered(self, at: int) -> _Match | None:
        """An all-gather of tokens and the products of what it gathers whose other factors are there by then."""
        ops = self.source.ops
        gather = ops[at]
        if gather.name != "perfmodel.all_gather" or gather.attrs["group"] != "tp":
            return None
        whole = gather.outputs[0]
        late = {whole.storage}  # storages written by the gather or after it
        early: list[int] = []
        products: list[int] = []
        for number in range(at + 1, self.last_use[whole.storage] + 1):
            op = ops[number]
            takes = op.name in _PRODUCTS and self._takes_rows(op, whole) and _pass(op) == _pass(gather)
            in_time = late.isdisjoint(spec.storage for spec in (_others(op) if takes else op.inputs))
            if takes and in_time:
                products.append(number)
            elif in_time and op.name in _EARLY:
                early.append(number)
                continue
            late.update(spec.storage for spec in op.outputs)
        if not products:
            return None
        return _Match(place=at, products=tuple(products), before=self._needed(early, products))

    def _needed(self, early: Sequence[int], products: Sequence[int]) -> tuple[int, ...]:
        """Of the ops that may come before a gather those that its products need, in order."""
        ops = self.source.ops
        wanted = {spec.id for number in products for spec in _others(ops[number])}
        found: list[int] = []
        for number in reversed(early):
            if wanted.intersection(spec.id for spec in ops[number].outputs):
                wanted.update(spec.id for spec in ops[number].inputs)
                found.append(number)
        return tuple(reversed(found))

    def _takes_rows(self, op: Op, whole: TensorSpec) -> bool:
        left = _left(op)
        return left.storage == whole.storage and left.is_contiguous and left.shape[0] % self.n == 0

    def _scattered(self, at: int) -> _Match | None:
        """A product whose result is scattered before anything else but views reads it."""
        ops = self.source.ops
        product = ops[at]
        if product.name != "aten.mm" or product.outputs[0].shape[0] % self.n:
            return None
        storage = product.outputs[0].storage
        for number in range(at + 1, len(ops)):
            op = ops[number]
            if op.phase != product.phase:
                return None
            if op.name in _VIEWS or all(spec.storage != storage for spec in (*op.inputs, *op.outputs)):
                continue
            if op.name == "perfmodel.reduce_scatter" and op.attrs["group"] == "tp":
                return _Match(place=number, products=(at,))
            return None
        return None

    def _gather(self, match: _Match) -> Iterator[Op]:
        ops = self.source.ops
        collective = ops[match.place]
        held = collective.inputs[0]
        for step in range(self.n):
            arriving = self._like(held)
            if step < self.n - 1:
                yield _send(collective, held, arriving)
            for product in (ops[number] for number in match.products):
                yield _piece(product, self.n, left_storage=held.storage, out_storage=product.outputs[0].storage)
            held = arriving

    def _scatter(self, at: int, match: _Match) -> tuple[list[Op], Op]:
        """The pieces of the product at a place with what they send, and the sum of what arrived, in place of the scatter."""
        product, collective = self.source.ops[at], self.source.ops[match.place]
        scattered = collective.outputs[0]
        made: list[Op] = []
        arrived = scattered
        for step in range(self.n):
            piece = _piece(product, self.n, left_storage=None, out_storage=self._number())
            made.append(piece)
            if step < self.n - 1:
                arrived = self._like(piece.outputs[0])
                made.append(_send(collective, piece.outputs[0], arrived))
        shape = (self.n, *scattered.shape)
        stacked = TensorSpec(
            id=self._number(), shape=shape, dtype=scattered.dtype, strides=row_major(shape), storage=arrived.storage
        )
        total = replace(
            collective, name="aten.sum", overload="dim_IntList", inputs=(stacked,), input_names=("self",),
            outputs=(scattered,), attrs={"dim": [0]},
        )  # fmt: skip
        return made, total

    def _number(self) -> int:
        self.next_id += 1
        return self.next_id

    def _like(self, spec: TensorSpec) -> TensorSpec:
        number = self._number()
        return replace(spec, id=number, storage=number, strides=row_major(spec.shape))


def _last_uses(ops: Sequence[Op]) -> dict[int, int]:
    """The last op that touches each storage."""
    return {spec.storage: number for number, op in enumerate(ops) for spec in (*op.inputs, *op.outputs)}


def _pass(op: Op) -> tuple[str, bool]:
    return op.phase, op.recompute


def _others(op: Op) -> list[TensorSpec]:
    """What a product reads besides its left factor."""
    left = _left(op)
    return [spec for spec in op.inputs if spec is not left]


def _left(op: Op) -> TensorSpec:
    return op.inputs[1] if op.name == "aten.addmm" else op.inputs[0]


def _piece(op: Op, n: int, *, left_storage: int | None, out_storage: int) -> Op:
    """The product of one of `n` equal runs of rows."""
    left = _left(op)
    rows = replace(left, shape=(left.shape[0] // n, *left.shape[1:]))
    if left_storage is not None:
        rows = replace(rows, storage=left_storage)
    out = op.outputs[0]
    inputs: Sequence[TensorSpec] = [rows if spec is left else spec for spec in op.inputs]
    result = replace(out, shape=(out.shape[0] // n, *out.shape[1:]), storage=out_storage)
    return replace(op, inputs=tuple(inputs), outputs=(result,))


def _send(collective: Op, sent: TensorSpec, received: TensorSpec) -> Op:
    """A step of the ring: this rank's rows to the next, those of the one before to this."""
    return replace(
        collective,
        name="perfmodel.send_recv",
        inputs=(sent,),
        input_names=("self",),
        outputs=(received,),
        attrs={**collective.attrs, "bytes": math.prod(sent.shape) * sent.itemsize_bytes},
    )
