"""Context parallelism: every rank has a part of each sample's tokens, and keys and values go round a ring.

Ring attention (Liu, Zaharia and Abbeel 2023, arXiv:2310.01889): a rank attends from its queries to its own keys and values
while the next ones arrive. Tokens are dealt in pairs of chunks (the first with the last), so that under a causal mask every
rank does the same: half of its own square, then half of each other (Megatron Core's context parallelism). Backward sends keys
and values round again, and with them the sums of their gradients, which end where they belong.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from perfmodel.errors import InfeasiblePlanError
from perfmodel.graph import Graph, Op, Storage, TensorSpec
from perfmodel.plan.layout import Shard, row_major
from perfmodel.plan.shard_graph import Split, shard_graph

FIRST_RING = 1 << 47  # ids of tensors and storages of rings; beyond those of a sharded graph
_FUSED = ("aten._scaled_dot_product_flash_attention", "aten._scaled_dot_product_efficient_attention")
_TOKENS = 2  # dimension of query, key and value


def context_parallel(graph: Graph, n_ranks: int) -> Graph:
    """The graph of one rank of `n_ranks` that share the tokens of each sample.

    Raises InfeasiblePlanError where attention is not one fused operator, or the tokens do not divide.
    """
    if n_ranks == 1:
        return graph
    fused = [op for op in graph.ops if op.name in _FUSED]
    spelled_out = any(
        "softmax" in op.name and op.phase == "forward" and len(op.inputs[0].shape) > _TOKENS for op in graph.ops
    )  # a router's scores have two dimensions
    if not fused or spelled_out:
        raise InfeasiblePlanError(
            f"context parallel: {graph.model} does not compute attention by one fused operator, allowed attention: sdpa in "
            "the model file; scores that are spelled out need all keys at once"
        )
    local = shard_graph(graph, Split(group="cp", n_ranks=n_ranks, parameters={}, inputs=_tokens(graph, n_ranks)))
    return _Ring(local, n_ranks).graph()


def _tokens(graph: Graph, n_ranks: int) -> dict[int, Shard]:
    """The split of the inputs that are looked up as (samples, tokens), by tensor."""
    inputs = {storage.id for storage in graph.storages if storage.kind == "input"}
    found = {
        op.inputs[1].id: op.inputs[1].shape
        for op in graph.ops
        if op.name == "aten.embedding" and op.phase == "forward" and op.inputs[1].storage in inputs
    }
    if not found or any(len(shape) != 2 or shape[1] % (2 * n_ranks) for shape in found.values()):
        raise InfeasiblePlanError(
            f"context parallel: looked-up inputs of shapes {sorted(found.values())}, allowed (samples, tokens) with tokens a "
            f"multiple of {2 * n_ranks}, two chunks a rank"
        )
    return {
        number: Shard(dim=1, full=shape[1], local=shape[1] // n_ranks, kind="sequence")
        for number, shape in found.items()
    }


class _Ring:
    """Puts rings in place of the fused attention of a local graph; `context_parallel` is the only user."""

    def __init__(self, graph: Graph, n_ranks: int) -> None:
        self.source, self.n_ranks = graph, n_ranks
        self.ops: list[Op] = []
        self.made: dict[int, int] = {}  # new storage -> its bytes
        self.next_id = FIRST_RING

    def graph(self) -> Graph:
        """All ops; places of gradients and lifetimes move along."""
        begin: list[int] = []
        end: list[int] = []
        for op in self.source.ops:
            begin.append(len(self.ops))
            if op.name in _FUSED:
                self.ops += self._forward(op)
            elif op.name.removesuffix("_backward") in _FUSED:
                self.ops += self._backward(op)
            else:
                self.ops.append(op)
            end.append(len(self.ops) - 1)
        n_old, n_new = len(self.source.ops), len(self.ops)
        moved = [
            replace(
                s,
                born=s.born if s.born < 0 else begin[s.born],
                dies=s.dies if s.dies < 0 else n_new if s.dies >= n_old else end[s.dies],
            )
            for s in self.source.storages
        ]
        return replace(
            self.source,
            ops=tuple(op if op.id == i else replace(op, id=i) for i, op in enumerate(self.ops)),
            parameters=tuple(
                p if p.grad_op is None else replace(p, grad_op=end[p.grad_op]) for p in self.source.parameters
            ),
            storages=(*moved, *self._new_storages()),
        )

    def _new_storages(self) -> Iterator[Storage]:
        first: dict[int, int] = {}
        last: dict[int, int] = {}
        for number, op in enumerate(self.ops):
            for spec in (*op.inputs, *op.outputs):
                if spec.storage in self.made:
                    first.setdefault(spec.storage, number)
                    last[spec.storage] = number
        return (Storage(id=s, bytes=n, born=first[s], dies=last[s]) for s, n in self.made.items() if s in first)

    def _forward(self, op: Op) -> Iterator[Op]:
        """Each step attends to what is here while the next keys and values come; outputs of later steps are merged in."""
        query, pair = _arg(op, "query"), [_arg(op, "key"), _arg(op, "value")]
        for step in range(self.n_ranks):
            following = pair
            if step < self.n_ranks - 1:
                following = [self._like(spec) for spec in pair]
                yield self._send(op, pair, following, "keys and values")
            outputs = (
                op.outputs if step == 0 else tuple(self._like(s) if len(s.shape) > _TOKENS else s for s in op.outputs)
            )
            swap = {"query": query, **dict(zip(("key", "value"), self._seen(op, pair, step), strict=True))}
            yield _attend(op, swap, outputs, step)
            if step:
                yield self._pointwise(op, "aten.lerp_", op.outputs[0], outputs[0])
            pair = following

    def _backward(self, op: Op) -> Iterator[Op]:
        """Keys and values go round again; the gradients of a rank's own ones are summed on their way round."""
        pair = [_arg(op, "key"), _arg(op, "value")]
        n_gradients = 3
        whole = op.outputs[:n_gradients]
        carried: list[TensorSpec] = []
        for step in range(self.n_ranks):
            following = pair
            if step < self.n_ranks - 1:
                following = [self._like(spec) for spec in pair]
                yield self._send(op, pair, following, "keys and values")
            gradients = [whole[0] if step == 0 else self._like(whole[0]), *(self._like(spec) for spec in whole[1:])]
            swap = dict(zip(("key", "value"), self._seen(op, pair, step), strict=True))
            yield _attend(op, swap, (*gradients, *op.outputs[n_gradients:]), step)
            if step:
                yield self._pointwise(op, "aten.add_", whole[0], gradients[0])
            for one, sum_here in zip(gradients[1:], carried, strict=False):
                yield self._pointwise(op, "aten.add_", one, sum_here)
            carried = list(whole[1:]) if step == self.n_ranks - 1 else [self._like(spec) for spec in whole[1:]]
            yield self._send(op, gradients[1:], carried, "gradients of keys and values")
            pair = following

    def _seen(self, op: Op, pair: list[TensorSpec], step: int) -> list[TensorSpec]:
        """What a step attends to: under a causal mask half of another rank's keys, all of them without."""
        if step == 0 or not op.attrs.get("is_causal"):
            return pair
        return [_half(spec) for spec in pair]

    def _send(self, op: Op, sent: list[TensorSpec], received: list[TensorSpec], purpose: str) -> Op:
        return replace(
            op,
            name="perfmodel.send_recv",
            overload="default",
            inputs=tuple(sent),
            input_names=("self",) * len(sent),
            outputs=tuple(received),
            attrs={"group": "cp", "bytes": sum(spec.bytes for spec in sent), "purpose": purpose},
        )

    def _pointwise(self, op: Op, name: str, into: TensorSpec, other: TensorSpec) -> Op:
        names = ("self", "other") if name == "aten.add_" else ("self", "end")
        return replace(
            op, name=name, overload="Tensor", inputs=(into, other), input_names=names, outputs=(into,), attrs={}
        )  # fmt: skip

    def _like(self, spec: TensorSpec) -> TensorSpec:
        """A new dense tensor of the same shape."""
        self.next_id += 1
        self.made[self.next_id] = spec.bytes
        return replace(spec, id=self.next_id, storage=self.next_id, strides=row_major(spec.shape))


def _arg(op: Op, name: str) -> TensorSpec:
    found = op.arg(name)
    if found is None:
        raise RuntimeError(f"{op.name} has no argument {name}")
    return found


def _half(spec: TensorSpec) -> TensorSpec:
    shape = (*spec.shape[:_TOKENS], spec.shape[_TOKENS] // 2, *spec.shape[_TOKENS + 1 :])
    return replace(spec, shape=shape)


def _attend(op: Op, swap: dict[str, TensorSpec], outputs: tuple[TensorSpec, ...], step: int) -> Op:
    """The fused call of one step: on the diagonal as the model says, without a mask elsewhere."""
    attrs = {**op.attrs}
    if step:
        attrs["is_causal"] = False
    if "max_k" in attrs and "key" in swap:
        attrs["max_k"], attrs["max_q"] = swap["key"].shape[_TOKENS], _arg(op, "query").shape[_TOKENS]
    inputs = tuple(swap.get(name, spec) for spec, name in zip(op.inputs, op.input_names, strict=True))
    return replace(op, inputs=inputs, outputs=outputs, attrs=attrs)
