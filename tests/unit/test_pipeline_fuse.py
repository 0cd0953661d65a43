"""Fusion for compile mode: hand-counted chains, and what must hold for every fused graph."""

import pytest

from perfmodel.config import load_model
from perfmodel.extract import trace
from perfmodel.graph import Graph, Op, Storage, TensorSpec
from perfmodel.kernels import calls_of, work
from perfmodel.models import build
from perfmodel.pipeline.fuse import fuse_graph

N = 1024


def spec(storage, shape=(N,)):
    strides = tuple(1 if i == len(shape) - 1 else shape[-1] for i in range(len(shape)))
    return TensorSpec(id=storage, shape=shape, dtype="float32", strides=strides, storage=storage)


def graph(*rows, outlives=(), shapes=None):
    """Ops from (name, storages read, storage written); storages not written are there from the start."""
    shapes = shapes or {}
    ops = []
    for number, (name, reads, writes) in enumerate(rows):
        inputs = tuple(spec(s, shapes.get(s, (N,))) for s in reads)
        outputs = (spec(writes, shapes.get(writes, (N,))),)
        names = ("self", "other", "mat2")[: len(inputs)]
        ops.append(Op(id=number, name=name, inputs=inputs, input_names=names, outputs=outputs))
    storages = []
    for s in {s for _, reads, writes in rows for s in (*reads, writes)}:
        born = next((i for i, row in enumerate(rows) if row[2] == s), -1)
        touched = [i for i, row in enumerate(rows) if s in row[1] or s == row[2]]
        dies = len(rows) if s in outlives or born < 0 else max(touched)
        storages.append(Storage(id=s, bytes=4 * N, born=born, dies=dies))
    return Graph(
        model="m", target="cuda", precision="fp32", batch_size=1, ops=tuple(ops), storages=tuple(storages)
    )  # fmt: skip


def names(fused):
    return [op.attrs.get("chain", op.name) for op in fused.ops]


def test_a_chain_reads_its_inputs_and_writes_its_result_once():
    """add, mul, relu over a and b: 3 x 3 = 8 tensors moved before (2 + 1, 2 + 1, 1 + 1), 2 + 1 after."""
    before = graph(("aten.add", (0, 1), 2), ("aten.mul", (2, 1), 3), ("aten.relu", (3,), 4), outlives={4})
    after = fuse_graph(before)
    assert names(after) == [["add", "mul", "relu"]]
    assert sum(work(op).bytes for op in before.ops) == 8 * 4 * N
    assert work(after.ops[0]).bytes == 3 * 4 * N
    assert work(after.ops[0]).flops == 3 * N


def test_what_is_used_outside_is_written():
    """The sum is read by a product of matrices too, so the chain writes both."""
    shapes = dict.fromkeys(range(6), (32, 32))
    before = graph(
        ("aten.add", (0, 1), 2), ("aten.relu", (2,), 3), ("aten.mm", (2, 1), 4), outlives={3, 4}, shapes=shapes
    )
    after = fuse_graph(before)
    assert names(after) == [["add", "relu"], "aten.mm"]
    assert len(after.ops[0].outputs) == 2


def test_a_product_is_not_fused_into_and_ends_the_chain():
    shapes = dict.fromkeys(range(6), (32, 32))
    after = fuse_graph(
        graph(("aten.relu", (0,), 1), ("aten.mm", (1, 0), 2), ("aten.relu", (2,), 3), outlives={3}, shapes=shapes)
    )
    assert names(after) == ["aten.relu", "aten.mm", "aten.relu"]


def test_a_chain_does_not_wait_for_what_waits_for_it():
    """relu -> mm -> add(relu, mm): joining the add to the relu would make the product wait for itself."""
    shapes = dict.fromkeys(range(6), (32, 32))
    after = fuse_graph(
        graph(("aten.relu", (0,), 1), ("aten.mm", (1, 0), 2), ("aten.add", (1, 2), 3), outlives={3}, shapes=shapes)
    )
    assert names(after) == ["aten.relu", "aten.mm", "aten.add"]


def test_other_sizes_do_not_join():
    after = fuse_graph(graph(("aten.relu", (0,), 1), ("aten.relu", (1,), 2), outlives={2}, shapes={2: (2 * N,)}))
    assert names(after) == ["aten.relu", "aten.relu"]


MODELS = {
    "dlrm": {
        "kind": "dlrm", "batch_size": 128, "dense_features": 13, "bottom_mlp": [64, 16], "top_mlp": [64, 1],
        "embedding_dim": 16, "tables": [1000] * 4,
    },
    "gpt2": {
        "kind": "transformer", "architecture": "gpt2", "hidden_size": 64, "layers": 2, "heads": 4, "max_positions": 64,
        "vocab_size": 300, "batch_size": 4, "precision": "amp_bf16",
    },
    "resnet": {"kind": "vision", "depth": 18, "batch_size": 4, "image_size": 64, "classes": 10},
}  # fmt: skip


@pytest.fixture(scope="module", params=MODELS)
def pair(request):
    before = trace(build(load_model({"name": request.param, **MODELS[request.param]})))
    return before, fuse_graph(before)


def test_data_still_comes_before_its_use(pair):
    before, after = pair
    made_before, made = before.producers(), after.producers()
    for op in after.ops:
        for tensor in op.inputs:
            assert tensor.storage not in made_before or made[tensor.storage] <= op.id


def test_work_is_kept_and_bytes_only_fall(pair):
    before, after = pair
    total = [(sum(work(op).flops for op in g.ops), sum(work(op).bytes for op in g.ops)) for g in pair]
    assert total[1][0] == pytest.approx(total[0][0], rel=0.01)  # FLOPs an element are rounded up
    assert total[1][1] <= total[0][1]
    assert sum(len(calls_of(op)) for op in after.ops) < sum(len(calls_of(op)) for op in before.ops)


def test_gradients_are_ready_after_the_op_that_writes_them(pair):
    before, after = pair
    assert [op.id for op in after.ops] == list(range(len(after.ops)))
    for old, new in zip(before.parameters, after.parameters, strict=True):
        assert (old.grad_op is None) == (new.grad_op is None)
        if old.grad_op is not None:
            written = {s.storage for s in before.ops[old.grad_op].outputs}
            assert written <= {s.storage for s in (*after.ops[new.grad_op].outputs, *after.ops[new.grad_op].inputs)}


def test_lifetimes_cover_every_use(pair):
    _, after = pair
    alive = {s.id: s for s in after.storages}
    for op in after.ops:
        for tensor in (*op.inputs, *op.outputs):
            if tensor.storage in alive:
                storage = alive[tensor.storage]
                assert storage.born <= op.id <= storage.dies


def test_the_optimizer_is_left_alone(pair):
    before, after = pair
    assert [op.name for op in before.ops if op.phase == "optimizer"] == [
        op.name for op in after.ops if op.phase == "optimizer"
    ]
