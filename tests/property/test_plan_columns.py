"""Columns of passes that repeat are those of the events that they stand for, read one by one; parts of an optimizer, too."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perfmodel.api import as_topology, extract_graph
from perfmodel.config import load_plan
from perfmodel.errors import InfeasiblePlanError
from perfmodel.graph import Graph, Op, Parameter, TensorSpec
from perfmodel.plan import RankDevice, place
from perfmodel.plan.columns import ChainedOps, collectives_of, columns_of, scanned
from perfmodel.plan.optimizer_parts import OptimizerParts

SMALL = {
    "kind": "transformer", "name": "small", "architecture": "gpt2", "batch_size": 1, "precision": "bf16", "optimizer": "adamw",
    "vocab_size": 512, "hidden_size": 256, "layers": 4, "heads": 4, "max_positions": 128,
}  # fmt: skip
MEMORY_BYTES = 10**12
plans = st.builds(
    "tp={},pp={},shard={},accumulate={}".format,
    st.sampled_from([1, 2, 4]),
    st.sampled_from([1, 2, 4]),
    st.sampled_from(["nothing", "optimizer", "gradients", "parameters"]),
    st.integers(1, 4),
)


@pytest.fixture(scope="module")
def graph():
    return extract_graph(SMALL)


@pytest.fixture(scope="module")
def ranks():
    return [RankDevice(device=p.device, memory_bytes=MEMORY_BYTES) for p in as_topology("dgx_h100", 2).ranks]


def by_place(columns):
    """Ops by where they stand; a sequence may name them in another order."""
    return dict(zip(columns.op_at.tolist(), columns.ops, strict=True))


@settings(max_examples=25, deadline=None)
@given(text=plans)
def test_columns_of_passes_are_those_of_their_events(graph, ranks, text) -> None:
    try:
        placement = place(graph, load_plan(text), ranks, advise=False)
    except InfeasiblePlanError:
        return
    for rank_class in placement.classes:
        known, plain = columns_of(rank_class.events), scanned(tuple(rank_class.events))
        for name in ("collective_at", "instance", "waiter", "source"):
            np.testing.assert_array_equal(getattr(known, name), getattr(plain, name), err_msg=name)
        assert known.size == plain.size == len(rank_class.events)
        mine, expected = by_place(known), by_place(plain)
        assert mine.keys() == expected.keys()
        assert all(mine[place] is expected[place] for place in expected), "the op objects themselves"
        assert list(collectives_of(rank_class.events)) == [
            (event.collective.instance, collective)
            for event, (_, collective) in zip(plain.collectives, collectives_of(rank_class.events), strict=True)
        ]


@settings(max_examples=25, deadline=None)
@given(text=plans)
def test_nothing_of_a_mesh_is_read_before_a_collective_of_the_iteration_fills_it(graph, ranks, text) -> None:
    """So no op waits for an exchange of the iteration before. The cast of the rest's shard only names the same storage."""
    try:
        placement = place(graph, load_plan(text), ranks, advise=False)
    except InfeasiblePlanError:
        return
    for rank_class in placement.classes:
        filled = {s for event in rank_class.events if event.collective for s in event.writes}
        seen: set[int] = set()
        for event in rank_class.events:
            if event.collective is not None:
                seen |= event.writes
            elif event.stream == "compute" and event.op is not None and event.op.name != "aten.mul":
                unfilled = {s for s in event.reads & filled if s > 1 << 43} - seen
                made_here = {s for s in unfilled if any(s in e.writes and e.op for e in rank_class.events)}
                assert unfilled == made_here, event.label


@st.composite
def optimizers(draw):
    """Parameters, and ops on lists of them, of numbers alone, and on single tensors."""
    n = draw(st.integers(1, 5))

    def spec(number, size):
        return TensorSpec(id=number, shape=(size,), dtype="float32", strides=(1,), storage=number)

    weights = [spec(10 + i, 8) for i in range(n)]
    ops = []
    for _ in range(draw(st.integers(1, 4))):
        kind = draw(st.sampled_from(["lists", "numbers", "single"]))
        number = len(ops)
        if kind == "single":
            one = weights[draw(st.integers(0, n - 1))]
            ops.append(
                Op(id=number, name="aten.mul_", inputs=(one,), input_names=("self",), outputs=(one,), phase="optimizer")
            )
            continue
        states = [spec(100 * (number + 1) + i, 1 if kind == "numbers" else 8) for i in range(n)]
        firsts = states if kind == "numbers" else weights
        inputs = [*firsts, *([] if kind == "numbers" else states), spec(999, 1)]
        names = ("self",) * n + (() if kind == "numbers" else ("other",) * n) + ("lr",)
        ops.append(
            Op(
                id=number, name="aten._foreach_add_", inputs=tuple(inputs), input_names=names, outputs=tuple(firsts),
                phase="optimizer",
            )
        )  # fmt: skip
    parameters = tuple(Parameter(name=f"w{i}", tensor=w, grad_op=None) for i, w in enumerate(weights))
    return Graph(model="m", target="cuda", precision="fp32", batch_size=1, ops=tuple(ops), parameters=parameters)


@given(graph=optimizers(), data=st.data())
def test_parts_of_an_optimizer_are_the_places_of_its_parameters(graph, data) -> None:
    """The rule by hand: of every list the entries of the chosen weights, lists of numbers cut alike, the rest as it is."""
    n = len(graph.parameters)
    chosen = data.draw(st.sets(st.integers(0, n - 1)))
    kept, _ = OptimizerParts(graph).of({10 + i for i in chosen})
    listed = any(op.name.startswith("aten._foreach") and op.inputs[0].n_elems > 1 for op in graph.ops)
    expected = []
    for op in graph.ops:
        if op.name == "aten.mul_":
            if op.inputs[0].storage - 10 in chosen:
                expected.append(op.inputs)
            continue
        is_number = op.inputs[0].n_elems == 1
        places = set(range(n)) if is_number and not listed else chosen
        if places:
            place = [i % n if name != "lr" or n == 1 else None for i, name in enumerate(op.input_names)]
            expected.append(tuple(s for s, i in zip(op.inputs, place, strict=True) if i is None or i in places))
    assert [op.inputs for op in kept] == expected
    assert all(len(op.inputs) == len(op.input_names) for op in kept)
    assert all(Counter(op.outputs) <= Counter(op.inputs) for op in kept)


def test_chained_ops_are_read_by_place_as_the_list_is() -> None:
    ops = [*range(5)]
    chained = ChainedOps(tuple(ops[:2]), (), ChainedOps(tuple(ops[2:3]), tuple(ops[3:])))
    assert len(chained) == 5
    assert [chained[place] for place in range(-5, 5)] == [ops[place] for place in range(-5, 5)]
    assert chained[1:4] == ops[1:4]
    with pytest.raises(IndexError):
        chained[5]
