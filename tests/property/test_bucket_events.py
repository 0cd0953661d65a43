"""DDP's events as columns are those that are made one by one, inserted op by op and linked by their storages."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import chain

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perfmodel.config.plan import DataParallel
from perfmodel.graph import Op, Parameter, TensorSpec
from perfmodel.plan.buckets import Bucket, assign_buckets
from perfmodel.plan.columns import columns_of, joined_columns
from perfmodel.plan.ddp import bucket_insertions, copies, copy_back
from perfmodel.plan.ddp_events import BucketEvents
from perfmodel.plan.events import Event, link_events, op_event
from perfmodel.plan.splices import SplicedEvents, Splices, splices_of

RANKS = (0, 1, 2)
FIRST = 7  # number of the first all-reduce
TYPES = {"float32": 4, "bfloat16": 2}


def tensor(number: int, size: int = 4, dtype: str = "float32") -> TensorSpec:
    return TensorSpec(id=number, shape=(size,), dtype=dtype, strides=(1,), storage=number)


@st.composite
def steps(draw):
    """Ops of a step, some on the copy stream, that read and write few storages; and parameters whose gradients they finish."""
    n_ops = draw(st.integers(2, 12))
    touched = st.lists(st.integers(0, 5), max_size=2).map(lambda ids: tuple(tensor(i) for i in ids))
    ops = [
        Op(
            id=number,
            name="aten.add",
            inputs=(read := draw(touched)),
            input_names=("self",) * len(read),
            outputs=draw(touched),
            phase="backward",
            stream=draw(st.sampled_from(("compute", "compute", "copy"))),
        )
        for number in range(n_ops)
    ]
    parameters = [
        Parameter(
            name=f"layer.{number}",
            tensor=tensor(100 + number, draw(st.integers(1, 40)), draw(st.sampled_from(sorted(TYPES)))),
            grad_op=draw(st.integers(0, n_ops - 1)),
        )
        for number in range(draw(st.integers(1, 8)))
    ]
    return ops, parameters


@st.composite
def bucketings(draw):
    return DataParallel(
        bucket_cap=f"{draw(st.integers(1, 200))} B",
        first_bucket=f"{draw(st.integers(0, 100))} B",
        gradient_as_bucket_view=draw(st.booleans()),
        compression=draw(st.sampled_from(("none", "fp16", "bf16"))),
    )


def spliced(ops: Sequence[Op], n_behind: int, buckets: tuple[Bucket, ...], ddp: DataParallel) -> SplicedEvents:
    base = link_events(map(op_event, ops))
    parameters = [parameter for bucket in buckets for parameter in bucket.parameters]
    added = BucketEvents(buckets, {id(p): copies(p) for p in parameters}, RANKS, FIRST, ddp)
    slots = added.slots(np.arange(1, len(ops) + 1), len(ops) - n_behind)
    return SplicedEvents(base, Splices(joined_columns([columns_of(base)]), added, [slots]), 0)


def one_by_one(ops: Sequence[Op], n_behind: int, buckets: tuple[Bucket, ...], ddp: DataParallel) -> tuple[Event, ...]:
    inserted = bucket_insertions(buckets, RANKS, FIRST, ddp.compression)
    step = [(op_event(op), *inserted.get(op.id, ())) for op in ops[: len(ops) - n_behind]]
    left = copy_back(buckets, as_views=ddp.gradient_as_bucket_view)
    return link_events([*chain.from_iterable(step), *left, *map(op_event, ops[len(ops) - n_behind :])])


def test_it_is_a_sequence() -> None:
    ops, parameter = [replace_id(number) for number in range(3)], Parameter(name="w", tensor=tensor(100), grad_op=1)
    ddp = DataParallel()
    events = spliced(ops, 1, assign_buckets([parameter], 1, 1), ddp)
    assert [event.label for event in events] == [
        "aten.add", "aten.add", "aten.mul", "all_reduce gradient bucket 0", "aten.copy_", "aten.add",
    ]  # fmt: skip
    assert [event.after for event in events] == [(), (), (), (2,), (3,), ()]
    assert len(events) == 6
    assert events[3:5] == tuple(events)[3:5]
    assert events == tuple(events)


def replace_id(number: int) -> Op:
    return Op(id=number, name="aten.add", phase="backward")


@settings(max_examples=200, deadline=None)
@given(step=steps(), ddp=bucketings())
def test_the_events_are_those_made_one_by_one(step, ddp) -> None:
    ops, parameters = step
    last = max(parameter.grad_op for parameter in parameters)
    n_behind = len(ops) - 1 - last  # the optimizer, after the copies back
    buckets = assign_buckets(parameters, ddp.first_bucket, ddp.bucket_cap)
    found, expected = spliced(ops, n_behind, buckets, ddp), one_by_one(ops, n_behind, buckets, ddp)
    assert tuple(found) == expected


@settings(max_examples=100, deadline=None)
@given(step=steps(), ddp=bucketings())
def test_the_columns_are_those_of_the_events(step, ddp) -> None:
    ops, parameters = step
    buckets = assign_buckets(parameters, ddp.first_bucket, ddp.bucket_cap)
    events = spliced(ops, 0, buckets, ddp)
    found, expected = events.columns, columns_of(tuple(events))
    assert found.size == expected.size
    by_place = sorted(zip(found.op_at.tolist(), map(id, found.ops), strict=True))
    assert by_place == list(zip(expected.op_at.tolist(), map(id, expected.ops), strict=True))
    assert found.collective_at.tolist() == expected.collective_at.tolist()
    assert [event.collective for event in found.collectives] == [event.collective for event in expected.collectives]
    assert found.instance.tolist() == expected.instance.tolist()
    assert found.waiter.tolist() == expected.waiter.tolist()
    assert found.source.tolist() == expected.source.tolist()


def test_the_check_sees_a_wait_for_another_event() -> None:
    ops, parameter = [replace_id(number) for number in range(3)], Parameter(name="w", tensor=tensor(100), grad_op=1)
    buckets, ddp = assign_buckets([parameter], 1, 1), DataParallel()
    events = list(one_by_one(ops, 1, buckets, ddp))
    events[3] = replace(events[3], after=(1,))
    with pytest.raises(AssertionError):
        assert tuple(spliced(ops, 1, buckets, ddp)) == tuple(events)


@settings(max_examples=60, deadline=None)
@given(step=steps(), ddp=bucketings(), longer=st.integers(1, 3))
def test_several_sequences_are_each_spliced_and_stand_one_behind_the_other(step, ddp, longer) -> None:
    ops, parameters = step
    buckets = assign_buckets(parameters, ddp.first_bucket, ddp.bucket_cap)
    held = [parameter for bucket in buckets for parameter in bucket.parameters]
    added = BucketEvents(buckets, {id(p): copies(p) for p in held}, RANKS, FIRST, ddp)
    bases = [link_events(map(op_event, [*ops, *([ops[-1]] * more)])) for more in (0, longer, 0)]
    slots = [added.slots(np.arange(1, len(ops) + 1), len(ops)) for _ in bases]
    splices = Splices(joined_columns([columns_of(base) for base in bases]), added, slots)
    found = [SplicedEvents(base, splices, number) for number, base in enumerate(bases)]
    alone = [SplicedEvents(base, Splices(joined_columns([columns_of(base)]), added, slots[:1]), 0) for base in bases]
    assert [tuple(events) for events in found] == [tuple(events) for events in alone]
    whole, expected = splices.columns, joined_columns([columns_of(tuple(events)) for events in alone]).columns
    for name in ("collective_at", "instance", "waiter", "source"):
        assert getattr(whole, name).tolist() == getattr(expected, name).tolist()
    assert sorted(whole.op_at.tolist()) == expected.op_at.tolist()
    assert splices_of(found) is splices
    assert splices_of(found[:2]) is None
