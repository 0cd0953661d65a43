"""NVIDIA's DLRM operators: the same numbers and gradients as torch's modules, and kernels and host work counted by hand."""

from collections import Counter

import pytest
import torch

from perfmodel.config import load_model, load_plan
from perfmodel.db import load_device
from perfmodel.errors import ConfigError
from perfmodel.extract import trace
from perfmodel.kernels import calls_of
from perfmodel.models import build, materialize
from perfmodel.plan import RankDevice, place

BATCH, DIM, ROWS = 24, 8, (11, 7, 30)
FUSED = {"kind": "dot", "pad_to_multiple": 8, "fused": True}
MODEL = {
    "kind": "dlrm", "name": "d", "dense_features": 3, "bottom_mlp": [5, DIM], "top_mlp": [6, 4, 1], "embedding_dim": DIM,
    "batch_size": BATCH, "optimizer": "sgd", "precision": "fp32", "interaction": FUSED, "joint": "all", "tables": list(ROWS),
}  # fmt: skip


def graph_of(**changes):
    return trace(build(load_model({**MODEL, **changes})))


def gradients(built):
    built.loss(built.module(*built.args)).backward()
    return [p.grad.to_dense() for p in built.module.parameters()]


def copied(source, target):
    """The target with the source's parameters, which come in the same order."""
    for mine, theirs in zip(source.parameters(), target.parameters(), strict=True):
        theirs.data.copy_(mine.data)
    return target


@pytest.mark.parametrize(
    "changes",
    [
        {"lookup": "gather"},
        {"lookup": "fused_gather"},
        {"mlp": "apex"},
        {"interaction": {**FUSED, "dense_from_stack": True}},
        {"lookup": "gather", "mlp": "apex", "interaction": {**FUSED, "dense_from_stack": True}},
    ],
)
def test_logits_and_gradients_are_those_of_torch_modules(changes):
    plain, nvidia = (materialize(build(load_model({**MODEL, **c})), 3) for c in ({}, changes))
    copied(plain.module, nvidia.module)
    assert torch.equal(plain.args[1][0], nvidia.args[1][0].flatten())
    torch.testing.assert_close(nvidia.module(*nvidia.args), plain.module(*plain.args))
    for mine, theirs in zip(gradients(nvidia), gradients(plain), strict=True):
        torch.testing.assert_close(mine, theirs)


def kernels(graph, name):
    return [call for op in graph.ops if op.name == name for call in calls_of(op)]


def test_a_fused_gather_writes_rows_of_the_training_type_at_once():
    fused, apart = (graph_of(lookup=lookup, precision="amp_fp16") for lookup in ("fused_gather", "gather"))
    n_elems = BATCH * len(ROWS) * DIM
    [gathered] = kernels(fused, "perfmodel.gather_rows")
    assert gathered.work.write_bytes == 2 * n_elems
    rows, cast = kernels(apart, "perfmodel.gather_rows")
    assert (rows.work.write_bytes, cast.work.read_bytes, cast.work.write_bytes) == (
        4 * n_elems,
        4 * n_elems,
        2 * n_elems,
    )
    # Backward: 16-bit gradients are copied into fp32 values; fused, the row numbers are written too.
    values, numbers = kernels(fused, "perfmodel.gather_rows_backward")
    assert (values.work.read_bytes, values.work.write_bytes) == (2 * n_elems, 4 * n_elems)
    assert numbers.work.write_bytes == BATCH * len(ROWS) * 8
    assert len(kernels(apart, "perfmodel.gather_rows_backward")) == 1


def test_fp32_rows_of_a_plain_gather_are_the_gradient_as_they_are():
    assert kernels(graph_of(lookup="gather"), "perfmodel.gather_rows_backward") == []
    assert len(kernels(graph_of(lookup="fused_gather"), "perfmodel.gather_rows_backward")) == 2


def test_an_mlp_in_one_call_has_the_products_of_its_layers():
    one, many = graph_of(mlp="apex"), graph_of()
    [bottom, top] = [op for op in one.ops if op.name == "perfmodel.mlp"]
    assert [call.family for call in calls_of(bottom)] == ["gemm", "gemm"]
    products = ("aten.mm", "aten.addmm", "perfmodel.mlp", "perfmodel.mlp_backward")

    def flops(graph):
        return sum(c.work.flops for name in products for c in kernels(graph, name) if c.family == "gemm")

    assert flops(one) == flops(many)
    # Top: two layers, each a masked gradient and two products (6 and 4 wide; the input needs a gradient). Bottom: no input's.
    backward = [Counter(c.family for c in calls_of(op)) for op in one.ops if op.name == "perfmodel.mlp_backward"]
    assert backward == [{"gemm": 4, "elementwise": 2}, {"gemm": 3, "elementwise": 2}]
    assert top.outputs[-1].shape == (BATCH, 4)


def test_o2_casts_no_weight_and_scales_no_loss():
    autocast, o2 = (graph_of(precision="amp_fp16", mlp="apex", lookup="gather", weights=w) for w in ("fp32", "fp16"))
    assert "aten._amp_update_scale_" in {op.name for op in autocast.ops}
    names = Counter(op.name for op in o2.ops)
    assert not names["aten._amp_update_scale_"]
    assert not names["aten._local_scalar_dense"]
    cast = [op for op in o2.ops if op.name == "aten._to_copy" and op.phase == "forward"]
    assert [op.inputs[0].shape for op in cast] == [(BATCH, 3)]  # the dense features alone
    table = next(p for p in o2.parameters if "sparse_arch" in p.name)
    assert table.tensor.dtype == "float32"


def test_rows_of_half_precision_tables_are_two_bytes():
    graph = graph_of(precision="fp16", lookup="fused_gather")
    assert graph.tables[0].itemsize_bytes == 2
    assert {p.tensor.dtype for p in graph.parameters} == {"float16"}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"lookup": "gather", "tables": [{"rows": 9, "pooling_factor": 2}]}, "found lookup gather with bags"),
        ({"weights": "fp16"}, "found fp16 with precision fp32, allowed with amp_fp16"),
        ({"mlp": "apex", "top_mlp": [1]}, "allowed 2 or more"),
        ({"interaction": {"kind": "dot", "dense_from_stack": True}}, "dense_from_stack: found without fused"),
    ],
)
def test_operators_that_do_not_fit_the_model_are_refused(changes, words):
    with pytest.raises(ConfigError, match=words):
        load_model({**MODEL, **changes})


def test_a_joint_gather_and_the_bottom_mlp_go_to_ranks_of_their_own():
    graph = graph_of(lookup="gather", mlp="apex", precision="amp_fp16")
    plan = load_plan(
        {"embeddings": {"strategy": "explicit", "index_exchange": False, "bottom_mlp": 0, "placement": {"joint0": 1}}}
    )
    device = load_device("a100_sxm_80gb")
    placement = place(graph, plan, [RankDevice(device=device.name, memory_bytes=device.memory_bytes)] * 4)
    ops = {c.ranks: [e.op for e in c.events if e.op is not None] for c in placement.classes}
    [first] = [ranks for ranks in ops if 0 in ranks]
    [second] = [ranks for ranks in ops if 1 in ranks]
    lookups = {ranks: [op for op in found if op.name == "perfmodel.gather_rows"] for ranks, found in ops.items()}
    assert [len(lookups[ranks]) for ranks in (first, second)] == [0, 1]
    assert lookups[second][0].outputs[0].shape == (4 * BATCH, len(ROWS), DIM)
    bottoms = {
        ranks: [op for op in found if op.name == "perfmodel.mlp" and op.module == "dense_arch"]
        for ranks, found in ops.items()
    }
    assert [len(bottoms[ranks]) for ranks in (first, second)] == [1, 0]
    assert bottoms[first][0].outputs[0].shape[0] == 4 * BATCH


def test_a_loop_that_waits_and_keeps_its_optimizer_out_of_the_graph():
    from perfmodel.api import predict_run

    loop = {"synchronize": True, "capture_optimizer": False}
    graph = graph_of(loop=loop)
    assert graph.ops[-1].name == "perfmodel.synchronize"
    assert graph.ops[-1].host_sync
    uncaptured = {op.phase for op in graph.ops if op.attrs.get("uncaptured")}
    assert uncaptured == {"optimizer"}

    def tasks(**changes):
        run = predict_run({**MODEL, **changes}, "v100", mode="cuda_graph", bounds=False)
        return run.prediction.iteration_time_s, len(run.classes[0].tasks)

    (plain_s, plain), (waiting_s, waiting) = tasks(), tasks(loop=loop)
    assert waiting > plain  # launches of the optimizer's kernels, and the wait
    assert waiting_s > plain_s
