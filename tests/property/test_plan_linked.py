"""Events put between linked ops wait as all of them would if they were linked one by one from the beginning."""

from hypothesis import example, given
from hypothesis import strategies as st

from perfmodel.graph import Op, TensorSpec
from perfmodel.plan.events import Collective, Event, op_event
from perfmodel.plan.segments import START, Groups, Linked

GROUPS = Groups(of={"tp": (0, 1)}, siblings={"tp": ()})
FAR = 1000  # storages that no op of the graph touches


def spec(storage):
    return TensorSpec(id=storage, shape=(2,), dtype="float32", strides=(1,), storage=storage)


@st.composite
def graphs(draw):
    """Ops on compute and copy streams, with collectives of tensor-parallel ranks between them."""
    storages = st.integers(1, 5)
    ops = []
    for number in range(draw(st.integers(1, 9))):
        reads, writes = draw(st.lists(storages, min_size=1, max_size=2)), draw(storages)
        kind = draw(st.sampled_from(["op", "op", "op", "copy", "all_reduce", "all_gather"]))
        attrs = {"group": "tp", "bytes": 8, "purpose": "test"} if kind.startswith("all") else {}
        ops.append(
            Op(
                id=number, name=f"perfmodel.{kind}" if attrs else "aten.mm", inputs=tuple(map(spec, reads)), attrs=attrs,
                input_names=("self",) * len(reads), outputs=(spec(writes),), stream="copy" if kind == "copy" else "compute",
            )
        )  # fmt: skip
    return ops


@st.composite
def additions(draw, n_ops):
    """By op id events on compute, copy and communication streams; of storages of their own, seldom of the graph's."""
    first = draw(st.sampled_from([FAR, FAR, FAR, 1]))
    storages = st.frozensets(st.integers(first, first + 3), max_size=2)

    def events():
        found = []
        for kind in draw(st.lists(st.sampled_from(["op", "copy", "all_gather", "reduce_scatter"]), max_size=2)):
            reads, writes = draw(storages), draw(storages)
            if kind in ("op", "copy"):
                op = Op(id=-1, name="aten.add", inputs=(spec(first),), input_names=("self",), outputs=(spec(first + 1),),
                        stream="copy" if kind == "copy" else "compute")  # fmt: skip
                found.append(op_event(op, reads, writes))
            else:
                collective = Collective(op=kind, bytes=8, ranks=(0, 1), dtype="float32", instance=-1, purpose="test")
                found.append(Event(stream="comm", phase="backward", collective=collective, reads=reads, writes=writes))
        return found

    places = st.integers(START, n_ops)  # one more than there are
    after = {place: events() for place in draw(st.lists(places.filter(lambda p: p != START), max_size=3, unique=True))}
    before = {place: events() for place in draw(st.lists(places, max_size=3, unique=True))}
    return after, before, events()


def touched(event):
    if event.reads or event.writes or event.op is None:
        return event.reads, event.writes
    return frozenset(s.storage for s in event.op.inputs), frozenset(s.storage for s in event.op.outputs)


def expected_waits(flat, n_before_ends):
    """The rule of `link_events` and of collectives behind compute, by looking back from each event."""
    found = []
    for number, event in enumerate(flat):
        waits = set()
        reads, writes = touched(event)
        earlier = [(i, flat[i], *touched(flat[i])) for i in range(number)]
        for storage in reads | writes:
            last = max((i for i, _, _, wrote in earlier if storage in wrote), default=-1)
            waits |= {last} if last >= 0 else set()
            if storage in writes:
                waits |= {i for i, _, read, wrote in earlier if i > last and storage in read and storage not in wrote}
        waits = {i for i in waits if flat[i].stream != event.stream}
        gathers = event.stream == "comm" and event.collective is not None and event.collective.op == "all_gather"
        if event.collective is not None and not gathers and number < n_before_ends:
            waits |= {max((i for i, other, *_ in earlier if other.stream == "compute"), default=-1)} - {-1}
        latest = {flat[i].stream: i for i in sorted(waits)}
        found.append(tuple(sorted(latest.values())))
    return found


@given(data=st.data(), ops=graphs())
def test_events_between_linked_ops_wait_as_if_all_were_linked_at_once(data, ops) -> None:
    after, before, ends = data.draw(additions(len(ops)))
    linked = Linked(ops, GROUPS)
    plain = Linked(ops, GROUPS).run
    flat = list(before.get(START, ()))
    for op, event in zip(ops, plain, strict=True):
        flat += [*before.get(op.id, ()), event, *after.get(op.id, ())]
    run = linked.between(after, before, ends)
    assert [touched(event) for event in run] == [touched(event) for event in (*flat, *ends)]
    assert [event.after for event in run] == expected_waits([*flat, *ends], len(flat))
    assert linked.run == plain, "the ops alone stay as they were"


@example(n=3)
@given(n=st.integers(1, 6))
def test_collectives_wait_for_what_was_put_on_the_compute_stream_before_them(n) -> None:
    reduce = Op(
        id=0, name="perfmodel.all_reduce", inputs=(spec(1),), input_names=("self",), outputs=(spec(1),),
        attrs={"group": "tp", "bytes": 8, "purpose": "test"},
    )  # fmt: skip
    far = Op(id=-1, name="aten.add", inputs=(spec(FAR),), input_names=("self",), outputs=(spec(FAR),))
    run = Linked([reduce], GROUPS).between({}, {START: [op_event(far)] * n})
    assert run[n].after == (n - 1,)
