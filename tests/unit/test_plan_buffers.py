"""DDP's broadcasts of buffers: as many bytes as the real module has in buffers, once a step, where DDP does so."""

from collections import Counter

import pytest

from perfmodel.config import load_model, load_plan
from perfmodel.extract import trace
from perfmodel.models import build, materialize
from perfmodel.plan import RankDevice, place
from perfmodel.plan.buffers import FIRST_INSTANCE

RANK = RankDevice(device="cpu", memory_bytes=1 << 40)
RESNET = {
    "kind": "vision", "name": "r", "depth": 18, "image_size": 32, "batch_size": 2, "classes": 4, "optimizer": "sgd",
}  # fmt: skip
DLRM = {
    "kind": "dlrm", "name": "d", "batch_size": 8, "dense_features": 4, "bottom_mlp": [8], "top_mlp": [4, 1],
    "embedding_dim": 8, "tables": [{"rows": 50, "count": 3, "pooling_factor": 2}], "sparse_optimizer": "sgd",
    "interaction": "dot",
}  # fmt: skip


def events(model, plan="ddp", n_ranks=2):
    graph = trace(build(load_model(model)), target="cpu")
    return place(graph, load_plan(plan), [RANK] * n_ranks).classes[0].events


def broadcasts(found):
    return [e.collective for e in found if e.collective is not None and e.collective.op == "broadcast"]


def test_every_buffer_of_the_real_module_travels_once_by_element_type():
    module = materialize(build(load_model(RESNET))).module
    real = Counter()
    for buffer in module.buffers():
        real[str(buffer.dtype).removeprefix("torch.")] += buffer.numel() * buffer.element_size()
    sent = {c.dtype: c.bytes for c in broadcasts(events(RESNET))}
    assert sent == dict(real)
    assert len(real) == 2  # running statistics, and how many batches they are of


def test_each_buffer_is_copied_back_and_the_forward_pass_waits():
    found = events(RESNET)
    n_buffers = len(list(materialize(build(load_model(RESNET))).module.buffers()))
    first = next(i for i, e in enumerate(found) if e.op is not None and e.op.name == "aten.convolution")
    copies = [e for e in found[:first] if e.op is not None and e.op.name == "aten.copy_"]
    assert len(copies) == n_buffers
    waits = {i for e in copies for i in e.after}
    assert {found[i].collective.op for i in waits} == {"broadcast"}


@pytest.mark.parametrize(("plan", "n_ranks"), [("ddp,broadcast_buffers=false", 2), ("ddp", 1)])
def test_none_where_ddp_sends_none(plan, n_ranks):
    assert not broadcasts(events(RESNET, plan, n_ranks))


def test_later_micro_batches_do_without():
    once, thrice = broadcasts(events(RESNET)), broadcasts(events(RESNET, "ddp,accumulate=3"))
    assert [c.instance for c in once] == [c.instance for c in thrice]
    assert min(c.instance for c in once) >= FIRST_INSTANCE


def test_spread_tables_leave_the_dense_part_without():
    assert not broadcasts(events(DLRM))
