"""Cross-stream dependencies follow from storages: hand-worked cases."""

from perfmodel.graph import Op, TensorSpec
from perfmodel.plan.events import Collective, Event, link_events


def spec(storage: int) -> TensorSpec:
    return TensorSpec(id=storage, shape=(4,), dtype="float32", strides=(1,), storage=storage)


def op(reads: tuple[int, ...], writes: tuple[int, ...], stream="compute") -> Event:
    inputs = tuple(map(spec, reads))
    found = Op(
        id=0, name="aten.add", inputs=inputs, input_names=("self",) * len(inputs), outputs=tuple(map(spec, writes))
    )
    return Event(stream=stream, phase="forward", op=found)


def collective(reads: set[int], writes: set[int]) -> Event:
    what = Collective(op="all_reduce", bytes=16, ranks=(0, 1), dtype="float32", instance=0, purpose="test")
    return Event(stream="comm", phase="forward", collective=what, reads=frozenset(reads), writes=frozenset(writes))


def test_a_collective_waits_for_what_it_reads_and_its_reader_for_it() -> None:
    events = link_events([op((1,), (2,)), collective({2}, {3}), op((1,), (9,)), op((3,), (4,))])
    assert [event.after for event in events] == [(), (0,), (), (1,)]


def test_same_stream_order_adds_no_dependency() -> None:
    assert [e.after for e in link_events([op((1,), (2,)), op((2,), (3,))])] == [(), ()]


def test_a_writer_waits_for_readers_on_other_streams() -> None:
    events = link_events([op((), (1,)), collective({1}, {2}), op((), (1,))])
    assert events[2].after == (1,)


def test_only_the_last_event_of_each_stream_is_kept() -> None:
    events = link_events([op((), (1,)), op((), (2,)), collective({1, 2}, {3})])
    assert events[2].after == (1,)


def test_a_copy_that_fills_an_input_is_waited_for() -> None:
    events = link_events([op((), (1,), "copy"), op((1,), (2,))])
    assert events[1].after == (0,)
