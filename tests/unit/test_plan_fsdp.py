"""FSDP's options, compression hooks and zero-bubble parts of a small GPT: what moves, and where it is issued."""

from collections import Counter
from functools import cache

import pytest

from perfmodel.config import load_model, load_plan
from perfmodel.errors import InfeasiblePlanError
from perfmodel.extract import trace
from perfmodel.graph import Graph
from perfmodel.models import build
from perfmodel.plan import Event, RankDevice, place
from perfmodel.plan.weight_gradients import weight_ops

LAYERS, N = 4, 8
MODEL = {
    "kind": "transformer", "name": "tiny", "architecture": "gpt2", "batch_size": 2, "precision": "fp32",
    "optimizer": "adamw", "vocab_size": 512, "hidden_size": 64, "layers": LAYERS, "heads": 4, "max_positions": 32,
    "attention": "eager", "tied_embeddings": False,
}  # fmt: skip
RANK = RankDevice(device="a100_sxm_40gb", memory_bytes=40 * 2**30)


@cache
def gpt() -> Graph:
    return trace(build(load_model(MODEL)))


PSI = sum(p.tensor.bytes for p in gpt().parameters)
BLOCKS = sum(p.tensor.bytes for p in gpt().parameters if p.name.startswith("transformer.h."))


def events(plan: str, n: int = N) -> tuple[Event, ...]:
    return tuple(place(gpt(), load_plan(plan), [RANK] * n).classes[0].events)


def moved(plan: str, n: int = N) -> Counter:
    """Bytes by operation and size of the group."""
    total: Counter = Counter()
    for event in events(plan, n):
        if event.collective is not None:
            total[event.collective.op, len(event.collective.ranks)] += event.collective.bytes
    return total


def test_hybrid_sharding_reduces_the_shards_between_groups() -> None:
    # arXiv:2304.11277, section 3.2.2: within a group as fully sharded; between groups an all-reduce of each rank's shard.
    # `ranks` is a key of the file's section fsdp; the GPUs of a node are 4 here.
    assert moved("fsdp,fsdp.ranks=4") == {
        ("all_gather", 4): PSI + BLOCKS, ("reduce_scatter", 4): PSI, ("all_reduce", 2): PSI // 4,
    }  # fmt: skip
    groups = {e.collective.ranks for e in events("fsdp,fsdp.ranks=4") if e.collective is not None}
    assert groups == {(0, 1, 2, 3), (0, 4)}


def test_hybrid_sharding_holds_a_share_of_its_group() -> None:
    def memory(plan: str):
        return place(gpt(), load_plan(plan), [RANK] * N).classes[0].memory

    assert memory("fsdp,fsdp.ranks=4").optimizer_bytes == pytest.approx(2 * memory("fsdp").optimizer_bytes, rel=0.01)
    with pytest.raises(InfeasiblePlanError, match=r"fsdp\.ranks: found 3 with 8 replicas, allowed a divisor"):
        place(gpt(), load_plan("fsdp,fsdp.ranks=3"), [RANK] * N)


def test_units_that_stay_are_gathered_once() -> None:
    assert moved("fsdp,reshard_after_forward=false") == {("all_gather", N): PSI, ("reduce_scatter", N): PSI}


def test_a_wrap_policy_says_what_is_gathered_together() -> None:
    # Attention and feed-forward layers apart: 2 units a block, everything else with the rest, which stays.
    plan = load_plan({"data_parallel": {"shard": "parameters"}, "fsdp": {"wrap": ["attn", "mlp"]}})
    gathered = [
        e.collective
        for e in place(gpt(), plan, [RANK] * N).classes[0].events
        if e.collective is not None and e.collective.op == "all_gather"
    ]
    inside = sum(p.tensor.bytes for p in gpt().parameters if ".attn." in p.name or ".mlp." in p.name)
    assert len(gathered) == 1 + 2 * 2 * LAYERS
    assert sum(c.bytes for c in gathered) == PSI + inside
    assert "parameters of transformer.h.0.attn" in {c.purpose for c in gathered}
    with pytest.raises(InfeasiblePlanError, match=r"ends in 'decoder'; the model has .*transformer\.h\.\*"):
        place(gpt(), load_plan({"data_parallel": {"shard": "parameters"}, "fsdp": {"wrap": ["decoder"]}}), [RANK] * N)


def order(plan: str, phase: str, purpose: str, op: str) -> tuple[int, dict[str, int]]:
    """Place of a collective, and of the first op of each block in that phase."""
    found = events(plan)
    at = next(
        i for i, e in enumerate(found)
        if e.collective is not None and e.phase == phase and e.collective.purpose == purpose and e.collective.op == op
    )  # fmt: skip
    first: dict[str, int] = {}
    for i, e in enumerate(found):
        if e.op is not None and e.phase == phase and e.op.module.startswith("transformer.h."):
            first.setdefault(e.op.module.split(".")[2], i)
    return at, first


def test_backward_asks_for_the_next_unit_when_the_plan_says() -> None:
    what = ("backward", "parameters of block 1", "all_gather")
    at, first = order("fsdp", *what)
    assert first["3"] < at < first["2"]
    at, first = order("fsdp,backward_prefetch=post", *what)
    assert first["2"] < at < first["1"]
    scatter, _ = order("fsdp,backward_prefetch=post", "backward", "gradients of block 2", "reduce_scatter")
    assert at < scatter
    at, first = order("fsdp,backward_prefetch=none", *what)
    assert first["2"] < at < first["1"]
    scatter, _ = order("fsdp,backward_prefetch=none", "backward", "gradients of block 2", "reduce_scatter")
    assert scatter < at


def test_forward_prefetch_asks_one_unit_ahead() -> None:
    what = ("forward", "parameters of block 2", "all_gather")
    at, first = order("fsdp", *what)
    assert first["1"] < at < first["2"]
    at, first = order("fsdp,forward_prefetch=true", *what)
    assert first["0"] < at < first["1"]


def test_flat_parameters_are_not_copied_out_but_divided() -> None:
    def names(plan: str) -> Counter:
        return Counter(e.op.name for e in events(plan) if e.op is not None and e.op.id == -1)

    one, two = names("fsdp1"), names("fsdp")
    assert moved("fsdp1") == moved("fsdp")
    assert two["aten.copy_"] - one["aten.copy_"] == 2 * LAYERS + 1  # one of each gather
    assert one["aten.div_"] == LAYERS + 1


@pytest.mark.parametrize("hook", ["fp16", "bf16"])
def test_compression_hooks_halve_what_moves(hook) -> None:
    assert moved("ddp,broadcast_buffers=false") == {("all_reduce", N): PSI}
    assert moved(f"ddp,broadcast_buffers=false,compression={hook}") == {("all_reduce", N): PSI // 2}
    found = events(f"ddp,broadcast_buffers=false,compression={hook},bucket_cap=100KiB")
    for i, event in enumerate(found):
        if event.collective is not None:  # cast and divided before, cast back beside compute after
            assert [found[j].op.name for j in (i - 2, i - 1, i + 1)] == ["aten._to_copy", "aten.div_", "aten.copy_"]
            assert found[i + 1].stream == "copy"
            assert i in found[i + 1].after
            assert i - 1 in event.after


def test_a_static_graph_changes_no_step() -> None:
    assert events("ddp,static_graph=true") == events("ddp")


def test_gradients_of_weights_are_put_off() -> None:
    weights = [gpt().ops[i] for i in weight_ops(gpt())]
    products = [op.module for op in weights if op.name == "aten.mm"]
    linears = {p.name.removesuffix(".weight") for p in gpt().parameters if "attn.c" in p.name or "mlp.c" in p.name}
    linears = {name for name in linears if not name.endswith(".bias")} | {"lm_head"}
    assert sorted(products) == sorted(linears)


def test_zero_bubble_runs_every_op_and_moves_what_1f1b_does() -> None:
    def summary(schedule: str, stage: int) -> tuple[Counter, Counter]:
        plan = load_plan(f"pp=2,micro_batches=4,schedule={schedule}")
        found = place(gpt(), plan, [RANK] * 4).classes[stage].events
        ops = Counter((e.op.name, e.op.module) for e in found if e.op is not None)
        moved = Counter(
            (e.collective.op, e.collective.bytes, e.collective.ranks) for e in found if e.collective is not None
        )
        return ops, moved

    for stage in (0, 1):
        assert summary("zero_bubble", stage) == summary("1f1b", stage)
