"""FSDP2 on a CPU: the copies around its collectives are those that torch's `fully_shard` makes, counted in a real step."""

import warnings
from collections import Counter
from functools import cache

import pytest
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.profiler import ProfilerActivity, profile
from torch.testing._internal.distributed.fake_pg import FakeStore

from perfmodel.config import load_model, load_plan
from perfmodel.extract import trace
from perfmodel.kernels.cpu_memory import lifetimes
from perfmodel.models import build
from perfmodel.plan import RankDevice, place
from perfmodel.validate.train import real_model
from perfmodel.validate.train_replicas import blocks_of

N, LAYERS = 2, 3
MODEL = {
    "kind": "transformer", "name": "tiny", "architecture": "llama", "batch_size": 2, "optimizer": "adamw", "vocab_size": 64,
    "hidden_size": 16, "layers": LAYERS, "heads": 2, "max_positions": 8, "attention": "eager",
}  # fmt: skip
RANK = RankDevice(device="cpu", memory_bytes=1 << 40)


@cache
def events(plan="fsdp"):
    graph = trace(build(load_model(MODEL)), target="cpu")
    return tuple(place(graph, load_plan(plan), [RANK] * N).classes[0].events)


def ops(name, plan="fsdp"):
    return [e.op for e in events(plan) if e.op is not None and e.op.id == -1 and e.op.name == name]


def real_step():
    """Operators of one step of the model under `fully_shard`, on a group whose collectives move nothing."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=N)
        try:
            built = real_model(MODEL)
            mesh = init_device_mesh("cpu", (N,))
            for block in blocks_of(built.module):
                fully_shard(block, mesh=mesh)
            fully_shard(built.module, mesh=mesh)
            built.loss(built.module(*built.args)).backward()
            built.module.zero_grad()
            with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as recorded:
                built.loss(built.module(*built.args)).backward()
        finally:
            distributed.destroy_process_group()
    return list(recorded.events())


def test_copies_are_those_of_a_real_step():
    parameters = [p.tensor.n_elems for p in trace(build(load_model(MODEL)), target="cpu").parameters]
    measured = Counter(e.name for e in real_step())
    gathers = [e.collective for e in events() if e.collective is not None and e.collective.op == "all_gather"]
    packed = [op for op in ops("aten.cat") if op.phase == "backward" and len(op.outputs[0].shape) == 2]
    # Each unit's shards are put in place once a gather, its gradients laid side by side once; blocks are gathered twice.
    assert measured["fsdp::all_gather_copy_in"] == len(gathers) == 2 * LAYERS + 1
    assert measured["fsdp::chunk_cat"] == len(packed) == LAYERS + 1
    assert sum(op.outputs[0].n_elems for op in packed) == sum(parameters)
    assert len(ops("aten.clone")) == len(parameters) + 9 * LAYERS  # a block has 9 parameters


def test_gradients_are_divided_whole_by_gloo_once():
    scattered = [
        e.collective.bytes for e in events() if e.collective is not None and e.collective.op == "reduce_scatter"
    ]
    assert sorted(op.inputs[0].bytes for op in ops("aten.div_")) == sorted(scattered)


def test_whole_gradients_die_with_their_unit_and_shards_stay():
    step = [e.op for e in events() if e.op is not None]
    lives = lifetimes(step)
    died = {storage: index for index, storages in lives.dies.items() for storage in storages}
    packed = [i for i, op in enumerate(step) if op.id == -1 and op.name == "aten.cat" and len(op.outputs[0].shape) == 2]
    for place_of, op in ((i, step[i]) for i in packed):
        assert {died[s.storage] for s in op.inputs} == {place_of}
    kept = [s for op in ops("aten.empty") if len(op.outputs) > 1 for s in op.outputs[:-1]]
    assert {died[s.storage] for s in kept} == {len(step)}
    assert sum(s.n_elems for s in kept) == pytest.approx(sum(step[i].outputs[0].n_elems for i in packed) / N)


@pytest.mark.parametrize(("plan", "longest"), [("fsdp", 1), ("fsdp,reshard_after_forward=false", LAYERS)])
def test_blocks_are_freed_before_the_next_is_gathered_unless_they_stay(plan, longest):
    step = [e.op for e in events(plan) if e.op is not None]
    died = {storage: index for index, storages in lifetimes(step).dies.items() for storage in storages}
    copies = [i for i, op in enumerate(step) if op.id == -1 and op.name == "aten.clone" and op.phase == "forward"]
    blocks = copies[len(copies) - 9 * LAYERS :: 9]  # the first copy of each block; the rest came before
    last_forward = max(i for i, op in enumerate(step) if op.phase == "forward")
    alive = [sum(b <= at < died[step[b].outputs[0].storage] for b in blocks) for at in range(last_forward)]
    assert max(alive) == longest


def test_hooks_cost_the_thread_that_calls_them():
    hooks = [op for op in ops("aten.empty") if "host_ops" in op.attrs]
    gathers = 2 * LAYERS + 1
    assert len(hooks) == gathers + (LAYERS + 1) + (LAYERS + 1)  # gathers, units in forward, units reduced


def test_flat_parameters_only_wait():
    collectives = [e for e in events("fsdp1") if e.collective is not None]
    assert len(ops("aten.empty")) > 0
    assert not ops("aten.empty", "fsdp1")
    assert len(collectives) == len([e for e in events() if e.collective is not None])
