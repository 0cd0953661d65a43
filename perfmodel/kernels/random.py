"""Random numbers and dropout: Philox generators that write (and for dropout read) each element once."""

from __future__ import annotations

from perfmodel.graph import Op
from perfmodel.kernels.copy import moved, total_bytes, touched_bytes
from perfmodel.kernels.index import INDEX_BYTES, sort_calls
from perfmodel.kernels.registry import KernelCall, kernel_rule

Calls = tuple[KernelCall, ...]


@kernel_rule("aten.rand", "aten.rand_like", "aten.randn", "aten.randn_like", "aten.randint", "aten.randint_like",
             "aten.uniform_", "aten.uniform", "aten.normal_", "aten.normal", "aten.random_", "aten.exponential_",
             "aten.geometric_", "aten.cauchy_", "aten.log_normal_")  # fmt: skip
def generate(op: Op) -> Calls:
    """Writes every element once; the old values are not read."""
    return moved("random", 0, op.outputs or op.inputs[:1])


@kernel_rule("aten.bernoulli", "aten.bernoulli_")
def bernoulli(op: Op) -> Calls:
    """Writes every element once; reads the probabilities where these are a tensor."""
    is_tensor = op.name == "aten.bernoulli" or op.arg("p") is not None
    return moved("random", touched_bytes(op.inputs[-1]) if is_tensor else 0, op.outputs or op.inputs[:1])


@kernel_rule("aten.native_dropout", "aten._fused_dropout")
def dropout(op: Op) -> Calls:
    """Reads the input, writes the output and a mask of one byte an element: one compare and one multiply."""
    return moved("random", total_bytes(op.inputs), op.outputs, flops=2 * op.inputs[0].n_elems)


@kernel_rule("aten.native_dropout_backward", "aten._masked_scale")
def dropout_backward(op: Op) -> Calls:
    """Reads gradient and mask, writes the input's gradient: two multiplies an element."""
    return moved("copy", total_bytes(op.inputs), op.outputs, flops=2 * op.inputs[0].n_elems)


@kernel_rule("aten.randperm")
def permutation(op: Op) -> Calls:
    """Random keys are sorted with their positions."""
    n_elems = op.outputs[0].n_elems
    keys = moved("random", 0, op.outputs[0])
    return (*keys, *sort_calls(n_elems, key_bytes=INDEX_BYTES, value_bytes=INDEX_BYTES))


@kernel_rule("aten.multinomial")
def multinomial(op: Op) -> Calls:
    """Without replacement: exponential noise, a division and a top-k; priced as one pass over the probabilities each."""
    weights = op.inputs[0]
    noise = moved("random", 0, weights)
    divided = moved("copy", 2 * weights.bytes, weights, flops=weights.n_elems)
    return (*noise, *divided, *moved("scan", weights.bytes, op.outputs[0]))
