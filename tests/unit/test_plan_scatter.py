"""When divided gradients leave a rank: after every micro-batch, every group of an interleaved schedule, or once a step.

Volumes follow ZeRO (Rajbhandari et al. 2020, arXiv:1910.02054, section 7), once for each sum that is scattered; memory, that
whole gradients are there from the first backward pass of a sum to its last.
"""

from collections import Counter
from functools import cache

import pytest
import torch

from perfmodel.api import extract_graph
from perfmodel.config import load_model, load_plan
from perfmodel.db import load_device
from perfmodel.errors import ConfigError, InfeasiblePlanError
from perfmodel.extract import trace
from perfmodel.graph import Graph
from perfmodel.models import build
from perfmodel.plan import RankDevice, place
from perfmodel.plan.holding import Holding
from perfmodel.plan.mesh import mesh_of
from perfmodel.plan.recompute import recomputed
from perfmodel.plan.schedule import schedule
from perfmodel.plan.spread import Spread
from perfmodel.plan.stage_memory import kept_bytes, stage_memory
from perfmodel.plan.tensor_parallel import tensor_parallel

RANK = RankDevice(device="a100_sxm_40gb", memory_bytes=40 * 2**30)
TOKENS, FFN, LAYERS, BATCH = 32, 192, 8, 8
MODEL = {
    "kind": "transformer", "name": "tiny", "architecture": "llama", "batch_size": BATCH, "precision": "bf16",
    "optimizer": "adamw", "vocab_size": 512, "hidden_size": 64, "layers": LAYERS, "heads": 4, "max_positions": TOKENS,
    "ffn_size": FFN,
}  # fmt: skip
DP, MICRO = 4, 8


@cache
def llama() -> Graph:
    return trace(build(load_model(MODEL)))


def classes(plan: str, n_ranks: int):
    return place(llama(), load_plan(plan), [RANK] * n_ranks).classes


def psi(rank_class) -> int:
    """Bytes of a rank's parameters, from what ZeRO 1 gathers of them."""
    return sum(
        e.collective.bytes
        for e in rank_class.events
        if e.collective is not None and e.collective.purpose == "updated parameters"
    )


def moved(rank_class) -> Counter:
    """Bytes of gradients and parameters by operation over replicas."""
    total: Counter = Counter()
    for event in rank_class.events:
        if event.collective is not None and event.stream == "comm":
            total[event.collective.op] += event.collective.bytes
    return total


def added(rank_class) -> int:
    """Elements of shards of gradients that are added to those of an earlier micro-batch."""
    return sum(
        e.op.outputs[0].n_elems
        for e in rank_class.events
        if e.op is not None and e.op.name == "aten.add_" and e.op.stream == "copy"
    )


MESH = f"pp=2,dp={DP},micro_batches={MICRO},schedule=interleaved,chunks=2,group_size=4"


def test_zero_2_scatters_in_every_micro_batch_of_each_stage() -> None:
    states = classes(f"{MESH},shard=optimizer", 2 * DP)
    for one, two in zip(states, classes(f"{MESH},shard=gradients", 2 * DP), strict=True):
        size = psi(one)
        assert moved(one) == {"reduce_scatter": size, "all_gather": size}
        assert moved(two) == {"reduce_scatter": MICRO * size, "all_gather": size}
        assert added(one) == 0
        # All but the first micro-batch of a run of blocks are added, a rank's share of each bucket rounded up.
        n_scatters = sum(e.collective is not None and e.collective.op == "reduce_scatter" for e in two.events)
        assert 0 <= added(two) * DP - (MICRO - 1) * size // 2 < n_scatters * DP
        whole = one.memory.gradients_bytes
        assert two.memory.gradients_bytes == pytest.approx(whole / DP, abs=2)
        assert two.memory.optimizer_bytes == one.memory.optimizer_bytes


@pytest.mark.parametrize(("scatter", "n_sums"), [("step", 1), ("group", 2), ("micro_batch", MICRO)])
def test_fully_sharded_stages_scatter_once_a_sum(scatter, n_sums) -> None:
    plan = f"{MESH},shard=parameters,reshard_after_forward=false"
    for one, ours in zip(
        classes(f"{MESH},shard=optimizer", 2 * DP), classes(f"{plan},scatter={scatter}", 2 * DP), strict=True
    ):
        assert moved(ours) == {"reduce_scatter": n_sums * psi(one), "all_gather": psi(one)}
        shards = sum(-(-p // DP) for p in _elements(one))
        assert added(ours) == (n_sums - 1) * shards


def _elements(rank_class) -> list[int]:
    """Elements of each parameter of a rank whose gradient it reduces, by what is put into buckets."""
    return [
        e.op.inputs[0].n_elems
        for e in rank_class.events
        if e.op is not None and e.op.name == "aten.mul" and e.op.overload == "out"
    ]


def test_whole_gradients_of_a_group_are_there_from_its_first_backward_to_its_last() -> None:
    p, m, v, group = 2, 8, 2, 4
    steps = schedule("interleaved", 0, p, m, v, group)

    def peak(sum_group):
        held = Holding(steps=steps, kept_bytes=(0, 0), above_bytes=(0, 0), summed_bytes=(7, 5), sum_group=sum_group)
        return held, held.peak()[1]

    # With all micro-batches in one sum both runs are whole together; a run's group of backward passes stands alone.
    assert peak(None)[1] == 12
    held, most = peak(group)
    assert most == 7
    spans = sorted(held.lifetimes())
    for chunk, size in enumerate((7, 5)):
        backwards = [i for i, s in enumerate(steps) if s.kind == "backward" and s.chunk == chunk]
        mine = [(begin, end) for bytes_, begin, end in spans if bytes_ == size]
        assert mine == [(backwards[g], backwards[g + group - 1]) for g in range(0, m, group)]


def test_sums_of_groups_hold_less_and_move_more() -> None:
    plan = f"{MESH},shard=parameters,reshard_after_forward=false,fsdp.reduce_dtype=fp32"
    step, group = (classes(f"{plan},scatter={how}", 2 * DP)[0].memory for how in ("step", "group"))
    assert step.activations_bytes == group.activations_bytes
    # Two runs of four micro-batches: at most one of them is whole (the blocks are equal; the first also has the embedding).
    assert group.gradients_bytes < 0.75 * step.gradients_bytes


def test_no_sync_holds_whole_gradients_and_scatters_once() -> None:
    """FSDP's `no_sync`: gradients of all micro-batches in one sum, whole, on one stage."""
    own, once = classes("fsdp,accumulate=4", DP)[0], classes("fsdp,accumulate=4,scatter=step", DP)[0]
    assert moved(own)["reduce_scatter"] == 4 * moved(once)["reduce_scatter"]
    assert moved(own)["all_gather"] == moved(once)["all_gather"]  # parameters are freed after backward either way
    size = sum(p.tensor.bytes for p in llama().parameters)
    assert once.memory.gradients_bytes - own.memory.gradients_bytes == size
    assert added(once) == 0
    assert added(own) == 3 * sum(-(-p.tensor.n_elems // DP) for p in llama().parameters)


def test_hybrid_shards_are_added_by_the_size_of_their_group() -> None:
    hybrid = classes("fsdp,accumulate=2,fsdp.ranks=2", DP)[0]
    assert added(hybrid) == sum(-(-p.tensor.n_elems // 2) for p in llama().parameters)


def test_groups_belong_to_the_interleaved_schedule() -> None:
    with pytest.raises(ConfigError, match=r"fsdp.scatter: found group with schedule 1f1b, allowed with interleaved"):
        load_plan("pp=2,shard=parameters,scatter=group")


@pytest.mark.slow
def test_both_plans_of_llama_3_405b_fit() -> None:
    """Dubey et al. 2024 (arXiv:2407.21783, table 4): 8,192 and 16,384 H100 of 80 GB (79.6 GiB by the database) trained it."""
    capacity = load_device("h100_sxm").memory_bytes
    whole = extract_graph("llama3_405b_megatron", batch=1)
    needed = {}
    for n in (8192, 16384):
        spec = load_plan(f"llama3_405b_{n}")
        for name, changed in (("", spec), ("kept", spec.model_copy(update={"recompute": None}))):
            spread = Spread(recomputed(whole, changed.recompute), changed, mesh_of(changed.mesh, n))
            needed[n, name] = max(stage_memory(spread, stage).total_bytes for stage in (0, 1, 15))
    assert needed[8192, ""] < capacity
    assert needed[16384, ""] < capacity
    # What docs/accuracy.md says of the plans without the SwiGLU product made again.
    assert needed[16384, "kept"] / 2**30 == pytest.approx(74.6, abs=0.1)
    assert needed[8192, "kept"] / 2**30 == pytest.approx(81.5, abs=0.1)


# Activation functions computed again.


def test_what_stands_between_the_linears_of_a_feed_forward_layer_is_not_kept() -> None:
    """SiLU(gate) and its product with up go (16 bits each); gate, up and all else stay (arXiv:2302.13971, section 2.4)."""
    again = recomputed(llama(), "activation")
    assert kept_bytes(llama()) - kept_bytes(again) == LAYERS * 2 * (2 * BATCH * TOKENS * FFN)
    done = Counter(op.name for op in again.ops if op.recompute and op.name in ("aten.silu", "aten.mul", "aten.mm"))
    assert done == {"aten.silu": LAYERS, "aten.mul": LAYERS}


def test_a_gpt_layer_drops_the_output_of_its_gelu() -> None:
    spec = {**MODEL, "architecture": "gpt2", "implementation": "megatron", "attention": "eager", "layers": 2}
    del spec["ffn_size"]
    graph = trace(build(load_model(spec)))
    # Korthikanti et al. 2022 (arXiv:2205.05198, section 4.1): the second linear's input is 8 s b h bytes.
    assert kept_bytes(graph) - kept_bytes(recomputed(graph, "activation")) == 2 * 8 * TOKENS * BATCH * 64


def test_a_tensor_parallel_rank_makes_its_part_again() -> None:
    again = recomputed(llama(), "activation")
    for tp in (1, 2, 4):
        plan = load_plan(f"tp={tp},sequence=true")
        kept = [kept_bytes(tensor_parallel(g, plan.tensor_parallel, tp)) for g in (llama(), again)]
        assert kept[0] - kept[1] == LAYERS * 2 * (2 * BATCH * TOKENS * FFN) // tp
    sharded = tensor_parallel(again, load_plan("tp=4").tensor_parallel, 4)
    whole = sum(s.bytes for s in again.storages if s.kind == "gradient")
    part = sum(s.bytes for s in sharded.storages if s.kind == "gradient")
    assert part < whole / 3  # norms alone are whole


def test_models_without_such_layers_are_refused() -> None:
    with pytest.raises(InfeasiblePlanError, match=r"recompute: found activation, but h.0 has no GELU"):
        recomputed(extract_graph(Linears(), inputs=torch.zeros(4, 8), loss=torch.sum), "activation")


class Linears(torch.nn.Module):
    """Blocks of linears and nothing between them."""

    def __init__(self) -> None:
        super().__init__()
        self.h = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(2))

    def forward(self, x):
        for block in self.h:
            x = block(x)
        return x
