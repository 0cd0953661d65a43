"""Megatron-style tensor parallelism of an extracted graph: which modules are split how, found by the names of their paths.

Column-parallel linears split their outputs, row-parallel ones their inputs (Shoeybi et al. 2019, arXiv:1909.08053); the token
embedding and the head split the vocabulary, padded as Megatron-LM pads it; with `sequence` the tokens are split between the
parallel regions (Korthikanti et al. 2022, arXiv:2205.05198).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase

from perfmodel.config.plan import COLUMN, ROW, VOCABULARY, TensorParallel
from perfmodel.errors import InfeasiblePlanError, suggest
from perfmodel.graph import Graph, Op, Parameter
from perfmodel.plan.async_tensor import overlapped
from perfmodel.plan.layout import Shard
from perfmodel.plan.shard_graph import Split, TokenSplit, shard_graph

# Megatron-LM's --make-vocab-size-divisible-by: the vocabulary is padded to a multiple of this times the group.
VOCABULARY_MULTIPLE = 128
EXPERT_DIMS = 3  # of a stack of weights (experts, outputs, inputs)


def tensor_parallel(graph: Graph, plan: TensorParallel, n_ranks: int) -> Graph:
    """The graph of one rank of a tensor-parallel group of `n_ranks`.

    Raises InfeasiblePlanError where a pattern finds no module or a module does not divide by the group.
    """
    if n_ranks == 1:
        return graph
    linears = {
        p.name.removesuffix(".weight"): p
        for p in graph.parameters
        if p.name.endswith(".weight") or len(p.tensor.shape) == EXPERT_DIMS
    }
    column = _matching(plan.column, linears, "column")
    row = _matching(plan.row, linears, "row")
    vocabulary = _matching(plan.vocabulary, linears, "vocabulary") if plan.vocabulary_parallel else []
    shards = dict(_vocabulary(graph, vocabulary, linears, n_ranks))
    shards |= dict(_split(graph, [m for m in column if m not in vocabulary], linears, (n_ranks, "column")))
    shards |= dict(_split(graph, [m for m in row if m not in vocabulary], linears, (n_ranks, "row")))
    sequence = _tokens(graph, n_ranks) if plan.sequence else None
    local = shard_graph(graph, Split(group="tp", n_ranks=n_ranks, parameters=shards, sequence=sequence))
    return overlapped(local, n_ranks) if plan.async_tp else local


def _matching(patterns: Sequence[str], linears: Mapping[str, Parameter], kind: str) -> list[str]:
    """Modules whose path ends as a pattern says.

    Raises InfeasiblePlanError if none does, or if one of the plan's own patterns (not the defaults) finds none.
    """
    found = [path for path in linears if any(_ends(path, pattern) for pattern in patterns)]
    idle = [pattern for pattern in patterns if not any(_ends(path, pattern) for path in found)]
    if not found or (idle and tuple(patterns) not in (COLUMN, ROW, VOCABULARY)):
        known = sorted({path.rpartition(".")[2] for path in linears})
        near = suggest(idle[0], known) if found else ""
        raise InfeasiblePlanError(
            f"tensor parallel: no module with a weight matches tensor_parallel.{kind} ({', '.join(idle)}); "
            f"the model's end in {', '.join(known[:12])}{near}"
        )
    return found


def _ends(path: str, pattern: str) -> bool:
    return fnmatchcase(path, pattern) or fnmatchcase(path, f"*.{pattern}")


def _split(
    graph: Graph, modules: Sequence[str], linears: Mapping[str, Parameter], how: tuple[int, str]
) -> Iterator[tuple[str, Shard]]:
    """The split of each linear's weight, and of a column-parallel one's bias."""
    n_ranks, kind = how
    biases = {p.name: p for p in graph.parameters if p.name.endswith(".bias")}
    first_use = _first_uses(graph)
    for path in modules:
        weight = linears[path].tensor
        if len(weight.shape) == EXPERT_DIMS:
            yield linears[path].name, _even(path, weight.shape, 1 if kind == "column" else 2, n_ranks)
            continue
        if len(weight.shape) != 2:
            raise InfeasiblePlanError(f"tensor parallel: {path}.weight has shape {weight.shape}, allowed a matrix")
        outputs_first = _is_transposed(graph, first_use, weight.storage)
        dim = 0 if outputs_first == (kind == "column") else 1
        yield linears[path].name, _even(path, weight.shape, dim, n_ranks)
        bias = biases.get(f"{path}.bias")
        if kind == "column" and bias is not None:
            yield bias.name, _even(path, bias.tensor.shape, 0, n_ranks)


def _even(path: str, shape: Sequence[int], dim: int, n_ranks: int) -> Shard:
    if shape[dim] % n_ranks:
        raise InfeasiblePlanError(
            f"tensor parallel: {path} has {shape[dim]} features to split, allowed a multiple of {n_ranks}"
        )
    return Shard(dim=dim, full=shape[dim], local=shape[dim] // n_ranks)


def _vocabulary(
    graph: Graph, modules: Sequence[str], linears: Mapping[str, Parameter], n_ranks: int
) -> Iterator[tuple[str, Shard]]:
    """Embeddings and heads: rows of the vocabulary, padded where they do not divide."""
    for path in modules:
        rows = linears[path].tensor.shape[0]
        local = (
            rows // n_ranks
            if rows % n_ranks == 0
            else -(-rows // (VOCABULARY_MULTIPLE * n_ranks)) * VOCABULARY_MULTIPLE
        )
        for parameter in graph.parameters:
            if parameter.name in (linears[path].name, f"{path}.bias"):
                yield parameter.name, Shard(dim=0, full=rows, local=local)


def _first_uses(graph: Graph) -> dict[int, Op]:
    """The first forward op that reads each storage, through conversions of its type."""
    found: dict[int, Op] = {}
    for op in graph.ops:
        if op.phase == "forward":
            for spec in op.inputs:
                found.setdefault(spec.storage, op)
    return found


def _is_transposed(graph: Graph, first_use: Mapping[int, Op], storage: int) -> bool:
    """Whether a weight is (outputs, inputs), as nn.Linear's, and not (inputs, outputs) as GPT-2's projections."""
    op = first_use.get(storage)
    while op is not None and op.name in ("aten._to_copy", "aten.detach"):
        storage = op.outputs[0].storage
        following = first_use.get(storage)
        op = None if following is op else following
    return op is not None and op.name in ("aten.t", "aten.transpose", "aten.permute")


def _tokens(graph: Graph, n_ranks: int) -> TokenSplit:
    """Samples and tokens, from the first lookup's indices."""
    lookup = next((op for op in graph.ops if op.name == "aten.embedding"), None)
    shape = lookup.inputs[1].shape if lookup is not None else ()
    if len(shape) != 2 or shape[1] % n_ranks:
        raise InfeasiblePlanError(
            f"sequence parallel: tokens of shape {shape}, allowed (samples, tokens) with tokens a multiple of {n_ranks}"
        )
    samples, tokens = shape
    turned = any(
        op.name == "aten.native_layer_norm" and op.inputs[0].shape[:2] == (tokens, samples) for op in graph.ops
    )
    return TokenSplit(
        samples=samples, tokens=tokens, local=tokens // n_ranks, tokens_first=turned and samples != tokens
    )
