"""Events that torch's DistributedDataParallel adds to a backward pass.

For each dense gradient the reducer's hook copies it into its bucket, dividing by the number of ranks in the same kernel
(`mark_variable_ready_dense`); the last gradient of a bucket launches the bucket's all-reduce; the end of backward waits for
every bucket and, unless gradients are views of their buckets, copies each gradient back (`finalize_bucket_dense`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

from perfmodel.graph import ITEMSIZE_BYTES, Op, Parameter, TensorSpec
from perfmodel.plan.buckets import Bucket
from perfmodel.plan.events import Collective, Event, op_event

BUCKET_STORAGE = 1 << 41  # storages of buckets: this plus the bucket's number; beyond every storage of a graph
GRADIENT_STORAGE = 1 << 42  # storages of reduced gradients: this plus the parameter's tensor id
NARROW_STORAGE = BUCKET_STORAGE + (1 << 40)  # storages of compressed buckets: this plus the bucket's number
NARROW = {"fp16": "float16", "bf16": "bfloat16"}  # element types of compression hooks
MAX_COPIES = 8192  # parameters whose copies are remembered: the same op object is priced once


def bucket_insertions(
    buckets: Sequence[Bucket],
    ranks: tuple[int, ...],
    first_instance: int,
    compression: str = "none",
    *,
    first: int = 0,
) -> dict[int, list[Event]]:
    """Events to insert after each op (by op id): bucket copies as gradients become ready, all-reduces of full buckets.

    With `compression` (`fp16`, `bf16`) a full bucket is cast and divided, travels narrow and is cast back beside compute, as
    torch's `fp16_compress_hook` and `bf16_compress_hook` do. Buckets are numbered from `first`.
    """
    inserted: dict[int, list[Event]] = {}
    for number, bucket in enumerate(buckets, first):
        for parameter in bucket.parameters:
            if parameter.grad_op is not None:
                inserted.setdefault(parameter.grad_op, []).append(copy_in(parameter, number))
    for number, bucket in enumerate(buckets, first):
        events = reduction(bucket, number, ranks, first_instance + number, compression)
        inserted.setdefault(bucket.ready_op, []).extend(events)
    return inserted


def reduction(
    bucket: Bucket, number: int, ranks: tuple[int, ...], instance: int, compression: str = "none"
) -> list[Event]:
    """Events by which a full bucket is reduced: its all-reduce; with `compression`, between casts."""
    reduce = _all_reduce(bucket, number, ranks, instance)
    narrow = NARROW.get(compression)
    return [reduce] if narrow in (None, bucket.dtype) else _compressed(bucket, number, reduce, str(narrow))


def copy_back(buckets: Sequence[Bucket], *, as_views: bool, first: int = 0) -> list[Event]:
    """Events between backward and optimizer: each reduced gradient leaves its bucket.

    With views there is nothing to copy, but the compute stream still waits for every bucket: a zero-work op says so.
    """
    if as_views:
        return [bucket_wait(number) for number in range(first, first + len(buckets))]
    return [copy_out(p, number) for number, bucket in enumerate(buckets, first) for p in bucket.parameters]


def _all_reduce(bucket: Bucket, number: int, ranks: tuple[int, ...], instance: int) -> Event:
    storage = frozenset({BUCKET_STORAGE + number})
    collective = Collective(
        op="all_reduce",
        bytes=bucket.bytes,
        ranks=ranks,
        dtype=bucket.dtype,
        instance=instance,
        purpose=f"gradient bucket {number}",
    )
    return Event(stream="comm", phase="backward", collective=collective, reads=storage, writes=storage)


def _compressed(bucket: Bucket, number: int, reduce: Event, narrow: str) -> list[Event]:
    """The bucket's cast and division, its all-reduce at the narrow type, and the cast back on a stream of its own."""
    storage = BUCKET_STORAGE + number
    n_elems = bucket.bytes // ITEMSIZE_BYTES[bucket.dtype]
    wide = TensorSpec(id=storage, shape=(n_elems,), dtype=bucket.dtype, strides=(1,), storage=storage)
    thin = TensorSpec(
        id=NARROW_STORAGE + number, shape=(n_elems,), dtype=narrow, strides=(1,), storage=NARROW_STORAGE + number
    )
    cast, divide, back = _casts(wide, thin)
    if reduce.collective is None:
        raise RuntimeError("a bucket is reduced by a collective")
    travels = frozenset({thin.storage})
    collective = replace(reduce.collective, bytes=thin.bytes, dtype=narrow)
    reduce = replace(reduce, collective=collective, reads=travels, writes=travels)
    return [op_event(cast), op_event(divide), reduce, op_event(back)]


@lru_cache(maxsize=MAX_COPIES)
def _casts(wide: TensorSpec, thin: TensorSpec) -> tuple[Op, Op, Op]:
    def op(name: str, inputs: tuple[TensorSpec, ...], output: TensorSpec, **more: Any) -> Op:
        names = ("self", "src")[: len(inputs)]
        return Op(id=-1, name=name, inputs=inputs, input_names=names, outputs=(output,), phase="backward", **more)

    cast = op("aten._to_copy", (wide,), thin)
    divide = op("aten.div_", (thin,), thin, overload="Scalar", attrs={"other": 1.0})
    return cast, divide, op("aten.copy_", (wide, thin), wide, stream="copy")


def _spec(parameter: Parameter, storage: int) -> TensorSpec:
    spec = parameter.tensor
    return TensorSpec(id=storage, shape=spec.shape, dtype=spec.dtype, strides=spec.strides, storage=storage)


@lru_cache(maxsize=MAX_COPIES)
def copies(parameter: Parameter) -> tuple[Op, Op]:
    """The copies of a gradient into its bucket and back; which bucket is said by the events' storages."""
    gradient = _spec(parameter, GRADIENT_STORAGE + parameter.tensor.id)
    in_bucket = _spec(parameter, BUCKET_STORAGE + parameter.tensor.id)
    module = parameter.name.rpartition(".")[0]
    into = Op(
        id=-1,
        name="aten.mul",
        overload="out",
        inputs=(gradient,),
        input_names=("self",),
        outputs=(in_bucket,),
        module=module,
        phase="backward",
    )
    back = Op(
        id=-1,
        name="aten.copy_",
        inputs=(gradient, in_bucket),
        input_names=("self", "src"),
        outputs=(gradient,),
        module=module,
        phase="backward",
    )
    return into, back


def _storages(parameter: Parameter, number: int) -> tuple[frozenset[int], frozenset[int]]:
    """The gradient's storage and its bucket's."""
    return frozenset({GRADIENT_STORAGE + parameter.tensor.id}), frozenset({BUCKET_STORAGE + number})


def copy_in(parameter: Parameter, number: int) -> Event:
    """The event that puts a gradient into its bucket."""
    gradient, bucket = _storages(parameter, number)
    return op_event(copies(parameter)[0], gradient, bucket)


def copy_out(parameter: Parameter, number: int) -> Event:
    """The event that takes a reduced gradient out of its bucket."""
    gradient, bucket = _storages(parameter, number)
    return op_event(copies(parameter)[1], gradient | bucket, gradient)


@lru_cache(maxsize=MAX_COPIES)
def bucket_wait(number: int) -> Event:
    """What stands for the compute stream's wait for a bucket whose gradients are views of it: an op without work."""
    storage = BUCKET_STORAGE + number
    spec = TensorSpec(id=storage, shape=(1,), dtype="float32", strides=(1,), storage=storage)
    return op_event(
        Op(id=-1, name="aten.view", inputs=(spec,), input_names=("self",), outputs=(spec,), module="", phase="backward")
    )


def accumulate(parameters: Sequence[Parameter]) -> dict[int, list[Event]]:
    """Events to insert after each op (by op id) of a later micro-batch: its gradients are added to those before.

    As autograd's AccumulateGrad does, in place.
    """
    inserted: dict[int, list[Event]] = {}
    for parameter in parameters:
        if parameter.grad_op is not None and not parameter.sparse_grad:
            inserted.setdefault(parameter.grad_op, []).append(_add(parameter))
    return inserted


@lru_cache(maxsize=MAX_COPIES)
def _add(parameter: Parameter) -> Event:
    gradient = _spec(parameter, GRADIENT_STORAGE + parameter.tensor.id)
    op = Op(
        id=-1,
        name="aten.add_",
        overload="Tensor",
        inputs=(gradient, gradient),
        input_names=("self", "other"),
        outputs=(gradient,),
        module=parameter.name.rpartition(".")[0],
        phase="backward",
    )
    return op_event(op)
