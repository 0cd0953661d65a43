"""A wait of an event without kernels (a view of what a collective made) is that of the next kernel on its stream."""

from perfmodel.db import load_device
from perfmodel.estimate import Estimate, Source
from perfmodel.graph import Op, TensorSpec
from perfmodel.pipeline.lower import lower_class
from perfmodel.pipeline.pricebook import PriceBook
from perfmodel.pipeline.settings import RunSettings
from perfmodel.plan.events import Collective, Event, RankClass, link_events, op_event
from perfmodel.sim.program import COMM, COMPUTE


def spec(number: int, storage: int) -> TensorSpec:
    return TensorSpec(id=number, shape=(64, 64), dtype="float32", strides=(64, 1), storage=storage)


def op(name: str, source: int, target: int) -> Op:
    return Op(
        id=-1, name=name, inputs=(spec(source, source),), input_names=("self",), outputs=(spec(target + 100, target),)
    )


def reduce(storage: int) -> Event:
    collective = Collective(op="all_reduce", bytes=64, ranks=(0, 1), dtype="float32", instance=0, purpose="test")
    touched = frozenset({storage})
    return Event(stream="comm", phase="forward", collective=collective, reads=touched, writes=touched)


def lowered(*events: Event):
    device = load_device("a100_sxm_40gb")
    rank_class = RankClass(ranks=(0, 1), device=device.name, events=link_events(events))
    price = Estimate(time_s=1e-3, low_s=1e-3, high_s=1e-3, source=Source.FITTED)
    return lower_class(rank_class, device, PriceBook(device).prices(rank_class.events, {0: price}), RunSettings())


def tasks(found, stream: int) -> list[int]:
    return [i for i, s in enumerate(found.program.stream.tolist()) if s == stream]


def deps(found, task: int) -> set[int]:
    counts = found.program.dep_count.tolist()
    start = sum(counts[:task])
    return set(found.program.dep_index.tolist()[start : start + counts[task]])


def test_the_kernel_after_a_view_waits_for_what_the_view_waits_for() -> None:
    found = lowered(
        op_event(op("aten.exp", 1, 2)), reduce(2), op_event(op("aten.view", 2, 2)), op_event(op("aten.exp", 3, 4))
    )
    _, second = tasks(found, COMPUTE)
    assert tasks(found, COMM)[0] in deps(found, second)


def test_what_the_last_view_waits_for_holds_up_the_next_iteration() -> None:
    found = lowered(op_event(op("aten.exp", 1, 2)), reduce(2), op_event(op("aten.view", 2, 2)))
    (carried,) = found.carry
    assert (carried.task, carried.on) == (tasks(found, COMPUTE)[0], tasks(found, COMM)[0])
