"""What blocks wait for is what `link_events` finds event by event, however events are cut, on any number of ranks."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perfmodel.graph import Graph, Op
from perfmodel.plan.blocks import Block, linked
from perfmodel.plan.columns import EXCHANGED, columns_of
from perfmodel.plan.events import Collective, Event, link_events
from perfmodel.plan.facts import GraphFacts

STORAGES = st.frozensets(st.sampled_from([*range(6), EXCHANGED, EXCHANGED + 1]), max_size=3)
FACTS = GraphFacts(Graph(model="none", target="cuda", precision="fp32", batch_size=1, ops=()))


@st.composite
def events(draw) -> Event:
    stream = draw(st.sampled_from(("compute", "compute", "copy", "comm", "tensor")))
    touched = {"reads": draw(STORAGES), "writes": draw(STORAGES), "phase": "forward", "stream": stream}
    if stream not in ("comm", "tensor"):
        return Event(op=Op(id=0, name="aten.add"), **touched)
    instance = draw(st.integers(0, 3))
    collective = Collective(
        op="all_reduce", bytes=1, ranks=(0, 1), dtype="float32", instance=instance, purpose="a test"
    )
    return Event(collective=collective, **touched)


@st.composite
def cut(draw) -> list[Block]:
    """The events of a rank in blocks, some of them empty."""
    found = draw(st.lists(events(), max_size=14))
    places = sorted(draw(st.lists(st.integers(0, len(found)), max_size=4)))
    return [Block(found[begin:end]) for begin, end in pairwise([0, *places, len(found)])]


@settings(max_examples=300, deadline=None)
@given(ranks=st.lists(cut(), min_size=1, max_size=3), shared=cut())
def test_blocks_wait_as_their_events_do(ranks, shared) -> None:
    sequences = [[*blocks, *shared] for blocks in ranks]  # a block may stand on many ranks, behind different ones
    among, found = linked(FACTS, sequences)
    expected = [link_events(event for block in blocks for event in block.events) for blocks in sequences]
    assert [tuple(each) for each in found] == expected
    assert among.first.tolist()[-1] == sum(map(len, expected))
    for number, (each, flat) in enumerate(zip(found, expected, strict=True)):
        own, columns = among.part(number), columns_of(flat)
        assert own.size == len(each) == len(flat)
        for name in ("op_at", "collective_at", "instance", "waiter", "source"):
            assert getattr(own, name).tolist() == getattr(columns, name).tolist()
        assert list(map(id, own.ops)) == list(map(id, columns.ops))
        assert own.exchanged == columns.exchanged


def test_a_block_of_events_that_wait_is_refused() -> None:
    waiting = Event(stream="compute", phase="forward", op=Op(id=0, name="aten.add"), after=(0,))
    with pytest.raises(RuntimeError, match="wait for what follows"):
        Block([waiting])
