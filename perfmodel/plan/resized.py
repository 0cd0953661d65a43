"""An op of a split graph at the sizes of one rank."""

from __future__ import annotations

from typing import Any

from perfmodel.graph import Op, TensorSpec

COLLECTIVE_OPS = ("perfmodel.all_reduce", "perfmodel.reduce_scatter", "perfmodel.all_gather", "perfmodel.send_recv",
                  "perfmodel.all_to_all")  # fmt: skip
_SIZED = ("size", "num_weights", "split_size")  # attributes that say sizes of tensors


def resized(op: Op, inputs: tuple[TensorSpec, ...], outputs: tuple[TensorSpec, ...], number: int) -> Op:
    """The op on tensors of other sizes, at its place among the local ops."""
    attrs = op.attrs
    if op.name in COLLECTIVE_OPS or any(name in attrs for name in _SIZED):
        attrs = _resized_attrs(op, inputs, outputs)
    return Op(
        id=number,
        name=op.name,
        overload=op.overload,
        inputs=inputs,
        input_names=op.input_names,
        outputs=outputs,
        attrs=attrs,
        module=op.module,
        phase=op.phase,
        recompute=op.recompute,
        host_sync=op.host_sync,
        stream=op.stream,
    )


def _resized_attrs(op: Op, inputs: tuple[TensorSpec, ...], outputs: tuple[TensorSpec, ...]) -> dict[str, Any]:
    attrs = dict(op.attrs)
    if "size" in attrs and outputs:
        attrs["size"] = list(outputs[0].shape)
    if op.name in COLLECTIVE_OPS:
        attrs["bytes"] = sum(spec.bytes for spec in inputs)
    if "num_weights" in attrs:
        attrs["num_weights"] = outputs[0].shape[0]
    if "split_size" in attrs:
        attrs["split_size"] = outputs[0].shape[int(attrs.get("dim", 0))]
    return attrs
