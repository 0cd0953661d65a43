"""How operators carry splits from inputs to outputs: one rule an operator, by name.

A rule gets the op and a `Splits` and gives the split of each output. Where an operator needs a tensor whole, or one that is
still a sum over ranks complete, the rule asks for it; that is where communication comes from.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

from perfmodel.graph import Op, TensorSpec
from perfmodel.plan.layout import Shard, reshaped
from perfmodel.plan.splits import Outputs, Rule, Splits, refuse


def reshape(op: Op, splits: Splits) -> Outputs:
    """Views that keep the logical order."""
    source = op.inputs[0]
    shard = splits.of(source)
    if shard is None:
        return [None] * len(op.outputs)
    found = reshaped(shard, source.shape, op.outputs[0].shape)
    if found is None:
        raise refuse(op, f"a view {source.shape} -> {op.outputs[0].shape} does not divide by the group")
    return [found]


def transpose(op: Op, splits: Splits) -> Outputs:
    """`t`, `transpose` and `permute`."""
    shard = splits.of(op.inputs[0])
    if shard is None:
        return [None]
    n = len(op.inputs[0].shape)
    if op.name == "aten.permute":
        order = [dim % n for dim in op.attrs["dims"]]
    else:
        first, second = (0, n - 1) if op.name == "aten.t" else (op.attrs["dim0"] % n, op.attrs["dim1"] % n)
        order = list(range(n))
        order[first], order[second] = order[second], order[first]
    return [shard.at(order.index(shard.dim))]


_CASTS = ("aten._to_copy", "aten.clone")  # a sum cast is the sum of what is cast


def pointwise(op: Op, splits: Splits) -> Outputs:
    """Each output element from the input elements at its place; a whole input is sliced, which costs nothing."""
    partial = [spec for spec in op.inputs if splits.is_partial(spec)]
    if partial and splits.sums_stay() and op.name in _CASTS:
        splits.mark_partial(op.outputs[0])
        return [None] * len(op.outputs)
    sums = op.name in ("aten.add", "aten.add_") and len(partial) == len(op.inputs) > 1
    if not sums:
        for spec in partial:
            splits.complete(spec)
    found = [_aligned(splits.of(spec), spec, op.outputs[0]) for spec in op.inputs]
    kinds = [shard for shard in found if shard is not None]
    if kinds and any((k.dim, k.kind) != (kinds[0].dim, kinds[0].kind) for k in kinds):
        for spec, shard in zip(op.inputs, found, strict=True):
            if shard is not None and shard.kind == "sequence":
                splits.gather(spec)
        kinds = [shard for shard in kinds if shard.kind == "weight"]
    if sums:
        splits.mark_partial(op.outputs[0])
    first = kinds[0] if kinds else None
    return [first if first and _holds(first, spec) else None for spec in op.outputs]


def _aligned(shard: Shard | None, spec: TensorSpec, to: TensorSpec) -> Shard | None:
    """The split by the output's dimensions (broadcasting aligns on the right)."""
    return None if shard is None else shard.at(shard.dim + len(to.shape) - len(spec.shape))


def _holds(shard: Shard, spec: TensorSpec) -> bool:
    return shard.dim < len(spec.shape) and spec.shape[shard.dim] > 1


def product(op: Op, splits: Splits) -> Outputs:
    """`mm`, `addmm`, `bmm`, `baddbmm`: split rows, columns or batch stay; a split inner dimension leaves a sum."""
    left, right = _factors(op)
    for spec in op.inputs:
        splits.complete(spec)
    n = len(left.shape)
    first, second = splits.of(left), splits.of(right)
    if n == 3 and first and second and first.dim == second.dim == 0:
        return _with_buffer(op, splits, first)
    inner_left = first is not None and first.dim == n - 1
    inner_right = second is not None and second.dim == n - 2
    if inner_left and inner_right and first is not None and second is not None and first.kind == second.kind:
        splits.mark_partial(op.outputs[0])
        return [None]
    kept = None
    for spec, shard, inner in ((left, first, inner_left), (right, second, inner_right)):
        if shard is None:
            continue
        if shard.kind == "sequence" and (inner or (first is not None and second is not None)):
            splits.gather(spec)
        elif inner:
            raise refuse(op, "one factor is split along the summed dimension, the other is not")
        elif kept is not None:
            raise refuse(op, "both factors are split")
        else:
            kept = shard
    return _with_buffer(op, splits, kept)


def _with_buffer(op: Op, splits: Splits, kept: Shard | None) -> Outputs:
    """A result's own shape is also that of the tensor it is added to (`baddbmm` into an empty buffer)."""
    added = op.arg("self") if op.name in ("aten.addmm", "aten.baddbmm") else None
    if kept is not None and added is not None and added.shape == op.outputs[0].shape and splits.of(added) is None:
        splits.adopt(added, kept)
    return [kept]


def _factors(op: Op) -> tuple[TensorSpec, TensorSpec]:
    matrices = [spec for spec, name in zip(op.inputs, op.input_names, strict=True) if name != "self"]
    if len(matrices) < 2:
        return op.inputs[0], op.inputs[1]
    return matrices[0], matrices[1]


def reduction(op: Op, splits: Splits) -> Outputs:
    """Sums and means: over the split dimension they leave a sum over ranks."""
    source = op.inputs[0]
    splits.complete(source)
    shard = splits.of(source)
    if shard is None:
        return [None] * len(op.outputs)
    n = len(source.shape)
    given = op.attrs.get("dim")
    listed = [given] if isinstance(given, int) else list(given or range(n))
    dims = {dim % n for dim in listed}
    if shard.dim in dims:
        splits.mark_partial(op.outputs[0])
        return [None]
    gone = 0 if op.attrs.get("keepdim") else sum(dim < shard.dim for dim in dims)
    return [shard.at(shard.dim - gone)]


def along_dim(op: Op, splits: Splits) -> Outputs:
    """Operators along one dimension, which must be whole: softmax, slices, cumulative sums."""
    for spec in op.inputs:
        splits.complete(spec)
    source = next((spec for spec in op.inputs if splits.of(spec) is not None), None)
    shard = splits.of(source) if source is not None else None
    if shard is None or source is None:
        return [None] * len(op.outputs)
    dim = int(op.attrs.get("dim", 0)) % len(op.outputs[0].shape)
    if shard.dim == dim:
        if op.name in _LOG_SOFTMAX:
            return _vocabulary_softmax(op, splits, shard)
        raise refuse(op, "works along the split dimension")
    return [shard] * len(op.outputs)


_LOG_SOFTMAX = ("aten._log_softmax", "aten._log_softmax_backward_data")


def _vocabulary_softmax(op: Op, splits: Splits, shard: Shard) -> Outputs:
    """Megatron-LM's vocab_parallel_cross_entropy: the rows' largest and their sums are reduced, the logits never move."""
    if op.name == "aten._log_softmax":
        splits.exchange_rows(op.inputs[0], "largest logits")
        splits.exchange_rows(op.inputs[0], "sums of exponentials")
    return [shard]


def last_dim(op: Op, splits: Splits) -> Outputs:
    """Operators along the last dimension."""
    return along_dim(replace(op, attrs={**op.attrs, "dim": -1}), splits)


def pick(op: Op, splits: Splits) -> Outputs:
    """`gather` and `scatter_add_`: along a split dimension each rank has its part; what is picked is a sum over ranks."""
    for spec in op.inputs:
        splits.complete(spec)
    shard = splits.of(op.inputs[0])
    if shard is None:
        return [None]
    if op.name != "aten.gather":
        return [shard]
    if shard.dim != int(op.attrs["dim"]) % len(op.inputs[0].shape):
        return [shard]
    splits.mark_partial(op.outputs[0])
    return [None]


def pieces(op: Op, splits: Splits) -> Outputs:
    """Cutting and joining: `split`, `chunk`, `cat`; along the split dimension each piece is split alike."""
    for spec in op.inputs:
        splits.complete(spec)
    shards = [splits.of(spec) for spec in op.inputs]
    shard = next((s for s in shards if s is not None), None)
    if shard is None:
        return [None] * len(op.outputs)
    dim = int(op.attrs.get("dim", 0)) % len(op.inputs[0].shape)
    if shard.dim != dim:
        return [shard] * len(op.outputs)
    if any(s is None for s in shards):
        raise refuse(op, "joins split and whole tensors")
    return [replace(shard, full=full, local=_part(op, shard, full)) for full in (s.shape[dim] for s in op.outputs)]


def _part(op: Op, shard: Shard, full: int) -> int:
    local, rest = divmod(full * shard.local, shard.full)
    if rest:
        raise refuse(op, f"a piece of {full} does not divide by the group")
    return local


def gated(op: Op, splits: Splits) -> Outputs:
    """Halves of the last dimension side by side become one; a split last dimension has a part of each half on a rank."""
    source = op.inputs[0]
    splits.complete(source)
    shard = splits.of(source)
    if shard is None or shard.dim < len(source.shape) - 1:
        return [shard]
    full = op.outputs[0].shape[-1]
    return [replace(shard, full=full, local=_part(op, shard, full))]


def select(op: Op, splits: Splits) -> Outputs:
    """`select` and `select_backward`: a dimension goes or comes back."""
    shard = splits.of(op.inputs[0])
    if shard is None:
        return [None]
    wide = op.inputs[0] if op.name == "aten.select" else op.outputs[0]
    dim = int(op.attrs["dim"]) % len(wide.shape)
    back = op.name != "aten.select"
    if shard.dim == dim and not back:
        if shard.kind != "sequence":
            raise refuse(op, "takes one element of the split dimension")
        splits.gather(op.inputs[0])
        return [None]
    return [shard.at(shard.dim + (1 if back else -1) * (shard.dim >= dim if back else shard.dim > dim))]


def layer_norm(op: Op, splits: Splits) -> Outputs:
    """Norms over the last dimension; split rows stay split, and weight gradients are then sums over ranks."""
    for spec in op.inputs:
        splits.complete(spec)
    shard = splits.of(op.inputs[0])
    if shard is None:
        return [None] * len(op.outputs)
    if shard.kind == "weight":
        raise refuse(
            op, "normalises a split dimension, so a column-parallel module before it has no row-parallel partner"
        )
    outputs: list[Shard | None] = []
    for spec in op.outputs:
        if len(spec.shape) == len(op.inputs[0].shape):
            outputs.append(shard)
        else:
            splits.mark_partial(spec)
            outputs.append(None)
    return outputs


def attention(op: Op, splits: Splits) -> Outputs:
    """Fused attention: heads (dimension 1 of query) are independent."""
    for spec in op.inputs:
        splits.complete(spec)
    shards = [s for s in map(splits.of, op.inputs) if s is not None]
    shard = next((s for s in shards if s.kind == "weight"), None)
    if shard is None and shards and all(s.dim == 2 for s in shards):
        return [shards[0] if len(spec.shape) > 2 else None for spec in op.outputs]  # tokens: a ring takes its place
    if shard is None:
        return [None] * len(op.outputs)
    if shard.dim != 1:
        raise refuse(op, "attention is split elsewhere than by heads")
    heads = {spec.shape[1] for spec in op.inputs if len(spec.shape) > 2}
    return [shard if len(spec.shape) > 2 and spec.shape[1] in heads else None for spec in op.outputs]


def embedding(op: Op, splits: Splits) -> Outputs:
    """A lookup in a part of the vocabulary leaves a sum over ranks; of split tokens in a whole table, split rows."""
    weight, indices = op.inputs[0], op.inputs[1]
    if splits.of(weight) is not None:
        splits.mark_partial(op.outputs[0])
        return [None]
    return [splits.of(indices)]


def embedding_backward(op: Op, splits: Splits) -> Outputs:
    """Gradient of a table: its own part from all tokens, or a sum over ranks from split tokens."""
    gradient = op.inputs[0]
    splits.complete(gradient)
    shard, vocabulary = splits.of(gradient), splits.vocabulary(op)
    if vocabulary is not None:
        if shard is not None:
            splits.gather(gradient)
        return [vocabulary]
    if shard is not None:
        splits.mark_partial(op.outputs[0])
    return [None]


def nll_loss(op: Op, splits: Splits) -> Outputs:
    """The loss of each row is summed over ranks where the vocabulary is split; its gradient stays split."""
    source = op.args("self")[0]
    shard = splits.of(source)
    if shard is None:
        return [None] * len(op.outputs)
    if op.name == "aten.nll_loss_backward":
        return [shard]
    if shard.kind == "sequence":
        return [None] * len(op.outputs)  # each rank has the loss of its tokens
    splits.exchange_rows(source, "logits of the targets")
    return [None] * len(op.outputs)


def lists(op: Op, splits: Splits) -> Outputs:
    """Operators on lists of tensors: what stands at the same place of each list and has the same shape is split alike."""
    counts = Counter(op.input_names)
    length = max(counts.values(), default=1)
    at: dict[str, int] = {}
    shards: list[Shard | None] = [None] * length
    shapes: list[tuple[int, ...]] = [()] * length
    for spec, name in zip(op.inputs, op.input_names, strict=True):
        place = at.get(name, 0)
        at[name] = place + 1
        splits.complete(spec)
        shard = splits.of(spec)
        if shard is not None and counts[name] == length:
            shards[place], shapes[place] = shard, spec.shape
    at = dict.fromkeys(counts, 0)
    for spec, name in zip(op.inputs, op.input_names, strict=True):
        place, at[name] = at[name], at[name] + 1
        shard = shards[place] if counts[name] == length else None
        if shard is not None and spec.shape == shapes[place] and splits.of(spec) is None:
            splits.adopt(spec, shard)
    return [shards[i % length] if spec.shape == shapes[i % length] else None for i, spec in enumerate(op.outputs)]


def _named(rule: Rule, *names: str) -> dict[str, Rule]:
    return {f"aten.{name}": rule for name in names}


def passed_on(op: Op, splits: Splits) -> Outputs:
    """What goes round a ring arrives as it left."""
    return [splits.of(spec) for spec in op.inputs]


RULES: Mapping[str, Rule] = {
    "perfmodel.send_recv": passed_on,
    **_named(reshape, "view", "_unsafe_view", "reshape", "unsqueeze", "squeeze", "flatten", "unflatten", "_reshape_alias"),
    **_named(transpose, "t", "transpose", "permute"),
    **_named(product, "mm", "addmm", "bmm", "baddbmm"),
    **_named(reduction, "sum", "mean", "amax", "amin"),
    **_named(along_dim, "_softmax", "_softmax_backward_data", "_log_softmax", "_log_softmax_backward_data"),
    **_named(along_dim, "slice", "slice_backward", "cumsum", "constant_pad_nd"),
    "perfmodel.causal_softmax": last_dim,
    "perfmodel.causal_softmax_backward": last_dim,
    **_named(pick, "gather", "scatter_add_"),
    **_named(pieces, "split", "split_with_sizes", "chunk", "cat"),
    **_named(select, "select", "select_backward"),
    **_named(layer_norm, "native_layer_norm", "native_layer_norm_backward", "_fused_rms_norm", "_fused_rms_norm_backward"),
    "perfmodel.swiglu": gated,
    **_named(embedding, "embedding"),
    **_named(embedding_backward, "embedding_dense_backward"),
    **_named(nll_loss, "nll_loss_forward", "nll_loss_backward"),
    **_named(
        attention, "_scaled_dot_product_flash_attention", "_scaled_dot_product_flash_attention_backward",
        "_scaled_dot_product_efficient_attention", "_scaled_dot_product_efficient_attention_backward",
    ),
}  # fmt: skip
# Operators whose outputs have their inputs' shape (or broadcast to it) and no rule of their own.
_POINTWISE = """
add add_ sub sub_ mul mul_ div div_ pow neg exp tanh tanh_backward sigmoid sigmoid_backward silu silu_backward gelu
gelu_backward relu relu_ threshold_backward where masked_fill masked_fill_ _to_copy clone copy_ contiguous expand ones_like
zeros_like empty_like full_like native_dropout native_dropout_backward dropout rsqrt sqrt sqrt_ reciprocal cos sin le lt ge gt
eq ne logical_and logical_or bitwise_and bitwise_or rsub lerp_ addcmul_ addcdiv_ abs maximum minimum erf log log1p clamp
fill_ zero_ mish square
"""
_FUSED = (
    "bias_gelu",
    "bias_gelu_backward",
    "bias_dropout_add",
    "bias_dropout_backward",
    "rotary",
    "swiglu_backward",
)  # of Megatron-LM; fmt: skip
POINTWISE = frozenset((*(f"aten.{name}" for name in _POINTWISE.split()), *(f"perfmodel.{name}" for name in _FUSED)))
SAME_TENSOR = frozenset({"aten.detach", "aten.alias"})


def rule_of(op: Op) -> Rule:
    """The rule of an op. Raises InfeasiblePlanError where there is none."""
    found = RULES.get(op.name)
    if found is not None:
        return found
    if op.name in POINTWISE:
        return pointwise
    if "foreach" in op.name or "fused_" in op.name:
        return lists
    raise refuse(op, "there is no rule for how this operator carries a split")
